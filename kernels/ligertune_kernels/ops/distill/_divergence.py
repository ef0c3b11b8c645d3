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
"""

from __future__ import annotations

from typing import Literal

import torch

from ligertune_kernels.chips import launch_options
from ligertune_kernels.jit.device_functions import LN2, LOG2E, fp32
from ligertune_kernels.launcher import chip_of, on_device, tl, triton

Form = Literal["kl", "forward", "reverse", "mixture"]

BLOCK = 2048


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


def divergence_pass(
    x: torch.Tensor,  # (N, V)
    t: torch.Tensor,  # (N, V)
    form: Form,
    *,
    beta: float = 0.0,
    labels: torch.Tensor | None = None,  # (N,)
    ignore_index: int = -100,
    losses: torch.Tensor | None = None,  # (N, blocks_of(V)); (N, V) by_element
    dx: torch.Tensor | None = None,  # (N, V)
    dt: torch.Tensor | None = None,  # (N, V), only for "kl" and "forward"
    scale: torch.Tensor | None = None,  # () or (N,); (N, V) by_element
    by_element: bool = False,
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
            x, t, *(written if given is None else given for given in (labels, losses, dx, dt, scale)),
            x.stride(0), t.stride(0), row_stride, col_stride, n_cols, ignore_index, beta,
            FORM=form, HAS_LABELS=labels is not None, BY_ELEMENT=by_element, NEEDS_LOSS=losses is not None,
            NEEDS_DX=dx is not None, NEEDS_DT=dt is not None, BLOCK=block, **launch_options(block, chip_of(x.device)),
        )  # fmt: skip


def _block_of(n_cols: int) -> int:
    return min(BLOCK, triton.next_power_of_2(n_cols))


def blocks_of(n_cols: int) -> int:
    """Return the number of partial sums of a row's loss."""
    return triton.cdiv(n_cols, _block_of(n_cols))
