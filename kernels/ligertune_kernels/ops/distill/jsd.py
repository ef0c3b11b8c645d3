r"""Generalised Jensen-Shannon divergence of a student's log-probabilities from a teacher's (GKD, Agarwal et al. 2023).

With P the student and Q the teacher, each row adds

    β KL(Q ‖ M) + (1-β) KL(P ‖ M)        M = β Q + (1-β) P

and at the ends, where this vanishes, what TRL's GKDTrainer puts there: β = 0 forward KL(Q ‖ P), β = 1 reverse
KL(P ‖ Q). Its temperature divides logits, so it comes before this op: input = log_softmax(logits / temperature); the
loss is not multiplied by its square. The summands, their derivatives and the kernel stand in divergence.py.

For mean and sum the gradient is computed together with the loss, while both tensors are at hand, and waits for the
upstream gradient: 3 NV elements move instead of 5. For reduction="none" the backward makes the pass again.
"""

from __future__ import annotations

import torch
from torch import nn

from ligertune_kernels.autograd import no_double_backward
from ligertune_kernels.launcher import as_rows, runs_triton
from ligertune_kernels.ops.distill._divergence import blocks_of, divergence_pass, form_of, gradients_once, summands
from ligertune_kernels.ops.losses._row_pass import scales
from ligertune_kernels.ops.losses.cross_entropy import Reduction, check_reduction


def jsd_reference(
    input: torch.Tensor,
    target: torch.Tensor,
    *,
    beta: float = 0.5,
    labels: torch.Tensor | None = None,
    ignore_index: int = -100,
    reduction: Reduction = "mean",
) -> torch.Tensor:
    """The same in plain torch, differentiated by autograd."""
    wide = torch.promote_types(torch.promote_types(input.dtype, target.dtype), torch.float32)
    losses = summands(input.to(wide), target.detach().to(wide), beta).sum(dim=-1)
    if labels is not None:
        losses = losses.masked_fill(labels == ignore_index, 0.0)
    if reduction == "none":
        return losses
    return losses.sum() / denominator(losses.view(-1, 1), labels, ignore_index, reduction)


def denominator(
    rows: torch.Tensor,
    labels: torch.Tensor | None,
    ignore_index: int,
    reduction: Reduction,
    num_items_in_batch: int | torch.Tensor | None = None,
) -> torch.Tensor:
    """What a sum over rows (N, ·) is divided by, as a scalar on their device; never 0."""
    dtype = torch.promote_types(rows.dtype, torch.float32)
    if isinstance(num_items_in_batch, torch.Tensor):
        return num_items_in_batch.detach().to(rows.device, dtype, non_blocking=True).reshape(()).clamp(min=1)
    if num_items_in_batch is None and reduction == "mean" and labels is not None:
        return (labels != ignore_index).sum().clamp(min=1).to(dtype)
    n = num_items_in_batch if num_items_in_batch is not None else rows.shape[0] if reduction == "mean" else 1
    return torch.full((), max(1, n), dtype=dtype, device=rows.device)


def _losses(x: torch.Tensor, t: torch.Tensor, labels: torch.Tensor | None, options: dict, **gradient) -> torch.Tensor:
    """The losses (N,) of rows x and t; the gradient, times scale, goes into dx."""
    losses = torch.empty((x.shape[0], blocks_of(x.shape[1])), dtype=torch.float32, device=x.device)
    divergence_pass(x, t, form_of(options["beta"]), losses=losses, labels=labels, **options, **gradient)
    return losses.sum(dim=1)


class _JSD(torch.autograd.Function):
    """The sum over rows divided by `denominator`; loss and gradient in one pass."""

    @staticmethod
    def forward(ctx, x, t, labels, denominator, options):
        scale, ctx.afterwards = scales(denominator, x.dtype)
        dx = torch.empty(x.shape, dtype=x.dtype, device=x.device)
        losses = _losses(x, t, labels, options, dx=dx, scale=scale)
        ctx.save_for_backward(dx)
        ctx.spent = False
        return losses.sum() / denominator

    @staticmethod
    @no_double_backward
    def backward(ctx, d_loss):
        return *gradients_once(ctx, d_loss, "jsd"), None, None, None, None


