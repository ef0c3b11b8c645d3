"""Training from Python: `train`, `plan` and `Trainer`, with one's own task, loss, data, step, loop or callbacks."""

from __future__ import annotations

import contextlib
import json
import os
import tempfile
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import replace
from functools import cached_property
from pathlib import Path
from typing import Any

from torch import Tensor, nn

from ligertune.data.rows.data_files import display_path
from ligertune.errors import UserError
from ligertune.features.task import Task
from ligertune.hardware import is_launched
from ligertune.models.shape import read_shape
from ligertune.planning.feature_spec import feature_of
from ligertune.planning.plan import Plan
from ligertune.progress import LogLine
from ligertune.recipe.aliases import ALIASES
from ligertune.recipe.read import recipe_of
from ligertune.recipe.schema import Recipe
from ligertune.report import Report
from ligertune.run import run
from ligertune.training.callbacks import Callbacks
from ligertune.training.evaluate import EvalPrediction, EvaluationMetrics
from ligertune.training.resolve import plan_for
from ligertune.training.session import open_session
from ligertune.training.setup import Custom, Job, Training, no_predictions
from ligertune.training.step import StepFunction

DEFAULT_TASK = Recipe.model_fields["task"].default
RecipeLike = Recipe | str | os.PathLike[str] | Mapping[str, Any]
Row = Mapping[str, Any]
RowsLike = Iterable[Row] | Mapping[str, Iterable[Row]]
Loss = Callable[[nn.Module, dict[str, Any]], Tensor]


class Trainer:
    """Train a recipe from Python. Without other arguments it does what `ligertune train` does.

    Under `torchrun` or `accelerate launch` all ranks make one. Otherwise it trains on one device.
    """

    def __init__(
        self,
        recipe: RecipeLike,
        overrides: Sequence[str] | None = (),
        *,
        data: RowsLike | None = None,
        task: type[Task] | Callable[[Plan, nn.Module], Task] | None = None,
        loss: Loss | None = None,
        step: Callable[[Training], StepFunction] | None = None,
        callbacks: Sequence[object] = (),
        compute_metrics: Callable[[EvalPrediction], Mapping[str, float]] | None = None,
        preprocess_logits_for_metrics: Callable[[Tensor, Tensor], Tensor] | None = None,
        show: LogLine | None = None,
    ) -> None:
        """Check the recipe; nothing is loaded before `plan`, `open` or `train`. Raises UserError.

        recipe: path of a file, sections as a mapping, or a `Recipe`. overrides: "section.key=value", as --set.
        data: rows in any format of data.datasets, to train on instead of the recipe's data sets, which a mapping may
        then leave out; {"train": rows, "eval": rows} to evaluate on the others. Keys of `eval` that need evaluation
        data also need a data set in a file or a `Recipe`, which are checked without the rows.
        task: a subclass of `Task`, or a function (plan, model) that returns one. loss: only its function
        (model, batch) -> this batch's part of the loss (). step: makes the function of a step from the training.
        callbacks: objects with methods of transformers' TrainerCallback (ligertune/training/callbacks.py).
        compute_metrics, preprocess_logits_for_metrics: as in transformers' Trainer; reported with each evaluation.
        show: receives each logged line.
        """
        self._rows = {} if data is None else _rows_of(data)
        self.recipe = recipe_of(_with_places(recipe, self._rows), overrides)
        if self._rows and self.recipe.data.streaming:
            raise UserError("data: rows from Python are not streamed.", hint="Write data.streaming: false.")
        functions: dict[str, object] = {"task": task, "loss": loss, "step": step, "show": show}
        functions["compute_metrics"] = compute_metrics
        functions["preprocess_logits_for_metrics"] = preprocess_logits_for_metrics
        given = {name: function for name, function in functions.items() if function is not None}
        _check_functions(given, self.recipe.task)
        self._show = show or (lambda line: None)
        metrics = None
        if compute_metrics is not None:
            metrics = EvaluationMetrics(compute_metrics)
            if preprocess_logits_for_metrics is not None:
                metrics = replace(metrics, preprocess=preprocess_logits_for_metrics)
        self._custom = Custom(
            task=_task_maker(task, loss),
            callbacks=Callbacks(callbacks),
            metrics=metrics,
            setup=(lambda training: training) if step is None else (lambda t: _with_step(t, step)),
        )

    @cached_property
    def job(self) -> Job:
        """Plan, configuration, tokenizer and prepared data. Raises UserError for what cannot be trained."""
        processes = None if is_launched() else 1
        if not self._rows:
            return plan_for(self.recipe, processes=processes)
        with _as_files(self._rows) as files:
            return plan_for(_with_files(self.recipe, files), processes=processes)

    @property
    def plan(self) -> Plan:
        """Every decision of the run. The data are prepared for it, and no weights are loaded."""
        return self.job.plan

    def train(self) -> Report:
        """Train as planned, write the model and the report, and return the report.

        Raises UserError. Ctrl-C ends the step, saves, and raises KeyboardInterrupt; after SIGTERM the report says so.
        """
        report = run(self.job, self._show, custom=self._custom)
        if report.stopped_by == "SIGINT":
            raise KeyboardInterrupt(f"step {report.steps} is saved in {report.output_dir}")
        return report

    @contextlib.contextmanager
    def open(self) -> Iterator[Training]:
        """Load the model, and give everything that a step needs, for a loop of one's own.

        `training.run_step(step)` trains on the global batch of a step. The lock of output_dir is held meanwhile.
        """
        with open_session(self.job, self._show, custom=self._custom) as session:
            session.training.model.train()
            yield session.training


