r"""Generalised JSD of a student's linear layer from a teacher's, without ever holding their logits (N, V).

Student X (N, E) and W (V, E), teacher X' (N, E') and W' (V, E'):

    Z = X Wᵀ + b        Z' = X' W'ᵀ + b'        G = dloss/dZ as in jsd_row_pass.py        dX = G W        dW = Gᵀ X

The rows are taken in chunks as linear_cross_entropy takes them, and what it says of their height, of dW's rounding and
of float16's scale holds here. The student's logits are multiplied into slots of one reused buffer, the teacher's into
another of a single slot; one pass over both turns the student's into G in place and yields the losses. dW is added up
whenever the student's buffer is full. The gradients exist when the forward returns, 2 NV (3E + E') operations, and one
that nobody needs costs nothing. The teacher is a constant: it gets none.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import nn

from ligertune_kernels.autocast import autocast_dtype, without_autocast
from ligertune_kernels.autograd import no_double_backward
from ligertune_kernels.launcher import runs_triton
from ligertune_kernels.ops.distill._divergence import gradients_once
from ligertune_kernels.ops.distill._jsd_row_pass import jsd_row_pass
from ligertune_kernels.ops.distill.jsd import check_beta, denominator, jsd_reference
from ligertune_kernels.ops.losses._linear_chunks import _add_product, _logits
from ligertune_kernels.ops.losses._row_pass import scales
from ligertune_kernels.ops.losses._schedule import chunks_of

CHUNK_BYTES = 1 << 30  # of both buffers: 2048 rows of a 128k vocabulary in bf16, so 4096 tokens in two flushes
SLOT_ROWS = 1024  # cuBLAS reaches 763 TFLOP/s there on an H100 and gains 2 % by twice as many
COL_MULTIPLE = 64  # of the buffers' width, whatever the vocabulary: aligned rows for cuBLAS and for the pass
# dW's elements up to which it is summed in fp32 and rounded at the end: 128 tiles of 128 x 256, about one for each
# processor of an H100. Of few results cuBLAS may make the sums in parts, and it adds those of bfloat16 in bfloat16
# (torch's allow_bf16_reduced_precision_reduction, on by default): 131 x 24 of 11 aligned rows were off by 3.6e-3 where
# one rounding is 2.0e-3.
SMALL_WEIGHT = 1 << 22
SLOT_ROWS_TORCH = 256  # the torch row pass makes several fp32 copies of a slot


def linear_jsd_reference(
    student_hidden: torch.Tensor,
    student_weight: torch.Tensor,
    teacher_hidden: torch.Tensor,
    teacher_weight: torch.Tensor,
    *,
    labels: torch.Tensor | None = None,
    beta: float = 0.5,
    temperature: float = 1.0,
    ignore_index: int = -100,
    student_bias: torch.Tensor | None = None,
    teacher_bias: torch.Tensor | None = None,
    num_items_in_batch: int | torch.Tensor | None = None,
) -> torch.Tensor:
    """The same in plain torch, with all logits, differentiated by autograd."""
    with torch.no_grad():
        target = _log_probs(nn.functional.linear(teacher_hidden, teacher_weight, teacher_bias), temperature)
    input = _log_probs(nn.functional.linear(student_hidden, student_weight, student_bias), temperature)
    total = jsd_reference(input, target, beta=beta, labels=labels, ignore_index=ignore_index, reduction="sum")
    rows = input.reshape(-1, input.shape[-1])
    return total / denominator(rows, labels, ignore_index, "mean", num_items_in_batch)


def _log_probs(logits: torch.Tensor, temperature: float) -> torch.Tensor:
    return (logits.to(torch.promote_types(logits.dtype, torch.float32)) / temperature).log_softmax(dim=-1)


@dataclass(frozen=True)
class Layers:
    """Both models' last hidden states as rows (N, E) and heads (V, E), (V,)."""

    student_hidden: torch.Tensor
    student_weight: torch.Tensor
    student_bias: torch.Tensor | None
    teacher_hidden: torch.Tensor
    teacher_weight: torch.Tensor
    teacher_bias: torch.Tensor | None

    @property
    def tensors(self) -> tuple[torch.Tensor | None, ...]:
        """The fields, in order, named one by one: torch.compile does not trace vars()."""
        student = self.student_hidden, self.student_weight, self.student_bias
        return *student, self.teacher_hidden, self.teacher_weight, self.teacher_bias


