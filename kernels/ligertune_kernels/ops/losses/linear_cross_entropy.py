r"""Cross entropy of a linear layer's output, hidden X (N, E) and weight W (V, E), without ever holding logits (N, V).

    Z = X Wᵀ + b        loss_i and G = dloss/dZ as in row_pass.py        dX = G W        dW = Gᵀ X        db = sum_i G_i

The rows are taken in chunks (linear_chunks.py, as schedule.py says): the logits of a chunk are multiplied into one
reused buffer, one pass over its rows turns them into G in place and yields the losses, and G is multiplied into the
gradients. So these exist when the forward returns, and a gradient nobody needs costs nothing: 6 NEV operations, 4 NEV
with a frozen weight. Rows without a label need not be computed (labelled_rows.py).

Scale. The mean's 1/n is a scalar on the device and multiplies G in the pass, in fp32; nothing waits for the host. In
float16, p/n would vanish below 6e-8 and dW, undivided, could pass 65504. There the pass leaves 1/n out (and multiplies
by 256), dW is summed in fp32, and the backward applies upstream/(256 n) in fp32 at the end, where GradScaler's 65536
is already part of upstream. In the other dtypes the backward multiplies by upstream if that is not 1.

reduction="none" has one upstream value a row, which dW cannot be scaled by afterwards: its forward computes losses
only and its backward makes the chunks again with these values (8 NEV).
"""

from __future__ import annotations

import torch
from torch import nn

from ligertune_kernels.autocast import without_autocast
from ligertune_kernels.autograd import no_double_backward
from ligertune_kernels.launcher import runs_triton
from ligertune_kernels.ops.losses._linear_chunks import (  # noqa: F401  linear_jsd takes three of these from here
    Head,
    Needs,
    Targets,
    _add_product,
    _logits,
    run_chunks,
)
from ligertune_kernels.ops.losses._linear_inputs import check_shapes, chosen_schedule, rows_to_take, same_dtype
from ligertune_kernels.ops.losses._row_pass import Terms, scaled, scales
from ligertune_kernels.ops.losses._schedule import CHUNK_BYTES, Schedule, chunks_of  # noqa: F401  and this
from ligertune_kernels.ops.losses.cross_entropy import (
    SPENT,
    Reduction,
    check_reduction,
    cross_entropy_reference,
    mean_denominator,
)
from ligertune_kernels.ops.losses.labelled_rows import spread


def linear_cross_entropy_reference(
    hidden: torch.Tensor,
    weight: torch.Tensor,
    labels: torch.Tensor,
    bias: torch.Tensor | None = None,
    *,
    lora_a: torch.Tensor | None = None,
    lora_b: torch.Tensor | None = None,
    lora_scale: float = 1.0,
    class_weight: torch.Tensor | None = None,
    softcap: float | None = None,
    logit_scale: float = 1.0,
    z_loss: float = 0.0,
    label_smoothing: float = 0.0,
    ignore_index: int = -100,
    reduction: Reduction = "mean",
    num_items_in_batch: int | torch.Tensor | None = None,
) -> torch.Tensor:
    """The same in plain torch, with all logits, differentiated by autograd."""
    logits = nn.functional.linear(hidden, weight, bias)
    if lora_a is not None:
        logits = logits + lora_scale * nn.functional.linear(nn.functional.linear(hidden, lora_a), lora_b)
    wide = torch.promote_types(logits.dtype, torch.float32)
    loss = cross_entropy_reference(
        logits.to(wide) * logit_scale, labels, ignore_index=ignore_index, label_smoothing=label_smoothing,
        reduction=reduction if num_items_in_batch is None else "sum", softcap=softcap, z_loss=z_loss,
        weight=class_weight,
    )  # fmt: skip
    if num_items_in_batch is None:
        return loss
    return loss / _denominator(labels, class_weight, ignore_index, "mean", num_items_in_batch, wide)


class _LinearCrossEntropy(torch.autograd.Function):
    """The rows' losses, each over its denominator (one or N), added up; and the losses themselves, without gradient.

    The gradients are computed in the forward. The backward multiplies them by the upstream gradient, in place where
    kernels run: they are nobody else's, and a second backward is refused.
    """

    @staticmethod
    def forward(
        ctx, rows, weight, bias, lora_a, lora_b, labels, class_weight, denominator, lora_scale, terms, schedule
    ):
        scale, ctx.afterwards = scales(denominator, rows.dtype)
        parameters = rows, weight, bias, lora_a, lora_b
        done = run_chunks(
            rows, Head(weight, bias, lora_a, lora_b, lora_scale), Targets(labels, terms, class_weight, scale),
            Needs(*ctx.needs_input_grad[:5]), schedule,
        )  # fmt: skip
        ctx.save_for_backward(done.hidden, done.weight, done.bias, done.lora_a, done.lora_b)
        ctx.dtypes = [None if t is None else t.dtype for t in parameters]
        ctx.spent = False
        ctx.mark_non_differentiable(done.losses)
        return (done.losses / denominator).sum(), done.losses

    @staticmethod
    @no_double_backward
    def backward(ctx, d_loss, _):
        if ctx.spent:
            raise RuntimeError(SPENT.format(op="linear_cross_entropy"))
        saved = ctx.saved_tensors
        ctx.spent = any(t is not None and runs_triton(t) for t in saved)
        factor = d_loss if ctx.afterwards is None else d_loss * ctx.afterwards
        gradients = (
            None if t is None else scaled(t, factor).to(dtype) for t, dtype in zip(saved, ctx.dtypes, strict=True)
        )
        return *gradients, None, None, None, None, None, None


