"""Statistics of rows of logits (N, V): log-probability of the label, argmax, entropy and mean logit, in one sweep.

    z and lse as in _row_pass.py      logprob = z_y - lse      argmax: the first of the largest z
    entropy = log sum e^(z - m) - sum p (z - m)        mean_logit = sum z / V

with m the row's maximum: lse - sum p z would be a difference of numbers as large as the logits.

The arithmetic is fp32, or float64 in the torch form for float64 logits. No gradients.
"""

from __future__ import annotations

from typing import NamedTuple

import torch

from ligertune_kernels.chips import launch_options
from ligertune_kernels.jit.device_functions import LN2, fp32, scale_and_cap
from ligertune_kernels.launcher import chip_of, on_device, runs_triton, tl, triton
from ligertune_kernels.ops.losses._row_pass import MIN_COLS, VECTOR, LossOptions, capped_logits

BLOCK = 2048  # wider blocks spill on sm100 or sm120


class RowStatistics(NamedTuple):
    """Statistics of rows."""

    logprob: torch.Tensor  # (N,)
    argmax: torch.Tensor  # (N,), int64
    entropy: torch.Tensor  # (N,), in nats
    mean_logit: torch.Tensor  # (N,)

    def of(self, rows: slice) -> RowStatistics:
        """Return the statistics of some rows, as views."""
        return RowStatistics(*(t[rows] for t in self))


def empty_statistics(rows: torch.Tensor) -> RowStatistics:
    """Return memory for the statistics of rows (N, E)."""
    wide = torch.promote_types(rows.dtype, torch.float32)
    return RowStatistics(*(rows.new_empty(rows.shape[:1], dtype=dtype) for dtype in (wide, torch.int64, wide, wide)))


def statistics_torch(logits: torch.Tensor, labels: torch.Tensor, options: LossOptions) -> RowStatistics:
    """Return the statistics of logits (N, V) in plain torch; the log-probability is differentiable."""
    n_cols = logits.shape[1]
    z, _ = capped_logits(logits, options)
    log_probs = z.log_softmax(dim=-1)
    entropy = -(log_probs.exp() * log_probs.masked_fill(log_probs == -torch.inf, 0.0)).sum(dim=-1)
    is_class = (labels >= 0) & (labels < n_cols)
    logprob = log_probs.gather(1, labels.long().clamp(0, n_cols - 1).unsqueeze(1)).squeeze(1)
    logprob = logprob.masked_fill(~is_class, torch.nan).masked_fill(labels == options.ignore_index, 0.0)
    return RowStatistics(logprob, z.argmax(dim=-1), entropy, z.mean(dim=-1))


@triton.jit(do_not_specialize=["n_rows"])
def statistics_kernel(
    logits_ptr, labels_ptr, logprob_ptr, argmax_ptr, entropy_ptr, mean_ptr, logits_row_stride, n_rows, n_cols,
    ignore_index, softcap, logit_scale,
    HAS_SOFTCAP: tl.constexpr, LANES: tl.constexpr, VECTOR: tl.constexpr,
):  # fmt: skip
    """Write the statistics of a row; its most likely class is the first of equals."""
    softcap = fp32(softcap)
    logit_scale = fp32(logit_scale)
    row = tl.program_id(0).to(tl.int64)
    x_ptr = logits_ptr + row * logits_row_stride
    offs = tl.arange(0, LANES)[:, None] * VECTOR + tl.arange(0, VECTOR)[None, :]
    lane_max = tl.full([LANES], -1e30, dtype=tl.float32)
    lane_sum = tl.zeros([LANES], dtype=tl.float32)
    lane_below = tl.zeros([LANES], dtype=tl.float32)  # sum of (z - maximum) 2^(z - maximum)
    lane_total = tl.zeros([LANES], dtype=tl.float32)  # sum of z
    lane_col = tl.full([LANES], n_cols, dtype=tl.int32)  # first column with the maximum
    for start in range(0, n_cols, LANES * VECTOR):
        cols = start + offs
        x = tl.load(x_ptr + cols, mask=cols < n_cols, other=0.0).to(tl.float32)
        z, _ = scale_and_cap(x, softcap, logit_scale, HAS_SOFTCAP)
        lane_total += tl.sum(z, axis=1)  # 0 past the end of the row
        z = tl.where(cols < n_cols, z, float("-inf"))
        new_max = tl.maximum(lane_max, tl.max(z, axis=1))
        first = tl.min(tl.where(z == new_max[:, None], cols, n_cols), axis=1)
        lane_col = tl.where(new_max > lane_max, first, tl.minimum(lane_col, first))
        fading = tl.exp2(lane_max - new_max)
        below = z - new_max[:, None]
        e = tl.exp2(below)
        lane_below = (lane_below + (lane_max - new_max) * lane_sum) * fading
        lane_below += tl.sum(tl.where(e > 0.0, below, 0.0) * e, axis=1)
        lane_sum = lane_sum * fading + tl.sum(e, axis=1)
        lane_max = new_max
    row_max = tl.max(lane_max, axis=0)
    share = tl.exp2(lane_max - row_max)
    row_sum = tl.sum(lane_sum * share, axis=0)
    row_below = tl.sum((lane_below + (lane_max - row_max) * lane_sum) * share, axis=0)
    log_sum = tl.log2(row_sum)
    lse = row_max + log_sum
    first = tl.min(tl.where(lane_max == row_max, lane_col, n_cols), axis=0)
    tl.store(argmax_ptr + row, tl.minimum(first, n_cols - 1))  # a row of NaN has no maximum
    tl.store(entropy_ptr + row, (log_sum - row_below / row_sum) * LN2)
    tl.store(mean_ptr + row, tl.sum(lane_total, axis=0) * LN2 / n_cols)
    label = tl.load(labels_ptr + row).to(tl.int64)
    is_class = (label >= 0) & (label < n_cols)
    label_x = tl.load(x_ptr + label, mask=is_class, other=float("nan")).to(tl.float32)
    label_z, _ = scale_and_cap(label_x, softcap, logit_scale, HAS_SOFTCAP)
    tl.store(logprob_ptr + row, tl.where(label == ignore_index, 0.0, (label_z - lse) * LN2))


def write_statistics(logits: torch.Tensor, labels: torch.Tensor, options: LossOptions, out: RowStatistics) -> None:
    """Write the statistics of logits (N, V) into out."""
    if not runs_triton(logits):
        for place, values in zip(out, statistics_torch(logits, labels, options), strict=True):
            place.copy_(values)
        return
    n_rows, n_cols = logits.shape
    block = min(BLOCK, max(MIN_COLS, triton.next_power_of_2(n_cols)))
    chip = chip_of(logits.device)
    ignore_index, _, softcap, logit_scale, _ = options.numbers
    with on_device(logits):
        statistics_kernel[(n_rows,)](
            logits, labels, *out, logits.stride(0), n_rows, n_cols, ignore_index, softcap, logit_scale,
            HAS_SOFTCAP=options.softcap is not None, LANES=block // VECTOR, VECTOR=VECTOR,
            **launch_options(block, chip),
        )  # fmt: skip
