"""Losses of a linear layer in chunks of rows: logits in a reused buffer, which a row pass turns into gradients.

    Z = X Wᵀ + b + s (X Aᵀ) Bᵀ        G = dloss/dZ        dX = G W + s (G B) A        dW = Gᵀ X        db = sum_i G_i
    dA = s (G B)ᵀ X                   dB = s Gᵀ (X Aᵀ)    with A (R, E) and B (V, R), the optional low-rank term

tiles.py describes the schedules. Before the chunks stand their inputs: the layer, checks of shapes and dtypes, rows.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import NamedTuple

import torch
from torch.nn import functional as F

from ligertune_kernels.autograd import autocast_dtype
from ligertune_kernels.launcher import cached, chip_of, on_device, runs_triton
from ligertune_kernels.ops.losses.kernels import (
    LossOptions,
    RowStatistics,
    row_kernel,
    row_pass,
    slab_pass,
    write_statistics,
)
from ligertune_kernels.ops.losses.tiles import (
    MIN_GROUP_COLUMNS,
    MIN_QUERY_BYTES,
    SLOT_ROWS_TORCH,
    ChunkProducts,
    Schedule,
    accumulates_wide,
    adds_wide_products,
    free_bytes,
    may_group,
    may_take_groups,
    rest_stride,
    row_tiling,
    schedule_of,
)

Gradients = tuple[torch.Tensor | None, ...]


class LinearLora(NamedTuple):
    """LoRA of a linear layer: y += scale · (x aᵀ) bᵀ."""

    a: torch.Tensor  # (R, E)
    b: torch.Tensor  # (V, R)
    scale: float = 1.0


@dataclass(frozen=True)
class Head:
    """A linear layer: x Wᵀ + b + s (x Aᵀ) Bᵀ, with an optional bias and low-rank (LoRA) term."""

    weight: torch.Tensor  # (V, E)
    bias: torch.Tensor | None = None  # (V,)
    lora_a: torch.Tensor | None = None  # (R, E)
    lora_b: torch.Tensor | None = None  # (V, R)
    lora_scale: float = 1.0

    @property
    def tensors(self) -> tuple[torch.Tensor | None, ...]:
        return self.weight, self.bias, self.lora_a, self.lora_b

    def columns(self, first: int, last: int) -> Head:
        """Return the layer of the outputs in [first, last)."""
        if (first, last) == (0, len(self.weight)):
            return self
        bias, lora_b = (None if t is None else t[first:last] for t in (self.bias, self.lora_b))
        return Head(self.weight[first:last], bias, self.lora_a, lora_b, self.lora_scale)

    def low_rank(self, rows: torch.Tensor) -> torch.Tensor | None:
        """Return s X Aᵀ (N, R) of rows (N, E)."""
        return None if self.lora_a is None else self.lora_scale * torch.mm(rows, self.lora_a.t())

    def write_logits(self, rows: torch.Tensor, low_rank: torch.Tensor | None, out: torch.Tensor) -> None:
        """Write the logits (N, V) of rows (N, E) and their `low_rank` into out."""
        # The low-rank product comes first: the large one then adds to it without another pass over the logits.
        a, b = (rows, self.weight) if low_rank is None else (low_rank, self.lora_b)
        if self.bias is None:
            torch.mm(a, b.t(), out=out)
        else:
            torch.addmm(self.bias, a, b.t(), out=out)
        if low_rank is not None:
            torch.addmm(out, rows, self.weight.t(), out=out)

    def reference_logits(self, hidden: torch.Tensor) -> torch.Tensor:
        """Return the logits (..., V) of hidden (..., E), differentiable."""
        logits = F.linear(hidden, self.weight, self.bias)
        if self.lora_a is None:
            return logits
        return logits + self.lora_scale * F.linear(F.linear(hidden, self.lora_a), self.lora_b)


def check_linear(
    op: str,
    hidden: torch.Tensor,  # (..., E)
    head: Head,
    labels: torch.Tensor | None,  # (...)
    model: str = "",
) -> tuple[torch.Tensor, Head]:
    """Return hidden and head in one dtype: that of autocast, or the one they share.

    Raises ValueError if shapes or dtypes do not fit. model is a prefix of the names in messages: "student_".
    """
    weight, bias, lora_a, lora_b = head.tensors
    if weight.dim() != 2 or weight.shape[1] != hidden.shape[-1]:
        raise ValueError(
            f"{op}: {model}hidden is {tuple(hidden.shape)} and {model}weight {tuple(weight.shape)}: "
            "expected weight (V, E) with hidden's last size E"
        )
    if labels is not None and labels.shape != hidden.shape[:-1]:
        raise ValueError(
            f"{op}: labels are {tuple(labels.shape)}; expected {tuple(hidden.shape[:-1])} "
            "for this hidden (one label for each row)"
        )
    if bias is not None and bias.shape != weight.shape[:1]:
        raise ValueError(f"{op}: {model}bias is {tuple(bias.shape)}; expected {tuple(weight.shape[:1])}")
    if lora_a is not None and (lora_a.shape[1], lora_b.shape) != (weight.shape[1], (weight.shape[0], lora_a.shape[0])):
        raise ValueError(
            f"{op}: lora.a is {tuple(lora_a.shape)} and lora.b {tuple(lora_b.shape)}; "
            f"expected (R, {weight.shape[1]}) and ({weight.shape[0]}, R)"
        )
    dtype = autocast_dtype(hidden.device)
    if dtype is not None:
        return hidden.to(dtype), Head(*(None if t is None else t.to(dtype) for t in head.tensors), head.lora_scale)
    for t in head.tensors:
        if t is not None and t.dtype != hidden.dtype:
            raise ValueError(f"{op}: {model}hidden is {hidden.dtype} and a parameter {t.dtype}: expected the same")
    return hidden, head


def empty_loss(rows: torch.Tensor, head: Head) -> torch.Tensor:
    """Return 0, in at least fp32, with zero gradients for rows and parameters."""
    wide = torch.promote_types(rows.dtype, torch.float32)
    return sum(t[:0].sum(dtype=wide) for t in (rows, *head.tensors) if t is not None)


def choose_schedule(
    rows: torch.Tensor,  # (N, E)
    weight: torch.Tensor,  # (V, E)
    chunk_bytes: int,
    needs: tuple[bool, bool] | None = None,
) -> Schedule:
    """Return `schedule_of` these tensors. Free memory is queried only if the schedule needs much of it.

    needs: whether rows and weight need a gradient; None: as autograd says.
    """
    chip = chip_of(rows.device)
    needs_dx, needs_dw = needs or (torch.is_grad_enabled() and t.requires_grad for t in (rows, weight))
    sizes = (len(rows), weight.shape[1], weight.shape[0], rows.dtype)
    wide_products = adds_wide_products(chip) and (chip is None or not torch.compiler.is_compiling())
    products = ChunkProducts(needs_dx, max_slot_rows(rows), wide_products)
    options = {"needs_dw": needs_dw, "chunk_bytes": chunk_bytes, "products": products}
    schedule = schedule_of(*sizes, **options)
    if schedule.flushes and schedule.plan == "fast" and schedule.extra_bytes >= MIN_QUERY_BYTES:
        return schedule_of(*sizes, **options, free_bytes=free_bytes(rows.device))
    return schedule


def max_slot_rows(rows: torch.Tensor) -> int | None:
    """Return the most rows per matrix product; None: the default of the kernels."""
    return None if runs_triton(rows) else SLOT_ROWS_TORCH


@dataclass(frozen=True)
class Targets:
    """Labels and options of cross entropy."""

    labels: torch.Tensor  # (N,)
    options: LossOptions
    class_weight: torch.Tensor | None = None  # (V,)
    scale: torch.Tensor | None = None  # () or (N,): factor of the gradients
    statistics: RowStatistics | None = None  # where statistics of the rows are written; not for a trained layer

    def row_losses(
        self, logits: torch.Tensor, rows: slice, *, in_place: bool, **memory: torch.Tensor | None
    ) -> torch.Tensor:
        """Return the losses of some rows; overwrite their logits with the gradient if in_place.

        memory: lse and lead of these rows for `row_pass`.
        """
        if self.statistics is not None:
            write_statistics(logits, self.labels[rows], self.options, self.statistics.of(rows))
        scale = self.scale[rows] if self.scale is not None and self.scale.dim() else self.scale
        return row_pass(
            logits, self.labels[rows], self.options, weight=self.class_weight, gradient=logits if in_place else None,
            scale=scale, **memory,
        )  # fmt: skip


class Part(NamedTuple):
    """Logits, later gradients G, of some rows in the columns [first, last)."""

    g: torch.Tensor  # (c, last - first)
    first: int
    last: int


class ChunkedLoss:
    """Losses and gradients of rows, computed chunk by chunk. Sums over rows are at least fp32 until `result`."""

    def __init__(
        self,
        rows: torch.Tensor,  # (N, E)
        head: Head,
        row_losses: Callable[..., torch.Tensor],
        needs: Sequence[bool],  # which of rows and head.tensors need a gradient
        *,
        sums_wide: bool,
    ) -> None:
        """row_losses: called with the arguments of `Targets.row_losses`. sums_wide: accumulate dW in fp32."""
        self.rows = rows
        self.head = head
        self.row_losses = row_losses
        self.needs_grad = any(needs)
        self.losses: list[torch.Tensor] = []
        needs_dx, needs_dw, *needs_sums = needs
        self.wide = torch.promote_types(rows.dtype, torch.float32)
        self.d_rows = torch.empty_like(rows) if needs_dx else None
        self.d_weight = rows.new_empty(head.weight.shape, dtype=self.wide if sums_wide else None) if needs_dw else None
        self.d_bias, self.d_lora_a, self.d_lora_b = (
            rows.new_zeros(t.shape, dtype=self.wide) if needed else None
            for t, needed in zip(head.tensors[1:], needs_sums, strict=True)
        )

    def run_fast(self, slot: int, buffer_rows: int, width: int | None = None) -> None:
        """Take `slot` rows per product and accumulate dW every `buffer_rows`.

        width: columns of the buffer's rows, at least V.
        """
        n_rows = len(self.rows)
        vocab_size = len(self.head.weight)
        buffer = self.rows.new_empty((buffer_rows, width or vocab_size))
        for first in range(0, n_rows, buffer_rows):
            last = min(first + buffer_rows, n_rows)
            for start in range(first, last, slot):
                stop = min(start + slot, last)
                self._take(start, stop, buffer[start - first : stop - first])
            if self.d_weight is not None:
                g = buffer[: last - first, :vocab_size]
                _add_product(self.d_weight, g.t(), self.rows[first:last], beta=0 if first == 0 else 1)

    def run_in_groups(self, schedule: Schedule) -> None:
        """Take all logits at once, the first columns in the memory of dW."""
        n_rows = len(self.rows)
        vocab_size = len(self.head.weight)
        slot = schedule.slot
        lead, unused = self._lead(schedule.groups, schedule.slab)
        in_groups = schedule.groups * schedule.slab
        rest = self.rows.new_empty((n_rows, rest_stride(vocab_size - in_groups)))[:, : vocab_size - in_groups]
        sums = None
        if self.d_rows is not None:
            sums = unused[: len(unused) - len(unused) % (self.wide.itemsize // unused.itemsize)].view(self.wide)
            size = slot * self.rows.shape[1]
            sums = (sums[:size] if len(sums) >= size else sums.new_empty(size)).view(slot, -1)
        for start in range(0, n_rows, slot):
            stop = min(start + slot, n_rows)
            self._take(start, stop, rest[start:stop], lead, sums)
        self._add_dw_of_groups(lead)
        _add_product(self.d_weight[in_groups:], rest.t(), self.rows, beta=0)

    def run_lean(self, schedule: Schedule, targets: Targets) -> None:
        """Compute the logits twice, by rows and by columns."""
        rows = self.rows
        head = self.head
        slot = schedule.slot
        (n_rows, hidden_size), vocab_size = rows.shape, len(head.weight)
        lse = rows.new_empty(n_rows, 2, dtype=self.wide)
        # dW is not written before the first pass ends: its memory holds a slot of logits, and those that are kept.
        lead = None
        sums = None
        in_groups = schedule.groups * schedule.kept
        if schedule.groups:
            lead, unused = self._lead(schedule.groups, schedule.kept)
            stride = rest_stride(vocab_size - in_groups)
            rest = unused[: slot * stride].view(slot, stride)[:, : vocab_size - in_groups]
            sums = rows.new_empty((slot, hidden_size), dtype=self.wide) if self.d_rows is not None else None
        else:
            rest = self.d_weight.view(-1).view(rows.dtype)[: slot * vocab_size].view(slot, vocab_size)
        for start in range(0, n_rows, slot):
            stop = min(start + slot, n_rows)
            self._take(start, stop, rest[: stop - start], lead, sums, lse)
        if lead is not None:
            sums = None  # frees memory for the slabs
            self._add_dw_of_groups(lead)
        low_rank = head.low_rank(rows)
        buffer = rows.new_empty(n_rows * schedule.slab)
        for first in range(in_groups, vocab_size, schedule.slab):
            last = min(first + schedule.slab, vocab_size)
            g = buffer[: n_rows * (last - first)].view(n_rows, last - first)
            head.columns(first, last).write_logits(rows, low_rank, out=g)
            slab_pass(
                g, targets.labels, targets.options, first_col=first, vocab_size=vocab_size, lse=lse,
                scale=targets.scale, weight=targets.class_weight,
            )  # fmt: skip
            _add_product(self.d_weight[first:last], g.t(), rows, beta=0)

    def result(self) -> tuple[torch.Tensor, Gradients]:
        """Return the losses (N,) and the gradients of rows and head.tensors, None where not needed.

        dW is rounded to the rows' dtype, except in float16, whose sums are divided later. The others stay wide.
        """
        if self.d_weight is not None and self.rows.dtype is not torch.float16:
            self.d_weight = self.d_weight.to(self.rows.dtype)
        gradients = self.d_rows, self.d_weight, self.d_bias, self.d_lora_a, self.d_lora_b
        return torch.cat(self.losses), gradients

    def _lead(self, groups: int, width: int) -> tuple[torch.Tensor, torch.Tensor]:
        """Return the end of dW's memory as groups of columns of logits (K, N, S), and the memory before it."""
        if torch.compiler.is_compiling():  # inductor assumes that tensors do not share memory, and would copy
            raise ValueError("linear_cross_entropy: a schedule in groups cannot be compiled; do not pass a schedule")
        (n_rows, hidden_size), memory = self.rows.shape, self.d_weight.view(-1)
        assert memory.dtype == self.rows.dtype
        unused = memory.numel() - groups * n_rows * width
        assert min(unused - width * hidden_size, memory.numel() - width * (n_rows + groups * hidden_size)) >= 0
        return memory[unused:].view(groups, n_rows, width), memory[:unused]

    def _add_dw_of_groups(self, lead: torch.Tensor) -> None:
        """Write dW of the groups in order: what is written never overtakes what is still read (see tiles.py)."""
        width = lead.shape[2]
        for i, g in enumerate(lead):
            _add_product(self.d_weight[i * width : (i + 1) * width], g.t(), self.rows, beta=0)

    def _take(
        self,
        start: int,
        stop: int,
        rest: torch.Tensor,  # (c, >= V - K S)
        lead: torch.Tensor | None = None,  # (K, N, S)
        sums: torch.Tensor | None = None,  # (>= c, E), wide: memory for dX
        lse: torch.Tensor | None = None,  # (N, 2)
    ) -> None:
        """Compute one chunk of rows: logits into lead and rest, losses, and all gradients but dW."""
        chunk = slice(start, stop)
        vocab_size = len(self.head.weight)
        parts = []
        rows = self.rows[chunk]
        lse = None if lse is None else lse[chunk]
        if lead is not None:
            lead, width = lead[:, chunk], lead.shape[2]
            parts = [Part(g, i * width, (i + 1) * width) for i, g in enumerate(lead)]
        first = parts[-1].last if parts else 0
        logits = rest if rest.shape[1] == vocab_size - first else rest[:, : vocab_size - first]
        parts.append(Part(logits, first, vocab_size))
        low_rank = self.head.low_rank(rows)
        for part in parts:
            self.head.columns(part.first, part.last).write_logits(rows, low_rank, out=part.g)
        self.losses.append(self.row_losses(rest, chunk, in_place=self.needs_grad, lse=lse, lead=lead))
        if self.needs_grad:
            self._add_gradients(parts, low_rank, chunk, sums)

    def _add_gradients(
        self, parts: list[Part], low_rank: torch.Tensor | None, chunk: slice, sums: torch.Tensor | None
    ) -> None:
        """Compute dX of some rows and accumulate db, dA and dB."""
        # s G B (c, R)
        head = self.head
        through = None
        if low_rank is not None and (self.d_rows is not None or self.d_lora_a is not None):
            through = head.lora_scale * _product(parts, head.lora_b)
        if self.d_rows is not None:
            dx = self.d_rows[chunk]
            total = dx if sums is None else sums[: len(dx)]
            if through is not None:
                _add_product(total, through, head.lora_a, beta=0)
            for i, part in enumerate(parts):
                beta = int(i > 0 or through is not None)
                _add_product(total, part.g, head.weight[part.first : part.last], beta=beta)
            if sums is not None:
                dx.copy_(total)
        for part in parts:
            if self.d_bias is not None:
                self.d_bias[part.first : part.last] += part.g.sum(0, dtype=self.wide)
            if self.d_lora_b is not None:
                _add_product(self.d_lora_b[part.first : part.last], part.g.t(), low_rank, beta=1)
        if self.d_lora_a is not None:
            _add_product(self.d_lora_a, through.t(), self.rows[chunk], beta=1)


