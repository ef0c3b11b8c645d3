r"""Passes over rows of logits (N, V): cross entropy and its gradient, and statistics of the distribution.

Cross entropy has class weights, label smoothing, a soft cap and a z-loss.
For a row x (V,) with label y, class weights w (1 by default), smoothing ε, cap c, logit scale s and z-loss weight ζ:

    z = c tanh(s x / c), or s x without a cap        lse = log sum exp z        p = exp(z - lse)
    loss = (1 - ε) w_y (lse - z_y) + ε/V sum_j w_j (lse - z_j) + ζ lse²
    dloss/dx_j = s (1 - (z_j/c)²) · [ p_j ((1 - ε) w_y + ε/V sum w + 2 ζ lse) - ε/V w_j - (1 - ε) w_y [j = y] ]

A row whose label is ignore_index has loss 0 and gradient 0. A row whose label is no class has NaN in both and reads
nothing out of bounds. The arithmetic is fp32, or float64 in the torch form for float64 logits.

Statistics of a row with maximum m, without gradients:

    logprob = z_y - lse      argmax: the first of the largest z      mean_logit = sum z / V
    entropy = log sum e^(z - m) - sum p (z - m)      (lse - sum p z is a difference of numbers as large as the logits)

`row_pass` takes whole rows, `slab_pass` some columns of rows whose lse is known, `write_statistics` whole rows. Where
kernels do not run, each has a form in torch.

In the kernels z, lse and maxima are in bits: natural logarithms times log2(e).

A program of `row_kernel` reads a row in two sweeps. The first finds lse; each lane keeps the running maximum and sum of
its columns. The second computes the gradient, which may overwrite the logits. The last columns of the row, the tail,
are loaded once and stay in registers for both sweeps; a row that is all tail is read once and written once. The second
sweep runs backwards, because the columns that were read last are most likely still in the L2 cache. Both sweeps load
the next block before they work on the current one, to hide the latency of memory. Only the tail is masked.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import NamedTuple

import torch

from ligertune_kernels.chips import launch_options
from ligertune_kernels.jit.device_functions import LN2, LOG2E, fp32, scale_and_cap
from ligertune_kernels.launcher import chip_of, on_device, runs_triton, tl, triton
from ligertune_kernels.ops.losses.tiles import MIN_COLS, STATISTICS_BLOCK, VECTOR, row_tiling


@triton.jit
def below(x, z, top, logit_scale, HAS_SOFTCAP: tl.constexpr):
    """Return z - top. Without a cap one fused multiply-add rounds once: z of 10,000 bits is rounded by 0.0005."""
    if HAS_SOFTCAP:
        return z - top
    else:
        return tl.fma(x, logit_scale * LOG2E, -top)


@triton.jit
def power(x, z, top, logit_scale, HAS_SOFTCAP: tl.constexpr):
    """Return 2^(z - top)."""
    return tl.exp2(below(x, z, top, logit_scale, HAS_SOFTCAP))


@triton.jit
def bounded_tail(x, in_row, softcap, logit_scale, HAS_SOFTCAP: tl.constexpr):
    """Return z in bits, -inf past the end of the row: without a cap x is infinite there already."""
    z, _ = scale_and_cap(x, softcap, logit_scale, HAS_SOFTCAP)
    return tl.where(in_row, z, float("-inf")) if HAS_SOFTCAP else z


@triton.jit
def class_weights(weight_ptr, cols, n_cols, HAS_WEIGHT: tl.constexpr):
    """Load the weights of classes, 1 without class weights and 0 past the end of the row."""
    if HAS_WEIGHT:
        return tl.load(weight_ptr + cols, mask=cols < n_cols, other=0.0).to(tl.float32)
    else:
        return (cols < n_cols).to(tl.float32)


@triton.jit
def pack_columns(x):
    """Return columns (LANES, VECTOR) as 32-bit integers: two columns of 16 bits in each of (LANES, VECTOR / 2)."""
    if x.dtype.primitive_bitwidth == 32:
        return x.to(tl.int32, bitcast=True)
    else:
        low, high = tl.split(tl.reshape(x.to(tl.int16, bitcast=True), [x.shape[0], x.shape[1] // 2, 2]))
        return (low.to(tl.int32) & 0xFFFF) | (high.to(tl.int32) << 16)


@triton.jit
def unpack_columns(integers, after, DTYPE: tl.constexpr):
    """Return the columns that `pack_columns` packed, in fp32, once the scalar `after` is known."""
    # The compiler would unpack once and keep fp32 in twice the registers. A false dependency on `after`, which is never
    # 1e38, makes it unpack at each use.
    integers += (after == 1e38).to(tl.int32)
    if DTYPE.primitive_bitwidth == 32:
        return integers.to(tl.float32, bitcast=True)
    else:
        if DTYPE.is_bf16():
            low = (integers << 16).to(tl.float32, bitcast=True)
            high = (integers & -65536).to(tl.float32, bitcast=True)
        else:
            low = integers.to(tl.int16).to(tl.float16, bitcast=True).to(tl.float32)
            high = (integers >> 16).to(tl.int16).to(tl.float16, bitcast=True).to(tl.float32)
        return tl.reshape(tl.join(low, high), [integers.shape[0], 2 * integers.shape[1]])


@triton.jit
def columns(x_ptr, lead_ptr, start, lanes, vector, in_lead, group_cols, group_jump, GROUPED: tl.constexpr):
    """Return pointers to columns of a row.

    GROUPED: the first in_lead columns are at lead_ptr, in groups of group_cols columns, group_jump elements apart.
    """
    # group_cols is no constexpr: it depends on the number of rows, and each new batch would wait for the compiler.
    if GROUPED:
        cols = start + lanes
        # Offsets are selected and not pointers, which the compiler for AMD cannot analyse.
        apart = (x_ptr.to(tl.int64) - lead_ptr.to(tl.int64)) // (x_ptr.dtype.element_ty.primitive_bitwidth // 8)
        apart = tl.multiple_of(apart, 8)  # rows and groups begin at a vector
        jump = (cols // group_cols).to(tl.int64) * group_jump
        return lead_ptr + (tl.where(cols < in_lead, jump, apart) + cols) + vector
    else:
        return x_ptr + (start + (lanes + vector))


@triton.jit
def first_sweep(
    x_ptr, lead_ptr, kept, tail, weight_ptr, lanes, n_swept, n_cols, in_lead, group_cols, group_jump,
    softcap, logit_scale,
    HAS_WEIGHT: tl.constexpr, HAS_SMOOTHING: tl.constexpr, HAS_SOFTCAP: tl.constexpr, SWEEPS: tl.constexpr,
    GROUPED: tl.constexpr, LANES: tl.constexpr, VECTOR: tl.constexpr,
):  # fmt: skip
    """Return a row's maximum, its sum of 2^(z_j - maximum) and, for label smoothing, its sums of w_j z_j and w_j.

    Lanes are reduced only at the end.
    """
    BLOCK: tl.constexpr = LANES * VECTOR
    FIRST_READ: tl.constexpr = "evict_last"  # keeps the row in the L2 cache for the second sweep
    DTYPE: tl.constexpr = x_ptr.dtype.element_ty
    # Not -inf, because -inf - -inf is NaN. The only smaller logit is -inf.
    lane_max = tl.full([LANES], -1e30, dtype=tl.float32)
    lane_sum = tl.zeros([LANES], dtype=tl.float32)
    lane_z = tl.zeros([LANES], dtype=tl.float32)
    lane_weight = tl.zeros([LANES], dtype=tl.float32)
    if SWEEPS:
        vector = tl.arange(0, VECTOR)[None, :]
        x_next = tl.load(
            columns(x_ptr, lead_ptr, 0, lanes, vector, in_lead, group_cols, group_jump, GROUPED),
            eviction_policy=FIRST_READ,
        )
        for start in range(0, n_swept, BLOCK):
            x = x_next.to(tl.float32)
            cols = start + (lanes + vector)
            x_next = tl.load(
                columns(x_ptr, lead_ptr, start + BLOCK, lanes, vector, in_lead, group_cols, group_jump, GROUPED),
                mask=cols + BLOCK < n_swept, other=0.0, eviction_policy=FIRST_READ,
            )  # fmt: skip
            z, _ = scale_and_cap(x, softcap, logit_scale, HAS_SOFTCAP)
            new_max = tl.maximum(lane_max, tl.max(z, axis=1))
            lane_sum *= tl.exp2(lane_max - new_max)
            lane_sum += tl.sum(power(x, z, new_max[:, None], logit_scale, HAS_SOFTCAP), axis=1)
            lane_max = new_max
            if HAS_SMOOTHING:
                w = class_weights(weight_ptr, cols, n_cols, HAS_WEIGHT)
                lane_z += tl.sum(w * z, axis=1)
                lane_weight += tl.sum(w, axis=1)
    row_max = tl.max(lane_max, axis=0)
    z = bounded_tail(unpack_columns(kept, row_max, DTYPE), tail < n_cols, softcap, logit_scale, HAS_SOFTCAP)
    row_max = tl.maximum(row_max, tl.max(tl.max(z, axis=1), axis=0))
    x = unpack_columns(kept, row_max, DTYPE)
    z = bounded_tail(x, tail < n_cols, softcap, logit_scale, HAS_SOFTCAP)
    row_sum = tl.sum(lane_sum * tl.exp2(lane_max - row_max), axis=0)
    row_sum += tl.sum(tl.sum(power(x, z, row_max, logit_scale, HAS_SOFTCAP), axis=1), axis=0)
    z_sum = tl.sum(lane_z, axis=0)
    weight_sum = tl.sum(lane_weight, axis=0)
    if HAS_SMOOTHING:
        w = class_weights(weight_ptr, tail, n_cols, HAS_WEIGHT)
        z_sum += tl.sum(tl.sum(w * tl.where(tail < n_cols, z, 0.0), axis=1), axis=0)
        weight_sum += tl.sum(tl.sum(w, axis=1), axis=0)
    return row_max, row_sum, z_sum, weight_sum


@triton.jit
def dlogits(
    x, top, softmax_factor, smooth_factor, weight_ptr, cols, n_cols, softcap, logit_scale,
    HAS_WEIGHT: tl.constexpr, HAS_SMOOTHING: tl.constexpr, HAS_SOFTCAP: tl.constexpr,
):  # fmt: skip
    """Return the gradient of some columns of a row, as if none were the label's.

    top is the row's maximum. The factors include scale and logit_scale; softmax_factor is divided by the row's sum.
    """
    x = x.to(tl.float32)
    z, slope = scale_and_cap(x, softcap, logit_scale, HAS_SOFTCAP)
    dz = softmax_factor * power(x, z, top, logit_scale, HAS_SOFTCAP)
    if HAS_SMOOTHING:
        dz -= smooth_factor * class_weights(weight_ptr, cols, n_cols, HAS_WEIGHT)
    return dz * slope


@triton.jit
def label_terms(label_x_ptr, weight_ptr, label, is_class, label_smoothing, HAS_WEIGHT: tl.constexpr):
    """Return the label's logit x, its class weight and its share of the loss."""
    x = tl.load(label_x_ptr, mask=is_class, other=float("nan")).to(tl.float32)
    weight = 1.0
    if HAS_WEIGHT:
        weight = tl.load(weight_ptr + label, mask=is_class, other=0.0).to(tl.float32)
    return x, weight, (1.0 - label_smoothing) * weight


