r"""The Triton kernels behind row_pass.py, where the mathematics stands. z, lse and maxima are in bits: times log2(e).

A program of `row_kernel` takes a row in two sweeps: first for lse, each lane keeping the running maximum and sum of
its own columns, then for the gradient, which may be written over the logits. The row's last columns, the tail, are
loaded at the start and stay in registers for both; a row that is all tail is read once and written once. The others
are read again in the second sweep, backwards: what was read last is the likeliest to be in the L2 cache still. Each
block is asked for before the one ahead of it is worked on, or the memory would idle meanwhile. Only the tail is masked.
"""

from __future__ import annotations

from ligertune_kernels.jit.device_functions import LN2, LOG2E, fp32, scale_and_cap
from ligertune_kernels.launcher import tl, triton


@triton.jit
def below(x, z, top, logit_scale, HAS_SOFTCAP: tl.constexpr):
    """z - top. Without a cap of x's product before it is rounded: z of 10,000 bits is known to 0.0005."""
    if HAS_SOFTCAP:
        return z - top
    else:
        return tl.fma(x, logit_scale * LOG2E, -top)


@triton.jit
def power(x, z, top, logit_scale, HAS_SOFTCAP: tl.constexpr):
    """2^(z - top)."""
    return tl.exp2(below(x, z, top, logit_scale, HAS_SOFTCAP))


@triton.jit
def bounded_tail(x, in_row, softcap, logit_scale, HAS_SOFTCAP: tl.constexpr):
    """z in bits, -inf past the row's end: without a cap x is infinite there already."""
    z, _ = scale_and_cap(x, softcap, logit_scale, HAS_SOFTCAP)
    return tl.where(in_row, z, float("-inf")) if HAS_SOFTCAP else z


@triton.jit
def class_weights(weight_ptr, cols, n_cols, HAS_WEIGHT: tl.constexpr):
    if HAS_WEIGHT:
        return tl.load(weight_ptr + cols, mask=cols < n_cols, other=0.0).to(tl.float32)
    else:
        return (cols < n_cols).to(tl.float32)


