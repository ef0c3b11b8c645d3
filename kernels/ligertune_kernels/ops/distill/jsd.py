r"""Generalised Jensen-Shannon divergence of a student's log-probabilities from a teacher's (GKD, Agarwal et al. 2023).

With P the student and Q the teacher, each row adds

    β KL(Q ‖ M) + (1-β) KL(P ‖ M)        M = β Q + (1-β) P

and at the ends, where this is 0, what TRL's GKDTrainer uses there: β = 0 forward KL(Q ‖ P), β = 1 reverse KL(P ‖ Q).
GKDTrainer's temperature divides logits, so it is applied before this op: input = log_softmax(logits / temperature). The
loss is not multiplied by its square. kernels.py has the summands, their derivatives and the kernel.

For mean and sum the gradient is computed together with the loss, while both tensors are in registers, and kept for the
upstream gradient: 3 NV elements are moved instead of 5. For reduction="none" the backward runs the pass again. Kernels
compute in fp32.
"""

from __future__ import annotations

import torch

from ligertune_kernels.autograd import no_double_backward
from ligertune_kernels.launcher import as_rows, runs_triton
from ligertune_kernels.ops.distill.kernels import DivergenceTerms, blocks_of, divergence_pass, form_of, summands
from ligertune_kernels.ops.losses.cross_entropy import LossFunction, LossModule, Reduction, check_reduction, divisor_of


def jsd_reference(
    input: torch.Tensor,  # (..., V)
    target: torch.Tensor,  # (..., V)
    *,
    beta: float = 0.5,
    labels: torch.Tensor | None = None,  # (...)
    ignore_index: int = -100,
    reduction: Reduction = "mean",
    num_items_in_batch: int | torch.Tensor | None = None,
) -> torch.Tensor:
    """Compute `jsd` in plain torch, differentiated by autograd. num_items_in_batch replaces the divisor of the mean."""
    wide = torch.promote_types(torch.promote_types(input.dtype, target.dtype), torch.float32)
    losses = summands(input.to(wide), target.detach().to(wide), beta).sum(dim=-1)
    if labels is not None:
        losses = losses.masked_fill(labels == ignore_index, 0.0)
    if reduction == "none":
        return losses
    n = divisor_of(losses.view(-1), labels, reduction, ignore_index=ignore_index, num_items_in_batch=num_items_in_batch)
    return losses.sum() / n


def _terms(options: dict[str, float], labels: torch.Tensor | None) -> DivergenceTerms:
    beta = options["beta"]
    return DivergenceTerms(form_of(beta), beta, labels, options["ignore_index"])


def _losses(x: torch.Tensor, t: torch.Tensor, labels: torch.Tensor | None, options: dict, **gradient) -> torch.Tensor:
    """Return the losses (N,) of rows x and t; write the gradient times scale into dx."""
    losses = torch.empty((len(x), blocks_of(x.shape[1])), dtype=torch.float32, device=x.device)
    divergence_pass(x, t, _terms(options, labels), losses=losses, **gradient)
    return losses.sum(dim=1)


class _JSD(LossFunction):
    """The sum over rows divided by `denominator`; loss and gradient in one pass."""

    @staticmethod
    def forward(ctx, x, t, labels, denominator, options):
        scale = LossFunction.scale(ctx, denominator, x.dtype)
        dx = torch.empty(x.shape, dtype=x.dtype, device=x.device)
        losses = _losses(x, t, labels, options, dx=dx, scale=scale)
        LossFunction.keep(ctx, "jsd", [x], [dx])
        return losses.sum() / denominator


class _JSDRows(torch.autograd.Function):
    """One loss per row; the backward computes the gradient with the upstream gradient of each row."""

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
        divergence_pass(x, t, _terms(ctx.options, labels), dx=dx, scale=d_losses)
        return dx, None, None, None


def jsd(
    input: torch.Tensor,  # (..., V), the student's log-probabilities
    target: torch.Tensor,  # (..., V), the teacher's
    *,
    beta: float = 0.5,
    labels: torch.Tensor | None = None,  # (...)
    ignore_index: int = -100,
    reduction: Reduction = "mean",
) -> torch.Tensor:  # () or (...), float32
    """Generalised JSD: beta 0 is the forward KL divergence, 1 the reverse, 0.5 the symmetric JSD.

    Rows whose label is ignore_index count as nothing; labels have no other meaning here. The mean is over the rows that
    count, and 0 if none does. "none" returns one loss per row. The teacher is a constant.

    Raises ValueError on mismatched shapes, an unknown option, or a target that requires a gradient. A second backward
    through the same mean or sum raises RuntimeError where kernels run.
    """
    check_reduction("jsd", reduction)
    check_beta("jsd", beta)
    if input.shape != target.shape or input.dim() == 0:
        raise ValueError(
            f"jsd: input is {tuple(input.shape)} and target {tuple(target.shape)}: expected the same (..., V)"
        )
    if labels is not None and labels.shape != input.shape[:-1]:
        raise ValueError(f"jsd: labels are {tuple(labels.shape)}; expected {tuple(input.shape[:-1])} for this input")
    if torch.is_grad_enabled() and target.requires_grad:
        raise ValueError("jsd: target requires a gradient, but the teacher is a constant; pass target.detach()")
    options = {"beta": float(beta), "ignore_index": ignore_index}
    if input.numel() == 0 or not runs_triton(input):
        return jsd_reference(input, target, labels=labels, reduction=reduction, **options)
    x = as_rows(input)
    t = as_rows(target)
    flat = None if labels is None else labels.reshape(-1).contiguous()
    needs_grad = torch.is_grad_enabled() and input.requires_grad
    if reduction == "none":
        losses = _JSDRows.apply(x, t, flat, options) if needs_grad else _losses(x, t, flat, options)
        return losses.view(input.shape[:-1])
    n = divisor_of(x, flat, reduction, ignore_index=ignore_index)
    return _JSD.apply(x, t, flat, n, options) if needs_grad else _losses(x, t, flat, options).sum() / n


def check_beta(op: str, beta: float) -> None:
    """Raise ValueError if beta is not in [0, 1]."""
    if not 0.0 <= beta <= 1.0:
        raise ValueError(f"{op}: beta is {beta}; expected 0 (forward KL) to 1 (reverse KL)")


class JSDLoss(LossModule):
    """`jsd` with fixed options."""

    function = staticmethod(jsd)

    def forward(self, input: torch.Tensor, target: torch.Tensor, labels: torch.Tensor | None = None) -> torch.Tensor:
        return super().forward(input, target, labels=labels)
