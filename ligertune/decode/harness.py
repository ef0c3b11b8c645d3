"""Tasks of lm-evaluation-harness, an optional package, on a model of ours.

A task may run Python code of its author: the functions that its YAML file names, and what it loads.
"""

from __future__ import annotations

import contextlib
import io
import logging
import random
import warnings
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import numpy as np
import torch
from transformers import PreTrainedTokenizerBase

from ligertune.any_types import AnyModule
from ligertune.decode.log_probs import prepare_to_score
from ligertune.decode.sampling import SamplingNote, sampling_notes
from ligertune.decode.text_scorer import TextBatching, TextScorer
from ligertune.errors import UserError, message_of, pip_install
from ligertune.models.compile import run_eagerly
from ligertune.recipe.section import TASK_FILES

_SEED = 1234  # of few-shot examples, numpy and torch, as in lm_eval


@dataclass(frozen=True)
class HarnessOptions:
    """Which tasks are evaluated, and how.

    tasks: names of lm_eval, or paths of YAML files. include_path: folder with further tasks. limit: documents of each
    task. num_fewshot: None: that of the task. chat_template: put prompts into the model's template.
    """

    tasks: tuple[str, ...]
    include_path: str | None = None
    limit: int | None = None
    num_fewshot: int | None = None
    chat_template: bool = False
    batch_size: int | None = None


@dataclass(frozen=True)
class TaskMeasure:
    """A measure of a task. per_document: its value on each document, if the measure is their mean; else empty.

    documents: of the task; 0 for a group of tasks.
    """

    value: float
    stderr: float | None
    documents: int
    per_document: tuple[float, ...] = ()


def check_harness(options: HarnessOptions, key: str) -> None:
    """Raise UserError if lm_eval is missing or a file of a task does not exist. key: what messages name."""
    if find_spec("lm_eval") is None:
        raise UserError(
            f"{key}: tasks need the package lm-eval, which is not installed.", hint=f"{pip_install('lm-eval')}."
        )
    for name in options.tasks:
        if Path(name).suffix in TASK_FILES and not Path(name).expanduser().is_file():
            raise UserError(f"{key}: there is no file {name}.", hint="Name a task of lm_eval, or a YAML file of one.")
    if options.include_path is not None and not Path(options.include_path).is_dir():
        raise UserError(f"--include-path: there is no folder {options.include_path}.", hint="Name a folder of tasks.")


def run_tasks(scorer: TextScorer, tasks: Any, options: HarnessOptions, *, name: str) -> dict[str, TaskMeasure]:
    """Evaluate the tasks, and return their measures: "task/measure", with the name of a filter other than none.

    tasks: of `load_tasks`, which can be evaluated again. name: of the model. Random states of Python, numpy and torch
    are kept. Warns as `sample_answers` does. Raises UserError.
    """
    with _quiet(), _kept_random_states(), sampling_notes() as notes:
        from lm_eval import evaluate

        from ligertune.decode.harness_lm import HarnessModel

        model = HarnessModel(scorer, name=name, batch_size=options.batch_size)
        # not `simple_evaluate`, which does the same and asks git for a commit
        found = evaluate(
            lm=model,
            task_dict=tasks,
            limit=options.limit,
            apply_chat_template=options.chat_template,
            fewshot_as_multiturn=options.chat_template,
            log_samples=True,
        )
    for note in notes:
        warnings.warn(note, SamplingNote, stacklevel=2)
    assert found is not None  # of the first process, and there is one
    return _measures(found["results"], found["samples"])


def load_tasks(options: HarnessOptions, key: str) -> Any:
    """Return the tasks as lm_eval's evaluator takes them, with the seeds and few-shot examples of its command.

    key: what messages name. Raises UserError if lm_eval is missing, for unknown tasks, and for data that cannot be
    loaded.
    """
    check_harness(options, key)
    with _quiet(), _kept_random_states():
        return _loaded(options, key)