class _LinearCrossEntropyRows(torch.autograd.Function):
    """Every row's own loss; the backward makes the chunks again, scaled by the upstream gradient of each row."""

    @staticmethod
    def forward(ctx, rows, weight, bias, lora_a, lora_b, labels, class_weight, lora_scale, terms, schedule):
        ctx.save_for_backward(rows, weight, bias, lora_a, lora_b, labels, class_weight)
        ctx.rest = lora_scale, terms, schedule
        head = Head(weight, bias, lora_a, lora_b, lora_scale)
        return run_chunks(rows, head, Targets(labels, terms, class_weight), Needs(), schedule).losses

    @staticmethod
    @no_double_backward
    def backward(ctx, d_losses):
        *parameters, labels, class_weight = ctx.saved_tensors
        rows, (lora_scale, terms, schedule) = parameters[0], ctx.rest
        targets = Targets(labels, terms, class_weight, d_losses.contiguous())
        with without_autocast(rows.device):
            needs = Needs(*ctx.needs_input_grad[:5])
            done = run_chunks(rows, Head(*parameters[1:], lora_scale), targets, needs, schedule)
        found = done.hidden, done.weight, done.bias, done.lora_a, done.lora_b
        gradients = (None if g is None else g.to(t.dtype) for g, t in zip(found, parameters, strict=True))
        return *gradients, None, None, None, None, None


def linear_cross_entropy(
    hidden: torch.Tensor,
    weight: torch.Tensor,
    labels: torch.Tensor,
    bias: torch.Tensor | None = None,
    *,
    lora_a: torch.Tensor | None = None,
    lora_b: torch.Tensor | None = None,
    lora_scale: float = 1.0,
    class_weight: torch.Tensor | None = None,
    softcap: float | None = None,
    logit_scale: float = 1.0,
    z_loss: float = 0.0,
    label_smoothing: float = 0.0,
    ignore_index: int = -100,
    reduction: Reduction = "mean",
    num_items_in_batch: int | torch.Tensor | None = None,
    labelled_rows: torch.Tensor | None = None,
    chunk_bytes: int = CHUNK_BYTES,
    schedule: Schedule | None = None,
) -> torch.Tensor:
    """Cross entropy of hidden (..., E) times weight (V, E), plus bias (V,), against labels (...); in float32.

    Labels are aligned with hidden: already shifted. The logits are logit_scale times the product, then bounded by
    softcap, c·tanh(z/c); z_loss adds z_loss·lse² to each row. lora_a (R, E) and lora_b (V, R) add
    lora_scale·hidden·Aᵀ·Bᵀ to the product. class_weight (V,) weighs classes as torch's cross entropy does. With
    num_items_in_batch, an int or a scalar tensor, the sum is divided by that instead of by the number of labels that
    are not ignored. Where all are ignored the loss is 0 with zero gradients. A label that is neither a class nor
    ignore_index makes the loss and its gradients NaN.

    labelled_rows, from the function of that name, are the only rows computed; all others count as ignored. Labels on
    the CPU are as good: their rows are then found here. chunk_bytes bounds the buffer for logits, and `schedule_of`
    says what follows from that; a schedule of one's own goes before. Under autocast hidden, weight, bias and the
    low-rank term are cast to its dtype, as a linear layer's are. A second backward through the same "mean" or "sum" is
    refused where kernels run.
    """
    check_reduction("linear_cross_entropy", reduction)
    if reduction == "none" and num_items_in_batch is not None:
        raise ValueError("linear_cross_entropy: num_items_in_batch divides a sum; reduction='none' has none")
    check_shapes("linear_cross_entropy", hidden, weight, labels, bias, lora_a, lora_b)
    head = same_dtype("linear_cross_entropy", hidden, weight, bias, lora_a, lora_b)
    rows, flat, index = rows_to_take(head[0], labels, labelled_rows, ignore_index)
    terms = Terms(ignore_index, label_smoothing, softcap, logit_scale, z_loss)
    wide = torch.promote_types(rows.dtype, torch.float32)
    if rows.numel() == 0:
        loss = sum(t[:0].sum(dtype=wide) for t in (rows, *head[1:]) if t is not None)  # zero, with zero gradients
        return loss if reduction != "none" else loss + torch.zeros(labels.shape, dtype=wide, device=rows.device)
    if schedule is None:
        schedule = chosen_schedule(rows, weight, chunk_bytes)
    judged = flat, class_weight
    with without_autocast(rows.device):
        if reduction == "none":
            losses = _losses(rows, *head[1:], *judged, lora_scale, terms, schedule)
            return (losses if index is None else spread(losses, index, labels.numel())).view(labels.shape)
        denominator = _denominator(flat, class_weight, ignore_index, reduction, num_items_in_batch, wide)
        return summed_losses(rows, *head[1:], *judged, denominator, lora_scale, terms, schedule)[0]