def run_chunks(
    rows: torch.Tensor,  # (N, E)
    head: Head,
    targets: Targets,
    schedule: Schedule,
    needs: Sequence[bool] = (False,) * 5,
) -> tuple[torch.Tensor, Gradients]:
    """Return the losses (N,) and the gradients of rows and head.tensors that are needed, times targets.scale."""
    loss = ChunkedLoss(rows, head, targets.row_losses, needs, sums_wide=schedule.sums_wide(rows.dtype))
    if loss.d_weight is not None and may_group(len(head.weight), rows.dtype) and runs_triton(rows):
        compile_row_kernels(rows, len(head.weight), targets)
    if loss.d_weight is None or (schedule.plan == "fast" and not schedule.groups):
        loss.run_fast(schedule.slot, schedule.slot if loss.d_weight is None else schedule.buffer)
    elif schedule.plan == "lean":
        loss.run_lean(schedule, targets)
    else:
        loss.run_in_groups(schedule)
    return loss.result()


def compile_row_kernels(rows: torch.Tensor, vocab_size: int, targets: Targets) -> None:
    """Compile `row_kernel` for rows in one part and for rows in groups, once, without a launch.

    The number of rows decides which of them a batch takes. Compiled at its first use, the second would hold up some
    later training step by a second.
    """
    weight = targets.class_weight
    scale = targets.scale
    chip = chip_of(rows.device)
    if not may_take_groups(chip) or torch.compiler.is_compiling():
        return
    with on_device(rows):
        _compile_row_kernels(
            rows.device, rows.dtype, vocab_size, targets.options, targets.labels.dtype,
            None if weight is None else weight.dtype, scale.dtype, scale.dim() > 0,
        )  # fmt: skip


