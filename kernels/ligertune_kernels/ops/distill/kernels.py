r"""Divergences of distributions: one summand per column, its derivative, and a pass over rows, for kl_div and jsd.

For log-probabilities x (student) and t (teacher), with p = exp(x) and q = exp(t), a column adds

    kl          q (log q - x)                 d/dx = -q                t itself is the probability q
    forward     q (t - x)                     d/dx = -q                KL(teacher ‖ student), beta = 0
    reverse     p (x - t)                     d/dx = p (x - t + 1)     KL(student ‖ teacher), beta = 1
    mixture     β q (t - m) + (1-β) p (x - m)       d/dx = (1-β) p (x - m)        m = log(β q + (1-β) p)

x is a free variable in these derivatives: the caller differentiates the softmax before it. Where a probability is 0,
its summand is 0 whatever the logarithm is (0 log 0 = 0): a teacher cut down to its top k has columns of -inf.

The mixture is computed from d = t - x, which is precise where the distributions are close and cannot overflow:

    e = exp(-|d|)      L = log(β + (1-β) e) if d > 0 else log(1-β + β e)
    t - m = min(d, 0) - L                       x - m = -max(d, 0) - L

The arithmetic is fp32, rounded once at the end.

Row pass of linear_jsd (`jsd_row_pass`) over logits: a student's z and a teacher's w (N, V), temperature T.

    x = z/T - lse(z/T)        t = w/T - lse(w/T)        loss = sum_j of the summands above
    dloss/dz_j = (g_j - p_j sum_i g_i) / T              g = d(summand)/dx,  p = exp(x)

A row whose label is ignore_index has loss 0 and gradient 0. The arithmetic is fp32, or float64 in the torch form for
float64 logits.

A program sweeps its two rows for both lse, then for the loss and sum g, then for the gradient, which may overwrite the
student's logits. In forward KL, g = -q has the sum -1, and two sweeps suffice.

The sweeps are bound by instructions: one instruction per element takes 4.6 µs on an H100 for 1024 rows of a 128k
vocabulary, and their seven passes through memory 600 µs if the L2 cache keeps nothing. So the mixture, the default, is
written out here in 76 instructions, where `divergence` takes 153. In log2, with d = t - x and
L = log2(m / max(p, q)):

    x - m = -max(d, 0) - L    t - m = min(d, 0) - L    g_j - p_j sum_i g_i ~ p_j (x_j - m_j - sum_i p_i (x_i - m_i))

Rows of logits may be wider than the vocabulary. Columns past it are read as probability 0 and written as 0, so that
rows of 32001 columns in a buffer of width 32064 are still loaded 16 bytes at a time.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal, NamedTuple

import torch

from ligertune_kernels.chips import launch_options
from ligertune_kernels.jit.device_functions import LN2, LOG2E, fp32
from ligertune_kernels.launcher import chip_of, on_device, runs_triton, tl, triton
from ligertune_kernels.ops.distill.tiles import DIVERGENCE_BLOCK, ROW_BLOCKS, takes_fast_log
from ligertune_kernels.ops.losses.tiles import MIN_COLS, VECTOR

Form = Literal["kl", "forward", "reverse", "mixture"]


def form_of(beta: float) -> Form:
    """Return the form of the generalised JSD with this beta."""
    return {0.0: "forward", 1.0: "reverse"}.get(float(beta), "mixture")


def log_mixture(x: torch.Tensor, t: torch.Tensor, beta: float) -> torch.Tensor:
    """Return m = log(β q + (1-β) p), finite where both probabilities are 0: their column adds nothing."""
    return (beta * t.exp() + (1.0 - beta) * x.exp()).clamp(min=torch.finfo(x.dtype).tiny).log()


def weighted(p: torch.Tensor, log_ratio: torch.Tensor) -> torch.Tensor:
    """Return p · log_ratio, and 0 without gradient where p is 0."""
    return p * log_ratio.masked_fill(p == 0, 0.0)


def summands(x: torch.Tensor, t: torch.Tensor, beta: float) -> torch.Tensor:
    """Return the summands of the generalised JSD of log-probabilities (..., V), in plain torch."""
    if beta == 0:
        return weighted(t.exp(), t - x)
    if beta == 1:
        return weighted(x.exp(), x - t)
    m = log_mixture(x, t, beta)
    return beta * weighted(t.exp(), t - m) + (1.0 - beta) * weighted(x.exp(), x - m)


@triton.jit
def divergence(x, t, beta, FORM: tl.constexpr):
    """Return a column's summand, its derivative by x, and p (eliminated by the compiler where it is not used)."""
    # Compared with != 0 and not > 0: a NaN must not count as a probability of 0.
    p = tl.exp2(x * LOG2E)
    if FORM == "kl":
        loss = tl.where(t != 0.0, t * (tl.log2(t) * LN2 - x), 0.0)
        dx = -t
    elif FORM == "forward":
        q = tl.exp2(t * LOG2E)
        loss = tl.where(q != 0.0, q * (t - x), 0.0)
        dx = -q
    elif FORM == "reverse":
        loss = tl.where(p != 0.0, p * (x - t), 0.0)
        dx = loss + p
    else:
        d = tl.where(x == t, 0.0, t - x)  # both may be -inf
        teacher_larger = d > 0.0
        larger = tl.exp2(tl.where(teacher_larger, t, x) * LOG2E)
        e = tl.exp2(-tl.abs(d) * LOG2E)
        p = tl.where(teacher_larger, larger * e, larger)
        q = tl.where(teacher_larger, larger, larger * e)
        near = tl.where(teacher_larger, beta, 1.0 - beta)
        log_share = tl.log2(near + (1.0 - near) * e) * LN2
        dx = tl.where(p != 0.0, (1.0 - beta) * p * (-tl.where(teacher_larger, d, 0.0) - log_share), 0.0)
        loss = tl.where(q != 0.0, beta * q * (tl.where(teacher_larger, 0.0, d) - log_share), 0.0) + dx
    return loss, dx, p


