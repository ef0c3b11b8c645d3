"""Evaluate a target and its base model on tasks of lm-evaluation-harness."""

from __future__ import annotations

import contextlib
import math
import tempfile
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np

from ligertune.decode.harness import HarnessOptions, TaskMeasure, load_tasks, run_tasks
from ligertune.decode.sampling import sampling_notes
from ligertune.decode.text_scorer import TextScorer, batching_of
from ligertune.errors import UserError
from ligertune.evaluation.eval_options import EvalOptions
from ligertune.evaluation.eval_target import EvalTarget, find_target
from ligertune.evaluation.evaluate_run import EvaluationResult, MetricRow, on_both_models
from ligertune.evaluation.score_examples import EvaluationModel
from ligertune.features.example_scores import ScoreEstimate, mean_of
from ligertune.files.storage import utc_now
from ligertune.recipe.section import TASK_FILES
from ligertune.training.resolve import plan_for
from ligertune.training.setup import Job

KEY = "--tasks"
# A plan is made for data, and tasks bring their own: it is made for these texts.
_TEXTS = "One line of text is all that a plan needs.\nTasks bring their own data.\n"


def evaluate_tasks(
    name: str, options: EvalOptions, *, with_base: bool, say: Callable[[str], None] = lambda words: None
) -> tuple[EvaluationResult, EvalTarget]:
    """Return the measures of the tasks for the model that `name` means, and of its base model. Raises UserError."""
    begun = time.perf_counter()
    harness = HarnessOptions(
        tasks=options.tasks,
        include_path=options.include_path,
        limit=options.max_samples,
        num_fewshot=options.num_fewshot,
        chat_template=options.chat_template,
        batch_size=options.batch_size,
    )
    tasks = load_tasks(harness, KEY)
    with _file_of_texts() as texts:
        target = find_target(name, options, texts=texts)
        job = plan_for(target.recipe, for_show=True, processes=1)
    if options.chat_template and not job.tokenizer.tokenizer.chat_template:
        raise UserError("--chat-template: the model's tokenizer has no chat template.", hint="Leave it out.")
    compares = with_base and target.base_name is not None

    def work(loaded: EvaluationModel, model_name: str) -> dict[str, TaskMeasure]:
        say(f"evaluating {model_name}")
        return _run(loaded, job, tasks, harness, model_name)

    with sampling_notes() as notes:
        found, base = on_both_models(target, job, work, trust_remote_code=options.trust_remote_code, compares=compares)
    result = EvaluationResult(
        model=target.model,
        base=target.base_name if compares else None,
        task="tasks",
        data=tuple(Path(task).stem if Path(task).suffix in TASK_FILES else task for task in options.tasks),
        examples=_documents(found),
        tokens=0,
        labels=0,
        metrics=task_rows(found, base or {}),
        seconds=time.perf_counter() - begun,
        notes=tuple(notes),
        ended=utc_now(),
        predictions=lambda: iter(()),
    )
    return result, target


@contextlib.contextmanager
def _file_of_texts() -> Iterator[Path]:
    with tempfile.TemporaryDirectory(prefix="ligertune-texts-") as folder:
        path = Path(folder) / "texts.txt"
        path.write_text(_TEXTS, encoding="utf-8")
        yield path


def _run(loaded: EvaluationModel, job: Job, tasks: Any, harness: HarnessOptions, name: str) -> dict[str, TaskMeasure]:
    tokenizer = job.tokenizer.tokenizer
    rows = job.plan.rows
    batching = batching_of(tokenizer, packed=rows.is_padding_free, multiple_of=rows.multiple_of)
    return run_tasks(TextScorer(loaded.model, tokenizer, batching), tasks, harness, name=name)


def task_rows(found: dict[str, TaskMeasure], base: dict[str, TaskMeasure]) -> tuple[MetricRow, ...]:
    """Return the measures of tasks with those of the base model; `base` may be empty."""
    rows = []
    for name, measure in found.items():
        value = ScoreEstimate(measure.value, measure.stderr)
        other = base.get(name)
        if other is None:
            rows.append(MetricRow(name, value, None, None))
            continue
        of_base = ScoreEstimate(other.value, other.stderr)
        rows.append(MetricRow(name, value, of_base, _difference(measure, other)))
    return tuple(rows)


def _difference(measure: TaskMeasure, other: TaskMeasure) -> ScoreEstimate:
    """Return a difference, with a standard error where both measures are means over the same documents."""
    if measure.per_document and len(measure.per_document) == len(other.per_document):
        return mean_of(np.array(measure.per_document)).minus(mean_of(np.array(other.per_document)))
    difference = measure.value - other.value
    return ScoreEstimate(difference if math.isfinite(difference) else math.nan)


def _documents(found: dict[str, TaskMeasure]) -> int:
    """Return the documents of all tasks. A task has a name before the slash, and several measures."""
    by_task = {name.partition("/")[0]: measure.documents for name, measure in found.items()}
    return sum(by_task.values())