def _run_chunks(
    layers: Layers,
    labels: torch.Tensor | None,
    options: dict[str, float | int],
    chunk_bytes: int,
    needs: tuple[bool, bool, bool] = (False, False, False),
    scale: torch.Tensor | None = None,
) -> tuple[torch.Tensor, torch.Tensor | None, torch.Tensor | None, torch.Tensor | None]:
    """Losses (N,) and the gradients of student_hidden, student_weight and student_bias that are needed, times scale."""
    hidden, weight, bias = layers.student_hidden, layers.student_weight, layers.student_bias
    needs_dx, needs_dw, needs_db = needs
    (n_rows, _), vocab_size, dtype = hidden.shape, weight.shape[0], hidden.dtype
    row_bytes = vocab_size * (hidden.element_size() + layers.teacher_hidden.element_size())
    slot_rows = SLOT_ROWS if runs_triton(hidden) else SLOT_ROWS_TORCH
    chunks = chunks_of(n_rows, row_bytes, chunk_bytes, slot_rows, needs_dw=needs_dw)
    wide = torch.promote_types(dtype, torch.float32)
    width = _buffer_width(vocab_size)
    buffer = hidden.new_empty((chunks.buffer, width))
    teacher_buffer = layers.teacher_hidden.new_empty((chunks.slot, width))
    d_hidden = torch.empty_like(hidden) if needs_dx else None
    rounds_sums = chunks.flushes > 2 or weight.numel() <= SMALL_WEIGHT
    sums_wide = dtype is torch.float16 or (dtype is torch.bfloat16 and rounds_sums)
    d_weight = torch.empty(weight.shape, dtype=wide if sums_wide else dtype, device=weight.device) if needs_dw else None
    d_bias = torch.zeros(vocab_size, dtype=wide, device=weight.device) if needs_db else None
    losses = []
    for first in range(0, n_rows, chunks.buffer):
        last = min(first + chunks.buffer, n_rows)
        for start in range(first, last, chunks.slot):
            stop = min(start + chunks.slot, last)
            student_rows, teacher_rows = buffer[start - first : stop - first], teacher_buffer[: stop - start]
            student, teacher = student_rows[:, :vocab_size], teacher_rows[:, :vocab_size]  # (slot, V); student, later G
            _logits(hidden[start:stop], weight, bias, out=student)
            _logits(layers.teacher_hidden[start:stop], layers.teacher_weight, layers.teacher_bias, out=teacher)
            losses.append(
                jsd_row_pass(
                    student_rows,
                    teacher_rows,
                    None if labels is None else labels[start:stop],
                    vocab_size=vocab_size,
                    gradient=student_rows if any(needs) else None,
                    scale=scale,
                    **options,
                )
            )
            if needs_dx:
                torch.mm(student, weight, out=d_hidden[start:stop])
            if needs_db:
                d_bias += student.sum(0, dtype=wide)
        if needs_dw:
            _add_product(
                d_weight, buffer[: last - first, :vocab_size].t(), hidden[first:last], beta=0 if first == 0 else 1
            )
    if needs_dw and dtype is not torch.float16:
        d_weight = d_weight.to(dtype)
    return torch.cat(losses), d_hidden, d_weight, d_bias