@triton.jit
def hold(x):
    """Columns (LANES, VECTOR) as integers, for `held`: two numbers of 16 bits in one of (LANES, VECTOR / 2)."""
    if x.dtype.primitive_bitwidth == 32:
        return x.to(tl.int32, bitcast=True)
    else:
        low, high = tl.split(tl.reshape(x.to(tl.int16, bitcast=True), [x.shape[0], x.shape[1] // 2, 2]))
        return (low.to(tl.int32) & 0xFFFF) | (high.to(tl.int32) << 16)


@triton.jit
def held(integers, after, DTYPE: tl.constexpr):
    """What was held, in fp32, once the scalar `after` is known.

    The compiler would unpack once and keep fp32, in twice the registers. So it is told that the integers depend on
    `after`, which is never 1e38.
    """
    integers += (after == 1e38).to(tl.int32)
    if DTYPE.primitive_bitwidth == 32:
        return integers.to(tl.float32, bitcast=True)
    else:
        if DTYPE.is_bf16():
            low, high = (integers << 16).to(tl.float32, bitcast=True), (integers & -65536).to(tl.float32, bitcast=True)
        else:
            low = integers.to(tl.int16).to(tl.float16, bitcast=True).to(tl.float32)
            high = (integers >> 16).to(tl.int16).to(tl.float16, bitcast=True).to(tl.float32)
        return tl.reshape(tl.join(low, high), [integers.shape[0], 2 * integers.shape[1]])


@triton.jit
def columns(x_ptr, lead_ptr, start, lanes, vector, in_lead, group_cols, group_jump, GROUPED: tl.constexpr):
    """Where columns of a row are: the first in_lead at lead_ptr, in groups of group_cols, group_jump elements apart.

    group_cols is not compiled in, as it follows the number of rows: each new batch would wait for the compiler.
    """
    if GROUPED:
        cols = start + lanes
        # a choice of offsets and not of pointers, which the compiler for AMD cannot follow
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
    GROUPED: tl.constexpr, LANES: tl.constexpr, VECTOR: tl.constexpr, HINTS: tl.constexpr,
):  # fmt: skip
    """A row's maximum, its sum of 2^(z_j - maximum) and, for label smoothing, its sums of w_j z_j and w_j.

    The lanes meet only at the end.
    """
    BLOCK: tl.constexpr = LANES * VECTOR
    FIRST_READ: tl.constexpr = "evict_last" if HINTS else ""
    DTYPE: tl.constexpr = x_ptr.dtype.element_ty
    # Not -inf, of which -inf - -inf would make NaN; no logit is smaller but -inf itself.
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
            x, cols = x_next.to(tl.float32), start + (lanes + vector)
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
    z = bounded_tail(held(kept, row_max, DTYPE), tail < n_cols, softcap, logit_scale, HAS_SOFTCAP)
    row_max = tl.maximum(row_max, tl.max(tl.max(z, axis=1), axis=0))
    x = held(kept, row_max, DTYPE)
    z = bounded_tail(x, tail < n_cols, softcap, logit_scale, HAS_SOFTCAP)
    row_sum = tl.sum(lane_sum * tl.exp2(lane_max - row_max), axis=0)
    row_sum += tl.sum(tl.sum(power(x, z, row_max, logit_scale, HAS_SOFTCAP), axis=1), axis=0)
    z_sum, weight_sum = tl.sum(lane_z, axis=0), tl.sum(lane_weight, axis=0)
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
    """The gradient of some columns of a row, as if none were the label's. The factors hold scale and logit_scale.

    top: the row's maximum; softmax_factor is divided by its sum.
    """
    x = x.to(tl.float32)
    z, slope = scale_and_cap(x, softcap, logit_scale, HAS_SOFTCAP)
    dz = softmax_factor * power(x, z, top, logit_scale, HAS_SOFTCAP)
    if HAS_SMOOTHING:
        dz -= smooth_factor * class_weights(weight_ptr, cols, n_cols, HAS_WEIGHT)
    return dz * slope


@triton.jit
def label_terms(
    label_x_ptr, weight_ptr, label, is_class, label_smoothing, HAS_WEIGHT: tl.constexpr,
):  # fmt: skip
    """Of the label's own column: x, class weight, share of the loss."""
    x = tl.load(label_x_ptr, mask=is_class, other=float("nan")).to(tl.float32)
    weight = 1.0
    if HAS_WEIGHT:
        weight = tl.load(weight_ptr + label, mask=is_class, other=0.0).to(tl.float32)
    return x, weight, (1.0 - label_smoothing) * weight


# Numbers of rows differ from batch to batch, and Triton would compile anew for each that is or is not a multiple of 16.
@triton.jit(do_not_specialize=["n_rows"])
def row_kernel(
    logits_ptr, labels_ptr, weight_ptr, losses_ptr, lse_ptr, grad_ptr, scale_ptr, lead_ptr,
    logits_row_stride, grad_row_stride, scale_stride, n_rows, n_cols, n_swept, in_lead, group_cols, group_jump,
    ignore_index, label_smoothing, softcap, logit_scale, z_loss,
    HAS_WEIGHT: tl.constexpr, HAS_SMOOTHING: tl.constexpr, HAS_SOFTCAP: tl.constexpr, SAVES_LSE: tl.constexpr,
    NEEDS_GRAD: tl.constexpr, SWEEPS: tl.constexpr, GROUPED: tl.constexpr,
    TAIL_LANES: tl.constexpr, LANES: tl.constexpr, VECTOR: tl.constexpr,
    HINTS: tl.constexpr,
):  # fmt: skip
    BLOCK: tl.constexpr = LANES * VECTOR
    LAST_USE: tl.constexpr = "evict_first" if HINTS else ""
    dtype = grad_ptr.dtype.element_ty
    softcap, logit_scale, z_loss = fp32(softcap), fp32(logit_scale), fp32(z_loss)
    label_smoothing = fp32(label_smoothing)
    smooth_share = label_smoothing / n_cols
    lanes, vector = tl.arange(0, LANES)[:, None] * VECTOR, tl.arange(0, VECTOR)[None, :]
    tail = n_swept + tl.arange(0, TAIL_LANES)[:, None] * VECTOR + vector
    for row in range(tl.program_id(0).to(tl.int64), n_rows, tl.num_programs(0)):
        label = tl.load(labels_ptr + row).to(tl.int64)
        x_ptr = logits_ptr + row * logits_row_stride
        dx_ptr = grad_ptr + row * grad_row_stride
        row_lead_ptr = lead_ptr + row * group_cols
        if GROUPED:  # in_lead columns before the rest's first, so that columns are counted from the row's
            x_ptr -= in_lead
            dx_ptr -= in_lead
        if label == ignore_index:
            tl.store(losses_ptr + row, 0.0)
            if NEEDS_GRAD:
                if SWEEPS:
                    for start in range(0, n_swept, BLOCK):
                        swept = columns(
                            dx_ptr, row_lead_ptr, start, lanes, vector, in_lead, group_cols, group_jump, GROUPED
                        )
                        tl.store(swept, tl.zeros([LANES, VECTOR], dtype=dtype))
                tl.store(dx_ptr + tail, tl.zeros([TAIL_LANES, VECTOR], dtype=dtype), mask=tail < n_cols)
        else:
            is_class = (label >= 0) & (label < n_cols)
            past_end = tl.where(logit_scale < 0.0, float("inf"), float("-inf")).to(x_ptr.dtype.element_ty)
            kept = hold(tl.load(x_ptr + tail, mask=tail < n_cols, other=past_end, eviction_policy=LAST_USE))
            # Read before the sweeps: the second may write over it.
            label_x, label_weight, label_share = label_terms(
                columns(x_ptr, row_lead_ptr, label, 0, 0, in_lead, group_cols, group_jump, GROUPED),
                weight_ptr, label, is_class, label_smoothing, HAS_WEIGHT,
            )  # fmt: skip
            row_max, row_sum, z_sum, weight_sum = first_sweep(
                x_ptr, row_lead_ptr, kept, tail, weight_ptr, lanes, n_swept, n_cols, in_lead, group_cols, group_jump,
                softcap, logit_scale, HAS_WEIGHT, HAS_SMOOTHING, HAS_SOFTCAP, SWEEPS, GROUPED, LANES, VECTOR, HINTS,
            )  # fmt: skip
            label_z, _ = scale_and_cap(label_x, softcap, logit_scale, HAS_SOFTCAP)
            log_sum = tl.log2(row_sum)
            lse = row_max + log_sum  # rounded: a probability by it would be off by as much
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
                softmax_factor, smooth_factor = softmax_share * scale / row_sum, smooth_share * scale
                if SWEEPS:
                    last = n_swept - BLOCK
                    swept = columns(x_ptr, row_lead_ptr, last, lanes, vector, in_lead, group_cols, group_jump, GROUPED)
                    x_next = tl.load(swept, eviction_policy=LAST_USE)
                dx_tail = dlogits(
                    held(kept, lse, x_ptr.dtype.element_ty), row_max, softmax_factor, smooth_factor, weight_ptr, tail,
                    n_cols, softcap, logit_scale, HAS_WEIGHT, HAS_SMOOTHING, HAS_SOFTCAP,
                )  # fmt: skip
                tl.store(dx_ptr + tail, dx_tail.to(dtype), mask=tail < n_cols, eviction_policy=LAST_USE)
                if SWEEPS:
                    for back in range(0, n_swept, BLOCK):
                        x, start = x_next, last - back
                        cols, ahead = start + (lanes + vector), start - BLOCK
                        swept = columns(
                            x_ptr, row_lead_ptr, ahead, lanes, vector, in_lead, group_cols, group_jump, GROUPED
                        )
                        x_next = tl.load(swept, mask=cols >= BLOCK, other=0.0, eviction_policy=LAST_USE)
                        dx = dlogits(
                            x, row_max, softmax_factor, smooth_factor, weight_ptr, cols, n_cols, softcap, logit_scale,
                            HAS_WEIGHT, HAS_SMOOTHING, HAS_SOFTCAP,
                        )  # fmt: skip
                        swept = columns(
                            dx_ptr, row_lead_ptr, start, lanes, vector, in_lead, group_cols, group_jump, GROUPED
                        )
                        tl.store(swept, dx.to(dtype), eviction_policy=LAST_USE)
                label_z, label_slope = scale_and_cap(label_x, softcap, logit_scale, HAS_SOFTCAP)
                dx_label = softmax_factor * power(label_x, label_z, row_max, logit_scale, HAS_SOFTCAP)
                dx_label -= label_share * scale
                if HAS_SMOOTHING:
                    dx_label -= smooth_factor * label_weight
                tl.debug_barrier()  # the label's column was just written as if it were any other
                label_dx_ptr = columns(dx_ptr, row_lead_ptr, label, 0, 0, in_lead, group_cols, group_jump, GROUPED)
                tl.store(label_dx_ptr, (dx_label * label_slope).to(dtype), mask=is_class)


@triton.jit(do_not_specialize=["n_rows", "first_col"])
def slab_kernel(
    logits_ptr, labels_ptr, weight_ptr, lse_ptr, scale_ptr, weight_sum_ptr,
    logits_row_stride, scale_stride, n_rows, n_cols, first_col, vocab_size,
    ignore_index, label_smoothing, softcap, logit_scale, z_loss,
    HAS_WEIGHT: tl.constexpr, HAS_SMOOTHING: tl.constexpr, HAS_SOFTCAP: tl.constexpr,
    LANES: tl.constexpr, VECTOR: tl.constexpr,
):  # fmt: skip
    """One row of a slab of columns, whose lse is known: the gradient over the logits."""
    softcap, logit_scale, z_loss = fp32(softcap), fp32(logit_scale), fp32(z_loss)
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
        row_max, log_sum = tl.load(lse_ptr + 2 * row), tl.load(lse_ptr + 2 * row + 1)
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
    logits_ptr, labels_ptr, logprob_ptr, argmax_ptr, entropy_ptr, logits_row_stride, n_rows, n_cols,
    ignore_index, softcap, logit_scale,
    HAS_SOFTCAP: tl.constexpr, LANES: tl.constexpr, VECTOR: tl.constexpr,
):  # fmt: skip
    """One row's log-probability of the label, its likeliest class (the first of equals) and its entropy."""
    softcap, logit_scale = fp32(softcap), fp32(logit_scale)
    row = tl.program_id(0).to(tl.int64)
    x_ptr = logits_ptr + row * logits_row_stride
    offs = tl.arange(0, LANES)[:, None] * VECTOR + tl.arange(0, VECTOR)[None, :]
    lane_max = tl.full([LANES], -1e30, dtype=tl.float32)
    lane_sum = tl.zeros([LANES], dtype=tl.float32)
    lane_z = tl.zeros([LANES], dtype=tl.float32)  # sum of z 2^(z - maximum)
    lane_col = tl.full([LANES], n_cols, dtype=tl.int32)  # where the maximum was first met
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
    tl.store(argmax_ptr + row, tl.minimum(first, n_cols - 1))  # a row of NaN has no largest
    tl.store(entropy_ptr + row, (lse - tl.sum(lane_z * share, axis=0) / row_sum) * LN2)
    label = tl.load(labels_ptr + row).to(tl.int64)
    is_class = (label >= 0) & (label < n_cols)
    label_x = tl.load(x_ptr + label, mask=is_class, other=float("nan")).to(tl.float32)
    label_z, _ = scale_and_cap(label_x, softcap, logit_scale, HAS_SOFTCAP)
    tl.store(logprob_ptr + row, tl.where(label == ignore_index, 0.0, (label_z - lse) * LN2))
