r"""Kullback-Leibler divergence of log-probabilities, as torch.nn.functional.kl_div: y = q (log q - input).

q is the target, or exp(target) with log_target. The summand, its derivatives and the kernel stand in divergence.py:

    d_input = -q        d_target = log q + 1 - input, or with log_target q (target - input + 1)

For a reduced loss the gradient is computed together with it, while both tensors are at hand, and waits for the
upstream gradient, by which the backward multiplies it if that is not 1: 3 NV elements move instead of 4, and nothing
is kept of input and target. For reduction="none" the backward computes it from the target.

0 log 0 is 0, with log_target too, where torch gives NaN for a target of -inf.
"""

from __future__ import annotations

from typing import Literal

import torch
from torch import nn

from ligertune_kernels.autograd import no_double_backward
from ligertune_kernels.launcher import as_rows, runs_triton
from ligertune_kernels.ops.distill._divergence import blocks_of, divergence_pass, gradients_once, weighted
from ligertune_kernels.ops.losses._row_pass import scales

KLReduction = Literal["none", "sum", "mean", "batchmean"]


def kl_div_reference(
    input: torch.Tensor, target: torch.Tensor, *, reduction: KLReduction = "mean", log_target: bool = False
) -> torch.Tensor:
    """The same in plain torch, differentiated by autograd."""
    wide = torch.promote_types(torch.promote_types(input.dtype, target.dtype), torch.float32)
    x, t = input.to(wide), target.to(wide)
    losses = weighted(t.exp() if log_target else t, (t if log_target else t.log()) - x)
    if reduction == "none":
        return losses.to(input.dtype)
    return losses.sum() / _terms(input, reduction)


def _terms(input: torch.Tensor, reduction: KLReduction) -> int:
    """What the sum is divided by; as in torch, the mean over nothing is NaN."""
    return {"sum": 1, "mean": input.numel(), "batchmean": input.shape[0]}[reduction]


class _KLDiv(torch.autograd.Function):
    """The sum over rows (N, V), divided; loss and gradients in one pass."""

    @staticmethod
    def forward(ctx, x, t, n_terms, form):
        denominator = torch.full((), n_terms, dtype=torch.float32, device=x.device)
        narrow = torch.float16 if torch.float16 in (x.dtype, t.dtype) else x.dtype
        scale, ctx.afterwards = scales(denominator, narrow)
        losses = torch.empty((x.shape[0], blocks_of(x.shape[1])), dtype=torch.float32, device=x.device)
        dx, dt = (
            torch.empty(source.shape, dtype=source.dtype, device=source.device) if needed else None
            for source, needed in zip((x, t), ctx.needs_input_grad[:2], strict=True)
        )
        divergence_pass(x, t, form, losses=losses, dx=dx, dt=dt, scale=scale)
        ctx.save_for_backward(dx, dt)
        ctx.spent = False
        return losses.sum() / n_terms

    @staticmethod
    @no_double_backward
    def backward(ctx, d_loss):
        return *gradients_once(ctx, d_loss, "kl_div"), None, None


class _KLDivElements(torch.autograd.Function):
    """Every element's own loss, in x's dtype."""

    @staticmethod
    def forward(ctx, x, t, form):
        losses = torch.empty(x.shape, dtype=x.dtype, device=x.device)
        divergence_pass(x, t, form, losses=losses, by_element=True)
        # x is read for the target's gradient alone; elsewhere t stands in for it, and the kernel's load is dropped
        ctx.save_for_backward(x if ctx.needs_input_grad[1] else None, t)
        ctx.form, ctx.x_dtype = form, x.dtype
        return losses

    @staticmethod
    @no_double_backward
    def backward(ctx, d_losses):
        x, t = ctx.saved_tensors
        needs_dx, needs_dt = ctx.needs_input_grad[:2]
        dx = torch.empty(t.shape, dtype=ctx.x_dtype, device=t.device) if needs_dx else None
        dt = torch.empty(t.shape, dtype=t.dtype, device=t.device) if needs_dt else None
        divergence_pass(t if x is None else x, t, ctx.form, dx=dx, dt=dt, scale=d_losses, by_element=True)
        return dx, dt, None


def kl_div(
    input: torch.Tensor, target: torch.Tensor, *, reduction: KLReduction = "mean", log_target: bool = False
) -> torch.Tensor:
    """KL divergence of log-probabilities input (..., V) from target, as torch's; differentiable in both.

    target holds probabilities, or their logarithms with log_target. "batchmean", the mathematical mean, divides by the
    first size; "mean" divides by the number of elements. "none" gives (..., V) in input's dtype, the others a float32.
    A second backward through the same reduced loss is refused where kernels run.
    """
    if reduction not in ("none", "sum", "mean", "batchmean"):
        raise ValueError(f"kl_div: reduction is {reduction!r}; expected 'none', 'sum', 'mean' or 'batchmean'")
    if input.shape != target.shape or input.dim() == 0:
        raise ValueError(
            f"kl_div: input is {tuple(input.shape)} and target {tuple(target.shape)}: expected the same (..., V)"
        )
    if input.numel() == 0 or not runs_triton(input):
        return kl_div_reference(input, target, reduction=reduction, log_target=log_target)
    form = "forward" if log_target else "kl"
    x, t = as_rows(input), as_rows(target)
    if reduction == "none":
        return _KLDivElements.apply(x, t, form).view(input.shape)
    return _KLDiv.apply(x, t, _terms(input, reduction), form)


class KLDivLoss(nn.Module):
    """`kl_div` with its options fixed."""

    def __init__(self, *, reduction: KLReduction = "mean", log_target: bool = False) -> None:
        super().__init__()
        self.reduction, self.log_target = reduction, log_target

    def forward(self, input: torch.Tensor, target: torch.Tensor) -> torch.Tensor:
        return kl_div(input, target, reduction=self.reduction, log_target=self.log_target)

    def extra_repr(self) -> str:
        return f"reduction={self.reduction}, log_target={self.log_target}"