@triton.jit
def _divergence_kernel(
    x_ptr, t_ptr, labels_ptr, losses_ptr, dx_ptr, dt_ptr, scale_ptr,
    x_row_stride, t_row_stride, scale_row_stride, scale_col_stride, n_cols, ignore_index, beta,
    FORM: tl.constexpr, HAS_LABELS: tl.constexpr, BY_ELEMENT: tl.constexpr,
    NEEDS_LOSS: tl.constexpr, NEEDS_DX: tl.constexpr, NEEDS_DT: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    blocks = tl.cdiv(n_cols, BLOCK)
    row = (tl.program_id(0) // blocks).to(tl.int64)
    cols = (tl.program_id(0) % blocks) * BLOCK + tl.arange(0, BLOCK)
    mask = cols < n_cols
    read = mask
    if HAS_LABELS:
        read = mask & (tl.load(labels_ptr + row) != ignore_index)
    # Columns that are not read get probability 0 in both, which adds nothing and has no gradient.
    nothing: tl.constexpr = 0.0 if FORM == "kl" else float("-inf")
    x = tl.load(x_ptr + row * x_row_stride + cols, mask=read, other=float("-inf")).to(tl.float32)
    t = tl.load(t_ptr + row * t_row_stride + cols, mask=read, other=nothing).to(tl.float32)
    loss, dx, _ = divergence(x, t, fp32(beta), FORM)
    if NEEDS_LOSS:
        if BY_ELEMENT:
            tl.store(losses_ptr + row * n_cols + cols, loss.to(losses_ptr.dtype.element_ty), mask=mask)
        else:
            tl.store(losses_ptr + tl.program_id(0), tl.sum(loss, axis=0))
    if NEEDS_DX or NEEDS_DT:
        if BY_ELEMENT:
            scale_ptrs = scale_ptr + row * scale_row_stride + cols * scale_col_stride
            scale = tl.load(scale_ptrs, mask=mask, other=0.0).to(tl.float32)
        else:
            scale = tl.load(scale_ptr + row * scale_row_stride).to(tl.float32)
    if NEEDS_DX:
        tl.store(dx_ptr + row * n_cols + cols, (dx * scale).to(dx_ptr.dtype.element_ty), mask=mask)
    if NEEDS_DT:
        dt = tl.log2(t) * LN2 + 1.0 - x if FORM == "kl" else loss - dx
        tl.store(dt_ptr + row * n_cols + cols, (dt * scale).to(dt_ptr.dtype.element_ty), mask=mask)


class DivergenceTerms(NamedTuple):
    """What a pass over rows of log-probabilities computes."""

    form: Form
    beta: float = 0.0
    labels: torch.Tensor | None = None  # (N,)
    ignore_index: int = -100
    by_element: bool = False


def divergence_pass(
    x: torch.Tensor,  # (N, V)
    t: torch.Tensor,  # (N, V)
    terms: DivergenceTerms,
    *,
    losses: torch.Tensor | None = None,  # (N, blocks_of(V)); (N, V) by_element
    dx: torch.Tensor | None = None,  # (N, V)
    dt: torch.Tensor | None = None,  # (N, V), only for "kl" and "forward"
    scale: torch.Tensor | None = None,  # () or (N,); (N, V) by_element
) -> None:
    """Write those of losses, dx and dt that are given, in one pass over the rows.

    losses are sums over blocks of columns. dx and dt are the derivatives times scale. Rows whose label is ignore_index
    have loss 0 and gradient 0.
    """
    n_rows, n_cols = x.shape
    block = _block_of(n_cols)
    written = next(given for given in (dx, dt, losses) if given is not None)
    row_stride, col_stride, *_ = (0, 0) if scale is None else (*scale.stride(), 0, 0)
    # Flags keep the kernel from reading unused arguments; any tensor takes their place.
    with on_device(x):
        _divergence_kernel[(n_rows * blocks_of(n_cols),)](
            x, t, *(written if given is None else given for given in (terms.labels, losses, dx, dt, scale)),
            x.stride(0), t.stride(0), row_stride, col_stride, n_cols, terms.ignore_index, terms.beta,
            FORM=terms.form, HAS_LABELS=terms.labels is not None, BY_ELEMENT=terms.by_element,
            NEEDS_LOSS=losses is not None, NEEDS_DX=dx is not None, NEEDS_DT=dt is not None,
            BLOCK=block, **launch_options(block, chip_of(x.device)),
        )  # fmt: skip


def _block_of(n_cols: int) -> int:
    return min(DIVERGENCE_BLOCK, triton.next_power_of_2(n_cols))


def blocks_of(n_cols: int) -> int:
    """Return the number of partial sums of a row's loss."""
    return triton.cdiv(n_cols, _block_of(n_cols))


@triton.jit
def _log2(x, FAST: tl.constexpr):
    """Return log2 of a share. tl.log2 takes 18 instructions on NVIDIA; the fast one has an error of at most 2^-22."""
    if FAST:
        return tl.inline_asm_elementwise("lg2.approx.ftz.f32 $0, $1;", "=f,f", [x], tl.float32, is_pure=True, pack=1)
    return tl.log2(x)


@triton.jit
def _update_lanes(lane_max, lane_sum, z, unit):
    """Return the running maximum and sum of exponentials of each lane, with z (LANES, VECTOR) included."""
    new_max = tl.maximum(lane_max, tl.max(z, axis=1))
    lane_sum *= tl.exp2((lane_max - new_max) * unit)
    return new_max, lane_sum + tl.sum(tl.exp2((z - new_max[:, None]) * unit), axis=1)


@triton.jit
def _reduce_lanes(lane_max, lane_sum, unit):
    """Return a row's maximum, and log2 of its sum relative to the maximum."""
    row_max = tl.max(lane_max, axis=0)
    return row_max, tl.log2(tl.sum(lane_sum * tl.exp2((lane_max - row_max) * unit), axis=0))


@triton.jit
def _load(row_ptr, cols, n_cols, width, PADDED: tl.constexpr):
    x = tl.load(row_ptr + cols, mask=cols < width, other=float("-inf")).to(tl.float32)
    return tl.where(cols < n_cols, x, float("-inf")) if PADDED else x


@triton.jit
def _both_lse(z_ptr, w_ptr, offs, n_cols, width, unit, PADDED: tl.constexpr, LANES: tl.constexpr, VECTOR: tl.constexpr):
    """Return both lse as maximum and log2 of the sum: z - maximum is exact, z - lse would be rounded."""
    # Not -inf, because -inf - -inf is NaN. The only smaller logit is -inf.
    z_max = tl.full([LANES], -1e30, dtype=tl.float32)
    w_max = tl.full([LANES], -1e30, dtype=tl.float32)
    z_sum = tl.zeros([LANES], dtype=tl.float32)
    w_sum = tl.zeros([LANES], dtype=tl.float32)
    for start in range(0, width, LANES * VECTOR):
        z = _load(z_ptr, start + offs, n_cols, width, PADDED)
        w = _load(w_ptr, start + offs, n_cols, width, PADDED)
        z_max, z_sum = _update_lanes(z_max, z_sum, z, unit)
        w_max, w_sum = _update_lanes(w_max, w_sum, w, unit)
    z_max, z_log_sum = _reduce_lanes(z_max, z_sum, unit)
    w_max, w_log_sum = _reduce_lanes(w_max, w_sum, unit)
    return z_max, z_log_sum, w_max, w_log_sum


@triton.jit
def _mixture_sweep(
    z_ptr, w_ptr, dz_ptr, offs, n_cols, width, unit, z_max, z_log_sum, w_max, w_log_sum, beta, x_sum, scale,
    WRITES: tl.constexpr, FAST_LOG: tl.constexpr, PADDED: tl.constexpr, LANES: tl.constexpr, VECTOR: tl.constexpr,
):  # fmt: skip
    """Return sum p (x - m) and sum q (t - m) of a row, in log2.

    WRITES: x_sum is the first sum; write the gradient times scale into dz.
    """
    x_sums = tl.zeros([LANES, VECTOR], dtype=tl.float32)
    t_sums = tl.zeros([LANES, VECTOR], dtype=tl.float32)
    for start in range(0, width, LANES * VECTOR):
        cols = start + offs
        z = _load(z_ptr, cols, n_cols, width, PADDED)
        w = _load(w_ptr, cols, n_cols, width, PADDED)
        # A probability below 2^-200 is 0 in fp32. With this bound nothing is infinite, so 0 · inf cannot occur.
        x = tl.maximum((z - z_max) * unit - z_log_sum, -200.0, propagate_nan=tl.PropagateNan.ALL)
        t = tl.maximum((w - w_max) * unit - w_log_sum, -200.0, propagate_nan=tl.PropagateNan.ALL)
        d = t - x
        near = tl.where(d > 0.0, beta, 1.0 - beta)
        log_share = _log2(near + (1.0 - near) * tl.exp2(-tl.abs(d)), FAST_LOG)
        x_less_m = -tl.maximum(d, 0.0) - log_share
        p = tl.exp2(x)
        if WRITES:
            dz = p * (x_less_m * scale - x_sum * scale)
            tl.store(dz_ptr + cols, dz.to(dz_ptr.dtype.element_ty), mask=cols < width)
        else:
            x_sums += p * x_less_m
            t_sums += tl.exp2(t) * (tl.minimum(d, 0.0) - log_share)
    return tl.sum(tl.sum(x_sums, axis=1), axis=0), tl.sum(tl.sum(t_sums, axis=1), axis=0)


@triton.jit
def _divergence_sweep(
    z_ptr, w_ptr, dz_ptr, offs, n_cols, width, inverse_temperature, z_max, z_log_sum, w_max, w_log_sum, dx_sum, scale,
    FORM: tl.constexpr, WRITES: tl.constexpr, PADDED: tl.constexpr, LANES: tl.constexpr, VECTOR: tl.constexpr,
):  # fmt: skip
    """Return a row's loss and the sum of its g.

    WRITES: dx_sum is that sum; write the gradient times scale into dz.
    """
    losses = tl.zeros([LANES], dtype=tl.float32)
    dx_sums = tl.zeros([LANES], dtype=tl.float32)
    for start in range(0, width, LANES * VECTOR):
        cols = start + offs
        z = _load(z_ptr, cols, n_cols, width, PADDED)
        w = _load(w_ptr, cols, n_cols, width, PADDED)
        x = (z - z_max) * inverse_temperature - z_log_sum * LN2
        t = (w - w_max) * inverse_temperature - w_log_sum * LN2
        loss, dx, p = divergence(x, t, 0.0, FORM)
        if FORM == "reverse":
            dx = loss  # without p, which the softmax's derivative subtracts anyway: no cancellation of 1
        losses += tl.sum(loss, axis=1)
        dx_sums += tl.sum(dx, axis=1)
        if WRITES:
            dz = (dx - p * dx_sum) * scale
            tl.store(dz_ptr + cols, dz.to(dz_ptr.dtype.element_ty), mask=cols < width)
    return tl.sum(losses, axis=0), tl.sum(dx_sums, axis=0)


@triton.jit
def _divergence_row(
    z_ptr, w_ptr, dz_ptr, loss_ptr, offs, n_cols, width, inverse_temperature, z_max, z_log_sum, w_max, w_log_sum, scale,
    FORM: tl.constexpr, NEEDS_GRAD: tl.constexpr, PADDED: tl.constexpr, LANES: tl.constexpr, VECTOR: tl.constexpr,
):  # fmt: skip
    """Write a row's loss of forward or reverse KL and its gradient times scale."""
    dx_sum = -1.0
    if not NEEDS_GRAD or FORM != "forward":
        loss, dx_sum = _divergence_sweep(
            z_ptr, w_ptr, dz_ptr, offs, n_cols, width, inverse_temperature, z_max, z_log_sum, w_max, w_log_sum,
            dx_sum, scale, FORM, False, PADDED, LANES, VECTOR,
        )  # fmt: skip
        tl.store(loss_ptr, loss)
    if NEEDS_GRAD:
        loss, _ = _divergence_sweep(
            z_ptr, w_ptr, dz_ptr, offs, n_cols, width, inverse_temperature, z_max, z_log_sum, w_max, w_log_sum,
            dx_sum, scale, FORM, True, PADDED, LANES, VECTOR,
        )  # fmt: skip
        if FORM == "forward":
            tl.store(loss_ptr, loss)


@triton.jit(do_not_specialize=["n_rows"])
def _jsd_row_kernel(
    z_ptr, w_ptr, labels_ptr, losses_ptr, dz_ptr, scale_ptr, z_row_stride, w_row_stride, dz_row_stride,
    n_rows, n_cols, width, ignore_index, beta, inverse_temperature,
    FORM: tl.constexpr, HAS_LABELS: tl.constexpr, NEEDS_GRAD: tl.constexpr, PADDED: tl.constexpr,
    FAST_LOG: tl.constexpr, LANES: tl.constexpr, VECTOR: tl.constexpr,
):  # fmt: skip
    beta = fp32(beta)
    inverse_temperature = fp32(inverse_temperature)
    offs = tl.arange(0, LANES)[:, None] * VECTOR + tl.arange(0, VECTOR)[None, :]
    for row in range(tl.program_id(0).to(tl.int64), n_rows, tl.num_programs(0)):
        z_row = z_ptr + row * z_row_stride
        w_row = w_ptr + row * w_row_stride
        dz_row = dz_ptr + row * dz_row_stride
        ignored = False
        if HAS_LABELS:
            ignored = tl.load(labels_ptr + row) == ignore_index
        if ignored:
            tl.store(losses_ptr + row, 0.0)
            if NEEDS_GRAD:
                for start in range(0, width, LANES * VECTOR):
                    nothing = tl.zeros([LANES, VECTOR], dtype=dz_ptr.dtype.element_ty)
                    tl.store(dz_row + start + offs, nothing, mask=start + offs < width)
        else:
            unit = inverse_temperature * LOG2E
            z_max, z_log_sum, w_max, w_log_sum = _both_lse(
                z_row, w_row, offs, n_cols, width, unit, PADDED, LANES, VECTOR
            )
            scale = 0.0
            if NEEDS_GRAD:
                scale = tl.load(scale_ptr).to(tl.float32) * inverse_temperature
            if FORM == "mixture":
                x_sum, t_sum = _mixture_sweep(
                    z_row, w_row, dz_row, offs, n_cols, width, unit, z_max, z_log_sum, w_max, w_log_sum,
                    beta, 0.0, scale, False, FAST_LOG, PADDED, LANES, VECTOR,
                )  # fmt: skip
                tl.store(losses_ptr + row, (beta * t_sum + (1.0 - beta) * x_sum) * LN2)
                if NEEDS_GRAD:
                    _mixture_sweep(
                        z_row, w_row, dz_row, offs, n_cols, width, unit, z_max, z_log_sum, w_max, w_log_sum,
                        beta, x_sum, (1.0 - beta) * scale * LN2, True, FAST_LOG, PADDED, LANES, VECTOR,
                    )  # fmt: skip
            else:
                _divergence_row(
                    z_row, w_row, dz_row, losses_ptr + row, offs, n_cols, width, inverse_temperature, z_max, z_log_sum,
                    w_max, w_log_sum, scale, FORM, NEEDS_GRAD, PADDED, LANES, VECTOR,
                )  # fmt: skip


@dataclass(frozen=True)
class JSDOptions:
    """Options of the divergence of two rows of logits."""

    beta: float
    temperature: float
    ignore_index: int = -100


def jsd_row_pass(
    student: torch.Tensor,  # (N, W), W >= V
    teacher: torch.Tensor,  # (N, W)
    labels: torch.Tensor | None,  # (N,)
    options: JSDOptions,
    *,
    vocab_size: int,  # V
    gradient: torch.Tensor | None = None,  # (N, W), may be the student's logits
    scale: torch.Tensor | None = None,  # ()
) -> torch.Tensor:  # (N,)
    """Return the losses of rows of logits; write the student's gradient times scale into `gradient`, 0 past V."""
    if not runs_triton(student):
        return _jsd_row_pass_torch(student, teacher, labels, options, vocab_size, gradient, scale)
    n_rows, width = student.shape
    assert teacher.shape == student.shape and student.stride(1) == teacher.stride(1) == 1
    losses = torch.empty(n_rows, dtype=torch.float32, device=student.device)
    item = max(student.element_size(), teacher.element_size())
    block = max(MIN_COLS, min(ROW_BLOCKS[item], triton.next_power_of_2(width)))
    chip = chip_of(student.device)
    # One per processor. Two rows of 128256 then exceed the L2 cache, but with fewer some processors would be idle.
    programs = min(n_rows, chip.processors)
    needs_grad = gradient is not None
    # Flags keep the kernel from reading unused arguments; any tensor takes their place.
    with on_device(student):
        _jsd_row_kernel[(programs,)](
            student, teacher, losses if labels is None else labels, losses,
            gradient if needs_grad else student, scale if needs_grad else losses,
            student.stride(0), teacher.stride(0), gradient.stride(0) if needs_grad else 0, n_rows, vocab_size, width,
            options.ignore_index, options.beta, 1.0 / options.temperature, FORM=form_of(options.beta),
            HAS_LABELS=labels is not None, NEEDS_GRAD=needs_grad, PADDED=width != vocab_size,
            FAST_LOG=takes_fast_log(chip) and item == 2, LANES=block // VECTOR, VECTOR=VECTOR,
            **launch_options(2 * block, chip),
        )  # fmt: skip
    return losses


def _jsd_row_pass_torch(
    student: torch.Tensor,
    teacher: torch.Tensor,
    labels: torch.Tensor | None,
    options: JSDOptions,
    vocab_size: int,
    gradient: torch.Tensor | None,
    scale: torch.Tensor | None,
) -> torch.Tensor:
    beta = options.beta
    inverse_temperature = 1.0 / options.temperature
    wide = torch.promote_types(student.dtype, torch.float32)
    x, t = (
        (logits[:, :vocab_size].to(wide) * inverse_temperature).log_softmax(dim=-1) for logits in (student, teacher)
    )
    ignored = (
        torch.zeros(len(x), dtype=torch.bool, device=x.device) if labels is None else labels == options.ignore_index
    )
    losses = summands(x, t, beta).sum(dim=-1).masked_fill(ignored, 0.0)
    if gradient is not None:
        p = x.exp()
        if beta == 0:
            dx = -t.exp()
        elif beta == 1:
            dx = weighted(p, x - t)
        else:
            dx = (1.0 - beta) * weighted(p, x - log_mixture(x, t, beta))
        dz = (dx - p * dx.sum(dim=-1, keepdim=True)) * (scale * inverse_temperature)
        gradient[:, vocab_size:] = 0.0
        gradient[:, :vocab_size].copy_(dz.masked_fill(ignored.unsqueeze(1), 0.0))
    return losses