def train(recipe: RecipeLike, overrides: Sequence[str] | None = (), **options: Any) -> Report:
    """Train a recipe, and return its report. options: keywords of `Trainer`. Raises UserError."""
    return Trainer(recipe, overrides, **options).train()


def plan(recipe: RecipeLike, overrides: Sequence[str] | None = ()) -> Plan:
    """Return the plan of a recipe: batches, steps, kernels and predicted memory. Nothing is written.

    checkpoint.output_dir may hold a run. Raises UserError for what cannot be trained.
    """
    processes = None if is_launched() else 1
    return plan_for(recipe_of(recipe, overrides), for_show=True, processes=processes).plan


def _check_functions(given: Mapping[str, Any], task: str) -> None:
    """Raise TypeError for an argument of Trainer that is no function, and UserError for those that exclude others.

    It is called before a run replaces anything. given: name -> function. task: of the recipe.
    """
    for name, function in given.items():
        if not callable(function):
            raise TypeError(f"Trainer: {name} must be a function, and is {function!r}")
    if "task" in given and "loss" in given:
        raise UserError("Trainer: task and loss are both given.", hint="Define the loss in the task, or leave one out.")
    if "preprocess_logits_for_metrics" in given and "compute_metrics" not in given:
        raise UserError("Trainer: preprocess_logits_for_metrics is read by compute_metrics only.", hint="Give both.")
    if "loss" in given and task != DEFAULT_TASK:
        raise UserError(
            f"Trainer: loss trains on the labels of task: {DEFAULT_TASK}, and task is {task}.",
            hint="Give a subclass of Task that reads the batches of that task.",
        )
    if "compute_metrics" in given and "task" not in given and not feature_of(task).gives_predictions:
        raise no_predictions(task)


class _LossTask(Task):
    """Supervised fine-tuning with a user's loss."""

    def __init__(self, plan: Plan, model: nn.Module, loss: Loss) -> None:
        super().__init__(read_shape(model))
        self._loss = loss

    def loss(self, model: nn.Module, batch: dict[str, Any]) -> Tensor:
        loss = self._loss(model, batch)
        if not isinstance(loss, Tensor) or loss.numel() != 1:
            shape = f" of shape {tuple(loss.shape)}" if isinstance(loss, Tensor) else ""
            raise TypeError(f"loss returned {type(loss).__name__}{shape}. Return a tensor with one number")
        return loss


def _with_step(training: Training, make: Callable[[Training], StepFunction]) -> Training:
    """Return the training with a user's function of a step. Raises TypeError for anything but a function."""
    function = make(training)
    if not callable(function):
        raise TypeError(f"Trainer: step returned {type(function).__name__}. Return the function of a step")
    return replace(training, train_step=function)


def _made_task(make: Callable[..., Any], plan: Plan, model: nn.Module) -> Task:
    """Return the task that a user's function makes. Raises TypeError for another value."""
    made = make(plan, model)
    if not isinstance(made, Task):
        raise TypeError(
            f"Trainer: task returned {type(made).__name__}. Return an object of a subclass of ligertune.Task"
        )
    return made


def _task_maker(
    task: type[Task] | Callable[[Plan, nn.Module], Task] | None, loss: Loss | None
) -> Callable[[Plan, nn.Module], Task] | None:
    """Return the function that makes a user's task, or None for the recipe's."""
    if loss is not None:
        return lambda plan, model: _LossTask(plan, model, loss)
    if isinstance(task, type) and issubclass(task, Task):
        return lambda plan, model: task(read_shape(model))
    if task is None:
        return None
    return lambda plan, model: _made_task(task, plan, model)


