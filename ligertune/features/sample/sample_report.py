"""Report on sampled answers: their scores, lengths, speed and examples."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict, dataclass
from typing import Any

import numpy as np

from ligertune.errors import plural
from ligertune.features.sample.keep_answers import KeptRows, RatedAnswer
from ligertune.features.sample.recipe import SampleSpec

QUANTILES = (0, 5, 25, 50, 75, 95, 100)  # percent
_BINS = 10  # of the histogram; scores of fewer values have a bin each
_EXAMPLES = 3  # best and worst answers
_EXAMPLE_TEXT = 400  # characters


@dataclass(frozen=True)
class Distribution:
    """Numbers in short. quantiles: percent -> value."""

    mean: float
    std: float
    quantiles: dict[str, float]


@dataclass(frozen=True)
class Histogram:
    """Counts of numbers by value. values: those of the bins, or the lowest number of each; width: of a bin, or 0."""

    values: list[float]
    counts: list[int]
    width: float


@dataclass(frozen=True)
class AnswerExample:
    """An answer with its prompt as texts, shortened."""

    prompt: str
    answer: str
    score: float


@dataclass(frozen=True)
class Speed:
    """Tokens that this call generated, and the seconds that it took without loading the model."""

    tokens: int
    seconds: float

    @property
    def rate(self) -> float | None:
        """Tokens/s of all processes; None if nothing was generated."""
        return self.tokens / self.seconds if self.tokens and self.seconds > 0 else None


@dataclass(frozen=True)
class SampleReport:
    """What a call of `ligertune sample` has made. best_of: mean over prompts of the highest score."""

    source: str
    prompts: int
    answers: int
    num_generations: int
    keep: str
    kept: int
    score: Distribution | None
    histogram: Histogram | None
    functions: dict[str, float]
    best_of: float | None
    tokens: Distribution
    truncated_share: float
    speed: Speed
    best: list[AnswerExample]
    worst: list[AnswerExample]
    rows_read: int
    dropped: dict[str, int]
    notes: list[str]
    files: dict[str, str]

    def as_dict(self) -> dict[str, Any]:
        """Return the report as JSON values."""
        return {"status": "completed", **asdict(self), "tokens_per_second": self.speed.rate}


def distribution(values: Sequence[float]) -> Distribution:
    """Return mean, standard deviation and quantiles of at least one number."""
    array = np.asarray(values, dtype=np.float64)
    found = np.percentile(array, QUANTILES)
    quantiles = {str(percent): float(value) for percent, value in zip(QUANTILES, found, strict=True)}
    return Distribution(float(array.mean()), float(array.std()), quantiles)


def histogram(values: Sequence[float]) -> Histogram:
    """Return the counts of each value, or of ten equal bins if there are more values."""
    distinct, counts = np.unique(np.asarray(values, dtype=np.float64), return_counts=True)
    if len(distinct) <= _BINS:
        return Histogram(distinct.tolist(), counts.tolist(), 0.0)
    counts, edges = np.histogram(values, bins=_BINS)
    return Histogram(edges[:-1].tolist(), counts.tolist(), float(edges[1] - edges[0]))


def score_parts(rated: Sequence[RatedAnswer]) -> tuple[dict[str, float], float | None]:
    """Return the mean score of each function, and the mean over prompts of the highest score."""
    if rated[0].score is None:
        return {}, None
    functions = {name: float(np.mean([one.scores[name] for one in rated])) for name in rated[0].scores}
    highest: dict[int, float] = {}
    for one in rated:
        score = -np.inf if one.score is None else one.score
        highest[one.answer.prompt] = max(score, highest.get(one.answer.prompt, -np.inf))
    return functions, float(np.mean(list(highest.values())))


def examples(rated: Sequence[RatedAnswer]) -> tuple[list[AnswerExample], list[AnswerExample]]:
    """Return the answers with the highest and with the lowest scores, of different prompts."""
    scored = [one for one in rated if one.score is not None]
    ordered = sorted(scored, key=lambda one: one.score or 0.0)
    return _of_prompts(ordered[::-1]), _of_prompts(ordered)


def _of_prompts(ordered: Sequence[RatedAnswer]) -> list[AnswerExample]:
    found: dict[int, RatedAnswer] = {}
    for one in ordered:
        if len(found) == _EXAMPLES:
            break
        found.setdefault(one.answer.prompt, one)
    return [
        AnswerExample(_shortened(one.prompt.text), _shortened(one.answer.text), float(one.score or 0.0))
        for one in found.values()
    ]


def _shortened(text: str) -> str:
    half = _EXAMPLE_TEXT // 2
    return text if len(text) <= _EXAMPLE_TEXT else f"{text[:half]} … {text[-half:]}"


def notes_on(spec: SampleSpec, kept: KeptRows, rated: Sequence[RatedAnswer]) -> list[str]:
    """Return remarks on what was kept and what was not."""
    notes = []
    if kept.truncated:
        notes.append(
            f"{plural(kept.truncated, 'kept answer')} ended at sample.max_new_tokens: {spec.max_new_tokens}, in the "
            "middle: training on them teaches to stop there."
        )
    if kept.empty:
        notes.append(f"{plural(kept.empty, 'answer')} without text cannot be trained and is not kept.")
    if kept.ties:
        notes.append(f"{plural(kept.ties, 'prompt')} without a pair: all answers have one score, or one text.")
    if kept.below:
        notes.append(f"{plural(kept.below, 'prompt')} without an answer of score {spec.threshold:g} or more.")
    return notes