def _buffer_width(vocab_size: int) -> int:
    # torch.compile takes no out= whose rows have a gap
    return vocab_size if torch.compiler.is_compiling() else -(-vocab_size // COL_MULTIPLE) * COL_MULTIPLE


class _LinearJSD(torch.autograd.Function):
    """The sum over rows divided by `n`; gradients computed in the forward."""

    @staticmethod
    def forward(
        ctx, hidden, weight, bias, teacher_hidden, teacher_weight, teacher_bias, labels, n, options, chunk_bytes
    ):
        layers = Layers(hidden, weight, bias, teacher_hidden, teacher_weight, teacher_bias)
        scale, ctx.afterwards = scales(n, hidden.dtype)
        losses, *gradients = _run_chunks(layers, labels, options, chunk_bytes, ctx.needs_input_grad[:3], scale)
        ctx.save_for_backward(*gradients)
        ctx.dtypes = hidden.dtype, weight.dtype, None if bias is None else bias.dtype
        ctx.spent = False
        return losses.sum() / n

    @staticmethod
    @no_double_backward
    def backward(ctx, d_loss):
        gradients = gradients_once(ctx, d_loss, "linear_jsd")
        return *(None if g is None else g.to(dtype) for g, dtype in zip(gradients, ctx.dtypes, strict=True)), *[
            None
        ] * 7


def linear_jsd(
    student_hidden: torch.Tensor,
    student_weight: torch.Tensor,
    teacher_hidden: torch.Tensor,
    teacher_weight: torch.Tensor,
    *,
    labels: torch.Tensor | None = None,
    beta: float = 0.5,
    temperature: float = 1.0,
    ignore_index: int = -100,
    student_bias: torch.Tensor | None = None,
    teacher_bias: torch.Tensor | None = None,
    num_items_in_batch: int | torch.Tensor | None = None,
    chunk_bytes: int = CHUNK_BYTES,
) -> torch.Tensor:
    """Generalised JSD of softmax(student logits / temperature) from softmax(teacher logits / temperature); in float32.

    student_hidden (..., E) times student_weight (V, E), plus student_bias (V,), gives the student's logits; so the
    teacher's, whose E may differ. beta is that of `jsd`: 0 forward KL, 1 reverse KL. Rows whose label (...), aligned
    with hidden, is ignore_index count for nothing; labels mean nothing else here. The sum over the rows is divided by
    how many count, or by num_items_in_batch, an int or a scalar tensor; it is not multiplied by temperature². Where
    none counts the loss is 0 with zero gradients.

    The teacher is a constant: its tensors get no gradient, whatever they ask for. chunk_bytes bounds the buffers for
    logits. Under autocast all are cast to its dtype, as a linear layer's inputs are. A second backward through the
    same loss is refused where kernels run.
    """
    layers = Layers(student_hidden, student_weight, student_bias, teacher_hidden, teacher_weight, teacher_bias)
    _check(layers, labels, beta, temperature)
    if (dtype := autocast_dtype(student_hidden.device)) is not None:
        layers = Layers(*(None if t is None else t.to(dtype) for t in layers.tensors))
    _check_dtypes(layers)
    options = {"beta": float(beta), "temperature": float(temperature), "ignore_index": ignore_index}
    if student_hidden.numel() == 0:
        return linear_jsd_reference(
            layers.student_hidden, layers.student_weight, layers.teacher_hidden, layers.teacher_weight, labels=labels,
            student_bias=layers.student_bias, teacher_bias=layers.teacher_bias, num_items_in_batch=num_items_in_batch,
            **options,
        )  # fmt: skip
    layers = Layers(
        layers.student_hidden.reshape(-1, layers.student_hidden.shape[-1]).contiguous(),
        layers.student_weight,
        layers.student_bias,
        layers.teacher_hidden.detach().reshape(-1, layers.teacher_hidden.shape[-1]).contiguous(),
        layers.teacher_weight.detach(),
        None if layers.teacher_bias is None else layers.teacher_bias.detach(),
    )
    flat = None if labels is None else labels.reshape(-1).contiguous()
    students = (layers.student_hidden, layers.student_weight, layers.student_bias)
    needs_grad = torch.is_grad_enabled() and any(t is not None and t.requires_grad for t in students)
    with without_autocast(student_hidden.device):
        n = denominator(layers.student_hidden, flat, ignore_index, "mean", num_items_in_batch)
        if needs_grad:
            return _LinearJSD.apply(*layers.tensors, flat, n, options, chunk_bytes)
        return _run_chunks(layers, flat, options, chunk_bytes)[0].sum() / n


def _check(layers: Layers, labels: torch.Tensor | None, beta: float, temperature: float) -> None:
    check_beta("linear_jsd", beta)
    if not temperature > 0.0:
        raise ValueError(f"linear_jsd: temperature is {temperature}; expected more than 0")
    leading, vocab_size = layers.student_hidden.shape[:-1], layers.student_weight.shape[0]
    for model in ("student", "teacher"):
        hidden, weight, bias = (getattr(layers, f"{model}_{part}") for part in ("hidden", "weight", "bias"))
        if weight.dim() != 2 or weight.shape[1] != hidden.shape[-1]:
            raise ValueError(
                f"linear_jsd: {model}_hidden is {tuple(hidden.shape)} and {model}_weight {tuple(weight.shape)}: "
                "expected weight (V, E) with hidden's last size E"
            )
        if bias is not None and bias.shape != weight.shape[:1]:
            raise ValueError(
                f"linear_jsd: {model}_bias is {tuple(bias.shape)}; expected {tuple(weight.shape[:1])} for this weight"
            )
    if layers.teacher_hidden.shape[:-1] != leading or layers.teacher_weight.shape[0] != vocab_size:
        raise ValueError(
            f"linear_jsd: the student has rows {tuple(leading)} of a vocabulary of {vocab_size}, the teacher "
            f"{tuple(layers.teacher_hidden.shape[:-1])} of {layers.teacher_weight.shape[0]}: expected the same"
        )
    if labels is not None and labels.shape != leading:
        raise ValueError(
            f"linear_jsd: labels are {tuple(labels.shape)}; expected {tuple(leading)} for this hidden "
            "(one label for each row)"
        )


def _check_dtypes(layers: Layers) -> None:
    """A product takes one dtype; student and teacher may differ."""
    for model in ("student", "teacher"):
        parts = {part: getattr(layers, f"{model}_{part}") for part in ("hidden", "weight", "bias")}
        dtypes = {part: t.dtype for part, t in parts.items() if t is not None}
        if len(set(dtypes.values())) > 1:
            found = ", ".join(f"{part} is {dtype}" for part, dtype in dtypes.items())
            raise ValueError(f"linear_jsd: of the {model}, {found}: expected the same")


class LinearJSDLoss(nn.Module):
    """`linear_jsd` with its options fixed; the weights are the caller's, as they may be tied."""

    def __init__(
        self,
        *,
        beta: float = 0.5,
        temperature: float = 1.0,
        ignore_index: int = -100,
        chunk_bytes: int = CHUNK_BYTES,
    ) -> None:
        super().__init__()
        self.options = {
            "beta": beta,
            "temperature": temperature,
            "ignore_index": ignore_index,
            "chunk_bytes": chunk_bytes,
        }

    def forward(
        self,
        student_hidden: torch.Tensor,
        student_weight: torch.Tensor,
        teacher_hidden: torch.Tensor,
        teacher_weight: torch.Tensor,
        *,
        labels: torch.Tensor | None = None,
        student_bias: torch.Tensor | None = None,
        teacher_bias: torch.Tensor | None = None,
        num_items_in_batch: int | torch.Tensor | None = None,
    ) -> torch.Tensor:
        return linear_jsd(
            student_hidden, student_weight, teacher_hidden, teacher_weight, labels=labels, student_bias=student_bias,
            teacher_bias=teacher_bias, num_items_in_batch=num_items_in_batch, **self.options,
        )  # fmt: skip

    def extra_repr(self) -> str:
        return ", ".join(f"{name}={value}" for name, value in self.options.items())