def summed_losses(
    rows: torch.Tensor,
    weight: torch.Tensor,
    bias: torch.Tensor | None,
    lora_a: torch.Tensor | None,
    lora_b: torch.Tensor | None,
    labels: torch.Tensor,
    class_weight: torch.Tensor | None,
    denominator: torch.Tensor,
    lora_scale: float,
    terms: Terms,
    schedule: Schedule,
) -> tuple[torch.Tensor, torch.Tensor]:
    """The losses of rows (N, E), each over its denominator (one or N), added up; and, without gradient, the losses."""
    parameters = rows, weight, bias, lora_a, lora_b
    if _needs_grad(parameters):
        return _LinearCrossEntropy.apply(*parameters, labels, class_weight, denominator, lora_scale, terms, schedule)
    losses = _losses(*parameters, labels, class_weight, lora_scale, terms, schedule)
    return (losses / denominator).sum(), losses


def _losses(
    rows: torch.Tensor,
    weight: torch.Tensor,
    bias: torch.Tensor | None,
    lora_a: torch.Tensor | None,
    lora_b: torch.Tensor | None,
    labels: torch.Tensor,
    class_weight: torch.Tensor | None,
    lora_scale: float,
    terms: Terms,
    schedule: Schedule,
) -> torch.Tensor:
    """The losses (N,) of rows (N, E), each with its own gradient."""
    parameters = rows, weight, bias, lora_a, lora_b
    if _needs_grad(parameters):
        return _LinearCrossEntropyRows.apply(*parameters, labels, class_weight, lora_scale, terms, schedule)
    head = Head(weight, bias, lora_a, lora_b, lora_scale)
    return run_chunks(rows, head, Targets(labels, terms, class_weight), Needs(), schedule).losses


def _needs_grad(parameters: tuple[torch.Tensor | None, ...]) -> bool:
    return torch.is_grad_enabled() and any(t is not None and t.requires_grad for t in parameters)


def _denominator(
    labels: torch.Tensor,
    class_weight: torch.Tensor | None,
    ignore_index: int,
    reduction: Reduction,
    num_items_in_batch: int | torch.Tensor | None,
    dtype: torch.dtype,
) -> torch.Tensor:
    """What the sum over rows is divided by, as a scalar on the device; never 0."""
    if isinstance(num_items_in_batch, torch.Tensor):
        return num_items_in_batch.detach().to(labels.device, dtype, non_blocking=True).reshape(()).clamp(min=1)
    if num_items_in_batch is not None or reduction == "sum":
        n = 1 if num_items_in_batch is None else max(1, num_items_in_batch)
        return torch.full((), n, dtype=dtype, device=labels.device)
    return mean_denominator(labels, class_weight, ignore_index, dtype)


class LinearCrossEntropyLoss(nn.Module):
    """`linear_cross_entropy` with its options fixed; the weight is the caller's, as it may be tied."""

    def __init__(
        self,
        *,
        softcap: float | None = None,
        logit_scale: float = 1.0,
        z_loss: float = 0.0,
        label_smoothing: float = 0.0,
        ignore_index: int = -100,
        reduction: Reduction = "mean",
        chunk_bytes: int = CHUNK_BYTES,
    ) -> None:
        super().__init__()
        self.options = {
            "softcap": softcap,
            "logit_scale": logit_scale,
            "z_loss": z_loss,
            "label_smoothing": label_smoothing,
            "ignore_index": ignore_index,
            "reduction": reduction,
            "chunk_bytes": chunk_bytes,
        }

    def forward(
        self,
        hidden: torch.Tensor,
        weight: torch.Tensor,
        labels: torch.Tensor,
        bias: torch.Tensor | None = None,
        *,
        num_items_in_batch: int | torch.Tensor | None = None,
        labelled_rows: torch.Tensor | None = None,
    ) -> torch.Tensor:
        return linear_cross_entropy(
            hidden, weight, labels, bias, num_items_in_batch=num_items_in_batch, labelled_rows=labelled_rows,
            **self.options,
        )  # fmt: skip

    def extra_repr(self) -> str:
        return ", ".join(f"{name}={value}" for name, value in self.options.items())
