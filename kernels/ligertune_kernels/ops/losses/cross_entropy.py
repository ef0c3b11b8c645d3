r"""Cross entropy of logits (N, V), with class weights, label smoothing, a soft cap and a z-loss.

kernels.py has the mathematics of both directions; linear_cross_entropy shares it. This file reduces the losses of rows
and passes on the gradient:

    sum     sum_i loss_i
    mean    sum_i loss_i / n, n the number of labels that are not ignored (with class weights the sum of their weights).
            If all are ignored, the mean is 0 with zero gradients; torch returns NaN. The z-loss is always divided by
            the number of labels that are not ignored, as in PaLM.

For sum and mean the gradient is computed together with the loss, while the row is in the cache: 2 NV elements are moved
instead of 3. It is stored in a separate buffer, or over the logits (inplace), until the backward multiplies it by the
upstream gradient. For reduction="none" the logits are kept and the backward runs the pass. Kernels compute in fp32.

The other losses and divergences are reduced by the same denominators, functions and modules, which stand here first.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Sequence
from typing import Literal

import torch
from torch import nn

from ligertune_kernels.autograd import no_double_backward
from ligertune_kernels.chips import launch_options
from ligertune_kernels.launcher import as_rows, chip_of, on_device, runs_triton, tl, triton
from ligertune_kernels.ops.losses.kernels import LossOptions, capped_logits, row_pass
from ligertune_kernels.ops.losses.tiles import FACTOR_BLOCK, FACTOR_PROGRAMS

Reduction = Literal["mean", "sum", "none"]

# float16 holds nothing below 6e-8: p/n of a large vocabulary and batch would vanish. Its gradients are not divided by n
# in the forward but multiplied by this, and by 1/(256 n) in the backward, where the upstream gradient contains
# GradScaler's 65536. 256 (p - 1) W overflows for no weight below 128.
HALF_SCALE = 256.0


def check_reduction(op: str, reduction: str) -> None:
    """Raise ValueError if the reduction is none of "mean", "sum" and "none"."""
    if reduction not in ("mean", "sum", "none"):
        raise ValueError(f"{op}: reduction is {reduction!r}; expected 'mean', 'sum' or 'none'")


def divisor_of(
    rows: torch.Tensor,  # (N, ...): gives N, the device and the dtype
    labels: torch.Tensor | None,
    reduction: Reduction,
    *,
    ignore_index: int = -100,
    class_weight: torch.Tensor | None = None,  # (V,)
    num_items_in_batch: int | torch.Tensor | None = None,
) -> torch.Tensor:
    """Return what the sum over rows is divided by, as a scalar on their device, at least fp32; never 0.

    A mean counts the labels that are not ignored, each with the weight of its class, or all rows without labels.
    """
    dtype = torch.promote_types(rows.dtype, torch.float32)
    if isinstance(num_items_in_batch, torch.Tensor):
        return num_items_in_batch.detach().to(rows.device, dtype, non_blocking=True).reshape(()).clamp(min=1)
    if num_items_in_batch is None and reduction == "mean" and labels is not None:
        kept = labels != ignore_index
        if class_weight is None:
            return kept.sum().clamp(min=1).to(dtype)
        n = (class_weight.to(dtype)[labels.long().clamp(0, len(class_weight) - 1)] * kept).sum()
        return torch.where(n == 0, torch.ones_like(n), n)
    n = num_items_in_batch if num_items_in_batch is not None else len(rows) if reduction == "mean" else 1
    return torch.full((), max(1, n), dtype=dtype, device=rows.device)


def weights_and_divisor(
    rows: torch.Tensor,  # (N, ...)
    labels: torch.Tensor,
    reduction: Reduction,
    *,
    ignore_index: int,
    class_weight: torch.Tensor | None,  # (V,)
    z_loss: float,
    num_items_in_batch: int | torch.Tensor | None = None,
) -> tuple[torch.Tensor | None, torch.Tensor]:
    """Return the class weights and the divisor of a cross entropy.

    A mean with class weights and a z-loss divides by the number of labels that are not ignored, as PaLM's z-loss does.
    The weights are scaled to a mean of 1 over these labels, so that the rest of the loss is torch's weighted mean.
    """
    options = {"ignore_index": ignore_index, "num_items_in_batch": num_items_in_batch}
    divisor = divisor_of(rows, labels, reduction, class_weight=class_weight, **options)
    if class_weight is None or not z_loss or reduction != "mean" or num_items_in_batch is not None:
        return class_weight, divisor
    tokens = divisor_of(rows, labels, reduction, **options)
    return class_weight.to(divisor.dtype) * (tokens / divisor), tokens


class LossFunction(torch.autograd.Function):
    """Base of the losses that compute their gradients in the forward, which calls `scale` and `keep`."""

    @staticmethod
    def scale(ctx, divisor: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
        """Return the factor of gradients in dtype in the forward. Its product with the backward's is 1/divisor.

        divisor is a scalar or (N,).
        """
        if dtype is not torch.float16:
            ctx.factor = None
            return 1.0 / divisor
        least = divisor.abs().min()
        ctx.factor = 1.0 / (HALF_SCALE * least)
        return HALF_SCALE * (least / divisor)

    @staticmethod
    def keep(ctx, op: str, inputs: Sequence[torch.Tensor | None], gradients: Sequence[torch.Tensor | None]) -> None:
        """Save the gradients of the first inputs of forward for the backward."""
        ctx.save_for_backward(*gradients)
        ctx.dtypes = [None if t is None else t.dtype for t in inputs]
        ctx.op = op
        ctx.used = False

    @staticmethod
    @no_double_backward
    def backward(ctx, d_loss, *_):
        """Multiply by the upstream gradient. Kernels do so in place, so a second backward raises RuntimeError."""
        if ctx.used:
            raise RuntimeError(
                f"{ctx.op}: its gradient buffer was scaled in place and handed over by an earlier backward; "
                "run the forward again instead of backward(retain_graph=True)"
            )
        saved = ctx.saved_tensors
        ctx.used = any(t is not None and runs_triton(t) for t in saved)
        factor = d_loss if ctx.factor is None else d_loss * ctx.factor
        gradients = [
            None if t is None else _scaled(t, factor).to(dtype) for t, dtype in zip(saved, ctx.dtypes, strict=True)
        ]
        return *gradients, *[None] * (len(ctx.needs_input_grad) - len(gradients))


@triton.jit(do_not_specialize=["n"])
def _scale_kernel(x_ptr, factor_ptr, n, BLOCK: tl.constexpr):
    factor = tl.load(factor_ptr).to(tl.float32)
    if factor != 1.0:
        for start in range(tl.program_id(0).to(tl.int64) * BLOCK, n, tl.num_programs(0).to(tl.int64) * BLOCK):
            offs = start + tl.arange(0, BLOCK)
            x = tl.load(x_ptr + offs, mask=offs < n, other=0.0).to(tl.float32)
            tl.store(x_ptr + offs, (x * factor).to(x_ptr.dtype.element_ty), mask=offs < n)


def _scaled(t: torch.Tensor, factor: torch.Tensor) -> torch.Tensor:
    """Return t times a scalar tensor, or its rows times (N,): in place where kernels run, else a new tensor."""
    if factor.dim():
        factor = factor.view(-1, *[1] * (t.dim() - 1))
        return t.mul_(factor) if runs_triton(t) else (t * factor).to(t.dtype)
    if not runs_triton(t):
        return t * factor.to(t.dtype)
    if torch.compiler.is_compiling():
        # inductor copies what a kernel changes in place if the forward's graph made it, and torch 2.11 fails to copy
        # a tensor whose size varies: https://github.com/pytorch/pytorch/issues/181735
        return (t.float() * factor).to(t.dtype)
    chip = chip_of(t.device)
    programs = min(triton.cdiv(t.numel(), FACTOR_BLOCK), FACTOR_PROGRAMS * chip.processors)
    with on_device(t):
        # The kernel reads the factor, so the host does not wait for it.
        _scale_kernel[(programs,)](t, factor, t.numel(), BLOCK=FACTOR_BLOCK, **launch_options(FACTOR_BLOCK, chip))
    return t


class LossModule(nn.Module):
    """A loss function with fixed options; its tensors are arguments of forward."""

    function: Callable[..., torch.Tensor]

    def __init__(self, **options: float | str | bool | None) -> None:
        """options: keyword arguments of the function. An unknown one raises TypeError."""
        super().__init__()
        inspect.signature(self.function).bind_partial(**options)
        self.options = options

    def forward(self, *tensors: torch.Tensor, **more: int | torch.Tensor | None) -> torch.Tensor:
        return self.function(*tensors, **more, **self.options)

    def extra_repr(self) -> str:
        return ", ".join(f"{name}={value}" for name, value in self.options.items())


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
