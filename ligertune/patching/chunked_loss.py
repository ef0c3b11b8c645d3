"""The loss in chunks of rows, in plain torch: what one does without a kernel against the memory of the logits.

Each chunk's logits (ROWS, V) are made, give their part of the loss, and are made again in the backward.
"""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.utils.checkpoint import checkpoint
from transformers import PreTrainedModel

from ligertune.errors import UserError
from ligertune.patching.fused_loss import LossHead, LossInHead, refuse_head, refuse_loss
from ligertune.patching.module_patch import swap

ROWS = 1024


class ChunkedHead(LossHead):
    """Mixin of the output head: (..., E) -> (..., V), or -> the loss when labels come along."""

    def forward(self, input: Tensor, loss: tuple[Tensor, dict[str, Any]] | None = None) -> Tensor:
        if loss is None:
            return super().forward(input)
        labels, options = loss
        hidden, labels = input.reshape(-1, input.shape[-1]), labels.reshape(-1)  # (N, E), (N,)
        total = torch.zeros((), device=hidden.device)
        for rows, targets in zip(hidden.split(ROWS), labels.split(ROWS), strict=True):
            total = total + checkpoint(self._sum, rows, targets, options, use_reentrant=False)
        count = options["num_items_in_batch"]
        return total / ((labels != options["ignore_index"]).sum().clamp(min=1) if count is None else count)

    def _sum(self, hidden: Tensor, labels: Tensor, options: dict[str, Any]) -> Tensor:
        logits = F.linear(hidden, self.weight, self.bias).float() * options["logit_scale"]  # (rows, V)
        if options["softcap"] is not None:
            logits = options["softcap"] * torch.tanh(logits / options["softcap"])
        return F.cross_entropy(logits, labels, ignore_index=options["ignore_index"], reduction="sum")


def chunk_loss(model: PreTrainedModel) -> None:
    """Let the loss of `model` be computed in chunks; a UserError where it cannot be."""
    refusal = refuse_loss(model) or refuse_head(model.get_output_embeddings())
    if refusal is not None:
        raise UserError(f"--baseline hf-chunked: not with this model: {refusal.reason}.")
    swap(model.get_output_embeddings(), ChunkedHead, None)
    swap(model, LossInHead, None)