@triton.jit
def zero_row(
    dx_ptr, lead_ptr, tail, lanes, vector, n_swept, n_cols, in_lead, group_cols, group_jump,
    SWEEPS: tl.constexpr, GROUPED: tl.constexpr, TAIL_LANES: tl.constexpr, LANES: tl.constexpr, VECTOR: tl.constexpr,
):  # fmt: skip
    """Write the gradient of an ignored row."""
    dtype = dx_ptr.dtype.element_ty
    if SWEEPS:
        for start in range(0, n_swept, LANES * VECTOR):
            swept = columns(dx_ptr, lead_ptr, start, lanes, vector, in_lead, group_cols, group_jump, GROUPED)
            tl.store(swept, tl.zeros([LANES, VECTOR], dtype=dtype))
    tl.store(dx_ptr + tail, tl.zeros([TAIL_LANES, VECTOR], dtype=dtype), mask=tail < n_cols)


@triton.jit
def second_sweep(
    x_ptr, dx_ptr, lead_ptr, kept, after, tail, weight_ptr, lanes, vector, n_swept, n_cols, in_lead, group_cols,
    group_jump, row_max, softmax_factor, smooth_factor, softcap, logit_scale,
    HAS_WEIGHT: tl.constexpr, HAS_SMOOTHING: tl.constexpr, HAS_SOFTCAP: tl.constexpr, SWEEPS: tl.constexpr,
    GROUPED: tl.constexpr, LANES: tl.constexpr, VECTOR: tl.constexpr,
):  # fmt: skip
    """Write the gradient of a row, as if no column were the label's: the tail, then the other columns backwards."""
    BLOCK: tl.constexpr = LANES * VECTOR
    LAST_USE: tl.constexpr = "evict_first"
    dtype = dx_ptr.dtype.element_ty
    if SWEEPS:
        last = n_swept - BLOCK
        swept = columns(x_ptr, lead_ptr, last, lanes, vector, in_lead, group_cols, group_jump, GROUPED)
        x_next = tl.load(swept, eviction_policy=LAST_USE)
    dx_tail = dlogits(
        unpack_columns(kept, after, x_ptr.dtype.element_ty), row_max, softmax_factor, smooth_factor, weight_ptr, tail,
        n_cols, softcap, logit_scale, HAS_WEIGHT, HAS_SMOOTHING, HAS_SOFTCAP,
    )  # fmt: skip
    tl.store(dx_ptr + tail, dx_tail.to(dtype), mask=tail < n_cols, eviction_policy=LAST_USE)
    if SWEEPS:
        for back in range(0, n_swept, BLOCK):
            x = x_next
            start = last - back
            cols = start + (lanes + vector)
            ahead = start - BLOCK
            swept = columns(x_ptr, lead_ptr, ahead, lanes, vector, in_lead, group_cols, group_jump, GROUPED)
            x_next = tl.load(swept, mask=cols >= BLOCK, other=0.0, eviction_policy=LAST_USE)
            dx = dlogits(
                x, row_max, softmax_factor, smooth_factor, weight_ptr, cols, n_cols, softcap, logit_scale,
                HAS_WEIGHT, HAS_SMOOTHING, HAS_SOFTCAP,
            )  # fmt: skip
            swept = columns(dx_ptr, lead_ptr, start, lanes, vector, in_lead, group_cols, group_jump, GROUPED)
            tl.store(swept, dx.to(dtype), eviction_policy=LAST_USE)


