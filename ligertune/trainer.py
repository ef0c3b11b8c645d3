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

import numpy as np
from torch import Tensor, nn

from ligertune.errors import UserError
from ligertune.features.task import Task
from ligertune.hardware import is_launched
from ligertune.models.shape import read_shape
from ligertune.planning.plan import Plan
from ligertune.recipe.read import recipe_of
from ligertune.recipe.schema import Recipe
from ligertune.report import Report
from ligertune.run import run
from ligertune.training.callbacks import Callbacks
from ligertune.training.evaluate import EvalPrediction, EvaluationMetrics
from ligertune.training.resolve import plan_for
from ligertune.training.session import open_session
from ligertune.training.setup import Custom, Job, Training

RecipeLike = Recipe | str | os.PathLike[str] | Mapping[str, Any]
Loss = Callable[[nn.Module, dict[str, Any]], Tensor]
# called as TrainStep: (micro-batches, function that makes a batch, inputs of the loss, sum of losses) -> grad_norm
Step = Callable[[Sequence[Sequence[np.ndarray]], Callable[..., dict[str, Any]], dict[str, Any], Tensor], Tensor | None]


class Trainer:
    """Train a recipe from Python. Without other arguments it does what `ligertune train` does.

    Under `torchrun` or `accelerate launch` all ranks make one. Otherwise it trains on one device.
    """

    def __init__(
        self,
        recipe: RecipeLike,
        overrides: Sequence[str] = (),
        *,
        data: Iterable[Mapping[str, Any]] | None = None,
        task: type[Task] | Callable[[Plan, nn.Module], Task] | None = None,
        loss: Loss | None = None,
        step: Callable[[Training], Step] | None = None,
        callbacks: Sequence[object] = (),
        compute_metrics: Callable[[EvalPrediction], Mapping[str, float]] | None = None,
        preprocess_logits_for_metrics: Callable[[Tensor, Tensor], Tensor] | None = None,
        show: Callable[[dict[str, Any]], None] | None = None,
    ) -> None:
        """Check the recipe; nothing is loaded before `plan`, `open` or `train`. Raises UserError.

        recipe: path of a file, sections as a mapping, or a `Recipe`. overrides: "section.key=value", as --set.
        data: rows in any format of data.datasets, to train on instead of the first data set of the recipe.
        task: a subclass of `Task`, or a function (plan, model) that returns one. loss: only its function
        (model, batch) -> this batch's part of the loss (). step: makes the function of a step from the training.
        callbacks: objects with methods of transformers' TrainerCallback (ligertune/training/callbacks.py).
        compute_metrics, preprocess_logits_for_metrics: as in transformers' Trainer; reported with each evaluation.
        show: receives each logged line.
        """
        if task is not None and loss is not None:
            raise UserError(
                "Trainer: task and loss are both given.", hint="Define the loss in the task, or leave one out."
            )
        self.recipe = recipe_of(recipe, overrides)
        self._data = data
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
            setup=(lambda training: training) if step is None else (lambda t: replace(t, train_step=step(t))),
        )

    @cached_property
    def job(self) -> Job:
        """Plan, configuration, tokenizer and prepared data. Raises UserError for what cannot be trained."""
        processes = None if is_launched() else 1
        if self._data is None:
            return plan_for(self.recipe, processes=processes)
        with _as_file(self._data) as path:
            return plan_for(_with_rows(self.recipe, path), processes=processes)

    @property
    def plan(self) -> Plan:
        """Every decision of the run. The data are prepared for it, and no weights are loaded."""
        return self.job.plan

    def train(self) -> Report:
        """Train as planned, write the model and the report, and return the report. Raises UserError."""
        return run(self.job, self._show, custom=self._custom)

    @contextlib.contextmanager
    def open(self) -> Iterator[Training]:
        """Load the model, and give everything that a step needs, for a loop of one's own.

        `training.run_step(step)` trains on the global batch of a step. The lock of output_dir is held meanwhile.
        """
        with open_session(self.job, self._show, custom=self._custom) as session:
            session.training.model.train()
            yield session.training


def train(recipe: RecipeLike, overrides: Sequence[str] = (), **options: Any) -> Report:
    """Train a recipe, and return its report. options: keywords of `Trainer`. Raises UserError."""
    return Trainer(recipe, overrides, **options).train()


def plan(recipe: RecipeLike, overrides: Sequence[str] = ()) -> Plan:
    """Return the plan of a recipe: batches, steps, kernels and predicted memory. Nothing is written.

    checkpoint.output_dir may hold a run. Raises UserError for what cannot be trained.
    """
    processes = None if is_launched() else 1
    return plan_for(recipe_of(recipe, overrides), for_show=True, processes=processes).plan


class _LossTask(Task):
    """Supervised fine-tuning with a user's loss."""

    gives_predictions = True

    def __init__(self, plan: Plan, model: nn.Module, loss: Loss) -> None:
        super().__init__(read_shape(model))
        self._loss = loss

    def loss(self, model: nn.Module, batch: dict[str, Any]) -> Tensor:
        return self._loss(model, batch)


def _task_maker(
    task: type[Task] | Callable[[Plan, nn.Module], Task] | None, loss: Loss | None
) -> Callable[[Plan, nn.Module], Task] | None:
    """Return the function that makes a user's task, or None for the recipe's."""
    if loss is not None:
        return lambda plan, model: _LossTask(plan, model, loss)
    if isinstance(task, type) and issubclass(task, Task):
        return lambda plan, model: task(read_shape(model))
    return task


@contextlib.contextmanager
def _as_file(rows: Iterable[Mapping[str, Any]]) -> Iterator[Path]:
    """Write rows as JSON lines, which the readers of data take. The file is removed when the data are prepared."""
    with tempfile.TemporaryDirectory(prefix="ligertune-rows-") as folder:
        path = Path(folder) / "rows.jsonl"
        with path.open("w", encoding="utf-8") as file:
            for number, row in enumerate(rows, start=1):
                if not isinstance(row, Mapping):
                    raise UserError(
                        f"data: row {number} is {type(row).__name__}.",
                        hint='Give mappings such as {"instruction": "…", "output": "…"}.',
                    )
                file.write(json.dumps(dict(row), ensure_ascii=False) + "\n")
        yield path


def _with_rows(recipe: Recipe, path: Path) -> Recipe:
    """Return the recipe with a file in place of its data sets."""
    first = recipe.data.datasets[0].model_copy(update={"path": str(path)})
    data = recipe.data.model_copy(update={"datasets": (first,)})
    return recipe.model_copy(update={"data": data})
