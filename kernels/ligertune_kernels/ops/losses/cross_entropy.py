r"""Cross entropy of logits (N, V), with class weights, label smoothing, a soft cap and a z-loss.

The mathematics, both directions, and the kernel stand in row_pass.py, which linear_cross_entropy shares. This file
reduces the rows' losses and carries the gradient:

    sum     sum_i loss_i
    mean    sum_i loss_i / n, n the number of labels that are not ignored (with class weights the sum of theirs).
            Where all are ignored the mean is 0 with zero gradients, where torch gives NaN.

For sum and mean the gradient is computed together with the loss, while the row is in the cache: 2 NV elements move
instead of 3. It waits in a buffer of its own, or over the logits (inplace), for the upstream gradient, by which the
backward multiplies it if that is not 1. For reduction="none" the logits wait instead and the backward makes the pass.
"""

from __future__ import annotations

from typing import Literal

import torch
from torch import nn

from ligertune_kernels.autograd import no_double_backward
from ligertune_kernels.launcher import as_rows, runs_triton
from ligertune_kernels.ops.losses._row_pass import Terms, row_pass, scaled, scales

Reduction = Literal["mean", "sum", "none"]

SPENT = (
    "{op}: its gradient buffer was scaled in place and handed over by an earlier backward; "
    "run the forward again instead of backward(retain_graph=True)"
)


def cross_entropy_reference(
    logits: torch.Tensor,
    labels: torch.Tensor,
    *,
    weight: torch.Tensor | None = None,
    ignore_index: int = -100,
    reduction: Reduction = "mean",
    label_smoothing: float = 0.0,
    softcap: float | None = None,
    z_loss: float = 0.0,
) -> torch.Tensor:
    """The same in plain torch, differentiated by autograd."""
    wide = torch.promote_types(logits.dtype, torch.float32)
    z = logits.reshape(-1, logits.shape[-1]).to(wide)
    if softcap is not None:
        z = softcap * torch.tanh(z / softcap)
    flat = labels.reshape(-1, 1).long()
    ignored, is_class = flat == ignore_index, (flat >= 0) & (flat < z.shape[1])
    index = flat.clamp(0, z.shape[1] - 1)
    class_weight = z.new_ones(z.shape[1]) if weight is None else weight.to(wide)
    log_probs = z.log_softmax(dim=-1)
    losses = -(1.0 - label_smoothing) * class_weight[index] * log_probs.gather(1, index)
    if label_smoothing:
        losses = losses - label_smoothing * (class_weight * log_probs).mean(dim=-1, keepdim=True)
    if z_loss:
        losses = losses + z_loss * z.logsumexp(dim=-1, keepdim=True).square()
    losses = losses * torch.where(is_class | ignored, 1.0, torch.nan)  # NaN in the gradient too
    losses = losses.masked_fill(ignored, 0.0).squeeze(1)
    if reduction == "none":
        return losses.view(labels.shape)
    if reduction == "sum":
        return losses.sum()
    return losses.sum() / mean_denominator(labels, weight, ignore_index, wide)


def mean_denominator(
    labels: torch.Tensor, weight: torch.Tensor | None, ignore_index: int, dtype: torch.dtype
) -> torch.Tensor:
    """What a mean divides by, as a scalar on the device; 1 where all labels are ignored."""
    kept = labels != ignore_index
    if weight is None:
        return kept.sum().clamp(min=1).to(dtype)
    n = (weight.to(dtype)[labels.long().clamp(0, weight.shape[0] - 1)] * kept).sum()
    return torch.where(n == 0, torch.ones_like(n), n)


class _CrossEntropy(torch.autograd.Function):
    """Loss and gradient of rows (N, V) in one pass; the sum over rows divided by `denominator`."""

    @staticmethod
    def forward(ctx, rows, labels, weight, denominator, terms, inplace):
        gradient = _gradient_like(rows, inplace)
        scale, ctx.afterwards = scales(denominator, rows.dtype)
        losses = row_pass(rows, labels, terms, weight=weight, gradient=gradient, scale=scale)
        if inplace:
            torch.autograd.graph.increment_version(rows)
        ctx.save_for_backward(gradient)
        ctx.inplace, ctx.spent = inplace, False
        return losses.sum() / denominator

    @staticmethod
    @no_double_backward
    def backward(ctx, d_loss):
        (gradient,) = ctx.saved_tensors
        if ctx.spent:
            raise RuntimeError(SPENT.format(op="cross_entropy"))
        ctx.spent = True
        if ctx.inplace:
            torch.autograd.graph.increment_version(gradient)  # it is the caller's logits that are scaled
        factor = d_loss if ctx.afterwards is None else d_loss * ctx.afterwards
        return scaled(gradient, factor), None, None, None, None, None