def _loaded(options: HarnessOptions, key: str) -> Any:
    from lm_eval.tasks import TaskManager

    # the index of lm_eval's own tasks, thousands of files, is read only where one of them is named
    reads_index = not all(Path(name).suffix in TASK_FILES for name in options.tasks)
    manager = TaskManager(include_path=options.include_path, include_defaults=reads_index)
    _seed()
    try:
        loaded = manager.load([_spec(name) for name in options.tasks])
    except KeyError as error:
        raise UserError(f"{key}: {message_of(error)}.", hint="List the tasks of lm_eval: lm_eval ls tasks.") from error
    except Exception as error:  # of any library with which a task loads its data
        names = ", ".join(options.tasks)
        raise UserError(f"{key}: {names} could not be loaded: {message_of(error)}.") from error
    for task in loaded["tasks"].values():
        own = task.get_config("num_fewshot")
        wanted = own if options.num_fewshot is None or own == 0 else options.num_fewshot
        task.set_config(key="num_fewshot", value=wanted or 0)
        task.set_fewshot_seed(seed=_SEED)
    return loaded


def _spec(name: str) -> str:
    return str(Path(name).expanduser()) if Path(name).suffix in TASK_FILES else name


def _seed() -> None:
    """Seed as `lm_eval` does: a task may shuffle its documents."""
    random.seed(0)
    np.random.seed(_SEED)
    torch.manual_seed(_SEED)


def _measures(
    results: Mapping[str, Mapping[str, Any]], samples: Mapping[str, Sequence[Mapping[str, Any]]]
) -> dict[str, TaskMeasure]:
    found = {}
    for task, values in results.items():
        for written, value in values.items():
            measure, comma, filter_name = written.partition(",")
            if not comma or measure.endswith("_stderr") or not isinstance(value, int | float):
                continue
            stderr = values.get(f"{measure}_stderr,{filter_name}")
            words = f"{task}/{measure}" if filter_name == "none" else f"{task}/{measure} ({filter_name})"
            found[words] = TaskMeasure(
                float(value),
                float(stderr) if isinstance(stderr, int | float) else None,
                len({one.get("doc_id") for one in samples.get(task, ())}),
                _per_document(samples.get(task, ()), measure, filter_name, float(value)),
            )
    return found


def _per_document(
    samples: Sequence[Mapping[str, Any]], measure: str, filter_name: str, value: float
) -> tuple[float, ...]:
    """Return a measure's value on each document; nothing if the measure is not their mean."""
    numbers = [one.get(measure) for one in samples if one.get("filter", "none") == filter_name]
    if not numbers or not all(isinstance(number, int | float) for number in numbers):
        return ()
    values = np.array(numbers, dtype=np.float64)
    return tuple(values.tolist()) if np.isclose(values.mean(), value, rtol=1e-9, atol=1e-12) else ()


@contextlib.contextmanager
def _quiet() -> Iterator[None]:
    """Leave out the log lines and progress bars of lm_eval and of what tasks load; errors are raised."""
    nowhere = io.StringIO()
    logging.disable(logging.WARNING)
    try:
        with contextlib.redirect_stderr(nowhere), contextlib.redirect_stdout(nowhere):
            yield
    finally:
        logging.disable(logging.NOTSET)


@contextlib.contextmanager
def _kept_random_states() -> Iterator[None]:
    """Put the random states back that lm_eval's evaluator seeds: a run would draw other numbers after an evaluation."""
    states = (random.getstate(), np.random.get_state())
    with torch.random.fork_rng():
        try:
            yield
        finally:
            random.setstate(states[0])
            np.random.set_state(states[1])


@dataclass(frozen=True)
class TaskMeasures:
    """The measures of tasks by "task/measure", which a run computes with each evaluation."""

    tokenizer: PreTrainedTokenizerBase
    batching: TextBatching
    tasks: Any  # as `load_tasks` returns them
    options: HarnessOptions
    task: str  # of the run, for errors

    def __call__(self, model: AnyModule) -> dict[str, float]:
        """Return the measures of the model that trains."""
        prepare_to_score(model, self.task)
        scorer = TextScorer(model, self.tokenizer, self.batching)
        with run_eagerly():
            found = run_tasks(scorer, self.tasks, self.options, name="that trains")
        return {name: measure.value for name, measure in found.items()}


def task_measures(
    names: tuple[str, ...],
    tokenizer: PreTrainedTokenizerBase,
    batching: TextBatching,
    *,
    max_samples: int | None,
    task: str,
) -> TaskMeasures:
    """Return the measures of `eval.tasks`, whose data are loaded. Raises UserError."""
    options = HarnessOptions(names, limit=max_samples)
    return TaskMeasures(tokenizer, batching, load_tasks(options, "eval.tasks"), options, task)