# n_rows differs from batch to batch. Specialised, Triton would compile again when it is a multiple of 16 and when not.
@triton.jit(do_not_specialize=["n_rows"])
def row_kernel(
    logits_ptr, labels_ptr, weight_ptr, losses_ptr, lse_ptr, grad_ptr, scale_ptr, lead_ptr,
    logits_row_stride, grad_row_stride, scale_stride, n_rows, n_cols, n_swept, in_lead, group_cols, group_jump,
    ignore_index, label_smoothing, softcap, logit_scale, z_loss,
    HAS_WEIGHT: tl.constexpr, HAS_SMOOTHING: tl.constexpr, HAS_SOFTCAP: tl.constexpr, SAVES_LSE: tl.constexpr,
    NEEDS_GRAD: tl.constexpr, SWEEPS: tl.constexpr, GROUPED: tl.constexpr,
    TAIL_LANES: tl.constexpr, LANES: tl.constexpr, VECTOR: tl.constexpr,
):  # fmt: skip
    """Write the losses of rows, where wanted (maximum, log2 of the sum) into lse, and the gradient times scale."""
    LAST_USE: tl.constexpr = "evict_first"
    softcap = fp32(softcap)
    logit_scale = fp32(logit_scale)
    z_loss = fp32(z_loss)
    label_smoothing = fp32(label_smoothing)
    smooth_share = label_smoothing / n_cols
    lanes = tl.arange(0, LANES)[:, None] * VECTOR
    vector = tl.arange(0, VECTOR)[None, :]
    tail = n_swept + tl.arange(0, TAIL_LANES)[:, None] * VECTOR + vector
    for row in range(tl.program_id(0).to(tl.int64), n_rows, tl.num_programs(0)):
        label = tl.load(labels_ptr + row).to(tl.int64)
        x_ptr = logits_ptr + row * logits_row_stride
        dx_ptr = grad_ptr + row * grad_row_stride
        row_lead_ptr = lead_ptr + row * group_cols
        if GROUPED:  # in_lead columns before the first of the rest: column numbers are those of the whole row
            x_ptr -= in_lead
            dx_ptr -= in_lead
        if label == ignore_index:
            tl.store(losses_ptr + row, 0.0)
            if NEEDS_GRAD:
                zero_row(
                    dx_ptr, row_lead_ptr, tail, lanes, vector, n_swept, n_cols, in_lead, group_cols, group_jump,
                    SWEEPS, GROUPED, TAIL_LANES, LANES, VECTOR,
                )  # fmt: skip
        else:
            is_class = (label >= 0) & (label < n_cols)
            past_end = tl.where(logit_scale < 0.0, float("inf"), float("-inf")).to(x_ptr.dtype.element_ty)
            kept = pack_columns(tl.load(x_ptr + tail, mask=tail < n_cols, other=past_end, eviction_policy=LAST_USE))
            # Read before the second sweep, which may overwrite it.
            label_x, label_weight, label_share = label_terms(
                columns(x_ptr, row_lead_ptr, label, 0, 0, in_lead, group_cols, group_jump, GROUPED),
                weight_ptr, label, is_class, label_smoothing, HAS_WEIGHT,
            )  # fmt: skip
            row_max, row_sum, z_sum, weight_sum = first_sweep(
                x_ptr, row_lead_ptr, kept, tail, weight_ptr, lanes, n_swept, n_cols, in_lead, group_cols, group_jump,
                softcap, logit_scale, HAS_WEIGHT, HAS_SMOOTHING, HAS_SOFTCAP, SWEEPS, GROUPED, LANES, VECTOR,
            )  # fmt: skip
            label_z, _ = scale_and_cap(label_x, softcap, logit_scale, HAS_SOFTCAP)
            log_sum = tl.log2(row_sum)
            lse = row_max + log_sum  # rounded, so probabilities are computed from row_max and row_sum
            label_below = below(label_x, label_z, row_max, logit_scale, HAS_SOFTCAP)
            loss = label_share * (log_sum - label_below) * LN2 + z_loss * (lse * LN2) * (lse * LN2)
            softmax_share = label_share + 2.0 * z_loss * lse * LN2
            if HAS_SMOOTHING:
                loss += smooth_share * (weight_sum * lse - z_sum) * LN2
                softmax_share += smooth_share * weight_sum
            tl.store(losses_ptr + row, loss)
            if SAVES_LSE:
                tl.store(lse_ptr + 2 * row, row_max)
                tl.store(lse_ptr + 2 * row + 1, log_sum)

            if NEEDS_GRAD:
                scale = tl.load(scale_ptr + row * scale_stride).to(tl.float32) * logit_scale
                scale = tl.where(is_class, scale, float("nan"))
                softmax_factor = softmax_share * scale / row_sum
                smooth_factor = smooth_share * scale
                second_sweep(
                    x_ptr, dx_ptr, row_lead_ptr, kept, lse, tail, weight_ptr, lanes, vector, n_swept, n_cols, in_lead,
                    group_cols, group_jump, row_max, softmax_factor, smooth_factor, softcap, logit_scale,
                    HAS_WEIGHT, HAS_SMOOTHING, HAS_SOFTCAP, SWEEPS, GROUPED, LANES, VECTOR,
                )  # fmt: skip
                # Computed again: kept from above, the slope would occupy a register during the sweep.
                label_z, label_slope = scale_and_cap(label_x, softcap, logit_scale, HAS_SOFTCAP)
                dx_label = softmax_factor * power(label_x, label_z, row_max, logit_scale, HAS_SOFTCAP)
                dx_label -= label_share * scale
                if HAS_SMOOTHING:
                    dx_label -= smooth_factor * label_weight
                tl.debug_barrier()  # second_sweep has written the label's column too
                label_dx_ptr = columns(dx_ptr, row_lead_ptr, label, 0, 0, in_lead, group_cols, group_jump, GROUPED)
                tl.store(label_dx_ptr, (dx_label * label_slope).to(dx_ptr.dtype.element_ty), mask=is_class)


