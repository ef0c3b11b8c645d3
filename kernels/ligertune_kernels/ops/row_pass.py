r"""The pass over the rows of logits that cross_entropy and linear_cross_entropy share.

Of a row x (V,) with label y, class weights w (all 1 by default), smoothing ε, cap c and z-loss weight ζ:

    z = c tanh(s x / c), or s x without a cap        lse = log sum exp z        p = exp(z - lse)
    loss = (1 - ε) w_y (lse - z_y) + ε/V sum_j w_j (lse - z_j) + ζ lse²
    dloss/dx_j = s (1 - (z_j/c)²) · [ p_j ((1 - ε) w_y + ε/V sum w + 2 ζ lse) - ε/V w_j - (1 - ε) w_y [j = y] ]

A row whose label is ignore_index has loss 0 and gradient 0; one whose label is no class has NaN for both and reads
nothing out of bounds. All arithmetic is fp32 (float64 in the torch form for float64 logits).

A program sweeps its row twice: first for lse, each lane keeping the running maximum and sum of its own columns, then
for the gradient, which may be written over the logits. The second sweep is meant to hit the L2 cache: `launch` bounds
how many rows are in flight.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch

from ligertune_kernels.device_fns import LN2, LOG2E, fp32, tanh
from ligertune_kernels.launch import chip_of, on_device, options, programs_within_l2, runs_triton, tl, triton

BLOCK_BYTES = 32768  # of a row taken at once: 16384 columns of bf16 on 32 warps; as many of fp32 spill on sm100
VECTOR = 8  # neighbouring columns of one lane: 16 bytes of bf16
SCALE_BLOCK = 4096

# float16 holds nothing below 6e-8: p/n of a large vocabulary and batch would vanish. Its gradients are therefore not
# divided by n in the pass but multiplied by this, and by 1/(256 n) once the upstream gradient (GradScaler's 65536)
# is there too. 256 (p - 1) W overflows for no weight under 128.
HALF_SCALE = 256.0


@dataclass(frozen=True)
class Terms:
    """What a row's loss is made of."""

    ignore_index: int = -100
    label_smoothing: float = 0.0
    softcap: float | None = None
    logit_scale: float = 1.0
    z_loss: float = 0.0


@triton.jit
def _bounded(x, softcap, logit_scale, HAS_SOFTCAP: tl.constexpr):
    z = x * logit_scale
    if HAS_SOFTCAP:
        z = softcap * tanh(z / softcap)
    return z


@triton.jit
def _first_sweep(
    x_ptr,
    weight_ptr,
    offs,
    n_cols,
    softcap,
    logit_scale,
    HAS_WEIGHT: tl.constexpr,
    HAS_SMOOTHING: tl.constexpr,
    HAS_SOFTCAP: tl.constexpr,
    LANES: tl.constexpr,
    VECTOR: tl.constexpr,
):
    """A row's lse and, for label smoothing, its sums of w_j z_j and w_j. The lanes meet only at the end."""
    # Not -inf, of which -inf - -inf would make NaN; no logit is smaller but -inf itself.
    lane_max = tl.full([LANES], -1e30, dtype=tl.float32)
    lane_sum = tl.zeros([LANES], dtype=tl.float32)
    z_sum = tl.zeros([LANES], dtype=tl.float32)
    weight_sum = tl.zeros([LANES], dtype=tl.float32)
    for start in range(0, n_cols, LANES * VECTOR):
        mask = start + offs < n_cols
        x = tl.load(x_ptr + start + offs, mask=mask, other=float("-inf")).to(tl.float32)
        z = tl.where(mask, _bounded(x, softcap, logit_scale, HAS_SOFTCAP), float("-inf"))
        new_max = tl.maximum(lane_max, tl.max(z, axis=1))
        lane_sum *= tl.exp2((lane_max - new_max) * LOG2E)
        lane_sum += tl.sum(tl.exp2((z - new_max[:, None]) * LOG2E), axis=1)
        lane_max = new_max
        if HAS_SMOOTHING:
            w = mask.to(tl.float32)
            if HAS_WEIGHT:
                w = tl.load(weight_ptr + start + offs, mask=mask, other=0.0).to(tl.float32)
            z_sum += tl.sum(w * tl.where(mask, z, 0.0), axis=1)
            weight_sum += tl.sum(w, axis=1)
    row_max = tl.max(lane_max, axis=0)
    row_sum = tl.sum(lane_sum * tl.exp2((lane_max - row_max) * LOG2E), axis=0)
    return row_max + tl.log2(row_sum) * LN2, tl.sum(z_sum, axis=0), tl.sum(weight_sum, axis=0)


