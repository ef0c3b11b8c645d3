"""Evaluate a target and its base model on the same examples, and write the result into the run's folder."""

from __future__ import annotations

import json
import re
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, TypeVar

import numpy as np

from ligertune.data.examples import Examples
from ligertune.decode.answer_metric import ScoredAnswer, load_metric, read_questions, score_answers
from ligertune.decode.sampling import sampling_notes
from ligertune.errors import UserError
from ligertune.evaluation.eval_options import EvalOptions
from ligertune.evaluation.eval_target import EvalTarget
from ligertune.evaluation.score_examples import EvaluationModel, Progress, load_to_score, score_examples
from ligertune.features.example_scores import (
    TEXT_MEASURES,
    ExampleMeasures,
    Measured,
    Metrics,
    ScoredExamples,
    ScoreEstimate,
    mean_of,
)
from ligertune.features.task import examples_in_memory
from ligertune.files.storage import finite, model_name, utc_now, write_bytes, write_json
from ligertune.models.adapters.lora import adapter_off
from ligertune.planning.feature_spec import feature_of
from ligertune.planning.preflight import check_run_files
from ligertune.planning.saved_model import trained_base
from ligertune.recipe.section import EXACT_MATCH
from ligertune.recipe.train_sections import EvalSpec
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


@dataclass(frozen=True)
class AnswerOptions:
    """The metric of generated answers, and the longest answer. name: exact_match, or file.py:function."""

    name: str
    max_new_tokens: int


def answer_options(target: EvalTarget, options: EvalOptions) -> tuple[AnswerOptions | None, tuple[str, ...]]:
    """Return the metric to compute, if there is one, and notes. Raises UserError.

    A run may come from anyone, so a Python file runs only if the command line names it.
    """
    of_run = EvalSpec() if target.trained is None else target.trained.eval
    name = options.metric
    notes = []
    if name is None and of_run.metric == EXACT_MATCH:
        name = of_run.metric
    elif name is None and of_run.metric is not None:
        notes.append(f"eval.metric of the run, {of_run.metric}, is Python code, which runs if --metric names it")
    if name is not None:
        return AnswerOptions(name, options.max_new_tokens or of_run.answer_tokens), ()
    if options.max_new_tokens is not None:
        raise UserError("--max-new-tokens belongs to --metric.", hint="Write --metric exact_match.")
    return None, tuple(notes)


@dataclass(frozen=True)
class _Found:
    """What a model gives the examples. answers: None without a metric."""

    scored: ScoredExamples
    answers: list[ScoredAnswer] | None


def evaluate_target(
    target: EvalTarget, *, with_base: bool, options: EvalOptions | None = None, progress: Progress = lambda share: None
) -> EvaluationResult:
    """Prepare the data, load the model and its base model one after the other, and score the examples with both.

    With a metric, also generate answers and score them. Raises UserError.
    """
    begun = time.perf_counter()
    wanted = options or EvalOptions()
    answers, answer_notes = answer_options(target, wanted)
    job = plan_for(target.recipe, for_show=True, processes=1)
    build = job.plan.build
    feature = feature_of(build.task)
    measures = feature.evaluation or TEXT_MEASURES
    _check_base(target, with_base=with_base, needs_base=measures.reads_base(build))
    examples = _examples(job, target, wanted.max_samples)
    answer = None if answers is None else _answering(job, examples, answers)
    notes = [*job.data.notes, *answer_notes]
    if with_base and feature.scores_texts:
        notes.append(NO_COMPARISON)
    compares = with_base and not feature.scores_texts and target.base_name is not None

    def work(loaded: EvaluationModel, name: str) -> _Found:
        scored = score_examples(loaded, job, examples, progress)
        return _Found(scored, None if answer is None else answer(loaded.model, name, progress))

    with sampling_notes() as notes_on_answers:
        found, base = on_both_models(target, job, work, trust_remote_code=wanted.trust_remote_code, compares=compares)
    of_base = None if base is None else base.scored
    rows = [*_metric_rows(measures, job, found.scored, of_base)]
    if answers is not None:
        rows.append(_answer_row(answers, found, base))
    return EvaluationResult(
        model=target.model,
        base=None if base is None else target.base_name,
        task=build.task,
        data=tuple(model_name(one.path) for one in target.recipe.data.datasets),
        examples=len(examples),
        tokens=int(examples.lengths.sum()),
        labels=int(examples.trained.sum()),
        metrics=tuple(rows),
        seconds=time.perf_counter() - begun,
        notes=(*notes, *notes_on_answers),
        ended=utc_now(),
        predictions=lambda: _with_answers(measures.predictions(build, found.scored, of_base), found, base),
    )