@triton.jit(do_not_specialize=["n_rows", "first_col"])
def slab_kernel(
    logits_ptr, labels_ptr, weight_ptr, lse_ptr, scale_ptr, weight_sum_ptr,
    logits_row_stride, scale_stride, n_rows, n_cols, first_col, vocab_size,
    ignore_index, label_smoothing, softcap, logit_scale, z_loss,
    HAS_WEIGHT: tl.constexpr, HAS_SMOOTHING: tl.constexpr, HAS_SOFTCAP: tl.constexpr,
    LANES: tl.constexpr, VECTOR: tl.constexpr,
):  # fmt: skip
    """Overwrite some columns of a row, whose lse is known, with their gradient."""
    softcap = fp32(softcap)
    logit_scale = fp32(logit_scale)
    z_loss = fp32(z_loss)
    label_smoothing = fp32(label_smoothing)
    smooth_share = label_smoothing / vocab_size
    row = tl.program_id(0).to(tl.int64)
    cols = tl.arange(0, LANES)[:, None] * VECTOR + tl.arange(0, VECTOR)[None, :]
    label = tl.load(labels_ptr + row).to(tl.int64)
    x_ptr = logits_ptr + row * logits_row_stride
    mask = cols < n_cols
    if label == ignore_index:
        tl.store(x_ptr + cols, tl.zeros([LANES, VECTOR], dtype=x_ptr.dtype.element_ty), mask=mask)
    else:
        is_class = (label >= 0) & (label < vocab_size)
        row_max = tl.load(lse_ptr + 2 * row)
        log_sum = tl.load(lse_ptr + 2 * row + 1)
        label_share = 1.0 - label_smoothing
        if HAS_WEIGHT:
            label_share *= tl.load(weight_ptr + label, mask=is_class, other=0.0).to(tl.float32)
        softmax_share = label_share + 2.0 * z_loss * (row_max + log_sum) * LN2
        if HAS_SMOOTHING:
            softmax_share += smooth_share * tl.load(weight_sum_ptr)
        softmax_share *= tl.exp2(-log_sum)
        scale = tl.load(scale_ptr + row * scale_stride).to(tl.float32) * logit_scale
        scale = tl.where(is_class, scale, float("nan"))
        x = tl.load(x_ptr + cols, mask=mask, other=0.0)
        dx = dlogits(
            x, row_max, softmax_share * scale, smooth_share * scale, weight_ptr + first_col, cols, n_cols,
            softcap, logit_scale, HAS_WEIGHT, HAS_SMOOTHING, HAS_SOFTCAP,
        )  # fmt: skip
        _, slope = scale_and_cap(x.to(tl.float32), softcap, logit_scale, HAS_SOFTCAP)
        dx -= tl.where(cols == label - first_col, label_share * scale * slope, 0.0)
        tl.store(x_ptr + cols, dx.to(x_ptr.dtype.element_ty), mask=mask)


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


