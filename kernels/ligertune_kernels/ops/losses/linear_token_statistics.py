"""What a linear layer's distribution says of each token, without the logits: log-probability, likeliest class, entropy.

    z as in row_pass.py      logprob = z_y - lse      argmax: the first of the largest z      entropy = lse - sum p z

Nothing here is differentiable. The logits are made a chunk of rows at a time, and one sweep over each row gives all.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import nn

from ligertune_kernels.autocast import without_autocast
from ligertune_kernels.chips import launch_options
from ligertune_kernels.launcher import chip_of, on_device, runs_triton, triton
from ligertune_kernels.ops.losses._linear_chunks import Head
from ligertune_kernels.ops.losses._linear_inputs import check_shapes, same_dtype, slot_rows_of
from ligertune_kernels.ops.losses._row_kernels import statistics_kernel
from ligertune_kernels.ops.losses._row_pass import VECTOR
from ligertune_kernels.ops.losses._schedule import CHUNK_BYTES, schedule_of

BLOCK = 2048  # wider it spills on sm100 or sm120


@dataclass(frozen=True)
class TokenStatistics:
    """Of each token, in the labels' shape. Where the label is ignored logprob is 0, where it is no class NaN."""

    logprob: torch.Tensor
    argmax: torch.Tensor
    entropy: torch.Tensor

    @property
    def loss(self) -> torch.Tensor:
        """The cross entropy of each token."""
        return -self.logprob


def linear_token_statistics_reference(
    hidden: torch.Tensor,
    weight: torch.Tensor,
    labels: torch.Tensor,
    bias: torch.Tensor | None = None,
    *,
    lora_a: torch.Tensor | None = None,
    lora_b: torch.Tensor | None = None,
    lora_scale: float = 1.0,
    softcap: float | None = None,
    logit_scale: float = 1.0,
    ignore_index: int = -100,
) -> TokenStatistics:
    """The same in plain torch, from all logits."""
    logits = nn.functional.linear(hidden, weight, bias)
    if lora_a is not None:
        logits = logits + lora_scale * nn.functional.linear(nn.functional.linear(hidden, lora_a), lora_b)
    found = _statistics_torch(
        logits.reshape(-1, weight.shape[0]), labels.reshape(-1), softcap, logit_scale, ignore_index
    )
    return TokenStatistics(*(t.view(labels.shape) for t in found))


def _statistics_torch(
    logits: torch.Tensor, labels: torch.Tensor, softcap: float | None, logit_scale: float, ignore_index: int
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    n_cols = logits.shape[1]
    z = logits.to(torch.promote_types(logits.dtype, torch.float32)) * logit_scale
    if softcap is not None:
        z = softcap * torch.tanh(z / softcap)
    log_probs = z.log_softmax(dim=-1)
    entropy = -(log_probs.exp() * log_probs.masked_fill(log_probs == -torch.inf, 0.0)).sum(dim=-1)
    is_class = (labels >= 0) & (labels < n_cols)
    logprob = log_probs.gather(1, labels.long().clamp(0, n_cols - 1).unsqueeze(1)).squeeze(1)
    logprob = logprob.masked_fill(~is_class, torch.nan).masked_fill(labels == ignore_index, 0.0)
    return logprob, z.argmax(dim=-1), entropy


@torch.no_grad()
def linear_token_statistics(
    hidden: torch.Tensor,
    weight: torch.Tensor,
    labels: torch.Tensor,
    bias: torch.Tensor | None = None,
    *,
    lora_a: torch.Tensor | None = None,
    lora_b: torch.Tensor | None = None,
    lora_scale: float = 1.0,
    softcap: float | None = None,
    logit_scale: float = 1.0,
    ignore_index: int = -100,
    chunk_bytes: int = CHUNK_BYTES,
) -> TokenStatistics:
    """Log-probability of the label, likeliest class and entropy of each token; without gradient.

    hidden (..., E), weight (V, E), labels (...) and the options are those of linear_cross_entropy. argmax and entropy
    are there for ignored labels too.
    """
    check_shapes("linear_token_statistics", hidden, weight, labels, bias, lora_a, lora_b)
    rows, *parameters = same_dtype("linear_token_statistics", hidden, weight, bias, lora_a, lora_b)
    rows, flat = rows.reshape(-1, rows.shape[-1]).contiguous(), labels.reshape(-1).to(hidden.device).contiguous()
    head, (n_rows, vocab_size) = Head(*parameters, lora_scale), (len(rows), weight.shape[0])
    wide = torch.promote_types(rows.dtype, torch.float32)
    found = TokenStatistics(
        rows.new_empty(n_rows, dtype=wide),
        rows.new_empty(n_rows, dtype=torch.int64),
        rows.new_empty(n_rows, dtype=wide),
    )
    if n_rows:
        slot = schedule_of(
            n_rows, rows.shape[1], vocab_size, rows.dtype, needs_dx=False, needs_dw=False, chunk_bytes=chunk_bytes,
            slot_rows=slot_rows_of(rows),
        ).slot  # fmt: skip
        buffer = rows.new_empty((slot, vocab_size))
    with without_autocast(rows.device):
        for start in range(0, n_rows, slot if n_rows else 1):
            part = slice(start, min(start + slot, n_rows))
            logits = buffer[: part.stop - start]
            head.logits(rows[part], head.narrowed(rows[part]), out=logits)
            _take(logits, flat[part], softcap, logit_scale, ignore_index, found, part)
    return TokenStatistics(*(t.view(labels.shape) for t in (found.logprob, found.argmax, found.entropy)))


def _take(
    logits: torch.Tensor,
    labels: torch.Tensor,
    softcap: float | None,
    logit_scale: float,
    ignore_index: int,
    found: TokenStatistics,
    part: slice,
) -> None:
    """The statistics of some rows into their place."""
    out = found.logprob[part], found.argmax[part], found.entropy[part]
    if not runs_triton(logits):
        for place, values in zip(
            out, _statistics_torch(logits, labels, softcap, logit_scale, ignore_index), strict=True
        ):
            place.copy_(values)
        return
    n_rows, n_cols = logits.shape
    block, chip = min(BLOCK, max(128, triton.next_power_of_2(n_cols))), chip_of(logits.device)
    with on_device(logits):
        statistics_kernel[(n_rows,)](
            logits, labels, *out, logits.stride(0), n_rows, n_cols, ignore_index, softcap or 0.0, logit_scale,
            HAS_SOFTCAP=softcap is not None, LANES=block // VECTOR, VECTOR=VECTOR, **launch_options(block, chip),
        )  # fmt: skip
