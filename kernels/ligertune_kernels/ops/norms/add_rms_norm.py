"""Residual addition fused with the RMS norm after it: s = x + residual, y = rms_norm(s), for x, residual (..., E).

s is rounded to the tensors' dtype, as the model's own addition does, and the norm reads the rounded sum.
Backward: one kernel computes the gradient of both x and residual, with ds the gradient that reaches s past the norm:

    dx = rms_norm's dx of dy at s + ds

Everything is computed in fp32. Without fusion the sum, and backward both gradients, are written and read once more.
Kernels: _norm_kernels.py; launch plans: _row_norm.py.
"""

from __future__ import annotations

import torch

from ligertune_kernels.autograd import no_double_backward
from ligertune_kernels.launcher import runs_triton
from ligertune_kernels.ops.norms._row_norm import norm_backward, norm_forward
from ligertune_kernels.ops.norms.rms_norm import Cast, RMSNorm, check_rms_norm, rms_norm_reference, roundings


def add_rms_norm_reference(
    x: torch.Tensor,
    residual: torch.Tensor,
    weight: torch.Tensor | None = None,
    eps: float = 1e-6,
    *,
    offset: float = 0.0,
    cast: Cast = "llama",
) -> tuple[torch.Tensor, torch.Tensor]:
    """Compute `add_rms_norm` in plain torch: the addition, then the norm."""
    new_residual = x + residual
    return rms_norm_reference(new_residual, weight, eps, offset=offset, cast=cast), new_residual


class _AddRMSNorm(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x, residual, weight, options):
        eps, offset, cast, _ = options
        y, new_residual, stats = norm_forward(x, residual, weight, None, eps, offset=offset, **roundings(cast))
        ctx.set_materialize_grads(False)  # the last sum of a model has no reader: avoid a gradient of zeros
        ctx.save_for_backward(new_residual, weight, stats)
        ctx.options = options
        ctx.dtypes = (x.dtype, residual.dtype)
        return y, new_residual

    @staticmethod
    @no_double_backward
    def backward(ctx, dy, ds):
        new_residual, weight, stats = ctx.saved_tensors
        _, offset, cast, inplace = ctx.options
        needs_dx, needs_dr, needs_dw, _ = ctx.needs_input_grad
        if dy is None:
            dsum = ds
            dw = None
        else:
            dsum, dw, _ = norm_backward(
                dy, ds, new_residual, weight, None, stats, (needs_dx or needs_dr, needs_dw, False),
                offset=offset, round_xhat=cast == "llama", inplace=inplace,
            )  # fmt: skip
        dx, dr = (
            None if not needed or dsum is None else dsum if dsum.dtype is dtype else dsum.to(dtype)
            for needed, dtype in zip((needs_dx, needs_dr), ctx.dtypes, strict=True)
        )
        return dx, dr, dw, None


def add_rms_norm(
    x: torch.Tensor,  # (..., E)
    residual: torch.Tensor,  # (..., E)
    weight: torch.Tensor | None = None,  # (E,)
    eps: float = 1e-6,
    *,
    offset: float = 0.0,
    cast: Cast = "llama",
    inplace: bool = False,
) -> tuple[torch.Tensor, torch.Tensor]:  # both (..., E)
    """Return (rms_norm(x + residual), x + residual), computed in one pass.

    cast and offset are those of `rms_norm`. inplace: the backward may write the sum's gradient over the incoming
    gradient of the norm. Raises ValueError on mismatched shapes, an unknown cast, or an offset without a weight.
    """
    if x.shape != residual.shape:
        raise ValueError(f"add_rms_norm: x is {tuple(x.shape)}, but residual is {tuple(residual.shape)}")
    check_rms_norm("add_rms_norm", x, weight, cast, offset)
    given = (x, residual) if weight is None else (x, residual, weight)
    if x.numel() == 0 or not all(map(runs_triton, given)):
        return add_rms_norm_reference(x, residual, weight, eps, offset=offset, cast=cast)
    if torch.is_grad_enabled() and any(t.requires_grad for t in given):
        return _AddRMSNorm.apply(x, residual, weight, (eps, offset, cast, inplace))
    return norm_forward(x, residual, weight, None, eps, offset=offset, **roundings(cast))[:2]


class AddRMSNorm(RMSNorm):
    """`add_rms_norm` as a module: (hidden_states, residual) -> (normed sum, sum)."""

    def forward(self, hidden_states: torch.Tensor, residual: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        return add_rms_norm(hidden_states, residual, self.weight, self.eps, offset=self.offset, cast=self.cast)
