r"""Generalised JSD of a student's linear layer from a teacher's, without storing their logits (N, V).

Student X (N, E) and W (V, E), teacher X' (N, E') and W' (V, E'):

    Z = X Wᵀ + b        Z' = X' W'ᵀ + b'        G = dloss/dZ as in kernels.py        dX = G W        dW = Gᵀ X

Rows are taken in chunks as in linear_cross_entropy; its notes on chunk sizes, rounding of dW and float16's scale hold
here too. The student's logits are written into slots of one reused buffer, the teacher's into another of one slot. One
pass over both turns the student's into G in place and returns the losses, in fp32. dW is accumulated when the student's
buffer is full. The gradients exist when the forward returns, 2 NV (3E + E') operations; one that is not needed is not
computed. The teacher is a constant.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

import torch

from ligertune_kernels.autograd import without_autocast
from ligertune_kernels.launcher import runs_triton
from ligertune_kernels.ops.distill.jsd import check_beta, jsd_reference
from ligertune_kernels.ops.distill.kernels import JSDOptions, jsd_row_pass
from ligertune_kernels.ops.distill.tiles import JSD_CHUNK_BYTES, jsd_chunks, jsd_sums_wide
from ligertune_kernels.ops.losses.cross_entropy import LossFunction, LossModule, divisor_of
from ligertune_kernels.ops.losses.labelled_rows import rows_to_take
from ligertune_kernels.ops.losses.linear_chunks import ChunkedLoss, Gradients, Head, check_linear, empty_loss
from ligertune_kernels.ops.losses.tiles import rest_stride


def linear_jsd_reference(
    student_hidden: torch.Tensor,
    student_weight: torch.Tensor,
    teacher_hidden: torch.Tensor,
    teacher_weight: torch.Tensor,
    *,
    temperature: float = 1.0,
    student_bias: torch.Tensor | None = None,
    teacher_bias: torch.Tensor | None = None,
    **options: float | torch.Tensor | None,
) -> torch.Tensor:
    """Compute `linear_jsd` in plain torch with all logits; options are those of jsd_reference."""
    with torch.no_grad():
        target = _log_probs(teacher_hidden, Head(teacher_weight, teacher_bias), temperature)
    return jsd_reference(_log_probs(student_hidden, Head(student_weight, student_bias), temperature), target, **options)


def _log_probs(hidden: torch.Tensor, head: Head, temperature: float) -> torch.Tensor:
    logits = head.reference_logits(hidden)
    return (logits.to(torch.promote_types(logits.dtype, torch.float32)) / temperature).log_softmax(dim=-1)


@dataclass(frozen=True)
class TeacherLogits:
    """The teacher, whose logits of a chunk of rows are computed next to the student's."""

    hidden: torch.Tensor  # (N, E')
    head: Head
    labels: torch.Tensor | None  # (N,)
    options: JSDOptions
    scale: torch.Tensor | None = None  # (): factor of the student's gradients
    buffer: torch.Tensor | None = None  # (slot, W), W >= V

    def row_losses(self, logits: torch.Tensor, rows: slice, *, in_place: bool, **_: None) -> torch.Tensor:
        """Return the losses of some rows; overwrite their logits (c, W) with the gradient if in_place."""
        teacher = self.buffer[: len(logits)]
        vocab_size = len(self.head.weight)
        self.head.write_logits(self.hidden[rows], None, out=teacher[:, :vocab_size])
        return jsd_row_pass(
            logits, teacher, None if self.labels is None else self.labels[rows], self.options,
            vocab_size=vocab_size, gradient=logits if in_place else None, scale=self.scale,
        )  # fmt: skip


def divergence_workspace(
    n_rows: int, hidden: int, vocab_size: int, dtype: torch.dtype, teacher_dtype: torch.dtype, *, needs_dw: bool
) -> int:
    """Return the bytes that `linear_jsd` allocates on a GPU besides its inputs and the gradients in their dtype."""
    width = rest_stride(vocab_size)
    row_bytes = vocab_size * (dtype.itemsize + teacher_dtype.itemsize)
    chunks = jsd_chunks(n_rows, row_bytes, JSD_CHUNK_BYTES, on_gpu=True, needs_dw=needs_dw)
    sums = 4 * vocab_size * hidden if needs_dw and jsd_sums_wide(dtype, chunks.flushes, vocab_size * hidden) else 0
    return width * (chunks.buffer * dtype.itemsize + chunks.slot * teacher_dtype.itemsize) + sums


def _run_chunks(
    rows: torch.Tensor, head: Head, teacher: TeacherLogits, chunk_bytes: int, needs: Sequence[bool] = (False,) * 3
) -> tuple[torch.Tensor, Gradients]:
    """Return the losses (N,) of rows (N, E), and the gradients of rows, weight and bias that are needed."""
    vocab_size = len(head.weight)
    dtype = rows.dtype
    row_bytes = vocab_size * (rows.element_size() + teacher.hidden.element_size())
    chunks = jsd_chunks(len(rows), row_bytes, chunk_bytes, on_gpu=runs_triton(rows), needs_dw=needs[1])
    # Rows are aligned for cuBLAS and for the pass. torch.compile does not support out= tensors whose rows have a gap.
    width = vocab_size if torch.compiler.is_compiling() else rest_stride(vocab_size)
    teacher = replace(teacher, buffer=teacher.hidden.new_empty((chunks.slot, width)))
    sums_wide = jsd_sums_wide(dtype, chunks.flushes, head.weight.numel())
    loss = ChunkedLoss(rows, head, teacher.row_losses, (*needs, False, False), sums_wide=sums_wide)
    loss.run_fast(chunks.slot, chunks.buffer, width)
    losses, gradients = loss.result()
    return losses, gradients[:3]


