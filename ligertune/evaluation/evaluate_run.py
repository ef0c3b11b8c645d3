"""Evaluate a target and its base model on the same examples, and write the result into the run's folder."""

from __future__ import annotations

import json
import re
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from ligertune.data.examples import Examples
from ligertune.data.prepare import ProgressCallback
from ligertune.errors import UserError
from ligertune.evaluation.eval_target import EvalTarget
from ligertune.evaluation.score_examples import EvaluationModel, Progress, load_to_score, score_examples
from ligertune.features.example_scores import (
    TEXT_MEASURES,
    ExampleMeasures,
    Measured,
    Metrics,
    ScoredExamples,
    ScoreEstimate,
)
from ligertune.features.task import examples_in_memory
from ligertune.files.storage import finite, model_name, utc_now, write_bytes, write_json
from ligertune.models.adapters.lora import adapter_off
from ligertune.planning.feature_spec import feature_of
from ligertune.planning.preflight import check_run_files
from ligertune.planning.saved_model import trained_base
from ligertune.report.evaluation_results import EVALUATIONS, update_page
from ligertune.report.make_report import versions
from ligertune.training.resolve import plan_for
from ligertune.training.setup import Job

NO_COMPARISON = "the base model has no trained score head, so it is not compared"


@dataclass(frozen=True)
class MetricRow:
    """A measure of the model, of its base model, and their difference; None where there is none."""

    name: str
    value: ScoreEstimate
    base: ScoreEstimate | None
    difference: ScoreEstimate | None

    def as_dict(self) -> dict[str, Any]:
        """Return the numbers for JSON."""
        found: dict[str, Any] = self.value.as_dict()
        for key in ("base", "difference"):
            estimate = getattr(self, key)
            if estimate is not None:
                found[key] = estimate.as_dict()
        return found


@dataclass(frozen=True)
class EvaluationResult:
    """The result of an evaluation. tokens: of the examples; labels: those that the loss counts. notes: for people."""

    model: str
    base: str | None
    task: str
    data: tuple[str, ...]
    examples: int
    tokens: int
    labels: int
    metrics: tuple[MetricRow, ...]
    seconds: float
    notes: tuple[str, ...]
    ended: str
    predictions: Callable[[], Iterator[dict[str, Any]]]

    def as_dict(self) -> dict[str, Any]:
        """Return the result for JSON, without predictions."""
        return {
            "model": self.model,
            "base": self.base,
            "task": self.task,
            "data": list(self.data),
            "examples": self.examples,
            "tokens": self.tokens,
            "labels": self.labels,
            "metrics": {row.name: row.as_dict() for row in self.metrics},
            "seconds": round(self.seconds, 3),
            "notes": list(self.notes),
            "ended": self.ended,
            "versions": versions(),
        }


def evaluate_target(
    target: EvalTarget,
    *,
    with_base: bool,
    max_samples: int | None = None,
    trust_remote_code: bool = False,
    progress: Progress = lambda share: None,
    data_progress: ProgressCallback | None = None,
) -> EvaluationResult:
    """Prepare the data, load the model and its base model one after the other, and score the examples with both.

    max_samples: of examples that are held out. Raises UserError.
    """
    begun = time.perf_counter()
    job = plan_for(target.recipe, data_progress, for_show=True, processes=1)
    options = job.plan.build
    feature = feature_of(options.task)
    measures = feature.evaluation or TEXT_MEASURES
    needs_base = measures.reads_base(options)
    if needs_base and not with_base:
        raise UserError(
            "--no-base: the measures of this task compare with the base model.", hint="Leave --no-base out."
        )
    if needs_base and target.base_name is None:
        raise UserError(f"{target.model}: its measures compare with its base model, which no run names.")
    examples = _examples(job, target, max_samples)
    notes = list(job.data.notes)
    if with_base and feature.scores_texts:
        notes.append(NO_COMPARISON)
    compares = with_base and not feature.scores_texts and target.base_name is not None
    scored, base = _score_both(target, job, examples, trust_remote_code, progress, compares=compares)
    return EvaluationResult(
        model=target.model,
        base=None if base is None else target.base_name,
        task=options.task,
        data=tuple(model_name(one.path) for one in target.recipe.data.datasets),
        examples=len(examples),
        tokens=int(examples.lengths.sum()),
        labels=int(examples.trained.sum()),
        metrics=_metric_rows(measures, job, scored, base),
        seconds=time.perf_counter() - begun,
        notes=tuple(notes),
        ended=utc_now(),
        predictions=lambda: measures.predictions(options, scored, base),
    )