@triton.jit(do_not_specialize=["n_rows"])
def _row_kernel(
    logits_ptr,
    labels_ptr,
    weight_ptr,
    losses_ptr,
    grad_ptr,
    scale_ptr,
    logits_row_stride,
    grad_row_stride,
    scale_stride,
    n_rows,
    n_cols,
    ignore_index,
    label_smoothing,
    softcap,
    logit_scale,
    z_loss,
    HAS_WEIGHT: tl.constexpr,
    HAS_SMOOTHING: tl.constexpr,
    HAS_SOFTCAP: tl.constexpr,
    NEEDS_GRAD: tl.constexpr,
    LANES: tl.constexpr,
    VECTOR: tl.constexpr,
):
    softcap, logit_scale, label_smoothing, z_loss = (
        fp32(softcap),
        fp32(logit_scale),
        fp32(label_smoothing),
        fp32(z_loss),
    )
    offs = tl.arange(0, LANES)[:, None] * VECTOR + tl.arange(0, VECTOR)[None, :]
    for row in range(tl.program_id(0).to(tl.int64), n_rows, tl.num_programs(0)):
        label = tl.load(labels_ptr + row).to(tl.int64)
        x_ptr = logits_ptr + row * logits_row_stride
        dx_ptr = grad_ptr + row * grad_row_stride
        if label == ignore_index:
            tl.store(losses_ptr + row, 0.0)
            if NEEDS_GRAD:
                for start in range(0, n_cols, LANES * VECTOR):
                    nothing = tl.zeros([LANES, VECTOR], dtype=grad_ptr.dtype.element_ty)
                    tl.store(dx_ptr + start + offs, nothing, mask=start + offs < n_cols)
        else:
            is_class = (label >= 0) & (label < n_cols)
            # Read before the sweeps: the second may write over it.
            label_logit = tl.load(x_ptr + label, mask=is_class, other=float("nan")).to(tl.float32)
            label_z = _bounded(label_logit, softcap, logit_scale, HAS_SOFTCAP)
            label_share = 1.0 - label_smoothing
            if HAS_WEIGHT:
                label_share *= tl.load(weight_ptr + label, mask=is_class, other=0.0).to(tl.float32)
            lse, z_sum, weight_sum = _first_sweep(
                x_ptr, weight_ptr, offs, n_cols, softcap, logit_scale,
                HAS_WEIGHT, HAS_SMOOTHING, HAS_SOFTCAP, LANES, VECTOR,
            )  # fmt: skip
            smooth_share = label_smoothing / n_cols
            loss = label_share * (lse - label_z) + z_loss * lse * lse
            softmax_share = label_share + 2.0 * z_loss * lse
            if HAS_SMOOTHING:
                loss += smooth_share * (weight_sum * lse - z_sum)
                softmax_share += smooth_share * weight_sum
            tl.store(losses_ptr + row, loss)

            if NEEDS_GRAD:
                scale = tl.load(scale_ptr + row * scale_stride).to(tl.float32) * logit_scale
                scale = tl.where(is_class, scale, float("nan"))
                for start in range(0, n_cols, LANES * VECTOR):
                    cols = start + offs
                    mask = cols < n_cols
                    x = tl.load(x_ptr + cols, mask=mask, other=0.0).to(tl.float32)
                    z = _bounded(x, softcap, logit_scale, HAS_SOFTCAP)
                    dz = softmax_share * tl.exp2((z - lse) * LOG2E)
                    if HAS_SMOOTHING:
                        if HAS_WEIGHT:
                            dz -= smooth_share * tl.load(weight_ptr + cols, mask=mask, other=0.0).to(tl.float32)
                        else:
                            dz -= smooth_share
                    dz = tl.where(cols == label, dz - label_share, dz) * scale
                    if HAS_SOFTCAP:
                        dz *= 1.0 - (z / softcap) * (z / softcap)
                    tl.store(dx_ptr + cols, dz.to(grad_ptr.dtype.element_ty), mask=mask)


def row_pass(
    logits: torch.Tensor,
    labels: torch.Tensor,
    terms: Terms,
    *,
    weight: torch.Tensor | None = None,
    gradient: torch.Tensor | None = None,
    scale: torch.Tensor | None = None,
) -> torch.Tensor:
    """The losses (N,) of logits (N, V) and labels (N,); their gradient, times scale (one or N), goes into `gradient`.

    gradient (N, V) may be the logits themselves. scale is a tensor, since the host is not to wait for its value.
    """
    run = _row_pass_triton if runs_triton(logits) else _row_pass_torch
    return run(logits, labels, terms, weight, gradient, scale)


