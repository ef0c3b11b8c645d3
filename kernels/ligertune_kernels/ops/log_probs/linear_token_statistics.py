"""Statistics per token of a linear layer's distribution, without storing the logits.

losses/_statistics_pass.py has the mathematics. The logits are computed in chunks of rows, and one sweep over each row
gives all statistics, in fp32. No gradients: `linear_log_probs` has them.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch

from ligertune_kernels.autocast import without_autocast
from ligertune_kernels.ops.losses._linear_inputs import Head, check_linear, choose_schedule
from ligertune_kernels.ops.losses._row_pass import LossOptions
from ligertune_kernels.ops.losses._schedule import CHUNK_BYTES
from ligertune_kernels.ops.losses._statistics_pass import empty_statistics, statistics_torch, write_statistics


@dataclass(frozen=True)
class TokenStatistics:
    """Statistics of each token, in the shape of the labels.

    logprob is 0 where the label is ignored and NaN where it is no class. mean_logit is the mean over the vocabulary.
    """

    logprob: torch.Tensor
    argmax: torch.Tensor
    entropy: torch.Tensor
    mean_logit: torch.Tensor

    @property
    def loss(self) -> torch.Tensor:
        """The cross entropy of each token."""
        return -self.logprob


def linear_token_statistics_reference(
    hidden: torch.Tensor,  # (..., E)
    weight: torch.Tensor,  # (V, E)
    labels: torch.Tensor,  # (...)
    bias: torch.Tensor | None = None,  # (V,)
    *,
    lora_a: torch.Tensor | None = None,
    lora_b: torch.Tensor | None = None,
    lora_scale: float = 1.0,
    **options: int | float | None,
) -> TokenStatistics:
    """Compute `linear_token_statistics` in plain torch with all logits; options are the fields of LossOptions."""
    logits = Head(weight, bias, lora_a, lora_b, lora_scale).reference_logits(hidden)
    found = statistics_torch(logits.reshape(-1, len(weight)), labels.reshape(-1), LossOptions(**options))
    return TokenStatistics(*(t.view(labels.shape) for t in found))


@torch.no_grad()
def linear_token_statistics(
    hidden: torch.Tensor,  # (..., E)
    weight: torch.Tensor,  # (V, E)
    labels: torch.Tensor,  # (...)
    bias: torch.Tensor | None = None,  # (V,)
    *,
    lora_a: torch.Tensor | None = None,  # (R, E)
    lora_b: torch.Tensor | None = None,  # (V, R)
    lora_scale: float = 1.0,
    softcap: float | None = None,
    logit_scale: float = 1.0,
    ignore_index: int = -100,
    chunk_bytes: int = CHUNK_BYTES,
) -> TokenStatistics:
    """Return log-probability of the label, argmax, entropy and mean logit of each token, without gradients.

    The options are those of linear_cross_entropy. argmax (int64), entropy (float32, in nats) and mean_logit (float32)
    are computed at ignored labels too. Raises ValueError on mismatched shapes or dtypes.
    """
    head = Head(weight, bias, lora_a, lora_b, lora_scale)
    options = LossOptions(ignore_index, 0.0, softcap, logit_scale)
    hidden, head = check_linear("linear_token_statistics", hidden, head, labels)
    rows = hidden.reshape(-1, hidden.shape[-1]).contiguous()
    flat = labels.reshape(-1).to(rows.device).contiguous()
    n_rows = len(rows)
    found = empty_statistics(rows)
    if n_rows:
        slot = choose_schedule(rows, head.weight, chunk_bytes, needs=(False, False)).slot
        buffer = rows.new_empty((slot, len(weight)))
        with without_autocast(rows.device):
            for start in range(0, n_rows, slot):
                part = slice(start, min(start + slot, n_rows))
                logits = buffer[: part.stop - start]
                head.write_logits(rows[part], head.low_rank(rows[part]), out=logits)
                write_statistics(logits, flat[part], options, found.of(part))
    return TokenStatistics(*(t.view(labels.shape) for t in found))
