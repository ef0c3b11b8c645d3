r"""Cross entropy of logits (N, V), with class weights, label smoothing, a soft cap and a z-loss.

_row_pass.py has the mathematics of both directions; linear_cross_entropy shares it. This file reduces the losses of
rows and passes on the gradient:

    sum     sum_i loss_i
    mean    sum_i loss_i / n, n the number of labels that are not ignored (with class weights the sum of their weights).
            If all are ignored, the mean is 0 with zero gradients; torch returns NaN. The z-loss is always divided by
            the number of labels that are not ignored, as in PaLM.

For sum and mean the gradient is computed together with the loss, while the row is in the cache: 2 NV elements are moved
instead of 3. It is stored in a separate buffer, or over the logits (inplace), until the backward multiplies it by the
upstream gradient. For reduction="none" the logits are kept and the backward runs the pass. Kernels compute in fp32.
"""

from __future__ import annotations

import torch

from ligertune_kernels.autograd import no_double_backward
from ligertune_kernels.launcher import as_rows, runs_triton
from ligertune_kernels.ops.losses._reduction import (
    LossFunction,
    LossModule,
    Reduction,
    check_reduction,
    weights_and_divisor,
)
from ligertune_kernels.ops.losses._row_pass import LossOptions, capped_logits, row_pass


def cross_entropy_reference(
    logits: torch.Tensor,  # (..., V)
    labels: torch.Tensor,  # (...)
    *,
    weight: torch.Tensor | None = None,  # (V,)
    reduction: Reduction = "mean",
    **options: int | float | None,
) -> torch.Tensor:
    """Compute `cross_entropy` in plain torch, differentiated by autograd; options are the fields of LossOptions."""
    terms = LossOptions(**options)
    weight, divisor = weights_and_divisor(
        logits.reshape(-1, logits.shape[-1]), labels, reduction,
        ignore_index=terms.ignore_index, class_weight=weight, z_loss=terms.z_loss,
    )  # fmt: skip
    z, _ = capped_logits(logits.reshape(-1, logits.shape[-1]), terms)
    flat = labels.reshape(-1, 1).long()
    ignored = flat == terms.ignore_index
    is_class = (flat >= 0) & (flat < z.shape[1])
    index = flat.clamp(0, z.shape[1] - 1)
    class_weight = z.new_ones(z.shape[1]) if weight is None else weight.to(z.dtype)
    log_probs = z.log_softmax(dim=-1)
    losses = -(1.0 - terms.label_smoothing) * class_weight[index] * log_probs.gather(1, index)
    if terms.label_smoothing:
        losses = losses - terms.label_smoothing * (class_weight * log_probs).mean(dim=-1, keepdim=True)
    if terms.z_loss:
        losses = losses + terms.z_loss * z.logsumexp(dim=-1, keepdim=True).square()
    losses = losses * torch.where(is_class | ignored, 1.0, torch.nan)  # NaN in the gradient too
    losses = losses.masked_fill(ignored, 0.0).squeeze(1)
    if reduction == "none":
        return losses.view(labels.shape)
    return losses.sum() / divisor


class _CrossEntropy(LossFunction):
    """Loss and gradient of rows (N, V) in one pass; the sum over rows divided by `denominator`."""

    @staticmethod
    def forward(ctx, rows, labels, weight, denominator, options, inplace):
        gradient = _gradient_buffer(rows, inplace)
        scale = LossFunction.scale(ctx, denominator, rows.dtype)
        losses = row_pass(rows, labels, options, weight=weight, gradient=gradient, scale=scale)
        if inplace:
            torch.autograd.graph.increment_version(rows)
        LossFunction.keep(ctx, "cross_entropy", [rows], [gradient])
        ctx.inplace = inplace
        return losses.sum() / denominator

    @staticmethod
    def backward(ctx, d_loss):
        gradients = LossFunction.backward(ctx, d_loss)
        if ctx.inplace:
            torch.autograd.graph.increment_version(gradients[0])  # the caller's logits have been scaled
        return gradients


