"""The tasks classification and reward: a loss of the scores of texts, and measures. What they share is `ScoreTask`.

classification, the losses of transformers' *ForSequenceClassification:

    single_label_classification   cross-entropy
    multi_label_classification    binary cross-entropy of each label, mean over the labels
    regression                    squared error, mean over the numbers

reward, a score per text, higher for the chosen answer of a pair, with TRL's definitions and names:

    loss of a pair   -log sigmoid(r_chosen - r_rejected - margin) + c (r_chosen + r_rejected)^2

margin is the pair's, 0 without one; c is `reward.center_rewards_coefficient` (Eisenstein et al. 2023). The loss of a
step is the mean over the texts or pairs of the global batch.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.nn.functional import logsigmoid

from ligertune.data.templates.label_masking import IGNORE_INDEX
from ligertune.features.scores.document_scores import ROWS, last_tokens, set_pad_token
from ligertune.features.scores.label_kinds import MULTI, REGRESSION, SINGLE
from ligertune.features.scores.recipe import ClassificationSpec, RewardSpec
from ligertune.features.task import Measures, Task
from ligertune.planning.memory.model_shape import ModelShape

if TYPE_CHECKING:
    import numpy as np

    from ligertune.data.batching.collate import Batcher
    from ligertune.data.examples import Examples


class ScoreTask(Task):
    """A task whose loss is a function of the scores of documents.

    documents: sequences of an example.
    """

    documents = 1  # a pair has 2
    _pad_token_id: int

    def prepare(self, model: nn.Module, batchers: Sequence[Batcher]) -> None:
        self._pad_token_id = batchers[0].pad_token_id
        set_pad_token(model, self._pad_token_id)

    def inputs(self, examples: Examples, indices: np.ndarray, *, step: int | None = None) -> dict[str, Any]:
        """Return the divisor of the loss: the number of examples."""
        return {"num_items_in_batch": max(len(indices), 1)}

    def batch_fields(self, examples: Examples, indices: Sequence[int], batch: dict[str, Any]) -> dict[str, Any]:
        """Return the rows of the scores, whether each example counts (a rank without rows has one that does not), and
        `target_fields`.
        """
        shape = batch["input_ids"].shape
        lengths = batch.get("document_lengths") or [shape[1]] * shape[0]
        rows = last_tokens(
            batch["input_ids"], lengths[: self.documents * len(indices)], pad_token_id=self._pad_token_id
        )
        counts = torch.full((len(indices),), bool((batch["labels"] != IGNORE_INDEX).any()))
        targets = [tuple(map(float, examples[index].targets)) for index in indices]  # ids stand for names by now
        return {ROWS: rows, "counts": counts, "targets": self.target_tensor(targets)}

    def target_tensor(self, targets: Sequence[tuple[float, ...]]) -> Tensor:
        """Return the labels of D examples as the loss reads them. Each task defines it."""
        raise NotImplementedError

    def predictions(self, model: nn.Module, batch: dict[str, Any]) -> tuple[Tensor, Tensor]:
        """Return the scores (D, labels) of the documents that count, and their targets (D, ...)."""
        batch = dict(batch)
        counts = batch.pop("counts")
        targets = batch.pop("targets")
        del batch["labels"]
        scores = model(**batch, use_cache=False).logits[0]
        return scores[counts.repeat_interleave(self.documents)], targets[counts]

    def loss(self, model: nn.Module, batch: dict[str, Any]) -> Tensor:
        batch = dict(batch)
        del batch["labels"]
        divisor, counts, targets = (batch.pop(name) for name in ("num_items_in_batch", "counts", "targets"))
        scores = model(**batch, use_cache=False).logits[0]
        return self.loss_of_scores(scores.float(), targets, counts, divisor)

    def loss_of_scores(self, scores: Tensor, targets: Tensor, counts: Tensor, divisor: int) -> Tensor:
        """Return this batch's part of the loss (), and add to the measures. Each task defines it.

        scores: (documents, labels) float32. counts: (D,) bool, whether an example counts.
        """
        raise NotImplementedError


# ---- classification

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


def target_tensor(targets: Sequence[tuple[float, ...]], *, num_labels: int, problem_type: str) -> Tensor:
    """Return ids (D,) int64, or (D, labels) float32: 1 for the labels of each text, or its numbers."""
    if problem_type == SINGLE:
        return torch.tensor([int(target[0]) for target in targets])
    if problem_type == REGRESSION:
        return torch.tensor(targets, dtype=torch.float32)
    made = torch.zeros(len(targets), num_labels)
    for row, ids in enumerate(targets):
        made[row, [int(label) for label in ids]] = 1.0
    return made


def classification_losses(scores: Tensor, targets: Tensor, problem_type: str) -> Tensor:
    """Return the loss of each text (D,). scores: (D, labels); targets: of `target_tensor`."""
    if problem_type == SINGLE:
        return F.cross_entropy(scores, targets, reduction="none")
    if problem_type == MULTI:
        return F.binary_cross_entropy_with_logits(scores, targets, reduction="none").mean(1)
    return (scores - targets).square().mean(1)


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
        """Return the labels of D texts as the function `target_tensor` does."""
        return target_tensor(targets, num_labels=self._num_labels, problem_type=self._problem_type)

    def loss_of_scores(self, scores: Tensor, targets: Tensor, counts: Tensor, divisor: int) -> Tensor:
        losses = classification_losses(scores, targets, self._problem_type)
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


# ---- reward

# min_reward and max_reward are means over micro-batches
REWARD_MEASURES = ("min_reward", "mean_reward", "max_reward", "accuracy", "margin")


def pair_losses_of(rewards: Tensor, margins: Tensor, options: RewardSpec) -> Tensor:
    """Return the loss of each pair (P,). rewards: (P, 2) of the chosen and the rejected answer; margins: (P,)."""
    losses = -logsigmoid(rewards[:, 0] - rewards[:, 1] - margins)
    if options.center_rewards_coefficient is not None:
        losses = losses + options.center_rewards_coefficient * rewards.sum(1) ** 2
    return losses


class RewardTask(ScoreTask):
    """Give the chosen answer of each pair the higher reward."""

    documents = 2

    def __init__(self, shape: ModelShape, options: RewardSpec, device: torch.device) -> None:
        super().__init__(shape)
        self.options = options
        self.measures = Measures(REWARD_MEASURES, device)

    def target_tensor(self, targets: Sequence[tuple[float, ...]]) -> Tensor:
        """Return the margin of each pair, (P,)."""
        return torch.tensor([target[0] if target else 0.0 for target in targets])

    def loss_of_scores(self, scores: Tensor, targets: Tensor, counts: Tensor, divisor: int) -> Tensor:
        rewards = scores.view(-1, 2)
        difference = rewards[:, 0] - rewards[:, 1]
        losses = pair_losses_of(rewards, targets, self.options)
        self._measure(rewards.detach(), difference.detach(), counts)
        return losses.masked_fill(~counts, 0.0).sum() / divisor

    def _measure(self, rewards: Tensor, difference: Tensor, counts: Tensor) -> None:
        """Add to the measures. rewards: (P, 2), difference, counts: (P,)."""
        pairs = counts.sum()
        some = counts.any().float()
        self.measures.add("min_reward", rewards.min() * some, some)
        self.measures.add("max_reward", rewards.max() * some, some)
        self.measures.add("mean_reward", rewards * counts[:, None], 2 * pairs)
        self.measures.add("accuracy", (difference > 0) & counts, pairs)
        self.measures.add("margin", difference * counts, pairs)
