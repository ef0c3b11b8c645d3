"""The task classification: the losses of transformers' *ForSequenceClassification, and accuracy, F1 or errors.

    single_label_classification   cross-entropy
    multi_label_classification    binary cross-entropy of each label, mean over the labels
    regression                    squared error, mean over the numbers

The loss of a step is the mean over the texts of the global batch.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
import torch.nn.functional as F
from torch import Tensor

from ligertune.features.scores.label_kinds import MULTI, REGRESSION, SINGLE
from ligertune.features.scores.recipe import ClassificationSpec
from ligertune.features.scores.score_task import ScoreTask
from ligertune.features.task import Measures
from ligertune.planning.memory.model_shape import ModelShape

PARTS = ("true_positives", "false_positives", "false_negatives")  # of each label


class F1Measures(Measures):
    """Accuracy and F1, from counts of each label that are summed over steps and ranks.

    f1_macro: mean over labels; with one label per text, over those that a text has or is given, as scikit-learn does.
    f1: of the positive label, 1 of two. f1_micro: over all labels of a multi-label classification.
    """

    def __init__(self, num_labels: int, problem_type: str, device: torch.device | str) -> None:
        counts = [f"{part}/{label}" for part in PARTS for label in range(num_labels)]
        super().__init__(("accuracy", *counts), device)
        self._num_labels = num_labels
        self._problem_type = problem_type

    def add_counts(self, predicted: Tensor, true: Tensor) -> None:
        """Add the counts of D texts. predicted, true: (D, labels) bool."""
        parts = (predicted & true, predicted & ~true, ~predicted & true)
        self._sums[0, 1:] += torch.cat([part.sum(0) for part in parts]).float()
        self._sums[1, 1:] += 1

    def means(self, taken: Tensor) -> dict[str, float]:
        found = {name: value for name, value in super().means(taken).items() if name == "accuracy"}
        if not found:
            return found
        true, wrong, missed = taken[0, 1:].double().cpu().view(len(PARTS), self._num_labels)
        f1 = 2 * true / (2 * true + wrong + missed).clamp(min=1)
        if self._problem_type == MULTI:
            micro = 2 * true.sum() / (2 * true + wrong + missed).sum().clamp(min=1)
            return {**found, "f1_macro": float(f1.mean()), "f1_micro": float(micro)}
        found["f1_macro"] = float(f1[true + wrong + missed > 0].mean())
        return {**found, "f1": float(f1[1])} if self._num_labels == 2 else found


class ClassificationTask(ScoreTask):
    """Predict the label, the labels or the numbers of each text."""

    def __init__(self, shape: ModelShape, options: ClassificationSpec, device: torch.device) -> None:
        super().__init__(shape)
        assert options.num_labels is not None and options.problem_type is not None  # the data have completed both
        self._num_labels = options.num_labels
        self._problem_type = options.problem_type
        self._f1 = None
        if options.problem_type != REGRESSION:
            self._f1 = F1Measures(options.num_labels, options.problem_type, device)
        self.measures = self._f1 or Measures(("mean_absolute_error",), device)

    def target_tensor(self, targets: Sequence[tuple[float, ...]]) -> Tensor:
        """Return ids (D,) int64, or (D, labels) float32: 1 for the labels of each text, or its numbers."""
        if self._problem_type == SINGLE:
            return torch.tensor([int(target[0]) for target in targets])
        if self._problem_type == REGRESSION:
            return torch.tensor(targets, dtype=torch.float32)
        made = torch.zeros(len(targets), self._num_labels)
        for row, ids in enumerate(targets):
            made[row, [int(label) for label in ids]] = 1.0
        return made

    def loss_of_scores(self, scores: Tensor, targets: Tensor, counts: Tensor, divisor: int) -> Tensor:
        if self._problem_type == SINGLE:
            losses = F.cross_entropy(scores, targets, reduction="none")
        elif self._problem_type == MULTI:
            losses = F.binary_cross_entropy_with_logits(scores, targets, reduction="none").mean(1)
        else:
            losses = (scores - targets).square().mean(1)
        self._measure(scores.detach(), targets, counts)
        return losses.masked_fill(~counts, 0.0).sum() / divisor

    def _measure(self, scores: Tensor, targets: Tensor, counts: Tensor) -> None:
        """Add to the measures."""
        texts = counts.sum()
        if self._f1 is None:
            self.measures.add("mean_absolute_error", (scores - targets).abs().mean(1) * counts, texts)
            return
        if self._problem_type == SINGLE:
            labels = torch.arange(self._num_labels, device=scores.device)
            predicted = scores.argmax(1)[:, None] == labels
            true = targets[:, None] == labels
        else:
            predicted = scores > 0
            true = targets > 0
        self.measures.add("accuracy", (predicted == true).all(1) & counts, texts)
        self._f1.add_counts(predicted & counts[:, None], true & counts[:, None])
