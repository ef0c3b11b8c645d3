"""Measures of `ligertune eval` on the scores of texts and pairs, and predictions: labels, probabilities, rewards."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor

from ligertune.features.example_scores import ExampleMeasures, Measured, Metrics, ScoredExamples, ScoreEstimate, mean_of
from ligertune.features.scores.label_kinds import MULTI, REGRESSION, SINGLE
from ligertune.features.scores.recipe import ClassificationSpec, RewardSpec
from ligertune.features.scores.score_tasks import F1Measures, classification_losses, pair_losses_of, target_tensor
from ligertune.planning.options import BuildOptions

_THRESHOLD = 0.5  # a text has a label from this probability on, as in training: its score is above 0


def _targets(spec: ClassificationSpec, scored: ScoredExamples) -> Tensor:
    """Return the labels of all texts as the loss reads them."""
    assert spec.num_labels is not None and spec.problem_type is not None  # the data have completed both
    targets = [tuple(map(float, example.targets)) for example in scored.examples]
    return target_tensor(targets, num_labels=spec.num_labels, problem_type=spec.problem_type)


def _classification_metrics(options: BuildOptions, scored: ScoredExamples, base: ScoredExamples | None) -> Metrics:
    spec = options.section(ClassificationSpec)
    assert spec.num_labels is not None and spec.problem_type is not None  # as above
    scores = torch.from_numpy(np.ascontiguousarray(scored.scores))
    targets = _targets(spec, scored)
    exact = targets.double() if targets.is_floating_point() else targets
    losses = classification_losses(scores, exact, spec.problem_type)
    found: dict[str, Measured | ScoreEstimate] = {"loss": mean_of(losses.numpy())}
    if spec.problem_type == REGRESSION:
        found["mean_absolute_error"] = mean_of((scores - targets).abs().mean(1).numpy())
        return found
    if spec.problem_type == SINGLE:
        predicted = F.one_hot(scores.argmax(1), spec.num_labels).bool()
        true = F.one_hot(targets, spec.num_labels).bool()
    else:
        predicted = scores > 0
        true = targets > 0
    found["accuracy"] = mean_of((predicted == true).all(1).numpy())
    counts = F1Measures(spec.num_labels, spec.problem_type, "cpu")
    counts.add("accuracy", (predicted == true).all(1))
    counts.add_counts(predicted, true)
    of_counts = counts.means(counts.take())
    return found | {name: ScoreEstimate(value) for name, value in of_counts.items() if name != "accuracy"}


def _classification_predictions(
    options: BuildOptions, scored: ScoredExamples, base: ScoredExamples | None
) -> Iterator[dict[str, Any]]:
    spec = options.section(ClassificationSpec)
    count = scored.scores.shape[1]
    names = spec.labels or tuple(str(label) for label in range(count))
    scores = torch.from_numpy(np.ascontiguousarray(scored.scores))
    probabilities = scores.softmax(1) if spec.problem_type == SINGLE else scores.sigmoid()
    for index, example in enumerate(scored.examples):
        row: dict[str, Any] = {"source": example.source}
        if spec.problem_type == REGRESSION:
            yield row | {"prediction": scores[index].tolist(), "true": [float(value) for value in example.targets]}
            continue
        chances = dict(zip(names, probabilities[index].tolist(), strict=True))
        true = [names[int(label)] for label in example.targets]
        if spec.problem_type == MULTI:
            yield row | {"labels": _above(chances), "probabilities": chances, "true": true}
        else:
            yield row | {"label": max(chances, key=chances.__getitem__), "probabilities": chances, "true": true[0]}


def _above(chances: dict[str, float]) -> Sequence[str]:
    return [name for name, chance in chances.items() if chance > _THRESHOLD]


def _margins(scored: ScoredExamples) -> np.ndarray:
    """Return the margin that the data give each pair, 0 without one: (P,)."""
    return np.array([float(example.targets[0]) if example.targets else 0.0 for example in scored.examples])


def _reward_metrics(options: BuildOptions, scored: ScoredExamples, base: ScoredExamples | None) -> Metrics:
    rewards = torch.from_numpy(scored.scores.reshape(-1, 2))
    losses = pair_losses_of(rewards, torch.from_numpy(_margins(scored)), options.section(RewardSpec))
    difference = (rewards[:, 0] - rewards[:, 1]).numpy()
    return {
        "loss": mean_of(losses.numpy()),
        "accuracy": mean_of(difference > 0),
        "margin": mean_of(difference),
        "mean_reward": mean_of(rewards.mean(1).numpy()),
    }


def _reward_predictions(
    options: BuildOptions, scored: ScoredExamples, base: ScoredExamples | None
) -> Iterator[dict[str, Any]]:
    rewards = scored.scores.reshape(-1, 2)
    for example, (chosen, rejected) in zip(scored.examples, rewards.tolist(), strict=True):
        yield {
            "source": example.source,
            "reward_chosen": chosen,
            "reward_rejected": rejected,
            "margin": chosen - rejected,
        }


CLASSIFICATION_MEASURES = ExampleMeasures(_classification_metrics, _classification_predictions)
REWARD_MEASURES_OF_PAIRS = ExampleMeasures(_reward_metrics, _reward_predictions)