def _row_pass_triton(
    logits: torch.Tensor,
    labels: torch.Tensor,
    terms: Terms,
    weight: torch.Tensor | None,
    gradient: torch.Tensor | None,
    scale: torch.Tensor | None,
) -> torch.Tensor:
    n_rows, n_cols = logits.shape
    assert logits.stride(1) == 1 and labels.is_contiguous()
    losses = torch.empty(n_rows, dtype=torch.float32, device=logits.device)
    block = max(128, min(BLOCK_BYTES // logits.element_size(), triton.next_power_of_2(n_cols)))
    chip = chip_of(logits.device)
    programs = programs_within_l2(n_rows, n_cols * logits.element_size(), chip)
    needs_grad = gradient is not None
    scale_stride = 1 if needs_grad and scale.dim() else 0
    # A flag keeps the kernel off the arguments it has no use for; any tensor fills their place.
    with on_device(logits):
        _row_kernel[(programs,)](
            logits, labels, losses if weight is None else weight.contiguous(), losses,
            gradient if needs_grad else logits, scale if needs_grad else losses,
            logits.stride(0), gradient.stride(0) if needs_grad else 0, scale_stride, n_rows, n_cols,
            terms.ignore_index, terms.label_smoothing, terms.softcap or 0.0, terms.logit_scale, terms.z_loss,
            HAS_WEIGHT=weight is not None, HAS_SMOOTHING=terms.label_smoothing != 0.0,
            HAS_SOFTCAP=terms.softcap is not None, NEEDS_GRAD=needs_grad, LANES=block // VECTOR, VECTOR=VECTOR,
            **options(block, chip),
        )  # fmt: skip
    return losses


def _row_pass_torch(
    logits: torch.Tensor,
    labels: torch.Tensor,
    terms: Terms,
    weight: torch.Tensor | None,
    gradient: torch.Tensor | None,
    scale: torch.Tensor | None,
) -> torch.Tensor:
    n_cols, wide = logits.shape[1], torch.promote_types(logits.dtype, torch.float32)
    z = logits.to(wide) * terms.logit_scale
    if terms.softcap is not None:
        z = terms.softcap * torch.tanh(z / terms.softcap)
    lse = z.logsumexp(dim=-1, keepdim=True)
    labels = labels.long().unsqueeze(1)
    ignored, is_class = labels == terms.ignore_index, (labels >= 0) & (labels < n_cols)
    index = labels.clamp(0, n_cols - 1)
    share = z.new_full((1, 1), 1.0 - terms.label_smoothing)
    if weight is not None:
        share = share * weight.to(wide)[index]
    loss = share * (lse - z.gather(1, index)) + terms.z_loss * lse.square()
    softmax_share = share + 2.0 * terms.z_loss * lse
    smooth = 0.0
    if terms.label_smoothing:
        smooth = terms.label_smoothing / n_cols * (torch.ones_like(z[:1]) if weight is None else weight.to(wide))
        loss = loss + (smooth * (lse - z)).sum(dim=-1, keepdim=True)
        softmax_share = softmax_share + smooth.sum()
    if gradient is not None:
        dz = softmax_share * torch.exp(z - lse) - smooth
        dz.scatter_add_(1, index, -share.expand_as(index))
        if terms.softcap is not None:
            dz *= 1.0 - (z / terms.softcap).square()
        dz *= (scale.unsqueeze(1) if scale.dim() else scale) * terms.logit_scale
        gradient.copy_(dz.masked_fill_(~is_class, torch.nan).masked_fill_(ignored, 0.0))
    return loss.masked_fill(~is_class, torch.nan).masked_fill(ignored, 0.0).squeeze(1)


def scales(denominator: torch.Tensor, dtype: torch.dtype) -> tuple[torch.Tensor, torch.Tensor | None]:
    """1/denominator, parted into a factor for the pass and one for afterwards, of gradients of this dtype."""
    if dtype is torch.float16:
        return torch.full_like(denominator, HALF_SCALE), 1.0 / (HALF_SCALE * denominator)
    return 1.0 / denominator, None


@triton.jit(do_not_specialize=["n"])
def _scale_kernel(x_ptr, factor_ptr, n, BLOCK: tl.constexpr):
    factor = tl.load(factor_ptr).to(tl.float32)
    if factor != 1.0:
        offs = tl.program_id(0).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
        x = tl.load(x_ptr + offs, mask=offs < n, other=0.0).to(tl.float32)
        tl.store(x_ptr + offs, (x * factor).to(x_ptr.dtype.element_ty), mask=offs < n)


def scaled(t: torch.Tensor, factor: torch.Tensor) -> torch.Tensor:
    """t · factor: in t's own memory where kernels run (a factor of one then costs one launch), else a new tensor.

    The factor stays on the device: it is read there, so nothing waits for it.
    """
    if not runs_triton(t):
        return t * factor.to(t.dtype)
    with on_device(t):
        _scale_kernel[(triton.cdiv(t.numel(), SCALE_BLOCK),)](
            t, factor, t.numel(), BLOCK=SCALE_BLOCK, **options(SCALE_BLOCK, chip_of(t.device))
        )
    return t