class _CrossEntropyRows(torch.autograd.Function):
    """Every row's own loss; the pass for the gradient waits until the upstream gradient is there."""

    @staticmethod
    def forward(ctx, rows, labels, weight, terms, inplace):
        ctx.save_for_backward(rows, labels, weight)
        ctx.terms, ctx.inplace = terms, inplace
        return row_pass(rows, labels, terms, weight=weight)

    @staticmethod
    @no_double_backward
    def backward(ctx, d_losses):
        rows, labels, weight = ctx.saved_tensors
        gradient = _gradient_like(rows, ctx.inplace)
        row_pass(rows, labels, ctx.terms, weight=weight, gradient=gradient, scale=d_losses.contiguous())
        if ctx.inplace:
            torch.autograd.graph.increment_version(rows)
        return gradient, None, None, None, None


def _gradient_like(rows: torch.Tensor, inplace: bool) -> torch.Tensor:
    return rows.detach() if inplace else torch.empty(rows.shape, dtype=rows.dtype, device=rows.device)


def cross_entropy(
    logits: torch.Tensor,
    labels: torch.Tensor,
    *,
    weight: torch.Tensor | None = None,
    ignore_index: int = -100,
    reduction: Reduction = "mean",
    label_smoothing: float = 0.0,
    softcap: float | None = None,
    z_loss: float = 0.0,
    inplace: bool = False,
) -> torch.Tensor:
    """Cross entropy of logits (..., V) and labels (...), as torch's; the loss is float32 whatever the logits are.

    softcap bounds the logits first, c·tanh(z/c); z_loss adds z_loss·lse² to each row. The mean over no label is 0. A
    label that is neither a class nor ignore_index makes its row's loss and gradient NaN.

    inplace allows the gradient to be written over the logits, which saves their size once more. The caller must not
    read them again; autograd notices if an earlier op would. For "mean" and "sum" a second backward through the same
    loss is refused.
    """
    check_reduction("cross_entropy", reduction)
    if labels.shape != logits.shape[:-1]:
        raise ValueError(
            f"cross_entropy: labels are {tuple(labels.shape)}; expected {tuple(logits.shape[:-1])} for these logits"
        )
    terms = Terms(ignore_index, label_smoothing, softcap, z_loss=z_loss)
    if logits.numel() == 0 or not runs_triton(logits):
        return cross_entropy_reference(
            logits, labels, weight=weight, ignore_index=ignore_index, reduction=reduction,
            label_smoothing=label_smoothing, softcap=softcap, z_loss=z_loss,
        )  # fmt: skip
    needs_grad = torch.is_grad_enabled() and logits.requires_grad
    rows, flat = as_rows(logits), labels.reshape(-1).contiguous()
    if reduction == "none":
        if needs_grad:
            return _CrossEntropyRows.apply(rows, flat, weight, terms, inplace).view(labels.shape)
        return row_pass(rows, flat, terms, weight=weight).view(labels.shape)
    denominator = (
        mean_denominator(flat, weight, ignore_index, torch.float32)
        if reduction == "mean"
        else torch.ones((), dtype=torch.float32, device=logits.device)
    )
    if needs_grad:
        return _CrossEntropy.apply(rows, flat, weight, denominator, terms, inplace)
    return row_pass(rows, flat, terms, weight=weight).sum() / denominator


def check_reduction(op: str, reduction: str) -> None:
    if reduction not in ("mean", "sum", "none"):
        raise ValueError(f"{op}: reduction is {reduction!r}; expected 'mean', 'sum' or 'none'")


class CrossEntropyLoss(nn.Module):
    """`cross_entropy` with its options fixed."""

    def __init__(
        self,
        weight: torch.Tensor | None = None,
        *,
        ignore_index: int = -100,
        reduction: Reduction = "mean",
        label_smoothing: float = 0.0,
        softcap: float | None = None,
        z_loss: float = 0.0,
        inplace: bool = False,
    ) -> None:
        super().__init__()
        self.register_buffer("weight", weight)
        self.options = {
            "ignore_index": ignore_index,
            "reduction": reduction,
            "label_smoothing": label_smoothing,
            "softcap": softcap,
            "z_loss": z_loss,
            "inplace": inplace,
        }

    def forward(self, logits: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
        return cross_entropy(logits, labels, weight=self.weight, **self.options)

    def extra_repr(self) -> str:
        return ", ".join(f"{name}={value}" for name, value in self.options.items())
