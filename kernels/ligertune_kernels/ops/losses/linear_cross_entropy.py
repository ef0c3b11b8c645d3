r"""Cross entropy of a linear layer's output, hidden X (N, E) and weight W (V, E), without storing the logits (N, V).

    Z = X Wᵀ + b        loss_i and G = dloss/dZ as in kernels.py        dX = G W        dW = Gᵀ X        db = sum_i G_i

Rows are taken in chunks (linear_chunks.py) as a schedule says (tiles.py): the logits of a chunk are written into
one reused buffer, one pass over its rows turns them into G in place and returns the losses, and G is multiplied into
the gradients. So the gradients exist when the forward returns, and one that is not needed is not computed: 6 NEV
operations, 4 NEV with a frozen weight. Rows without a label are not computed (labelled_rows.py).

Scale: the mean's 1/n is a scalar on the device and multiplies G in the pass, in fp32, so the host does not wait for it.
In float16, p/n would vanish below 6e-8, and dW, not divided, could exceed 65504. There the pass leaves out 1/n (and
multiplies by 256), dW is summed in fp32, and the backward multiplies by upstream/(256 n) in fp32, where GradScaler's
65536 is already part of upstream. In the other dtypes the backward multiplies by upstream if it is not 1.

reduction="none" has one upstream value per row, by which dW cannot be scaled afterwards: its forward computes only the
losses, and its backward computes the chunks again with these values (8 NEV).

torch.compile sees the chunks as one operator: it would unroll their loop, and compile anew for each number of rows.
The operator looks for the rows with a label itself; its results have the size of all rows.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

import torch

from ligertune_kernels.autograd import no_double_backward, without_autocast
from ligertune_kernels.ops.losses.cross_entropy import (
    LossFunction,
    LossModule,
    Reduction,
    check_reduction,
    cross_entropy_reference,
    divisor_of,
    weights_and_divisor,
)
from ligertune_kernels.ops.losses.kernels import LossOptions, RowStatistics, empty_statistics
from ligertune_kernels.ops.losses.labelled_rows import PendingRows, can_skip_rows, rows_to_take, scatter_rows
from ligertune_kernels.ops.losses.linear_chunks import (
    Gradients,
    Head,
    LinearLora,
    Targets,
    check_linear,
    choose_schedule,
    empty_loss,
    run_chunks,
)
from ligertune_kernels.ops.losses.tiles import CHUNK_BYTES, Schedule


def linear_cross_entropy_reference(
    hidden: torch.Tensor,  # (..., E)
    weight: torch.Tensor,  # (V, E)
    labels: torch.Tensor,  # (...)
    bias: torch.Tensor | None = None,  # (V,)
    *,
    lora: LinearLora | None = None,
    class_weight: torch.Tensor | None = None,
    reduction: Reduction = "mean",
    num_items_in_batch: int | torch.Tensor | None = None,
    **options: int | float | None,
) -> torch.Tensor:
    """Compute `linear_cross_entropy` in plain torch with all logits; options are the fields of LossOptions."""
    logits = Head(weight, bias, *(lora or ())).reference_logits(hidden)
    if num_items_in_batch is None:
        return cross_entropy_reference(logits, labels, weight=class_weight, reduction=reduction, **options)
    total = cross_entropy_reference(logits, labels, weight=class_weight, reduction="sum", **options)
    return total / divisor_of(logits, labels, "mean", num_items_in_batch=num_items_in_batch)


# torch.compile takes operators of tensors, numbers and lists of them: no dataclass.
@torch.library.custom_op(
    "ligertune_kernels::linear_cross_entropy_chunks",
    mutates_args=(),
    schema="(Tensor rows, Tensor?[] parameters, float lora_scale, Tensor?[] targets, float[] options, int chunk_bytes, "
    "bool skip_ignored, bool[] wanted) -> Tensor[]",
)
def _chunks_operator(
    rows: torch.Tensor,  # (N, E)
    parameters: list[torch.Tensor | None],  # Head.tensors
    lora_scale: float,
    targets: list[torch.Tensor | None],  # labels, class_weight and scale of Targets
    options: list[float],  # LossOptions.numbers
    chunk_bytes: int,
    skip_ignored: bool,
    wanted: list[bool],  # statistics, and the gradients of rows and of each parameter
) -> list[torch.Tensor]:
    """Return the losses (N,), then what is wanted, in this order."""
    head = Head(*parameters, lora_scale)
    labels, class_weight, scale = targets
    statistics, *needs = wanted
    ignore_index, label_smoothing, softcap, logit_scale, z_loss = options
    terms = LossOptions(int(ignore_index), label_smoothing, softcap or None, logit_scale, z_loss)
    n_rows = len(rows)
    with without_autocast(rows.device):
        index = _rows_of_operator(labels, terms.ignore_index, rows.numel() * len(head.weight)) if skip_ignored else None
        if index is not None:
            rows = rows[index]
            labels = labels[index]
            scale = scale[index] if scale is not None and scale.dim() else scale
        rows = rows.contiguous()
        found = Targets(labels, terms, class_weight, scale, empty_statistics(rows) if statistics else None)
        schedule = choose_schedule(rows, head.weight, chunk_bytes, needs=(needs[0], needs[1]))
        losses, (d_rows, *gradients) = run_chunks(rows, head, found, schedule, needs)
    of_rows = [losses, *(found.statistics or ()), *([] if d_rows is None else [d_rows])]
    if index is not None:
        of_rows = [scatter_rows(t, index, n_rows) for t in of_rows]
    return [*of_rows, *(gradient for gradient in gradients if gradient is not None)]


def _rows_of_operator(labels: torch.Tensor, ignore_index: int, n_products: int) -> torch.Tensor | None:
    """Return the rows that the operator computes, at least one; None: all."""
    if not can_skip_rows(labels, n_products):
        return None
    index = PendingRows(labels, ignore_index=ignore_index).wait()
    if len(index) == 0:  # the gradients of the parameters need a product: of a row whose G is 0
        index = index.new_zeros(1)
    return None if len(index) == len(labels) else index


@_chunks_operator.register_fake
def _(rows, parameters, lora_scale, targets, options, chunk_bytes, skip_ignored, wanted):
    statistics, *needs = wanted
    wide = torch.promote_types(rows.dtype, torch.float32)
    d_weight = wide if rows.dtype is torch.float16 else rows.dtype
    tensors = zip((rows, *parameters), (rows.dtype, d_weight, wide, wide, wide), needs, strict=True)
    gradients = [rows.new_empty(t.shape, dtype=dtype) for t, dtype, needed in tensors if needed]
    measured = empty_statistics(rows) if statistics else ()
    return [rows.new_empty(rows.shape[:1], dtype=wide), *measured, *gradients]


@dataclass(frozen=True)
class ChunkOptions:
    """What chooses the schedule, in a compiled graph only when the operator runs."""

    chunk_bytes: int
    skip_ignored: bool  # the operator looks for rows with a label

    def schedule(
        self,
        rows: torch.Tensor,  # (N, E)
        weight: torch.Tensor,  # (V, E)
        needs: tuple[bool, bool] | None = None,
    ) -> Schedule | ChunkOptions:
        """Return `choose_schedule`, or self where all chunks are one operator of a compiled graph."""
        return self if torch.compiler.is_compiling() else choose_schedule(rows, weight, self.chunk_bytes, needs)


def linear_chunks(
    rows: torch.Tensor,  # (N, E)
    head: Head,
    targets: Targets,
    schedule: Schedule | ChunkOptions,
    needs: Sequence[bool] = (False,) * 5,
) -> tuple[torch.Tensor, RowStatistics | None, Gradients]:
    """Return the losses (N,), statistics if targets have room for them, and the gradients, as `run_chunks`."""
    if isinstance(schedule, ChunkOptions):
        schedule = schedule.schedule(rows, head.weight, needs[:2])
    if isinstance(schedule, Schedule):
        losses, gradients = run_chunks(rows, head, targets, schedule, needs)
        return losses, targets.statistics, gradients
    found = _chunks_operator(
        rows,
        list(head.tensors),
        head.lora_scale,
        [targets.labels, targets.class_weight, targets.scale],
        [float(number) for number in targets.options.numbers],
        schedule.chunk_bytes,
        schedule.skip_ignored,
        [targets.statistics is not None, *needs],
    )
    n_first = len(found) - sum(needs)
    places = [n_first + sum(needs[:i]) for i in range(len(needs))]
    gradients = tuple(found[place] if needed else None for place, needed in zip(places, needs, strict=True))
    return found[0], RowStatistics(*found[1:n_first]) if targets.statistics is not None else None, gradients


@dataclass(frozen=True)
class LinearJob:
    """What a loss of a linear layer computes, besides the tensors that may get a gradient."""

    targets: Targets
    lora_scale: float
    schedule: Schedule | ChunkOptions


class _LinearCrossEntropy(LossFunction):
    """The losses of rows, each divided by its denominator, () or (N,), and summed; the losses without gradient.

    The gradients are computed in the forward.
    """

    @staticmethod
    def forward(ctx, rows, weight, bias, lora_a, lora_b, denominator, job):
        head = Head(weight, bias, lora_a, lora_b, job.lora_scale)
        targets = replace(job.targets, scale=LossFunction.scale(ctx, denominator, rows.dtype))
        losses, _, gradients = linear_chunks(rows, head, targets, job.schedule, ctx.needs_input_grad[:5])
        LossFunction.keep(ctx, "linear_cross_entropy", (rows, *head.tensors), gradients)
        ctx.mark_non_differentiable(losses)
        return (losses / denominator).sum(), losses


class LinearRowLosses(torch.autograd.Function):
    """One loss per row and, with `measures`, statistics without gradient.

    The backward computes the chunks again, scaled by the upstream gradient of each row.
    """

    @staticmethod
    def forward(ctx, rows, weight, bias, lora_a, lora_b, job, measures):
        targets = replace(job.targets, statistics=empty_statistics(rows) if measures else None)
        ctx.save_for_backward(rows, weight, bias, lora_a, lora_b, targets.labels, targets.class_weight)
        ctx.arguments = job.lora_scale, targets.options, job.schedule
        head = Head(weight, bias, lora_a, lora_b, job.lora_scale)
        losses, statistics, _ = linear_chunks(rows, head, targets, job.schedule)
        if statistics is None:
            return (losses,)
        ctx.mark_non_differentiable(*statistics)
        return losses, *statistics

    @staticmethod
    @no_double_backward
    def backward(ctx, d_losses, *_):
        rows, *parameters, labels, class_weight = ctx.saved_tensors
        lora_scale, options, schedule = ctx.arguments
        head = Head(*parameters, lora_scale)
        targets = Targets(labels, options, class_weight, d_losses.contiguous())
        with without_autocast(rows.device):
            *_, found = linear_chunks(rows, head, targets, schedule, ctx.needs_input_grad[:5])
        gradients = (None if g is None else g.to(t.dtype) for g, t in zip(found, (rows, *parameters), strict=True))
        return *gradients, None, None


def linear_cross_entropy(
    hidden: torch.Tensor,  # (..., E)
    weight: torch.Tensor,  # (V, E)
    labels: torch.Tensor,  # (...), aligned with hidden: already shifted
    bias: torch.Tensor | None = None,  # (V,)
    *,
    lora: LinearLora | None = None,
    class_weight: torch.Tensor | None = None,  # (V,)
    softcap: float | None = None,
    logit_scale: float = 1.0,
    z_loss: float = 0.0,
    label_smoothing: float = 0.0,
    ignore_index: int = -100,
    reduction: Reduction = "mean",
    num_items_in_batch: int | torch.Tensor | None = None,
    labelled_rows: torch.Tensor | None = None,  # (M,)
    skip_ignored: bool = True,
    chunk_bytes: int = CHUNK_BYTES,
    schedule: Schedule | None = None,
) -> torch.Tensor:  # () or (...), float32
    """Cross entropy of logits hidden·Wᵀ + bias, and lora's scale·hidden·Aᵀ·Bᵀ, against labels.

    The logits are multiplied by logit_scale, then capped, c·tanh(z/c); z_loss adds z_loss·lse² to each row.
    num_items_in_batch, an int or a scalar tensor, replaces the number of labels that are not ignored as the divisor.
    If all labels are ignored, the loss is 0 with zero gradients. A label that is neither a class nor ignore_index makes
    the loss and its gradients NaN.

    Only labelled_rows, from the function of that name, are computed; the others count as ignored. Without them, rows
    with a label are looked for, and on a GPU the host waits until they are found. skip_ignored=False computes all rows
    without a wait, as do a CUDA graph in capture, and a GPU whose products take less than about 1 ms.
    chunk_bytes bounds the buffer for logits (see `schedule_of`), unless a schedule is passed.
    Autocast casts hidden and parameters as for a linear layer. A second backward through a "mean" or "sum" raises
    RuntimeError where kernels run. Raises ValueError on mismatched shapes or dtypes.
    """
    check_reduction("linear_cross_entropy", reduction)
    if reduction == "none" and num_items_in_batch is not None:
        raise ValueError("linear_cross_entropy: num_items_in_batch divides a sum; reduction='none' has none")
    head = Head(weight, bias, *(lora or ()))
    hidden, head = check_linear("linear_cross_entropy", hidden, head, labels)
    rows, flat, index = rows_to_take(
        hidden, labels, labelled_rows, ignore_index, skip_ignored=skip_ignored, vocab_size=len(weight)
    )
    targets = Targets(flat, LossOptions(ignore_index, label_smoothing, softcap, logit_scale, z_loss), class_weight)
    if rows.numel() == 0:
        loss = empty_loss(rows, head)
        return loss if reduction != "none" else loss + loss.new_zeros(labels.shape)
    if schedule is None:
        schedule = ChunkOptions(chunk_bytes, skip_ignored and labelled_rows is None).schedule(rows, weight)
    with without_autocast(rows.device):
        if reduction == "none":
            losses = _row_losses(rows, head, targets, schedule)
            return (losses if index is None else scatter_rows(losses, index, labels.numel())).view(labels.shape)
        class_weight, denominator = weights_and_divisor(
            rows, flat, reduction, ignore_index=ignore_index, class_weight=class_weight, z_loss=z_loss,
            num_items_in_batch=num_items_in_batch,
        )  # fmt: skip
        targets = replace(targets, class_weight=class_weight)
        return summed_losses(rows, head, targets, denominator, schedule)[0]


def summed_losses(
    rows: torch.Tensor,  # (N, E)
    head: Head,
    targets: Targets,
    denominator: torch.Tensor,  # () or (N,)
    schedule: Schedule | ChunkOptions,
) -> tuple[torch.Tensor, torch.Tensor]:  # (), (N,)
    """Return the sum of the losses, each divided by its denominator, and the losses without gradient."""
    if _needs_grad(rows, head):
        return _LinearCrossEntropy.apply(
            rows, *head.tensors, denominator, LinearJob(targets, head.lora_scale, schedule)
        )
    losses, *_ = linear_chunks(rows, head, targets, schedule)
    return (losses / denominator).sum(), losses


def _row_losses(rows: torch.Tensor, head: Head, targets: Targets, schedule: Schedule | ChunkOptions) -> torch.Tensor:
    """Return the losses (N,) of rows (N, E), differentiable one by one."""
    if not _needs_grad(rows, head):
        return linear_chunks(rows, head, targets, schedule)[0]
    return LinearRowLosses.apply(rows, *head.tensors, LinearJob(targets, head.lora_scale, schedule), False)[0]


def _needs_grad(rows: torch.Tensor, head: Head) -> bool:
    return torch.is_grad_enabled() and any(t is not None and t.requires_grad for t in (rows, *head.tensors))


class LinearCrossEntropyLoss(LossModule):
    """`linear_cross_entropy` with fixed options; the weight is an argument of forward, as it may be tied."""

    function = staticmethod(linear_cross_entropy)
