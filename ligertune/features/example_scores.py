"""Measures of an evaluation from a model's numbers for each example, with standard errors.

The mean of a measure is sum(s_i) / sum(n_i) over N examples, such as the losses and the labels of each. Its standard
error comes from the influence of each example, u_i = (s_i - mean n_i) / sum(n_i), because the tokens of a text depend
on each other:

    stderr = sqrt(N / (N - 1) sum(u_i^2))

The perplexity exp(mean) has the influence exp(mean) u_i. Two models are compared on the same examples, so the standard
error of a difference comes from the differences of their influences.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import numpy as np

from ligertune.data.examples import Examples

if TYPE_CHECKING:
    from ligertune.planning.options import BuildOptions


@dataclass(frozen=True)
class ScoredExamples:
    """What a model gives N examples with D documents: one document each, or the two answers of a pair.

    log_probs, tokens, correct (D,): sum of the log-probabilities of the labels, their number, and how many of them are
    the most probable token; zeros for a model with a score head. scores (D, labels): of such a model, else empty.
    """

    examples: Examples
    log_probs: np.ndarray
    tokens: np.ndarray
    correct: np.ndarray
    scores: np.ndarray


@dataclass(frozen=True)
class ScoreEstimate:
    """A measure and its standard error; None where it has none, as for a single example."""

    value: float
    stderr: float | None = None

    def as_dict(self) -> dict[str, float | None]:
        """Return the numbers for JSON; a number that is not finite is null there."""
        return {"value": _finite(self.value), "stderr": None if self.stderr is None else _finite(self.stderr)}


@dataclass(frozen=True)
class Measured:
    """A measure with the influence of each example on it (N,)."""

    value: float
    influence: np.ndarray

    @property
    def estimate(self) -> ScoreEstimate:
        return ScoreEstimate(self.value, _standard_error(self.influence))

    def minus(self, other: Measured) -> ScoreEstimate:
        """Return the difference to the measure of another model on the same examples."""
        return ScoreEstimate(self.value - other.value, _standard_error(self.influence - other.influence))

    def exp(self) -> Measured:
        """Return exp of the measure."""
        value = math.exp(self.value) if self.value < 700 else math.inf  # exp(710) is no float any more
        return Measured(value, value * self.influence)


Metrics = Mapping[str, Measured | ScoreEstimate]


@dataclass(frozen=True)
class ExampleMeasures:
    """What an evaluation measures for a task.

    metrics(options, scored, base): names -> measures; base: what the base model gives the same examples, or None.
    predictions(options, scored, base): yields a row for each example, as JSON values. reads_base(options): whether the
    measures compare with the base model; raises UserError for options that are not evaluated.
    """

    metrics: Callable[[BuildOptions, ScoredExamples, ScoredExamples | None], Metrics]
    predictions: Callable[[BuildOptions, ScoredExamples, ScoredExamples | None], Iterator[dict[str, Any]]]
    reads_base: Callable[[BuildOptions], bool] = lambda options: False


def mean_of(sums: np.ndarray, counts: np.ndarray | None = None) -> Measured:
    """Return sum(sums) / sum(counts) over N examples. counts: (N,), or None for one each. NaN where all are 0."""
    sums = np.asarray(sums, dtype=np.float64)
    counts = np.ones(len(sums)) if counts is None else np.asarray(counts, dtype=np.float64)
    total = counts.sum()
    if total == 0:
        return Measured(math.nan, np.zeros(0))
    value = float(sums.sum() / total)
    counted = counts > 0  # the others are no summands of the mean
    return Measured(value, np.where(counted, (sums - value * counts) / total, 0.0)[counted])


def _standard_error(influence: np.ndarray) -> float | None:
    number = len(influence)
    if number < 2:
        return None
    return float(np.sqrt(number / (number - 1) * np.square(influence).sum()))


def _finite(value: float) -> float | None:
    return value if math.isfinite(value) else None


def _text_metrics(options: BuildOptions, scored: ScoredExamples, base: ScoredExamples | None) -> Metrics:
    loss = mean_of(-scored.log_probs, scored.tokens)
    accuracy = mean_of(scored.correct, scored.tokens)
    return {"loss": loss, "perplexity": loss.exp(), "token_accuracy": accuracy}


def _text_predictions(
    options: BuildOptions, scored: ScoredExamples, base: ScoredExamples | None
) -> Iterator[dict[str, Any]]:
    for index, example in enumerate(scored.examples):
        tokens = int(scored.tokens[index])
        loss = float(-scored.log_probs[index] / tokens) if tokens else None
        row = {"source": example.source, "tokens": tokens, "loss": loss}
        if base is not None:
            row["base_loss"] = float(-base.log_probs[index] / tokens) if tokens else None
        yield row


TEXT_MEASURES = ExampleMeasures(_text_metrics, _text_predictions)
