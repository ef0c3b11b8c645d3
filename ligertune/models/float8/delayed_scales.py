"""Delayed scales of float8 tensors: each follows from the largest values of earlier steps.

    scale = largest float8 / (HEADROOM · max of the last HISTORY steps' amax)

The kernel that quantises a tensor with this scale also finds its amax, so no pass over the tensor only looks for it.
Scales stay the same within an optimizer step: micro-batches and recomputed layers round as the first forward did. In
the first step there is no history, and each tensor is scaled by its own amax.

The history is saved with each checkpoint, so that a resumed run rounds as an uninterrupted one.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable
from dataclasses import dataclass
from typing import NamedTuple

import torch
from ligertune_kernels import quantize_float8
from ligertune_kernels.ops.float8.quantize_float8 import Output
from ligertune_kernels.ops.float8.tiles import PARTS
from torch import Tensor

from ligertune.models.float8.input_groups import InputGroup, group_layers
from ligertune.models.float8.quantized import Quantized

HISTORY = 16  # steps
# A tensor may grow twofold from its history before values are cut off. float8 is a floating-point type: a smaller scale
# costs no precision, only a bit of its range below.
HEADROOM = 2.0
ALIGNED = 4  # float32 values per scale: the kernel's loads of each are aligned


class SlotScale(NamedTuple):
    """How a kernel quantises a tensor that it computes: q = x · scale."""

    scale: Tensor  # () float32
    inverse: Tensor  # () float32
    amax: Tensor | None  # (PARTS,) float32: running maxima to update


def largest_value(x: Tensor) -> Tensor:  # () float32
    return torch.linalg.vector_norm(x, float("inf")).float()


@torch.no_grad()
def quantize_by_amax(
    x: Tensor, dtype: torch.dtype, *, rows: Output = True, columns: Output = True, amax: Tensor | None = None
) -> Quantized:
    """Quantise with the scale that x's own largest value gives. amax (): it is already known."""
    scale = _scale_by(largest_value(x) if amax is None else amax, dtype)
    copies = quantize_float8(x, scale, dtype=dtype, rows=rows, columns=columns)
    return Quantized(copies.rows, copies.columns, scale.reciprocal())


def _scale_by(amax: Tensor, dtype: torch.dtype) -> Tensor:
    # for a tensor of zeros any scale is right, and max / 0 would be infinite
    return torch.where(amax > 0, torch.finfo(dtype).max / amax, 1.0)


@dataclass(frozen=True)
class _Input:
    """The last quantised input of a layer, for the next layers that read the same tensor."""

    tensor: weakref.ref[Tensor]
    version: int
    slot: int
    recorded: bool
    found: Quantized

    def serves(self, x: Tensor, *, columns: bool, record: bool) -> bool:
        """Return whether x is the same tensor with the same values, in the copies that are needed."""
        same = self.tensor() is x and self.version == x._version and self.recorded == record
        return same and (self.found.by_columns is not None or not columns)


