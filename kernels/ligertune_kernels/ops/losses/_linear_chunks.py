"""The two schedules of linear_cross_entropy: chunks of rows through the products and the row pass, gradients alongside.

    Z = X Wᵀ + b + s (X Aᵀ) Bᵀ        G = dloss/dZ        dX = G W + s (G B) A        dW = Gᵀ X        db = sum_i G_i
    dA = s (G B)ᵀ X                   dB = s Gᵀ (X Aᵀ)    with A (R, E) and B (V, R), the low-rank term, where given

The logits of a chunk are multiplied into a reused buffer (cuBLAS), which the row pass turns into G in place.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import NamedTuple

import torch

from ligertune_kernels.launcher import chip_of
from ligertune_kernels.ops.losses._row_pass import Terms, row_pass, slab_pass
from ligertune_kernels.ops.losses._schedule import Schedule, rest_stride


class Needs(NamedTuple):
    """Which gradients are wanted."""

    hidden: bool = False
    weight: bool = False
    bias: bool = False
    lora_a: bool = False
    lora_b: bool = False


@dataclass(frozen=True)
class Head:
    """A linear layer: weight (V, E), bias (V,), and of a low-rank term lora_a (R, E), lora_b (V, R), lora_scale."""

    weight: torch.Tensor
    bias: torch.Tensor | None = None
    lora_a: torch.Tensor | None = None
    lora_b: torch.Tensor | None = None
    lora_scale: float = 1.0

    def columns(self, first: int, last: int) -> Head:
        """The layer of some of its outputs."""
        bias, lora_b = (None if t is None else t[first:last] for t in (self.bias, self.lora_b))
        return Head(self.weight[first:last], bias, self.lora_a, lora_b, self.lora_scale)

    def narrowed(self, rows: torch.Tensor) -> torch.Tensor | None:
        """s X Aᵀ (N, R), what the low-rank term knows of the rows."""
        return None if self.lora_a is None else self.lora_scale * torch.mm(rows, self.lora_a.t())

    def logits(self, rows: torch.Tensor, narrow: torch.Tensor | None, out: torch.Tensor) -> None:
        """The low-rank term is written first: the large product then adds to it on its way out of the registers."""
        if narrow is None:
            _logits(rows, self.weight, self.bias, out=out)
        else:
            _logits(narrow, self.lora_b, self.bias, out=out)
            torch.addmm(out, rows, self.weight.t(), out=out)


@dataclass(frozen=True)
class Targets:
    """What the logits are judged by: labels (N,), the terms of the loss, class weights (V,), scale (one or N)."""

    labels: torch.Tensor
    terms: Terms
    class_weight: torch.Tensor | None = None
    scale: torch.Tensor | None = None

    def pass_over(
        self,
        logits: torch.Tensor,
        start: int,
        stop: int,
        *,
        turns: bool,
        lse: torch.Tensor | None = None,
        lead: torch.Tensor | None = None,
    ) -> torch.Tensor:
        """The losses of some rows; where asked to, the logits are turned into their gradient."""
        scale = self.scale[start:stop] if self.scale is not None and self.scale.dim() else self.scale
        return row_pass(
            logits, self.labels[start:stop], self.terms, weight=self.class_weight,
            gradient=logits if turns else None, scale=scale, lse=None if lse is None else lse[start:stop], lead=lead,
        )  # fmt: skip


class Part(NamedTuple):
    """G (c, last - first) of some rows, in the columns from first to last."""

    g: torch.Tensor
    first: int
    last: int


@dataclass
class Gradients:
    """What the chunks gave; None where nobody asked. Sums over rows are wide until `rounded`."""

    losses: torch.Tensor  # (N,)
    hidden: torch.Tensor | None = None
    weight: torch.Tensor | None = None
    bias: torch.Tensor | None = None
    lora_a: torch.Tensor | None = None
    lora_b: torch.Tensor | None = None
    parts: list[torch.Tensor] = field(default_factory=list)  # the losses so far

    @classmethod
    def wanted(cls, x: torch.Tensor, head: Head, needs: Needs, *, sums_wide: bool) -> Gradients:
        dtype, wide = x.dtype, torch.promote_types(x.dtype, torch.float32)
        weight, lora_a, lora_b = head.weight, head.lora_a, head.lora_b
        return cls(
            losses=x.new_empty(0),
            hidden=torch.empty_like(x) if needs.hidden else None,
            weight=torch.empty(weight.shape, dtype=wide if sums_wide else dtype, device=x.device)
            if needs.weight
            else None,
            bias=x.new_zeros(weight.shape[0], dtype=wide) if needs.bias else None,
            lora_a=x.new_zeros(lora_a.shape, dtype=wide) if needs.lora_a else None,
            lora_b=x.new_zeros(lora_b.shape, dtype=wide) if needs.lora_b else None,
        )

    def rounded(self, dtype: torch.dtype) -> Gradients:
        """All losses in one, and dW in `dtype`, unless that is float16, whose sums are not divided yet."""
        self.losses = torch.cat(self.parts)
        if self.weight is not None and dtype is not torch.float16:
            self.weight = self.weight.to(dtype)
        return self

    def add_rows(
        self,
        head: Head,
        x: torch.Tensor,
        narrow: torch.Tensor | None,
        parts: Sequence[Part],
        start: int,
        stop: int,
        sums: torch.Tensor | None = None,
    ) -> None:
        """All that G (c, V) of some rows gives, but dW. Of G in several parts dX is summed in `sums`, fp32 (c, E)."""
        through = None  # s G B (c, R)
        if narrow is not None and (self.hidden is not None or self.lora_a is not None):
            through = head.lora_scale * _product(parts, head.lora_b)
        if self.hidden is not None:
            dx = self.hidden[start:stop]
            total = dx if sums is None else sums[: stop - start]
            if through is not None:
                _add_product(total, through, head.lora_a, beta=0)
            for i, part in enumerate(parts):
                _add_product(total, part.g, head.weight[part.first : part.last], beta=int(i > 0 or through is not None))
            if sums is not None:
                dx.copy_(total)
        for part in parts:
            if self.bias is not None:
                self.bias[part.first : part.last] += part.g.sum(0, dtype=self.bias.dtype)
            if self.lora_b is not None:
                _add_product(self.lora_b[part.first : part.last], part.g.t(), narrow, beta=1)
        if self.lora_a is not None:
            _add_product(self.lora_a, through.t(), x[start:stop], beta=1)


def run_chunks(x: torch.Tensor, head: Head, targets: Targets, needs: Needs, schedule: Schedule) -> Gradients:
    """Losses (N,) of rows (N, E) and the gradients that are needed, times the targets' scale."""
    found = Gradients.wanted(x, head, needs, sums_wide=schedule.sums_wide(x.dtype))
    run = _fast
    if needs.weight and (schedule.plan == "lean" or schedule.groups):
        run = _lean if schedule.plan == "lean" else _in_groups
    run(x, head, targets, needs, schedule, found)
    return found.rounded(x.dtype)  # the buffers are gone