class _CrossEntropyRows(torch.autograd.Function):
    """One loss per row; the backward computes the gradient with the upstream gradient of each row."""

    @staticmethod
    def forward(ctx, rows, labels, weight, options, inplace):
        ctx.save_for_backward(rows, labels, weight)
        ctx.options = options
        ctx.inplace = inplace
        return row_pass(rows, labels, options, weight=weight)

    @staticmethod
    @no_double_backward
    def backward(ctx, d_losses):
        rows, labels, weight = ctx.saved_tensors
        gradient = _gradient_buffer(rows, ctx.inplace)
        row_pass(rows, labels, ctx.options, weight=weight, gradient=gradient, scale=d_losses.contiguous())
        if ctx.inplace:
            torch.autograd.graph.increment_version(rows)
        return gradient, None, None, None, None


def _gradient_buffer(rows: torch.Tensor, inplace: bool) -> torch.Tensor:
    return rows.detach() if inplace else torch.empty(rows.shape, dtype=rows.dtype, device=rows.device)


def cross_entropy(
    logits: torch.Tensor,  # (..., V)
    labels: torch.Tensor,  # (...)
    *,
    weight: torch.Tensor | None = None,  # (V,)
    ignore_index: int = -100,
    reduction: Reduction = "mean",
    label_smoothing: float = 0.0,
    softcap: float | None = None,
    z_loss: float = 0.0,
    inplace: bool = False,
) -> torch.Tensor:  # () or (...), float32
    """Cross entropy as torch.nn.functional.cross_entropy, with the classes last.

    softcap caps the logits first, c·tanh(z/c). z_loss adds z_loss·lse² to each row. The mean over no label is 0. A
    label that is neither a class nor ignore_index makes the loss and gradient of its row NaN.

    inplace allows writing the gradient over the logits, which saves their size. The caller must not read them
    afterwards; autograd raises if an earlier op would. For "mean" and "sum" a second backward through the same loss
    raises RuntimeError. Raises ValueError on mismatched shapes or an unknown reduction.
    """
    check_reduction("cross_entropy", reduction)
    if labels.shape != logits.shape[:-1]:
        raise ValueError(
            f"cross_entropy: labels are {tuple(labels.shape)}; expected {tuple(logits.shape[:-1])} for these logits"
        )
    options = LossOptions(ignore_index, label_smoothing, softcap, z_loss=z_loss)
    if logits.numel() == 0 or not runs_triton(logits):
        return cross_entropy_reference(
            logits, labels, weight=weight, ignore_index=ignore_index, reduction=reduction,
            label_smoothing=label_smoothing, softcap=softcap, z_loss=z_loss,
        )  # fmt: skip
    needs_grad = torch.is_grad_enabled() and logits.requires_grad
    rows = as_rows(logits)
    flat = labels.reshape(-1).contiguous()
    if reduction == "none":
        if needs_grad:
            return _CrossEntropyRows.apply(rows, flat, weight, options, inplace).view(labels.shape)
        return row_pass(rows, flat, options, weight=weight).view(labels.shape)
    weight, denominator = weights_and_divisor(
        rows, flat, reduction, ignore_index=ignore_index, class_weight=weight, z_loss=z_loss
    )
    if needs_grad:
        return _CrossEntropy.apply(rows, flat, weight, denominator, options, inplace)
    return row_pass(rows, flat, options, weight=weight).sum() / denominator


class CrossEntropyLoss(LossModule):
    """`cross_entropy` with fixed options and class weights."""

    function = staticmethod(cross_entropy)

    def __init__(self, weight: torch.Tensor | None = None, **options: float | str | bool | None) -> None:
        super().__init__(**options)
        self.register_buffer("weight", weight)

    def forward(self, logits: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
        return super().forward(logits, labels, weight=self.weight)