class DelayedScales:
    """Scales and running amax of a model's float8 tensors: one slot per tensor.

    sizes: out_features and in_features of each layer by its first slot, which is its input's; those of its weight and
    of its output gradient follow.
    """

    def __init__(
        self, dtypes: list[torch.dtype], device: torch.device, sizes: dict[int, tuple[int, int]] | None = None
    ) -> None:
        self.dtypes = dtypes
        self.steps = 0
        self.forgotten = 0  # how often `forget_copies` was called
        self._sizes = sizes or {}
        self.groups: dict[int, InputGroup] = {}  # by a layer's first slot
        slots = len(dtypes)
        self.largest = torch.tensor([torch.finfo(dtype).max for dtype in dtypes], device=device)  # (slots,)
        self.history = torch.zeros(HISTORY, slots, device=device)
        self.parts = torch.zeros(slots, PARTS, device=device)  # running amax of this step
        self.scale = torch.ones(slots, ALIGNED, device=device)
        self.inverse = torch.ones(slots, ALIGNED, device=device)
        # Views of these, made once: each call of a layer would spend some microseconds of the host on them.
        self._of_slot = [SlotScale(*one) for one in zip(self.scale[:, 0], self.inverse[:, 0], self.parts, strict=True)]
        self._sources = list(range(slots))  # of layers that read the same tensor, the input's slot of one of them
        self._shared: Tensor | None = None  # slots that share a scale have the same number; None after a change
        self._last: _Input | None = None

    @torch.no_grad()
    def quantize(
        self, slot: int, x: Tensor, *, rows: Output = True, columns: Output = True, record: bool = True
    ) -> Quantized:
        """Quantise x with the scale of a slot. record: x's amax counts for later steps."""
        dtype = self.dtypes[slot]
        scale, inverse, parts = self._scale_of(slot, record)
        if self.steps:
            copies = quantize_float8(x, scale, dtype=dtype, rows=rows, columns=columns, amax=parts)
            return Quantized(copies.rows, copies.columns, inverse)
        amax = largest_value(x)
        if parts is not None:
            parts[0] = torch.maximum(parts[0], amax)
        return quantize_by_amax(x, dtype, rows=rows, columns=columns, amax=amax)

    def _scale_of(self, slot: int, record: bool) -> SlotScale:
        return self._of_slot[slot] if record else self._of_slot[slot]._replace(amax=None)

    @torch.no_grad()
    def scales_of(
        self, slots: tuple[int, ...], find_maxima: Callable[[list[Tensor]], object], *, record: bool
    ) -> list[SlotScale]:
        """Return the scales of tensors that one kernel computes and quantises.

        find_maxima: compute the tensors and update running maxima (PARTS,). It is called in the first step only, whose
        scales follow from them. record: the amax of the tensors counts for later steps.
        """
        if self.steps:
            return [self._scale_of(slot, record) for slot in slots]
        found = list(torch.zeros(len(slots), PARTS, device=self.parts.device))
        find_maxima(found)
        if record:
            for slot, maxima in zip(slots, found, strict=True):
                self.parts[slot] = torch.maximum(self.parts[slot], maxima)
        scales = [_scale_by(maxima.amax(), self.dtypes[slot]) for slot, maxima in zip(slots, found, strict=True)]
        return [SlotScale(scale, scale.reciprocal(), None) for scale in scales]

    def quantize_input(self, slot: int, x: Tensor, *, columns: bool, record: bool) -> Quantized:
        """Quantise a layer's input. Layers that read the same tensor one after the other share its copies."""
        last = None if x.is_inference() else self._last
        if last is not None and last.serves(x, columns=columns, record=record):
            self._share(slot, last.slot)
            return last.found
        found = self.quantize(slot, x, columns=columns, record=record)
        if not x.is_inference():
            self._last = _Input(weakref.ref(x), x._version, slot, record, found)
        return found

    def forget_copies(self) -> None:
        """Let each layer quantise its input and its weight anew."""
        self._last = None
        self.forgotten += 1

    def _share(self, slot: int, other: int) -> None:
        own = self._sources[slot]
        source = self._sources[other]
        if own != source:
            self._sources = [source if each == own else each for each in self._sources]
            self._shared = None

    @torch.no_grad()
    def update(self, reduce_max: Callable[[Tensor], Tensor]) -> None:
        """Compute the scales of the next step. reduce_max: the largest values over ranks, which share the scales."""
        if self._shared is None:
            self._group_layers()
        self._last = None
        self.history[self.steps % HISTORY] = reduce_max(self.parts.amax(1))
        self.parts.zero_()
        self.steps += 1
        self._set_scales()

    def _group_layers(self) -> None:
        """Group the layers that read the same tensor: their weights share a scale, and so do their output gradients."""
        self.groups = group_layers(self._sources, self._sizes)
        shared = list(self._sources)
        for slot, group in self.groups.items():
            shared[slot + 1 : slot + 3] = group.first + 1, group.first + 2
        self._shared = torch.tensor(shared, device=self.parts.device)

    def _set_scales(self) -> None:
        assert self._shared is not None  # both callers group the layers before
        amax = self.history.amax(0)
        amax = torch.zeros_like(amax).scatter_reduce_(0, self._shared, amax, "amax")[self._shared]
        scale = torch.where(amax > 0, self.largest / (HEADROOM * amax), 1.0)
        self.scale[:, 0] = scale
        self.inverse[:, 0] = scale.reciprocal()

    def state(self) -> dict[str, Tensor]:
        """Return what a resumed run needs, in host memory."""
        sources = torch.tensor(self._sources)
        return {"history": self.history.cpu(), "steps": torch.tensor(self.steps), "sources": sources}

    @torch.no_grad()
    def load(self, state: dict[str, Tensor]) -> None:
        """Continue from a saved state. Raises ValueError if it belongs to another model."""
        if state["history"].shape != self.history.shape:
            found = tuple(state["history"].shape)
            expected = tuple(self.history.shape)
            raise ValueError(f"float8 scales have shape {found}: expected {expected}")
        self.history.copy_(state["history"])
        self.steps = int(state["steps"])
        if self.steps:
            if "sources" in state:  # checkpoints of older versions have none: the next step finds them
                self._sources = state["sources"].tolist()
            self._group_layers()
            self._set_scales()