def _rows_of(data: RowsLike) -> dict[str, Iterable[Row]]:
    """Return the rows to train on and those to evaluate on, by the names "train" and "eval"."""
    given = dict(data) if isinstance(data, Mapping) else {"train": data}
    if "train" not in given or given.keys() - {"train", "eval"}:
        raise UserError(
            f"data: the splits are {', '.join(map(str, given)) or 'none'}.", hint='Name them "train" and "eval".'
        )
    for name, rows in given.items():
        is_frame = type(rows).__name__ == "DataFrame"  # iterating one yields names or columns
        if is_frame or isinstance(rows, str | bytes | Mapping) or not isinstance(rows, Iterable):
            hint = '. Give its rows: to_dict("records") of pandas, to_dicts() of polars' if is_frame else ""
            raise TypeError(
                f"data: give rows, such as a list of dicts or a datasets.Dataset, and not {type(rows).__name__}{hint}"
            )
        # an iterator can be read once, and an error while planning lets the user try again
        given[name] = list(rows) if isinstance(rows, Iterator) else rows
    return given


def _with_places(recipe: RecipeLike, rows: Mapping[str, Iterable[Row]]) -> RecipeLike:
    """Return the recipe with places for rows that a mapping names no data sets for."""
    section = recipe.get("data", {}) if isinstance(recipe, Mapping) else None
    if not rows or not isinstance(recipe, Mapping) or not isinstance(section, Mapping):
        return recipe
    places = {}
    if not _names("datasets", recipe, section):
        places["datasets"] = [{"path": "data"}]
    if "eval" in rows and not any(_names(key, recipe, section) for key in ("eval_datasets", "val_split")):
        places["eval_datasets"] = [{"path": "data"}]
    return {**recipe, "data": {**places, **section}}


def _names(key: str, recipe: Mapping[str, Any], section: Mapping[str, Any]) -> bool:
    """Return whether a recipe has a key of its section `data`, by its own name or by that of another tool."""
    others = {name for row in ALIASES if row.key == f"data.{key}" for name in row.names}
    return key in section or not others.isdisjoint(section) or not others.isdisjoint(recipe)


@contextlib.contextmanager
def _as_files(rows: Mapping[str, Iterable[Row]]) -> Iterator[dict[str, Path]]:
    """Write rows as JSON lines, which the readers of data take. The files are removed when the data are prepared.

    Messages name the rows as the user gave them.
    """
    with tempfile.TemporaryDirectory(prefix="ligertune-rows-") as folder:
        files = {name: Path(folder) / f"{name}.jsonl" for name in rows}
        places = {path: "data" if name == "train" else f"data[{name!r}]" for name, path in files.items()}
        for name, path in files.items():
            _write_rows(path, rows[name], places[path])
        try:
            yield files
        except UserError as error:
            message = error.message
            hint = error.hint
            for path, place in places.items():
                for written in (str(path), display_path(path)):
                    message = message.replace(written, place)
                    hint = hint.replace(written, place)
            raise UserError(message, hint=hint, exit_code=error.exit_code) from None


def _write_rows(path: Path, rows: Iterable[Row], place: str) -> None:
    """Write rows to a file of JSON lines. place: what messages call them."""
    with path.open("w", encoding="utf-8") as file:
        for number, row in enumerate(rows, start=1):
            if not isinstance(row, Mapping):
                raise UserError(
                    f"{place}: row {number} is {type(row).__name__}.",
                    hint='Give mappings such as {"instruction": "…", "output": "…"}.',
                )
            file.write(_json_line(row, f"{place}: row {number}"))


def _json_line(row: Row, place: str) -> str:
    """Return a row as a JSON line. Raises UserError that names the column which JSON cannot hold."""
    try:
        line = json.dumps(dict(row), ensure_ascii=False, default=_python_number)
        line.encode()
    except (TypeError, ValueError, RecursionError) as error:
        columns = ", ".join(map(str, row))
        raise UserError(
            f"{place} ({columns}) holds a value that is no text, number, list or dict: {error}.",
            hint="Convert it, or leave its column out.",
        ) from None
    return line + "\n"


def _python_number(value: Any) -> Any:
    """Return a number or an array of numpy, or a tensor, as Python's numbers."""
    if hasattr(value, "tolist"):
        return value.tolist()
    raise TypeError(f"{type(value).__name__}")


def _with_files(recipe: Recipe, files: Mapping[str, Path]) -> Recipe:
    """Return the recipe with files in place of its data sets."""
    firsts = {"train": recipe.data.datasets[0], "eval": (recipe.data.eval_datasets or recipe.data.datasets)[0]}
    # only format and columns: what else the data set says is about the rows that these replace
    specs = {
        name: type(firsts[name])(path=str(path), format=firsts[name].format, columns=firsts[name].columns)
        for name, path in files.items()
    }
    changes: dict[str, Any] = {"datasets": (specs["train"],)}
    if "eval" in specs:
        changes |= {"eval_datasets": (specs["eval"],), "val_split": 0.0}
    return recipe.model_copy(update={"data": recipe.data.model_copy(update=changes)})