def _examples(job: Job, target: EvalTarget, max_samples: int | None) -> Examples:
    if not target.held_out:
        return examples_in_memory(job.data.train)
    assert job.data.eval is not None  # of data.val_split
    held_out = job.data.eval
    return held_out.select(range(min(max_samples or len(held_out), len(held_out))))


def _score_both(
    target: EvalTarget, job: Job, examples: Examples, trust_remote_code: bool, progress: Progress, *, compares: bool
) -> tuple[ScoredExamples, ScoredExamples | None]:
    """Return what the model and its base model give the examples. An adapter is switched off for its base."""
    share = 0.5 if compares else 1.0
    loaded = load_to_score(target.model, job, trust_remote_code=trust_remote_code)
    scored = score_examples(loaded, job, examples, lambda done: progress(share * done))
    if not compares:
        return scored, None
    if target.has_adapter:
        with adapter_off(loaded.model):
            return scored, score_examples(loaded, job, examples, lambda done: progress(share * (1 + done)))
    del loaded  # before the other model is loaded
    base = load_base(target, job, trust_remote_code)
    return scored, score_examples(base, job, examples, lambda done: progress(share * (1 + done)))


def load_base(target: EvalTarget, job: Job, trust_remote_code: bool) -> EvaluationModel:
    """Load the base model of a run that trained all weights, as training began with it."""
    assert target.base is not None  # `_score_both` compares with it
    recorded = trained_base(Path(target.model).expanduser(), target.run)
    if recorded is not None:  # in the dtype of training, and not quantised
        recorded = replace(recorded, stored_as=None)
    loaded = load_to_score(target.base, job, trust_remote_code=trust_remote_code, base=recorded)
    rows = loaded.model.get_input_embeddings().weight.shape[0]
    if rows < len(job.tokenizer.tokenizer):
        raise UserError(
            f"{target.base} knows {rows:,} tokens, and training has added some, so it cannot read these data.",
            hint="Write --no-base.",
        )
    return loaded


def _metric_rows(
    measures: ExampleMeasures, job: Job, scored: ScoredExamples, base: ScoredExamples | None
) -> tuple[MetricRow, ...]:
    options = job.plan.build
    of_model = measures.metrics(options, scored, base)
    of_base: Metrics = {} if base is None else measures.metrics(options, base, None)
    rows = []
    for name, measured in of_model.items():
        other = of_base.get(name)
        difference = None
        if isinstance(measured, Measured) and isinstance(other, Measured):
            difference = measured.minus(other)
        rows.append(MetricRow(name, _estimate(measured), None if other is None else _estimate(other), difference))
    return tuple(rows)


def _estimate(measured: Measured | ScoreEstimate) -> ScoreEstimate:
    return measured.estimate if isinstance(measured, Measured) else measured


def write_result(result: EvaluationResult, run: Path) -> Path:
    """Write the result into the folder `evaluations` of a run, and show it on the run's page. Returns the file."""
    stamp = re.sub(r"\D", "", result.ended)[:17]  # milliseconds: of two evaluations in a second, both are kept
    first = re.sub(r"[^A-Za-z0-9._-]+", "-", Path(result.data[0]).stem).strip(".-") or "data"
    check_run_files(run)
    folder = run / EVALUATIONS
    folder.mkdir(exist_ok=True)
    path = folder / f"{stamp}-{first[:80]}.json"
    write_json(path, result.as_dict())
    update_page(run)
    return path


def write_predictions(result: EvaluationResult, path: Path) -> int:
    """Write a line of JSON for each example. Returns their number."""
    lines = [json.dumps(finite(row), ensure_ascii=False) for row in result.predictions()]
    write_bytes(path, "".join(f"{line}\n" for line in lines).encode())
    return len(lines)