@dataclass(frozen=True)
class LossOptions:
    """Terms of cross entropy beyond labels and class weights."""

    ignore_index: int = -100
    label_smoothing: float = 0.0
    softcap: float | None = None
    logit_scale: float = 1.0
    z_loss: float = 0.0

    @property
    def numbers(self) -> tuple[int, float, float, float, float]:
        """The options in the order of the kernels' arguments."""
        return self.ignore_index, self.label_smoothing, self.softcap or 0.0, self.logit_scale, self.z_loss

    def flags(self, has_weight: bool) -> dict[str, bool]:
        """Return the kernels' constants that leave out unused terms. has_weight: there are class weights."""
        has_smoothing = self.label_smoothing != 0.0
        has_softcap = self.softcap is not None
        return {"HAS_WEIGHT": has_weight, "HAS_SMOOTHING": has_smoothing, "HAS_SOFTCAP": has_softcap}

    def is_plain(self, has_weight: bool) -> bool:
        """Return whether a row's loss is its label's alone: no cap, smoothing or class weights."""
        return not has_weight and not self.label_smoothing and self.softcap is None


def row_pass(
    logits: torch.Tensor,  # (N, V)
    labels: torch.Tensor,  # (N,)
    options: LossOptions,
    *,
    weight: torch.Tensor | None = None,  # (V,)
    gradient: torch.Tensor | None = None,  # (N, V), may be the logits
    scale: torch.Tensor | None = None,  # () or (N,)
    lse: torch.Tensor | None = None,  # (N, 2)
    lead: torch.Tensor | None = None,  # (K, N, S)
) -> torch.Tensor:  # (N,)
    """Return the losses of rows; write their gradient times scale into `gradient`.

    lse receives what `slab_pass` needs of each row that is not ignored: the largest z, and lse minus that. With lead
    the first K S columns of the rows lie there, in K groups, and logits hold the others; both are overwritten with
    their gradient. scale is a tensor, because the host must not wait for its value.
    """
    if not runs_triton(logits):
        if lead is None:
            return _row_pass_torch(logits, labels, options, weight, gradient, scale, lse)
        return _grouped_pass_torch(logits, labels, options, weight, scale, lse, lead)
    assert logits.stride(1) == 1 and labels.is_contiguous()
    assert lead is None or gradient is logits
    groups = Groups() if lead is None else Groups.of(lead)
    n_rows = len(logits)
    n_cols = groups.in_lead + logits.shape[1]
    losses = torch.empty(n_rows, dtype=torch.float32, device=logits.device)
    chip = chip_of(logits.device)
    tiling = row_tiling(
        n_rows, n_cols, logits.element_size(), chip,
        plain=options.is_plain(weight is not None), rest_cols=None if lead is None else logits.shape[1],
    )  # fmt: skip
    constants = tiling.constants(
        chip, saves_lse=lse is not None, needs_grad=gradient is not None, grouped=lead is not None
    )
    if lead is None:  # not `losses`: torch.compile takes lead for an output, and would preserve what it held before
        lead = losses.new_empty(1)
    gradient_stride = 0
    scale_stride = 0
    if gradient is not None:
        gradient_stride = gradient.stride(0)
        scale_stride = 1 if scale.dim() else 0
    # Flags keep the kernel from reading unused arguments; any tensor takes their place.
    with on_device(logits):
        row_kernel[(tiling.programs,)](
            logits, labels, _contiguous_or(weight, losses), losses, _or(lse, losses), _or(gradient, logits),
            _or(scale, losses), lead,
            logits.stride(0), gradient_stride, scale_stride, n_rows, n_cols, tiling.swept,
            *groups, *options.numbers, **options.flags(weight is not None), **constants,
        )  # fmt: skip
    return losses


