r"""Kullback-Leibler divergence of log-probabilities, as torch.nn.functional.kl_div: y = q (log q - input).

q is the target, or exp(target) with log_target. kernels.py has the kernel, which computes in fp32.

    d_input = -q        d_target = log q + 1 - input, or with log_target q (target - input + 1)

For a reduced loss the gradient is computed together with the loss, while both tensors are in registers, and kept until
the backward multiplies it by the upstream gradient: 3 NV elements are moved instead of 4, and neither input nor target
is kept. For reduction="none" the backward computes it from the target.

0 log 0 is 0, also with log_target, where torch returns NaN for a target of -inf.
"""

from __future__ import annotations

from typing import Literal

import torch

from ligertune_kernels.autograd import no_double_backward
from ligertune_kernels.launcher import as_rows, runs_triton
from ligertune_kernels.ops.distill.kernels import DivergenceTerms, blocks_of, divergence_pass, weighted
from ligertune_kernels.ops.losses.cross_entropy import LossFunction, LossModule

KLReduction = Literal["none", "sum", "mean", "batchmean"]


def kl_div_reference(
    input: torch.Tensor, target: torch.Tensor, *, reduction: KLReduction = "mean", log_target: bool = False
) -> torch.Tensor:
    """Compute `kl_div` in plain torch, differentiated by autograd."""
    wide = torch.promote_types(torch.promote_types(input.dtype, target.dtype), torch.float32)
    x = input.to(wide)
    t = target.to(wide)
    losses = weighted(t.exp() if log_target else t, (t if log_target else t.log()) - x)
    if reduction == "none":
        return losses.to(input.dtype)
    return losses.sum() / _divisor(input, reduction)


def _divisor(input: torch.Tensor, reduction: KLReduction) -> int:
    """Return what the sum is divided by. As in torch, the mean of an empty tensor is NaN."""
    return {"sum": 1, "mean": input.numel(), "batchmean": input.shape[0]}[reduction]


class _KLDiv(LossFunction):
    """The sum over rows (N, V), divided; loss and gradients in one pass."""

    @staticmethod
    def forward(ctx, x, t, divisor, form):
        denominator = torch.full((), divisor, dtype=torch.float32, device=x.device)
        narrow = torch.float16 if torch.float16 in (x.dtype, t.dtype) else x.dtype
        scale = LossFunction.scale(ctx, denominator, narrow)
        losses = torch.empty((len(x), blocks_of(x.shape[1])), dtype=torch.float32, device=x.device)
        dx, dt = (
            torch.empty(source.shape, dtype=source.dtype, device=source.device) if needed else None
            for source, needed in zip((x, t), ctx.needs_input_grad[:2], strict=True)
        )
        divergence_pass(x, t, DivergenceTerms(form), losses=losses, dx=dx, dt=dt, scale=scale)
        LossFunction.keep(ctx, "kl_div", [x, t], [dx, dt])
        return losses.sum() / divisor


class _KLDivElements(torch.autograd.Function):
    """One loss per element, in x's dtype."""

    @staticmethod
    def forward(ctx, x, t, form):
        losses = torch.empty(x.shape, dtype=x.dtype, device=x.device)
        divergence_pass(x, t, DivergenceTerms(form, by_element=True), losses=losses)
        # Only the target's gradient depends on x. Without it, t takes x's place and the compiler drops the load.
        ctx.save_for_backward(x if ctx.needs_input_grad[1] else None, t)
        ctx.form = form
        ctx.x_dtype = x.dtype
        return losses

    @staticmethod
    @no_double_backward
    def backward(ctx, d_losses):
        x, t = ctx.saved_tensors
        needs_dx, needs_dt = ctx.needs_input_grad[:2]
        dx = torch.empty(t.shape, dtype=ctx.x_dtype, device=t.device) if needs_dx else None
        dt = torch.empty(t.shape, dtype=t.dtype, device=t.device) if needs_dt else None
        terms = DivergenceTerms(ctx.form, by_element=True)
        divergence_pass(t if x is None else x, t, terms, dx=dx, dt=dt, scale=d_losses)
        return dx, dt, None


def kl_div(
    input: torch.Tensor,  # (..., V), log-probabilities
    target: torch.Tensor,  # (..., V)
    *,
    reduction: KLReduction = "mean",
    log_target: bool = False,
) -> torch.Tensor:
    """KL divergence of input from target as torch's, differentiable in both.

    target holds probabilities, or log-probabilities with log_target. "batchmean", the mathematical mean, divides by the
    first size; "mean" divides by the number of elements. "none" returns (..., V) in input's dtype, the others a float32
    scalar. A second backward through the same reduced loss raises RuntimeError where kernels run. Raises ValueError on
    mismatched shapes or an unknown reduction.
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
    x = as_rows(input)
    t = as_rows(target)
    if reduction == "none":
        return _KLDivElements.apply(x, t, form).view(input.shape)
    return _KLDiv.apply(x, t, _divisor(input, reduction), form)


class KLDivLoss(LossModule):
    """`kl_div` with fixed options."""

    function = staticmethod(kl_div)