class _LinearJSD(LossFunction):
    """The sum over rows divided by `n`; gradients are computed in the forward."""

    @staticmethod
    def forward(ctx, rows, weight, bias, teacher, n, chunk_bytes):
        teacher = replace(teacher, scale=LossFunction.scale(ctx, n, rows.dtype))
        losses, gradients = _run_chunks(rows, Head(weight, bias), teacher, chunk_bytes, ctx.needs_input_grad[:3])
        LossFunction.keep(ctx, "linear_jsd", (rows, weight, bias), gradients)
        return losses.sum() / n


def linear_jsd(
    student_hidden: torch.Tensor,  # (..., E)
    student_weight: torch.Tensor,  # (V, E)
    teacher_hidden: torch.Tensor,  # (..., E'), E' may differ from E
    teacher_weight: torch.Tensor,  # (V, E')
    *,
    labels: torch.Tensor | None = None,  # (...), aligned with hidden
    beta: float = 0.5,
    temperature: float = 1.0,
    ignore_index: int = -100,
    student_bias: torch.Tensor | None = None,  # (V,)
    teacher_bias: torch.Tensor | None = None,  # (V,)
    num_items_in_batch: int | torch.Tensor | None = None,
    skip_ignored: bool = True,
    chunk_bytes: int = JSD_CHUNK_BYTES,
) -> torch.Tensor:  # (), float32
    """Generalised JSD of softmax(student logits / temperature) from softmax(teacher logits / temperature).

    beta is that of `jsd`: 0 forward KL, 1 reverse KL. Rows whose label is ignore_index count as nothing; labels have no
    other meaning here. The sum over rows is divided by the number of rows that count, or by num_items_in_batch, an int
    or a scalar tensor; it is not multiplied by temperature². If no row counts, the loss is 0 with zero gradients.

    Rows that count are looked for, and only these computed, as in linear_cross_entropy; a compiled call computes all.
    The teacher is a constant: its tensors get no gradient even if they require one. chunk_bytes bounds the buffers for
    logits. Autocast casts all tensors as for a linear layer. A second backward through the same loss raises
    RuntimeError where kernels run. Raises ValueError on mismatched shapes or dtypes and unknown options.
    """
    check_beta("linear_jsd", beta)
    if not temperature > 0.0:
        raise ValueError(f"linear_jsd: temperature is {temperature}; expected more than 0")
    hidden, head = check_linear("linear_jsd", student_hidden, Head(student_weight, student_bias), labels, "student_")
    teacher_head = Head(teacher_weight.detach(), None if teacher_bias is None else teacher_bias.detach())
    taught, teacher_head = check_linear("linear_jsd", teacher_hidden.detach(), teacher_head, None, "teacher_")
    if taught.shape[:-1] != hidden.shape[:-1] or len(teacher_head.weight) != len(head.weight):
        raise ValueError(
            f"linear_jsd: the student has rows {tuple(hidden.shape[:-1])} of a vocabulary of {len(head.weight)}, the "
            f"teacher {tuple(taught.shape[:-1])} of {len(teacher_head.weight)}: expected the same"
        )
    rows, taught, flat = _rows_that_count(
        hidden, taught, labels, ignore_index, skip_ignored=skip_ignored, vocab_size=len(head.weight)
    )
    if rows.numel() == 0:
        return empty_loss(rows, head)
    options = JSDOptions(float(beta), float(temperature), ignore_index)
    needs_grad = torch.is_grad_enabled() and any(t is not None and t.requires_grad for t in (rows, *head.tensors))
    with without_autocast(rows.device):
        n = divisor_of(rows, flat, "mean", ignore_index=ignore_index, num_items_in_batch=num_items_in_batch)
        teacher = TeacherLogits(taught, teacher_head, flat, options)
        if needs_grad:
            return _LinearJSD.apply(rows, head.weight, head.bias, teacher, n, chunk_bytes)
        return _run_chunks(rows, head, teacher, chunk_bytes)[0].sum() / n


def _rows_that_count(
    hidden: torch.Tensor,  # (..., E)
    taught: torch.Tensor,  # (..., E')
    labels: torch.Tensor | None,  # (...)
    ignore_index: int,
    **search: int,
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor | None]:
    """Return the rows of student and teacher and their labels, as `rows_to_take`."""
    taught = taught.reshape(-1, taught.shape[-1])
    if labels is None:
        return hidden.reshape(-1, hidden.shape[-1]).contiguous(), taught.contiguous(), None
    rows, flat, index = rows_to_take(hidden, labels, None, ignore_index, **search)
    return rows, taught.contiguous() if index is None else taught.index_select(0, index), flat


class LinearJSDLoss(LossModule):
    """`linear_jsd` with fixed options; the weights are arguments of forward, as they may be tied."""

    function = staticmethod(linear_jsd)