class Groups(NamedTuple):
    """Columns of rows that lie in groups: how many in all and in each, and the elements from one to the next."""

    in_lead: int = 0
    group_cols: int = 0
    group_jump: int = 0

    @classmethod
    def of(cls, lead: torch.Tensor) -> Groups:  # (K, N, S)
        """Return those of a tensor of K groups."""
        n_groups, _, width = lead.shape
        assert lead.stride(2) == 1 and lead.stride(1) == width
        return cls(n_groups * width, width, lead.stride(0) - width)


def _or(t: torch.Tensor | None, instead: torch.Tensor) -> torch.Tensor:
    return instead if t is None else t


def _contiguous_or(t: torch.Tensor | None, instead: torch.Tensor) -> torch.Tensor:
    return instead if t is None else t.contiguous()


def slab_pass(
    logits: torch.Tensor,  # (N, S)
    labels: torch.Tensor,  # (N,)
    options: LossOptions,
    *,
    first_col: int,
    vocab_size: int,
    lse: torch.Tensor,  # (N, 2), from row_pass
    scale: torch.Tensor,  # () or (N,)
    weight: torch.Tensor | None = None,  # (V,), of all classes
) -> None:
    """Overwrite logits, which are the columns from first_col on, with their gradient times scale."""
    if not runs_triton(logits):
        _slab_pass_torch(logits, labels, options, first_col, vocab_size, lse, scale, weight)
        return
    weight_sum = lse if weight is None else weight.sum(dtype=torch.float32)
    if weight is None and options.label_smoothing:
        weight_sum = torch.full((), vocab_size, dtype=torch.float32, device=logits.device)
    n_rows, n_cols = logits.shape
    block = max(MIN_COLS, triton.next_power_of_2(n_cols))
    chip = chip_of(logits.device)
    with on_device(logits):
        slab_kernel[(n_rows,)](
            logits, labels, _contiguous_or(weight, lse), lse, scale, weight_sum,
            logits.stride(0), 1 if scale.dim() else 0, n_rows, n_cols, first_col, vocab_size, *options.numbers,
            **options.flags(weight is not None), LANES=block // VECTOR, VECTOR=VECTOR, **launch_options(block, chip),
        )  # fmt: skip


