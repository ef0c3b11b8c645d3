"""Layers that read the same tensor, such as the query, key and value projections: one product for its gradient.

    dx = dq Wq + dk Wk + dv Wv = [dq dk dv] [Wq; Wk; Wv]

Separate products would each write a gradient in 16 bits, which autograd would then add. So the layers of a group share
one scale for their weights, and one for their output gradients. They write their weights into slices of one matrix, and
their output gradients into slices of another.

The layers are modules of their own, which the attention calls one after the other. The first of them also returns an
empty tensor, its `token`, and the others read the token in place of x. So autograd runs the backward of the others
first. Each writes its quantised output gradient into the group's matrix; the backward of the first multiplies.
"""

from __future__ import annotations

import itertools
import weakref
from collections.abc import Hashable
from dataclasses import dataclass

import torch
from torch import Tensor

from ligertune.models.float8.quantized import GRADIENT, OPERAND, Quantized, float8_product

# Outputs per input. With more, as gate and up have, the product takes so long that the additions hardly count.
MOST_OUTPUTS = 4


class InputGroup:
    """The layers of a model that read the same tensor, by the first slot of each."""

    def __init__(self, widths: dict[int, int]) -> None:  # out_features by slot
        ends = list(itertools.accumulate(widths.values()))
        self.places = {slot: slice(end - width, end) for (slot, width), end in zip(widths.items(), ends, strict=True)}
        self.width = ends[-1]
        self.first = min(widths)
        self._written: dict[int, Hashable] = {}
        self._columns: Tensor | None = None  # (E, width) float8
        self._open: _OpenCall | None = None

    def columns_for(self, slot: int, version: Hashable, weight: Tensor) -> tuple[Tensor, Tensor]:
        """Return where a layer writes its weight by columns (E, F), and the matrix (E, width) it is a slice of.

        A backward may still need what an older version of the weight has written: that matrix is left as it is.
        """
        if self._columns is None or self._written.get(slot, version) != version:
            size = weight.shape[1], self.width
            self._columns = torch.empty(size, dtype=OPERAND, device=weight.device)
            self._written = {}
        self._written[slot] = version
        return self._columns[:, self.places[slot]], self._columns

    def call_of(self, slot: int, x: Tensor) -> tuple[JointCall | None, Tensor | None]:
        """Return what a layer's call on x shares with the others', and the token; no token for the first layer.

        There is no call if x needs no gradient.
        """
        if not (x.requires_grad and torch.is_grad_enabled()):
            return None, None
        found = self._open
        if found is None or not found.takes(slot, x):
            self._open = None
            return JointCall(self, slot), None
        found.slots.add(slot)
        if len(found.slots) == len(self.places):
            self._open = None  # the token holds the graph
        return found.call, found.token

    def open(self, call: JointCall, x: Tensor, token: Tensor) -> None:
        """Let the next layers that read x take part in the first one's call."""
        self._open = _OpenCall(call, weakref.ref(x), x._version, token, {call.first})


@dataclass(frozen=True)
class _OpenCall:
    """A call that not all layers of the group have taken part in."""

    call: JointCall
    tensor: weakref.ref[Tensor]
    version: int
    token: Tensor  # (0,)
    slots: set[int]

    def takes(self, slot: int, x: Tensor) -> bool:
        return self.tensor() is x and self.version == x._version and slot not in self.slots


class JointCall:
    """The backward of one call of each layer on the same tensor. It holds no token, which would hold its graph."""

    def __init__(self, group: InputGroup, first: int) -> None:
        self.group = group
        self.first = first
        self._rows: Tensor | None = None  # (N, width) float8
        self._arrived: dict[int, tuple[Quantized, Quantized]] = {}
        self._backward = -1  # autograd's number of the backward pass in which they arrived

    def rows_for(self, slot: int, dy: Tensor) -> Tensor:  # (N, F)
        """Return where a layer writes its output gradient by rows."""
        if self._rows is None:
            self._rows = torch.empty(dy.shape[:-1].numel(), self.group.width, dtype=GRADIENT, device=dy.device)
        return self._rows[:, self.group.places[slot]]

    def leave(self, slot: int, dy: Quantized, weight: Quantized) -> None:
        """Keep a layer's quantised gradient and weight for the first one's backward."""
        backward = torch._C._current_graph_task_id()
        if backward != self._backward:  # an earlier pass that needed no gradient of x may have left some
            self._arrived = {}
            self._backward = backward
        self._arrived[slot] = dy, weight

    def input_gradient(self, dtype: torch.dtype) -> Tensor:  # (N, E)
        """Return the sum of the products of the gradients that have arrived, and forget them."""
        arrived = self._arrived
        rows = self._rows
        self._arrived = {}
        self._rows = None
        (dy, weight), *others = arrived.values()
        whole = weight.whole
        is_complete = len(arrived) == len(self.group.places) and all(w.whole is whole for _, w in others)
        if is_complete and rows is not None and whole is not None:
            return float8_product(rows, whole, dy.inverse, weight.inverse, dtype, fast=False)
        # A layer took no part, or a weight changed between the calls.
        dx = float8_product(dy.rows, weight.columns, dy.inverse, weight.inverse, dtype, fast=False)
        for dy, weight in others:
            dx += float8_product(dy.rows, weight.columns, dy.inverse, weight.inverse, dtype, fast=False)
        return dx


def group_layers(sources: list[int], sizes: dict[int, tuple[int, int]]) -> dict[int, InputGroup]:
    """Return the group of each layer that has one, by the layer's first slot.

    sources: by slot, the same number for layers that read the same tensor. sizes: out_features and in_features by slot.
    """
    members: dict[int, list[int]] = {}
    for slot in sizes:
        members.setdefault(sources[slot], []).append(slot)
    groups = {}
    for slots in members.values():
        widths = {slot: sizes[slot][0] for slot in slots}
        if len(slots) > 1 and sum(widths.values()) <= MOST_OUTPUTS * sizes[slots[0]][1]:
            groups.update(dict.fromkeys(slots, InputGroup(widths)))
    return groups