@cached
def _compile_row_kernels(
    device: torch.device,
    logits: torch.dtype,
    vocab_size: int,
    options: LossOptions,
    labels: torch.dtype,
    weight: torch.dtype | None,
    scale: torch.dtype,
    scale_per_row: bool,
) -> None:
    """Compile with dtypes in place of tensors: Triton assumes that tensors of these dtypes begin at a vector."""
    chip = chip_of(device)
    losses = torch.float32
    plain = options.is_plain(weight is not None)
    for grouped in (False, True):
        # Triton compiles again only where divisibility by 16 differs: one number of columns stands for all.
        in_groups = MIN_GROUP_COLUMNS if grouped else 0
        stride = rest_stride(vocab_size - in_groups) if grouped else vocab_size
        rest_cols = vocab_size - in_groups if grouped else None
        tiling = row_tiling(chip.processors, vocab_size, logits.itemsize, chip, plain=plain, rest_cols=rest_cols)
        row_kernel.warmup(
            logits, labels, weight or losses, losses, losses, logits, scale, logits if grouped else losses,
            stride, stride, int(scale_per_row), chip.processors, vocab_size, tiling.swept,
            in_groups, in_groups, in_groups, *options.numbers, **options.flags(weight is not None),
            **tiling.constants(chip, saves_lse=False, needs_grad=True, grouped=grouped), grid=(tiling.programs,),
        )  # fmt: skip