def capped_logits(logits: torch.Tensor, options: LossOptions) -> tuple[torch.Tensor, torch.Tensor | float]:
    """Return z and dz/dx of logits x, at least fp32."""
    z = logits.to(torch.promote_types(logits.dtype, torch.float32)) * options.logit_scale
    if options.softcap is None:
        return z, options.logit_scale
    t = torch.tanh(z / options.softcap)
    return options.softcap * t, options.logit_scale * (1.0 - t.square())


def _row_pass_torch(
    logits: torch.Tensor,
    labels: torch.Tensor,
    options: LossOptions,
    weight: torch.Tensor | None,
    gradient: torch.Tensor | None,
    scale: torch.Tensor | None,
    lse_out: torch.Tensor | None,
) -> torch.Tensor:
    z, slope = capped_logits(logits, options)
    n_cols = z.shape[1]
    lse = z.logsumexp(dim=-1, keepdim=True)
    index = labels.long().unsqueeze(1).clamp(0, n_cols - 1)
    share = z.new_full((1, 1), 1.0 - options.label_smoothing)
    if weight is not None:
        share = share * weight.to(z.dtype)[index]
    loss = share * (lse - z.gather(1, index)) + options.z_loss * lse.square()
    softmax_share = share + 2.0 * options.z_loss * lse
    smooth = 0.0
    if options.label_smoothing:
        smooth = options.label_smoothing / n_cols * (torch.ones_like(z[:1]) if weight is None else weight.to(z.dtype))
        loss = loss + (smooth * (lse - z)).sum(dim=-1, keepdim=True)
        softmax_share = softmax_share + smooth.sum()
    if lse_out is not None:
        top = z.amax(dim=-1, keepdim=True)
        lse_out.copy_(torch.cat([top, (z - top).logsumexp(dim=-1, keepdim=True)], dim=1))
    if gradient is not None:
        dz = softmax_share * z.softmax(dim=-1) - smooth
        dz.scatter_add_(1, index, -share.expand_as(index))
        dz *= slope * (scale.unsqueeze(1) if scale.dim() else scale)
        gradient.copy_(_masked(dz, labels, n_cols, options))
    return _masked(loss, labels, n_cols, options).squeeze(1)