class _JSDRows(torch.autograd.Function):
    """Every row's own loss; the pass for the gradient waits until the upstream gradient is there."""

    @staticmethod
    def forward(ctx, x, t, labels, options):
        ctx.save_for_backward(x, t, labels)
        ctx.options = options
        return _losses(x, t, labels, options)

    @staticmethod
    @no_double_backward
    def backward(ctx, d_losses):
        x, t, labels = ctx.saved_tensors
        dx = torch.empty(x.shape, dtype=x.dtype, device=x.device)
        divergence_pass(x, t, form_of(ctx.options["beta"]), labels=labels, dx=dx, scale=d_losses, **ctx.options)
        return dx, None, None, None


def jsd(
    input: torch.Tensor,
    target: torch.Tensor,
    *,
    beta: float = 0.5,
    labels: torch.Tensor | None = None,
    ignore_index: int = -100,
    reduction: Reduction = "mean",
) -> torch.Tensor:
    """Generalised JSD of log-probabilities input (..., V), the student's, from target, the teacher's; in float32.

    beta 0 is the forward KL divergence, 1 the reverse, 0.5 the symmetric JSD. Rows whose label (...) is ignore_index
    count for nothing; labels mean nothing else here. The mean is over the rows that count, and 0 over none. "none"
    gives one loss a row. The teacher is a constant: a target that asks for a gradient is refused. So is a second
    backward through the same mean or sum, where kernels run.
    """
    _check(input, target, beta, labels, reduction)
    options = {"beta": float(beta), "ignore_index": ignore_index}
    if input.numel() == 0 or not runs_triton(input):
        return jsd_reference(input, target, labels=labels, reduction=reduction, **options)
    x, t, flat = as_rows(input), as_rows(target), None if labels is None else labels.reshape(-1).contiguous()
    needs_grad = torch.is_grad_enabled() and input.requires_grad
    if reduction == "none":
        losses = _JSDRows.apply(x, t, flat, options) if needs_grad else _losses(x, t, flat, options)
        return losses.view(input.shape[:-1])
    n = denominator(x, flat, ignore_index, reduction)
    return _JSD.apply(x, t, flat, n, options) if needs_grad else _losses(x, t, flat, options).sum() / n


def _check(input: torch.Tensor, target: torch.Tensor, beta: float, labels: torch.Tensor | None, reduction: str) -> None:
    check_reduction("jsd", reduction)
    check_beta("jsd", beta)
    if input.shape != target.shape or input.dim() == 0:
        raise ValueError(
            f"jsd: input is {tuple(input.shape)} and target {tuple(target.shape)}: expected the same (..., V)"
        )
    if labels is not None and labels.shape != input.shape[:-1]:
        raise ValueError(f"jsd: labels are {tuple(labels.shape)}; expected {tuple(input.shape[:-1])} for this input")
    if torch.is_grad_enabled() and target.requires_grad:
        raise ValueError("jsd: target asks for a gradient, but the teacher is a constant here; pass target.detach()")


def check_beta(op: str, beta: float) -> None:
    if not 0.0 <= beta <= 1.0:
        raise ValueError(f"{op}: beta is {beta}; expected 0 (forward KL) to 1 (reverse KL)")


class JSDLoss(nn.Module):
    """`jsd` with its options fixed."""

    def __init__(self, *, beta: float = 0.5, ignore_index: int = -100, reduction: Reduction = "mean") -> None:
        super().__init__()
        self.options = {"beta": beta, "ignore_index": ignore_index, "reduction": reduction}

    def forward(self, input: torch.Tensor, target: torch.Tensor, labels: torch.Tensor | None = None) -> torch.Tensor:
        return jsd(input, target, labels=labels, **self.options)

    def extra_repr(self) -> str:
        return ", ".join(f"{name}={value}" for name, value in self.options.items())