def _product(parts: list[Part], matrix: torch.Tensor) -> torch.Tensor:
    """Return G (c, V) times matrix (V, R), rounded once."""
    if len(parts) == 1:
        return torch.mm(parts[0].g, matrix)
    total = matrix.new_empty((len(parts[0].g), matrix.shape[1]), dtype=torch.promote_types(matrix.dtype, torch.float32))
    for i, part in enumerate(parts):
        _add_product(total, part.g, matrix[part.first : part.last], beta=int(i > 0))
    return total.to(matrix.dtype)


def _add_product(total: torch.Tensor, a: torch.Tensor, b: torch.Tensor, *, beta: int) -> None:
    """Set total to beta · total + a b. total is at least as wide as the factors."""
    if total.dtype != a.dtype:
        chip = chip_of(total.device)
        tracing = torch.compiler.is_compiling()  # torch 2.11 fails to trace a product into a wider sum
        if accumulates_wide(chip) and total.device.type == "cuda" and not tracing:
            torch.addmm(total, a, b, out_dtype=total.dtype, beta=beta, out=total)
            return
        a = a.to(total.dtype)
        b = b.to(total.dtype)
    if beta == 0:  # inductor splits addmm into 0 · total + a b, which is NaN if the unwritten total holds NaN
        torch.mm(a, b, out=total)
    else:
        torch.addmm(total, a, b, beta=beta, out=total)
