"""Losses of supervised fine-tuning other than the cross-entropy of the labels, computed inside the output head.

    smoothed labels       (1 - s) nll + s / V Σ_v (-log p_v)     as transformers' Trainer with label_smoothing_factor: s
    dynamic fine-tuning   p nll, where p gets no gradient        Wu et al. 2025, arXiv:2508.05629

nll = -log p of the label, V classes. Both are summed over the trained tokens and divided by their number. Evaluation
computes nll alone, so that its losses and perplexities compare with those of other runs.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch.nn.functional as F
from ligertune_kernels import linear_cross_entropy, linear_log_probs
from torch import Tensor, nn

from ligertune.data.templates.label_masking import IGNORE_INDEX
from ligertune.features.task import Measures, Task
from ligertune.patching.fused_loss import HeadLoss, head_loss
from ligertune.planning.memory.model_shape import ModelShape


@dataclass(frozen=True)
class SmoothedLabels:
    """Cross-entropy with smoothed labels. smoothing: the share s of each label's weight that all classes get."""

    smoothing: float

    def fused(
        self, hidden: Tensor, weight: Tensor, bias: Tensor | None, labels: Tensor, options: dict[str, Any]
    ) -> Tensor:
        return linear_cross_entropy(hidden, weight, labels, bias, label_smoothing=self.smoothing, **options)

    def dense(self, logits: Tensor, labels: Tensor, num_items_in_batch: int | Tensor | None) -> Tensor:
        logits = logits.float()
        s = self.smoothing
        total = F.cross_entropy(logits, labels, ignore_index=IGNORE_INDEX, reduction="sum", label_smoothing=s)
        return total / _count(labels, num_items_in_batch)


class DynamicFineTuning:
    """The cross-entropy of each token times the model's probability of the token."""

    def fused(
        self, hidden: Tensor, weight: Tensor, bias: Tensor | None, labels: Tensor, options: dict[str, Any]
    ) -> Tensor:
        options = dict(options)
        count = _count(labels, options.pop("num_items_in_batch"))
        return self._sum(linear_log_probs(hidden, weight, labels, bias, **options).logprob) / count

    def dense(self, logits: Tensor, labels: Tensor, num_items_in_batch: int | Tensor | None) -> Tensor:
        nll = F.cross_entropy(logits.float(), labels, ignore_index=IGNORE_INDEX, reduction="none")
        return self._sum(-nll) / _count(labels, num_items_in_batch)

    @staticmethod
    def _sum(logprob: Tensor) -> Tensor:
        """Return the sum of the losses, given log-probabilities (N,), which are 0 where the label is ignored."""
        return -(logprob.detach().exp() * logprob).sum()


def _count(labels: Tensor, num_items_in_batch: int | Tensor | None) -> int | Tensor:
    """Return what divides the sum."""
    return (labels != IGNORE_INDEX).sum().clamp(min=1) if num_items_in_batch is None else num_items_in_batch


class TokenLossTask(Task):
    """Supervised fine-tuning with another loss in training."""

    def __init__(self, shape: ModelShape, measures: Measures | None, loss: HeadLoss) -> None:
        super().__init__(shape, measures)
        self._loss = loss

    def loss(self, model: nn.Module, batch: dict[str, Any]) -> Tensor:
        if not model.training:
            return super().loss(model, batch)
        with head_loss(self._loss):
            return super().loss(model, batch)