def _check_base(target: EvalTarget, *, with_base: bool, needs_base: bool) -> None:
    if needs_base and not with_base:
        raise UserError(
            "--no-base: the measures of this task compare with the base model.", hint="Leave --no-base out."
        )
    if needs_base and target.base_name is None:
        raise UserError(f"{target.model}: its measures compare with its base model, which no run names.")


def _examples(job: Job, target: EvalTarget, max_samples: int | None) -> Examples:
    if not target.held_out:
        return examples_in_memory(job.data.train)
    assert job.data.eval is not None  # of data.val_split
    held_out = job.data.eval
    return held_out.select(range(min(max_samples or len(held_out), len(held_out))))


def _answering(
    job: Job, examples: Examples, answers: AnswerOptions
) -> Callable[[Any, str, Progress], list[ScoredAnswer]]:
    """Return the function that answers the prompts of the examples with a model. Raises UserError."""
    tokenizer = job.tokenizer.tokenizer
    if feature_of(job.plan.build.task).scores_texts:
        raise UserError("--metric: the model scores texts and writes none.", hint="Leave it out.")
    metric = load_metric(answers.name, key="--metric")
    questions = read_questions(examples, tokenizer, most=None, key="--metric")

    def answer(model: Any, name: str, progress: Progress) -> list[ScoredAnswer]:
        return score_answers(
            model, tokenizer, questions, metric, max_new_tokens=answers.max_new_tokens, name=name, progress=progress
        )

    return answer


def _answer_row(answers: AnswerOptions, found: _Found, base: _Found | None) -> MetricRow:
    measured = _mean_score(found)
    name = answers.name.rpartition(":")[2]
    if base is None:
        return MetricRow(name, measured.estimate, None, None)
    of_base = _mean_score(base)
    return MetricRow(name, measured.estimate, of_base.estimate, measured.minus(of_base))


def _mean_score(found: _Found) -> Measured:
    assert found.answers is not None  # a metric is measured
    return mean_of(np.array([one.score for one in found.answers]))


def _with_answers(rows: Iterator[dict[str, Any]], found: _Found, base: _Found | None) -> Iterator[dict[str, Any]]:
    """Add the answers to rows of predictions."""
    if found.answers is None:
        yield from rows
        return
    of_base = found.answers if base is None or base.answers is None else base.answers
    for row, answered, other in zip(rows, found.answers, of_base, strict=True):
        row |= {"prompt": answered.question.prompt, "reference": answered.question.reference}
        row |= {"answer": answered.answer, "score": answered.score}
        yield row if base is None else row | {"base_answer": other.answer, "base_score": other.score}


Found = TypeVar("Found")


def on_both_models(
    target: EvalTarget,
    job: Job,
    work: Callable[[EvaluationModel, str], Found],
    *,
    trust_remote_code: bool,
    compares: bool,
) -> tuple[Found, Found | None]:
    """Return what `work` finds with the model and, if `compares`, with its base model. Both get their names.

    An adapter is switched off for its base; another base is loaded after the model is gone.
    """
    loaded = load_to_score(target.model, job, trust_remote_code=trust_remote_code)
    found = work(loaded, target.model)
    if not compares:
        return found, None
    name = str(target.base_name)
    if target.has_adapter:
        with adapter_off(loaded.model):
            return found, work(loaded, name)
    del loaded
    return found, work(load_base(target, job, trust_remote_code), name)


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
