"""Statistics per token of a linear layer's distribution, without storing the logits: log-probability, argmax, entropy.

    z and lse as in _row_pass.py      logprob = z_y - lse      argmax: the first of the largest z
    entropy = lse - sum p z

The logits are computed in chunks of rows, and one sweep over each row gives all three, in fp32. No gradients.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch

from ligertune_kernels.autocast import without_autocast
from ligertune_kernels.chips import launch_options
from ligertune_kernels.jit.device_functions import LN2, fp32, scale_and_cap
from ligertune_kernels.launcher import chip_of, on_device, runs_triton, tl, triton
from ligertune_kernels.ops.losses._linear_inputs import Head, check_linear, max_slot_rows
from ligertune_kernels.ops.losses._row_pass import MIN_COLS, VECTOR, LossOptions, capped_logits
from ligertune_kernels.ops.losses._schedule import CHUNK_BYTES, schedule_of

BLOCK = 2048  # wider blocks spill on sm100 or sm120

Statistics = tuple[torch.Tensor, torch.Tensor, torch.Tensor]


@dataclass(frozen=True)
class TokenStatistics:
    """Statistics of each token, in the shape of the labels.

    logprob is 0 where the label is ignored and NaN where it is no class.
    """

    logprob: torch.Tensor
    argmax: torch.Tensor
    entropy: torch.Tensor

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
    found = _statistics_torch(logits.reshape(-1, len(weight)), labels.reshape(-1), LossOptions(**options))
    return TokenStatistics(*(t.view(labels.shape) for t in found))


def _statistics_torch(logits: torch.Tensor, labels: torch.Tensor, options: LossOptions) -> Statistics:
    n_cols = logits.shape[1]
    z, _ = capped_logits(logits, options)
    log_probs = z.log_softmax(dim=-1)
    entropy = -(log_probs.exp() * log_probs.masked_fill(log_probs == -torch.inf, 0.0)).sum(dim=-1)
    is_class = (labels >= 0) & (labels < n_cols)
    logprob = log_probs.gather(1, labels.long().clamp(0, n_cols - 1).unsqueeze(1)).squeeze(1)
    logprob = logprob.masked_fill(~is_class, torch.nan).masked_fill(labels == options.ignore_index, 0.0)
    return logprob, z.argmax(dim=-1), entropy


@triton.jit(do_not_specialize=["n_rows"])
def statistics_kernel(
    logits_ptr, labels_ptr, logprob_ptr, argmax_ptr, entropy_ptr, logits_row_stride, n_rows, n_cols,
    ignore_index, softcap, logit_scale,
    HAS_SOFTCAP: tl.constexpr, LANES: tl.constexpr, VECTOR: tl.constexpr,
):  # fmt: skip
    """Write the log-probability of a row's label, its most likely class (the first of equals) and its entropy."""
    softcap, logit_scale = fp32(softcap), fp32(logit_scale)
    row = tl.program_id(0).to(tl.int64)
    x_ptr = logits_ptr + row * logits_row_stride
    offs = tl.arange(0, LANES)[:, None] * VECTOR + tl.arange(0, VECTOR)[None, :]
    lane_max = tl.full([LANES], -1e30, dtype=tl.float32)
    lane_sum = tl.zeros([LANES], dtype=tl.float32)
    lane_z = tl.zeros([LANES], dtype=tl.float32)  # sum of z 2^(z - maximum)
    lane_col = tl.full([LANES], n_cols, dtype=tl.int32)  # first column with the maximum
    for start in range(0, n_cols, LANES * VECTOR):
        cols = start + offs
        x = tl.load(x_ptr + cols, mask=cols < n_cols, other=0.0).to(tl.float32)
        z, _ = scale_and_cap(x, softcap, logit_scale, HAS_SOFTCAP)
        z = tl.where(cols < n_cols, z, float("-inf"))
        new_max = tl.maximum(lane_max, tl.max(z, axis=1))
        first = tl.min(tl.where(z == new_max[:, None], cols, n_cols), axis=1)
        lane_col = tl.where(new_max > lane_max, first, tl.minimum(lane_col, first))
        fading = tl.exp2(lane_max - new_max)
        e = tl.exp2(z - new_max[:, None])
        lane_sum = lane_sum * fading + tl.sum(e, axis=1)
        lane_z = lane_z * fading + tl.sum(tl.where(e > 0.0, z, 0.0) * e, axis=1)
        lane_max = new_max
    row_max = tl.max(lane_max, axis=0)
    share = tl.exp2(lane_max - row_max)
    row_sum = tl.sum(lane_sum * share, axis=0)
    lse = row_max + tl.log2(row_sum)
    first = tl.min(tl.where(lane_max == row_max, lane_col, n_cols), axis=0)
    tl.store(argmax_ptr + row, tl.minimum(first, n_cols - 1))  # a row of NaN has no maximum
    tl.store(entropy_ptr + row, (lse - tl.sum(lane_z * share, axis=0) / row_sum) * LN2)
    label = tl.load(labels_ptr + row).to(tl.int64)
    is_class = (label >= 0) & (label < n_cols)
    label_x = tl.load(x_ptr + label, mask=is_class, other=float("nan")).to(tl.float32)
    label_z, _ = scale_and_cap(label_x, softcap, logit_scale, HAS_SOFTCAP)
    tl.store(logprob_ptr + row, tl.where(label == ignore_index, 0.0, (label_z - lse) * LN2))


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
    """Return the log-probability of the label, the argmax and the entropy of each token, without gradients.

    The options are those of linear_cross_entropy. argmax (int64) and entropy (float32, in nats) are computed at ignored
    labels too. Raises ValueError on mismatched shapes or dtypes.
    """
    head, options = Head(weight, bias, lora_a, lora_b, lora_scale), LossOptions(ignore_index, 0.0, softcap, logit_scale)
    hidden, head = check_linear("linear_token_statistics", hidden, head, labels)
    rows = hidden.reshape(-1, hidden.shape[-1]).contiguous()
    flat, n_rows = labels.reshape(-1).to(rows.device).contiguous(), len(rows)
    wide = torch.promote_types(rows.dtype, torch.float32)
    found = tuple(rows.new_empty(n_rows, dtype=dtype) for dtype in (wide, torch.int64, wide))
    if n_rows:
        slot = schedule_of(
            n_rows, rows.shape[1], len(weight), rows.dtype, needs_dx=False, needs_dw=False, chunk_bytes=chunk_bytes,
            slot_rows=max_slot_rows(rows),
        ).slot  # fmt: skip
        buffer = rows.new_empty((slot, len(weight)))
        with without_autocast(rows.device):
            for start in range(0, n_rows, slot):
                part = slice(start, min(start + slot, n_rows))
                logits = buffer[: part.stop - start]
                head.write_logits(rows[part], head.low_rank(rows[part]), out=logits)
                _write_statistics(logits, flat[part], options, tuple(t[part] for t in found))
    return TokenStatistics(*(t.view(labels.shape) for t in found))


def _write_statistics(logits: torch.Tensor, labels: torch.Tensor, options: LossOptions, out: Statistics) -> None:
    """Write logprob, argmax and entropy of logits (N, V) into out."""
    if not runs_triton(logits):
        for place, values in zip(out, _statistics_torch(logits, labels, options), strict=True):
            place.copy_(values)
        return
    n_rows, n_cols = logits.shape
    block, chip = min(BLOCK, max(MIN_COLS, triton.next_power_of_2(n_cols))), chip_of(logits.device)
    ignore_index, _, softcap, logit_scale, _ = options.numbers
    with on_device(logits):
        statistics_kernel[(n_rows,)](
            logits, labels, *out, logits.stride(0), n_rows, n_cols, ignore_index, softcap, logit_scale,
            HAS_SOFTCAP=options.softcap is not None, LANES=block // VECTOR, VECTOR=VECTOR,
            **launch_options(block, chip),
        )  # fmt: skip
