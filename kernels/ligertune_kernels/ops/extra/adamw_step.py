r"""AdamW step (Loshchilov and Hutter, arXiv:1711.05101) in one pass: parameter, gradient and states are read once.

    g = grad / grad_scale        m = b1 m + (1 - b1) g        v = b2 v + (1 - b2) g²
    p = p (1 - lr λ) - lr / (1 - b1^t) · m / (sqrt(v) / sqrt(1 - b2^t) + eps)

Everything is computed in fp32, and each tensor is rounded once to its dtype. The gradient is not written, so that
clipping (grad_scale) costs nothing: 7 tensors of traffic. The powers of b1 and b2 are computed on the host in double
precision. There is no backward.
"""

from __future__ import annotations

import math
from typing import NamedTuple

import torch

from ligertune_kernels.chips import Chip, launch_options
from ligertune_kernels.launcher import Launcher, cached, chip_of, runs_triton, tl, triton
from ligertune_kernels.ops.extra.tiles import STEP_BLOCK


class AdamWOptions(NamedTuple):
    """Options of a parameter group, as in torch.optim.AdamW."""

    lr: float
    betas: tuple[float, float]
    eps: float
    weight_decay: float

    def factors(self, step: int) -> tuple[float, float, float]:
        """Return (1 - lr λ, lr / (1 - b1^t), sqrt(1 - b2^t))."""
        beta1, beta2 = self.betas
        return 1 - self.lr * self.weight_decay, self.lr / (1 - beta1**step), math.sqrt(1 - beta2**step)


def adamw_step_reference(
    param: torch.Tensor,
    grad: torch.Tensor,
    exp_avg: torch.Tensor,
    exp_avg_sq: torch.Tensor,
    options: AdamWOptions,
    *,
    step: int,
    grad_scale: torch.Tensor | None = None,
) -> None:
    """Compute `adamw_step` in plain torch, in place."""
    wide = torch.promote_types(param.dtype, torch.float32)
    g = grad.to(wide) if grad_scale is None else grad.to(wide) / grad_scale
    beta1, beta2 = options.betas
    m = beta1 * exp_avg.to(wide) + (1 - beta1) * g
    v = beta2 * exp_avg_sq.to(wide) + (1 - beta2) * g * g
    decay, size, correction = options.factors(step)
    param.copy_(param.to(wide) * decay - size * m / (v.sqrt() / correction + options.eps))
    exp_avg.copy_(m)
    exp_avg_sq.copy_(v)


@triton.jit
def _adamw_kernel(
    param_ptr, grad_ptr, exp_avg_ptr, exp_avg_sq_ptr,  # (n_elements,)
    scale_ptr,  # () float32
    n_elements, decay, size, correction, beta1, beta2, eps,
    HAS_SCALE: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    offs = tl.program_id(0).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)  # an embedding can have more than 2**31 elements
    mask = offs < n_elements
    p = tl.load(param_ptr + offs, mask=mask, other=0.0).to(tl.float32)
    g = tl.load(grad_ptr + offs, mask=mask, other=0.0).to(tl.float32)
    m = tl.load(exp_avg_ptr + offs, mask=mask, other=0.0).to(tl.float32)
    v = tl.load(exp_avg_sq_ptr + offs, mask=mask, other=0.0).to(tl.float32)
    if HAS_SCALE:
        g = g / tl.load(scale_ptr)
    m = beta1 * m + (1 - beta1) * g
    v = beta2 * v + (1 - beta2) * g * g
    p = p * decay - size * m / (tl.sqrt(v) / correction + eps)
    tl.store(param_ptr + offs, p.to(param_ptr.dtype.element_ty), mask=mask)
    tl.store(exp_avg_ptr + offs, m.to(exp_avg_ptr.dtype.element_ty), mask=mask)
    tl.store(exp_avg_sq_ptr + offs, v.to(exp_avg_sq_ptr.dtype.element_ty), mask=mask)


@cached
def _launch(has_scale: bool, chip: Chip) -> Launcher:
    return Launcher(_adamw_kernel, {"HAS_SCALE": has_scale, "BLOCK": STEP_BLOCK, **launch_options(STEP_BLOCK, chip)})


def adamw_step(
    param: torch.Tensor,  # any shape
    grad: torch.Tensor,  # as param; not written
    exp_avg: torch.Tensor,  # as param
    exp_avg_sq: torch.Tensor,  # as param
    options: AdamWOptions,
    *,
    step: int,
    grad_scale: torch.Tensor | None = None,  # () float32
) -> None:
    """Do step number `step` (from 1): update param, exp_avg and exp_avg_sq in place.

    grad_scale: a scalar on the device that divides the gradient, from clipping or loss scaling. Raises ValueError on
    mismatched shapes.
    """
    tensors = (param, grad, exp_avg, exp_avg_sq)
    if any(t.shape != param.shape for t in tensors):
        raise ValueError(f"adamw_step: shapes {', '.join(str(tuple(t.shape)) for t in tensors)}: expected the same")
    if not (runs_triton(param) and all(t.is_contiguous() for t in tensors)):
        adamw_step_reference(*tensors, options, step=step, grad_scale=grad_scale)
    elif param.numel():
        beta1, beta2 = options.betas
        _launch(grad_scale is not None, chip_of(param.device))(
            (-(-param.numel() // STEP_BLOCK), 1, 1), (*tensors, param if grad_scale is None else grad_scale),
            (param.numel(),), *options.factors(step), float(beta1), float(beta2), float(options.eps),
        )  # fmt: skip
