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
from torch.autograd.function import once_differentiable

from ligertune_kernels.launch import runs_triton
from ligertune_kernels.ops.cross_entropy import (
    SPENT,
    Reduction,
    check_reduction,
    cross_entropy_reference,
    mean_denominator,
)
from ligertune_kernels.ops.labelled_rows import labelled_rows, spread, take_rows
from ligertune_kernels.ops.linear_chunks import (  # noqa: F401  linear_jsd takes them from here
    Head,
    Needs,
    Targets,
    _add_product,
    _autocast_dtype,
    _logits,
    _without_autocast,
    run_chunks,
)
from ligertune_kernels.ops.row_pass import Terms, scaled, scales
from ligertune_kernels.ops.schedule import (
    CHUNK_BYTES,
    Schedule,
    chunks_of,  # noqa: F401  likewise
    free_bytes,
    schedule_of,
)

SLOT_ROWS_TORCH = 256  # the torch row pass makes several fp32 copies of a slot
MUCH_MEMORY = 1 << 28  # asking what is free takes the host some 30 µs


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
    @once_differentiable
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
    @once_differentiable
    def backward(ctx, d_losses):
        *parameters, labels, class_weight = ctx.saved_tensors
        rows, (lora_scale, terms, schedule) = parameters[0], ctx.rest
        targets = Targets(labels, terms, class_weight, d_losses.contiguous())
        with _without_autocast(rows.device):
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
    _check(hidden, weight, labels, bias, lora_a, lora_b)
    head = _same_dtype(hidden, weight, bias, lora_a, lora_b)
    rows, flat, index = rows_to_take(head[0], labels, labelled_rows, ignore_index)
    terms = Terms(ignore_index, label_smoothing, softcap, logit_scale, z_loss)
    wide = torch.promote_types(rows.dtype, torch.float32)
    needs_grad = torch.is_grad_enabled() and any(t is not None and t.requires_grad for t in head)
    if rows.numel() == 0:
        loss = sum(t[:0].sum(dtype=wide) for t in (rows, *head[1:]) if t is not None)  # zero, with zero gradients
        return loss if reduction != "none" else loss + torch.zeros(labels.shape, dtype=wide, device=rows.device)
    if schedule is None:
        schedule = chosen_schedule(rows, weight, chunk_bytes)
    with _without_autocast(rows.device):
        if reduction == "none":
            if needs_grad:
                losses = _LinearCrossEntropyRows.apply(
                    rows, *head[1:], flat, class_weight, lora_scale, terms, schedule
                )  # fmt: skip
            else:
                losses = run_chunks(
                    rows, Head(*head[1:], lora_scale), Targets(flat, terms, class_weight), Needs(), schedule
                ).losses
            return (losses if index is None else spread(losses, index, labels.numel())).view(labels.shape)
        denominator = _denominator(flat, class_weight, ignore_index, reduction, num_items_in_batch, wide)
        if needs_grad:
            return _LinearCrossEntropy.apply(
                rows, *head[1:], flat, class_weight, denominator, lora_scale, terms, schedule
            )[0]
        done = run_chunks(rows, Head(*head[1:], lora_scale), Targets(flat, terms, class_weight), Needs(), schedule)
        return (done.losses / denominator).sum()


def rows_to_take(
    hidden: torch.Tensor, labels: torch.Tensor, index: torch.Tensor | None, ignore_index: int
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor | None]:
    """Rows (M, E), their labels (M,) on the same device, and which they are of all; None if they are all."""
    rows, flat = hidden.reshape(-1, hidden.shape[-1]), labels.reshape(-1)
    if index is None and labels.device.type == "cpu" and not torch.compiler.is_compiling():
        index = labelled_rows(labels, ignore_index=ignore_index)
    if index is None or len(index) == len(flat):
        return rows.contiguous(), flat.to(rows.device, non_blocking=True).contiguous(), None
    if index.device == flat.device:
        flat = flat[index].to(rows.device, non_blocking=True)
        index = index.to(rows.device, non_blocking=True)
    else:
        index = index.to(rows.device, non_blocking=True)
        flat = flat.to(rows.device, non_blocking=True)[index]
    return take_rows(rows, index), flat, index


def chosen_schedule(rows: torch.Tensor, weight: torch.Tensor, chunk_bytes: int) -> Schedule:
    """`schedule_of` for these tensors. Free memory is asked for only where the schedule needs much of it."""
    needs_grad = torch.is_grad_enabled()
    sizes = (len(rows), weight.shape[1], weight.shape[0], rows.dtype)
    options = {
        "needs_dx": needs_grad and rows.requires_grad,
        "needs_dw": needs_grad and weight.requires_grad,
        "chunk_bytes": chunk_bytes,
        "slot_rows": None if runs_triton(rows) else SLOT_ROWS_TORCH,
    }
    schedule = schedule_of(*sizes, **options)
    if schedule.flushes and schedule.plan == "fast" and schedule.extra_bytes >= MUCH_MEMORY:
        return schedule_of(*sizes, **options, free_bytes=free_bytes(rows.device))
    return schedule


def _same_dtype(hidden: torch.Tensor, *parameters: torch.Tensor | None) -> list[torch.Tensor | None]:
    """All as autocast casts them; else they have one dtype already."""
    dtype = _autocast_dtype(hidden.device)
    if dtype is not None:
        return [None if t is None else t.to(dtype) for t in (hidden, *parameters)]
    for t in parameters:
        if t is not None and t.dtype != hidden.dtype:
            raise ValueError(
                f"linear_cross_entropy: hidden is {hidden.dtype} and a parameter {t.dtype}: expected the same"
            )
    return [hidden, *parameters]


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


def _check(
    hidden: torch.Tensor,
    weight: torch.Tensor,
    labels: torch.Tensor,
    bias: torch.Tensor | None,
    lora_a: torch.Tensor | None,
    lora_b: torch.Tensor | None,
) -> None:
    if weight.dim() != 2 or weight.shape[1] != hidden.shape[-1]:
        raise ValueError(
            f"linear_cross_entropy: hidden is {tuple(hidden.shape)} and weight {tuple(weight.shape)}: "
            "expected weight (V, E) with hidden's last size E"
        )
    if labels.shape != hidden.shape[:-1]:
        raise ValueError(
            f"linear_cross_entropy: labels are {tuple(labels.shape)}; expected {tuple(hidden.shape[:-1])} "
            "for this hidden (one label for each row)"
        )
    if bias is not None and bias.shape != weight.shape[:1]:
        raise ValueError(f"linear_cross_entropy: bias is {tuple(bias.shape)}; expected {tuple(weight.shape[:1])}")
    if (lora_a is None) != (lora_b is None):
        raise ValueError("linear_cross_entropy: a low-rank term is lora_a and lora_b; expected both or none")
    if lora_a is not None and (lora_a.shape[1], lora_b.shape) != (weight.shape[1], (weight.shape[0], lora_a.shape[0])):
        raise ValueError(
            f"linear_cross_entropy: lora_a is {tuple(lora_a.shape)} and lora_b {tuple(lora_b.shape)}; "
            f"expected (R, {weight.shape[1]}) and ({weight.shape[0]}, R)"
        )


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