def _fast(x: torch.Tensor, head: Head, targets: Targets, needs: Needs, schedule: Schedule, found: Gradients) -> None:
    n_rows, vocab_size = len(x), len(head.weight)
    height = schedule.slot if found.weight is None else schedule.buffer
    buffer = x.new_empty((height, vocab_size))
    for first in range(0, n_rows, height):
        last = min(first + height, n_rows)
        for start in range(first, last, schedule.slot):
            stop = min(start + schedule.slot, last)
            _take(x, head, targets, needs, found, start, stop, buffer[start - first : stop - first])
        if found.weight is not None:
            _add_product(found.weight, buffer[: last - first].t(), x[first:last], beta=0 if first == 0 else 1)


def _in_groups(
    x: torch.Tensor, head: Head, targets: Targets, needs: Needs, schedule: Schedule, found: Gradients
) -> None:
    """All logits at once, the first columns in the memory of dW: see schedule.py for why dW never overtakes them."""
    n_rows, vocab_size = len(x), len(head.weight)
    lead, unused = _lead(found.weight, x, schedule.groups, schedule.slab)
    in_groups = schedule.groups * schedule.slab
    rest = x.new_empty((n_rows, rest_stride(vocab_size - in_groups)))[:, : vocab_size - in_groups]
    sums = None
    if found.hidden is not None:
        wide = torch.promote_types(x.dtype, torch.float32)
        sums = unused[: len(unused) - len(unused) % (wide.itemsize // x.dtype.itemsize)].view(wide)
        size = schedule.slot * x.shape[1]
        sums = (sums[:size] if len(sums) >= size else x.new_empty(size, dtype=wide)).view(schedule.slot, -1)
    for start in range(0, n_rows, schedule.slot):
        stop = min(start + schedule.slot, n_rows)
        _take_in_groups(x, head, targets, found, start, stop, lead[:, start:stop], rest[start:stop], sums)
    _dw_of_groups(found.weight, lead, x)
    _add_product(found.weight[in_groups:], rest.t(), x, beta=0)


def _lean(x: torch.Tensor, head: Head, targets: Targets, needs: Needs, schedule: Schedule, found: Gradients) -> None:
    (n_rows, hidden_size), vocab_size = x.shape, len(head.weight)
    wide = torch.promote_types(x.dtype, torch.float32)
    lse = x.new_empty(n_rows, 2, dtype=wide)
    # dW is not written until all rows are through: its memory holds a slot of logits, and those that are kept
    in_groups, slot = schedule.groups * schedule.kept, schedule.slot
    if schedule.groups:
        lead, unused = _lead(found.weight, x, schedule.groups, schedule.kept)
        stride = rest_stride(vocab_size - in_groups)
        rest = unused[: slot * stride].view(slot, stride)[:, : vocab_size - in_groups]
        sums = x.new_empty((slot, hidden_size), dtype=wide) if found.hidden is not None else None
    else:
        rest = found.weight.view(-1).view(x.dtype)[: slot * vocab_size].view(slot, vocab_size)
    for start in range(0, n_rows, slot):
        stop = min(start + slot, n_rows)
        here = rest[: stop - start]
        if schedule.groups:
            _take_in_groups(x, head, targets, found, start, stop, lead[:, start:stop], here, sums, lse)
        else:
            _take(x, head, targets, needs, found, start, stop, here, lse)
    if schedule.groups:
        sums = None  # its memory is the slab's now
        _dw_of_groups(found.weight, lead, x)
    narrow = head.narrowed(x)
    buffer = x.new_empty(n_rows * schedule.slab)
    for first in range(in_groups, vocab_size, schedule.slab):
        last = min(first + schedule.slab, vocab_size)
        g = buffer[: n_rows * (last - first)].view(n_rows, last - first)
        head.columns(first, last).logits(x, narrow, out=g)
        slab_pass(
            g, targets.labels, targets.terms, first_col=first, vocab_size=vocab_size, lse=lse, scale=targets.scale,
            weight=targets.class_weight,
        )  # fmt: skip
        _add_product(found.weight[first:last], g.t(), x, beta=0)


def _lead(d_weight: torch.Tensor, x: torch.Tensor, groups: int, width: int) -> tuple[torch.Tensor, torch.Tensor]:
    """The end of dW's memory as groups (K, N, S) of columns of logits, and what is before it."""
    if torch.compiler.is_compiling():  # it takes memory for a tensor's alone, and would copy what is shared
        raise ValueError("linear_cross_entropy: a schedule in groups cannot be compiled; leave the schedule to the op")
    (n_rows, hidden_size), memory = x.shape, d_weight.view(-1)
    assert memory.dtype == x.dtype
    unused = memory.numel() - groups * n_rows * width
    assert min(unused - width * hidden_size, memory.numel() - width * (n_rows + groups * hidden_size)) >= 0
    return memory[unused:].view(groups, n_rows, width), memory[:unused]


def _take_in_groups(
    x: torch.Tensor,
    head: Head,
    targets: Targets,
    found: Gradients,
    start: int,
    stop: int,
    lead: torch.Tensor,
    rest: torch.Tensor,
    sums: torch.Tensor | None,
    lse: torch.Tensor | None = None,
) -> None:
    """`_take` with the logits in lead (K, c, S) and rest (c, V - K S)."""
    rows, width, in_groups = x[start:stop], lead.shape[2], lead.shape[0] * lead.shape[2]
    narrow = head.narrowed(rows)
    parts = [Part(g, i * width, (i + 1) * width) for i, g in enumerate(lead)]
    parts.append(Part(rest, in_groups, in_groups + rest.shape[1]))
    for part in parts:
        head.columns(part.first, part.last).logits(rows, narrow, out=part.g)
    found.parts.append(targets.pass_over(rest, start, stop, turns=True, lse=lse, lead=lead))
    found.add_rows(head, x, narrow, parts, start, stop, sums)


def _dw_of_groups(d_weight: torch.Tensor, lead: torch.Tensor, x: torch.Tensor) -> None:
    """A group at a time, in order: see schedule.py for why what is written never overtakes what is read."""
    width = lead.shape[2]
    for i, g in enumerate(lead):
        _add_product(d_weight[i * width : (i + 1) * width], g.t(), x, beta=0)


def _take(
    x: torch.Tensor,
    head: Head,
    targets: Targets,
    needs: Needs,
    found: Gradients,
    start: int,
    stop: int,
    buffer: torch.Tensor,
    lse: torch.Tensor | None = None,
) -> None:
    """One chunk: logits into the buffer (c, V), losses and G from them, and what G gives."""
    rows = x[start:stop]
    narrow = head.narrowed(rows)
    head.logits(rows, narrow, out=buffer)
    found.parts.append(targets.pass_over(buffer, start, stop, turns=any(needs), lse=lse))
    if any(needs):
        found.add_rows(head, x, narrow, [Part(buffer, 0, len(head.weight))], start, stop)


def _logits(rows: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None, *, out: torch.Tensor) -> None:
    if bias is None:
        torch.mm(rows, weight.t(), out=out)
    else:
        torch.addmm(bias, rows, weight.t(), out=out)


def _product(parts: Sequence[Part], matrix: torch.Tensor) -> torch.Tensor:
    """G (c, V) times matrix (V, R), rounded once."""
    if len(parts) == 1:
        return torch.mm(parts[0].g, matrix)
    wide = torch.promote_types(matrix.dtype, torch.float32)
    total = matrix.new_empty((len(parts[0].g), matrix.shape[1]), dtype=wide)
    for i, part in enumerate(parts):
        _add_product(total, part.g, matrix[part.first : part.last], beta=int(i > 0))
    return total.to(matrix.dtype)


def _add_product(total: torch.Tensor, a: torch.Tensor, b: torch.Tensor, *, beta: int) -> None:
    """total = beta · total + a b, with a total at least as wide as the factors."""
    if total.dtype == a.dtype:
        torch.addmm(total, a, b, beta=beta, out=total)
        return
    chip = chip_of(total.device)
    tracing = torch.compiler.is_compiling()  # torch 2.11 fails to trace a product into a wider sum
    if chip is not None and chip.vendor == "nvidia" and total.device.type == "cuda" and not tracing:
        torch.addmm(total, a, b, out_dtype=total.dtype, beta=beta, out=total)
    else:
        torch.addmm(total, a.to(total.dtype), b.to(total.dtype), beta=beta, out=total)