def _masked(values: torch.Tensor, labels: torch.Tensor, n_classes: int, options: LossOptions) -> torch.Tensor:
    """Set the rows of values (N, ...) to NaN where the label is no class, to 0 where it is ignored; in place."""
    labels = labels.unsqueeze(1)
    values.masked_fill_((labels < 0) | (labels >= n_classes), torch.nan)
    return values.masked_fill_(labels == options.ignore_index, 0.0)


def _grouped_pass_torch(
    rest: torch.Tensor,
    labels: torch.Tensor,
    options: LossOptions,
    weight: torch.Tensor | None,
    scale: torch.Tensor | None,
    lse: torch.Tensor | None,
    lead: torch.Tensor,
) -> torch.Tensor:
    whole = torch.cat([*lead, rest], dim=1)
    losses = _row_pass_torch(whole, labels, options, weight, whole, scale, lse)
    widths = [lead.shape[2]] * len(lead) + [rest.shape[1]]
    for part, gradient in zip((*lead, rest), whole.split(widths, dim=1), strict=True):
        part.copy_(gradient)
    return losses


def _slab_pass_torch(
    logits: torch.Tensor,
    labels: torch.Tensor,
    options: LossOptions,
    first_col: int,
    vocab_size: int,
    lse: torch.Tensor,
    scale: torch.Tensor,
    weight: torch.Tensor | None,
) -> None:
    z, slope = capped_logits(logits, options)
    n_cols = z.shape[1]
    (top, log_sum), index = lse.split(1, dim=1), labels.long().unsqueeze(1)
    weight = z.new_ones(vocab_size) if weight is None else weight.to(z.dtype)
    share = (1.0 - options.label_smoothing) * weight[index.clamp(0, vocab_size - 1)]
    smooth = options.label_smoothing / vocab_size * weight
    softmax_share = share + 2.0 * options.z_loss * (top + log_sum) + smooth.sum()
    dz = softmax_share * torch.exp((z - top) - log_sum) - smooth[first_col : first_col + n_cols]
    index = index - first_col
    inside = (index >= 0) & (index < n_cols)
    dz.scatter_add_(1, index.clamp(0, n_cols - 1), torch.where(inside, -share, 0.0))
    dz *= slope * (scale.unsqueeze(1) if scale.dim() else scale)
    logits.copy_(_masked(dz, labels, vocab_size, options))


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


def write_statistics(logits: torch.Tensor, labels: torch.Tensor, options: LossOptions, out: RowStatistics) -> None:
    """Write the statistics of logits (N, V) into out."""
    if not runs_triton(logits):
        for place, values in zip(out, statistics_torch(logits, labels, options), strict=True):
            place.copy_(values)
        return
    n_rows, n_cols = logits.shape
    block = min(STATISTICS_BLOCK, max(MIN_COLS, triton.next_power_of_2(n_cols)))
    chip = chip_of(logits.device)
    ignore_index, _, softcap, logit_scale, _ = options.numbers
    with on_device(logits):
        statistics_kernel[(n_rows,)](
            logits, labels, *out, logits.stride(0), n_rows, n_cols, ignore_index, softcap, logit_scale,
            HAS_SOFTCAP=options.softcap is not None, LANES=block // VECTOR, VECTOR=VECTOR,
            **launch_options(block, chip),
        )  # fmt: skip
