"""Log-probabilities of labels under a language model, computed at the labelled positions only.

`labels` of a batch are those of training: not shifted, IGNORE_INDEX where nothing is asked for. With our loss kernels
in the model no logits are stored; without them the logits of labelled rows are read.
"""

from __future__ import annotations

from typing import Any

import torch
from ligertune_kernels import TokenLogProbs, linear_log_probs
from torch import Tensor, nn

from ligertune.data.templates.label_masking import IGNORE_INDEX
from ligertune.models.shape import base_of
from ligertune.patching.deferred_logits import loss_only
from ligertune.patching.fused_loss import KernelLossModel, head_loss, let_head_losses_run


class LabelLogProbs:
    """A HeadLoss that keeps the log-probability (N,) of each label, and whether it is the most probable token (N,)."""

    def __init__(self) -> None:
        self.log_probs: Tensor | None = None  # (N,), 0 where there is no label
        self.is_best: Tensor | None = None  # (N,) bool
        self.has_label: Tensor | None = None  # (N,) bool

    def fused(
        self, hidden: Tensor, weight: Tensor, bias: Tensor | None, labels: Tensor, options: dict[str, Any]
    ) -> Tensor:
        """Compute them from hidden states (N, E), without logits. Returns a loss that nobody reads."""
        kept = {name: value for name, value in options.items() if name != "num_items_in_batch"}
        found = linear_log_probs(hidden, weight, labels, bias, statistics=True, **kept)
        return self._keep(found, labels)

    def dense(self, logits: Tensor, labels: Tensor, num_items_in_batch: int | Tensor | None) -> Tensor:
        """Compute them from logits (N, V). Returns a loss that nobody reads."""
        rows = torch.nonzero(labels != IGNORE_INDEX)[:, 0]
        chosen = logits[rows]
        chosen = chosen.float() if chosen.dtype.itemsize < 4 else chosen
        log_probs = chosen.new_zeros(len(labels))
        log_probs[rows] = torch.log_softmax(chosen, -1).gather(-1, labels[rows, None])[:, 0]
        best = torch.zeros_like(labels)
        best[rows] = chosen.argmax(-1)
        return self._keep(TokenLogProbs(log_probs, argmax=best), labels)

    def _keep(self, found: TokenLogProbs, labels: Tensor) -> Tensor:
        assert found.argmax is not None  # both callers give it
        self.log_probs = found.logprob
        self.has_label = labels != IGNORE_INDEX
        self.is_best = (found.argmax == labels) & self.has_label
        return found.logprob.sum()


def prepare_to_score(model: nn.Module, task: str) -> None:
    """Let a model without our loss kernels compute `label_log_probs`. Raises UserError if it cannot."""
    inner = base_of(model)
    if not isinstance(inner, KernelLossModel):
        let_head_losses_run(inner, task)


@torch.no_grad()
def label_log_probs(model: nn.Module, batch: dict[str, Any]) -> LabelLogProbs:
    """Return what the model gives the labels of a collated batch, in the order of its positions."""
    kept = LabelLogProbs()
    with loss_only(), head_loss(kept):
        model(**batch, use_cache=False)
    return kept


def document_sums(model: nn.Module, batch: dict[str, Any]) -> Tensor:
    """Return sums over the documents of a packed batch, or the rows of a padded one: (3, D) float64.

    Row 0: log-probabilities of the labels. Row 1: their number. Row 2: how many are the most probable token.
    """
    labels = batch["labels"]
    lengths = batch.get("document_lengths") or [labels.shape[1]] * labels.shape[0]
    kept = label_log_probs(model, batch)
    assert kept.log_probs is not None and kept.has_label is not None and kept.is_best is not None  # of the forward
    values = torch.stack([kept.log_probs.double(), kept.has_label.double(), kept.is_best.double()])
    bounds = torch.tensor(lengths, device=values.device).expand(3, -1)
    return torch.segment_reduce(values, "sum", lengths=bounds, axis=1, unsafe=True)
