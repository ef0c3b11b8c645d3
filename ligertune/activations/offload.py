"""Activation offloading: tensors wait in pinned host memory between forward and backward.

The tensor that was stored last is needed first. So a tensor is copied to the host when the next one is stored, and is
prefetched while the one after it is in use; the last one never leaves the device. At most two are on the device at a
time, and one without `overlap`: then the device waits for each copy, which on long rows takes a small part of a
layer's time. The copies run one after another on their own stream, so pinned memory can be reused once its last copy is
queued. What is said of a tensor holds for tensors that are stored together.

The GPUs of a host share its memory, so each of them copies slower than one GPU alone. `OffloadPace` measures how many
layers can offload a tensor without making the device wait: CUDA events give the time of a pass over the layers, of the
copies, and of the device's waits for them. They are read at the start of the next pass if the device has reached them,
so measuring never waits. A CUDA graph keeps the share of the pass before it.
"""

from __future__ import annotations

import itertools
import weakref
from collections.abc import Sequence

import torch
from torch import Tensor

from ligertune.activations.random_state import is_recording

BLOCK = 32 << 20  # bytes: torch rounds pinned memory up to a power of two, so blocks waste at most one block per tensor
ROOM = 0.97  # share of the time of the layers that copies may take
WRITTEN_OVER = "a tensor that the backward needs was written over before its copy to the host had begun"

Span = tuple[torch.cuda.Event, torch.cuda.Event]  # begin and end


class OffloadPace:
    """The share of layers that offload, spread evenly; all of them until a pass has been measured."""

    def __init__(self) -> None:
        self.share = 1.0
        self._measures = False  # only passes that `begin` are measured
        self._due = 0.0
        self._layers = 0
        self._ends: list[torch.cuda.Event] = []  # of the first layer and of the last one so far
        self._copies: list[Span] = []
        self._waits: list[Span] = []

    def begin(self, other: OffloadPace | None = None) -> None:
        """Start a pass over the layers, and set the share from the measurements of the last one.

        other: the pace of tensors that all layers offload over the same link, and that have priority.
        """
        copied, waited = ([], []) if other is None else (other._copies, other._waits)
        spans = [*self._copies, *self._waits, *copied, *waited]
        if len(self._ends) == 2:
            spans.append((self._ends[0], self._ends[1]))
        if self._layers > 1 and self._copies and _have_ended(spans):
            copies = _milliseconds(self._copies)
            waits = _milliseconds([*self._waits, *waited])
            layer = (self._ends[0].elapsed_time(self._ends[1]) - waits) / (self._layers - 1)
            taken = _milliseconds(copied) / self._layers
            # two layers at least, or nothing would be left to measure: the last stored tensors are never copied
            self.share = max(offloadable_share(layer, copies / len(self._copies), taken), 2 / self._layers)
        self._reset()
        if other is not None:
            other._reset()

    def _reset(self) -> None:
        self._measures = True
        self._due = 0.0
        self._layers = 0
        self._ends = []
        self._copies = []
        self._waits = []

    def should_offload(self) -> bool:
        """Count one more layer, and return whether it offloads its tensor."""
        if not is_recording():
            self._layers += 1
            self._ends = [*self._ends[:1], record_event()]
        return self.is_due()

    def is_due(self) -> bool:
        """Return True in `share` of the calls, evenly spread."""
        self._due += self.share
        if self._due < 1.0 - 1e-9:  # the sum of shares may miss 1 by rounding
            return False
        self._due -= 1.0
        return True

    def copied(self, began: torch.cuda.Event, ended: torch.cuda.Event) -> None:
        if self._measures and not is_recording():
            self._copies.append((began, ended))

    def waited(self, began: torch.cuda.Event, ended: torch.cuda.Event) -> None:
        if self._measures and not is_recording():
            self._waits.append((began, ended))


def offloadable_share(layer: float, copy: float, taken: float = 0.0) -> float:
    """Return the share of layers that can copy for `copy` ms each while all layers compute for `layer` ms each.

    taken: ms of a layer's time in which other tensors are copied.
    """
    return min(1.0, max(0.0, (ROOM * layer - taken) / copy)) if copy > 0 else 1.0


def record_event() -> torch.cuda.Event:
    """Record a timing event on the current stream."""
    event = torch.cuda.Event(enable_timing=True)
    event.record()
    return event


def _have_ended(spans: list[Span]) -> bool:
    return all(ended.query() for _, ended in spans)


def _milliseconds(spans: list[Span]) -> float:
    return sum(began.elapsed_time(ended) for began, ended in spans)


class OffloadedTensors:
    """Tensors that were stored together. Their host memory is free again when this object is deleted."""

    def __init__(self, offloader: ActivationOffloader, tensors: Sequence[Tensor]) -> None:
        self._offloader = offloader
        self._tensors: list[Tensor] | None = [tensor.detach() for tensor in tensors]  # they share the version counters
        self._versions = [tensor._version for tensor in tensors]
        self._forms = [(tensor.shape, tensor.dtype) for tensor in tensors]
        self._blocks: list[list[Tensor]] = []  # of each tensor
        self._copied: torch.cuda.Event | None = None

    def __del__(self) -> None:
        """Let the next user of this memory wait for a copy that is still running."""
        self._wait_for_copy()

    @property
    def on_device(self) -> bool:
        return self._tensors is not None

    @property
    def written_over(self) -> bool:
        """Return whether a tensor on the device is no longer what was stored."""
        if self._tensors is None:
            return False
        return any(tensor._version != version for tensor, version in zip(self._tensors, self._versions, strict=True))

    def take(self, *, prefetches: bool = True) -> list[Tensor]:
        """Return the tensors on their device, and prefetch those stored before them. May be called again."""
        tensors = self.prefetch()
        self._wait_for_copy()
        if self._blocks:
            self._tensors = None
            self._copied = None
        self._offloader.taken(self, prefetches=prefetches)
        return tensors

    def offload(self) -> None:
        """Start the copy to the host of tensors that are on the device."""
        assert self._tensors is not None
        if self.written_over:
            raise RuntimeError(WRITTEN_OVER)
        sources = self._tensors = [tensor.contiguous() for tensor in self._tensors]
        if not self._blocks:
            self._blocks = [self._offloader.blocks(source.nbytes) for source in sources]
            weakref.finalize(self, self._offloader.give_back, self._blocks)
        self._copied = self._offloader.copy(sources, self._blocks, to_host=True)

    def release(self) -> None:
        """Free the device's memory: later kernels wait for the copy."""
        if self._copied is not None:
            began = record_event()
            self._wait_for_copy()
            self._offloader.pace.waited(began, record_event())
        self._tensors = None
        self._copied = None

    def prefetch(self) -> list[Tensor]:
        """Start the copy back, unless the tensors are on the device, and return the tensors that the copy fills."""
        if self._tensors is None:
            device = self._offloader.device
            self._tensors = [torch.empty(shape, dtype=dtype, device=device) for shape, dtype in self._forms]
            self._copied = self._offloader.copy(self._tensors, self._blocks, to_host=False)
            self._versions = [tensor._version for tensor in self._tensors]  # it may be offloaded again
        return self._tensors

    def _wait_for_copy(self) -> None:
        if self._copied is not None:
            torch.cuda.current_stream(self._offloader.device).wait_event(self._copied)


class ActivationOffloader:
    """The stored tensors of one model and their pinned memory. On a CPU tensors stay where they are.

    overlap: copy while the device computes, which needs memory for one more tensor.
    priority: another offloader, in which every layer stores a tensor. Both copy on its stream, and `store_if_fast`
    takes only the time that its copies leave.
    max_pinned: bytes of pinned memory that `store_if_fast` may take; None: unlimited.
    """

    def __init__(
        self, *, overlap: bool = True, priority: ActivationOffloader | None = None, max_pinned: int | None = None
    ) -> None:
        self._overlap = overlap
        self._priority = priority
        self._max_pinned = max_pinned
        self._pinned_blocks = 0  # allocated so far
        self.device: torch.device | None = None
        self._stream: torch.cuda.Stream | None = None
        self.pace = OffloadPace()
        self._filling = False  # no tensor was taken since the first one was stored
        self._free: list[Tensor] = []
        self._stored: list[weakref.ref[OffloadedTensors]] = []
        self._leaving: OffloadedTensors | None = None

    def store_if_fast(self, *tensors: Tensor) -> OffloadedTensors | None:
        """Store `tensors`; return None if pinned memory is used up, or if the device would wait for the copy."""
        if not tensors[0].is_cuda:
            return self.store(*tensors)
        if not self._filling and not is_recording():
            self.pace.begin(None if self._priority is None else self._priority.pace)
            self._filling = True
        fast = self.pace.should_offload()
        return self.store(*tensors) if fast and self._fits_host(tensors) else None

    def _fits_host(self, tensors: Sequence[Tensor]) -> bool:
        new = sum(-(-tensor.nbytes // BLOCK) for tensor in tensors) - len(self._free)
        return self._max_pinned is None or BLOCK * (self._pinned_blocks + new) <= self._max_pinned

    def store(self, *tensors: Tensor) -> OffloadedTensors:
        """Store `tensors`. They must not be written over before the next ones are stored."""
        if tensors[0].is_cuda and self._stream is None:
            self.device = tensors[0].device
            self._stream = self._stream_of(self.device)
        self._release_leaving()
        last = self._last()
        if self._stream is not None and last is not None and last.on_device:
            last.offload()
            self._leaving = last
            if not self._overlap:
                self._release_leaving()
        stored = OffloadedTensors(self, tensors)
        self._stored.append(weakref.ref(stored))
        return stored

    def _stream_of(self, device: torch.device) -> torch.cuda.Stream:
        if self._priority is None:
            return torch.cuda.Stream(device)
        if self._priority._stream is None:
            self._priority.device = device
            self._priority._stream = torch.cuda.Stream(device)
        return self._priority._stream

    def taken(self, tensors: OffloadedTensors, *, prefetches: bool) -> None:
        """Forget tensors and prefetch those stored before them, unless these are still on the device."""
        self._filling = False
        self._stored = [ref for ref in self._stored if ref() not in (None, tensors)]
        last = self._last()
        if self._leaving is not last or not prefetches:
            self._release_leaving()
        self._leaving = None
        if prefetches:
            self.prefetch_last()

    def prefetch_last(self) -> None:
        """Start the copy back of the tensors that are needed next."""
        last = self._last()
        if last is not None and self._overlap:
            last.prefetch()

    def flush(self) -> None:
        """Release the tensor that is being copied: others are needed before the one stored last."""
        self._filling = False
        self._release_leaving()

    def _release_leaving(self) -> None:
        if self._leaving is not None:
            self._leaving.release()
            self._leaving = None

    def _last(self) -> OffloadedTensors | None:
        while self._stored and self._stored[-1]() is None:
            self._stored.pop()
        return self._stored[-1]() if self._stored else None

    def copy(self, tensors: list[Tensor], blocks: list[list[Tensor]], *, to_host: bool) -> torch.cuda.Event:
        """Queue copies after the work that the device has been given so far; return the event of their end."""
        assert self._stream is not None  # `store` makes it for the first tensor of a GPU
        self._stream.wait_stream(torch.cuda.current_stream(self.device))
        with torch.cuda.stream(self._stream):
            began = record_event()
            pieces = itertools.chain.from_iterable(map(_pieces, tensors))
            for piece, block in zip(pieces, itertools.chain.from_iterable(blocks), strict=True):
                host = block[: piece.numel()]
                source, target = (piece, host) if to_host else (host, piece)
                target.copy_(source, non_blocking=True)
            ended = record_event()
        if to_host:
            self.pace.copied(began, ended)
        return ended

    def blocks(self, nbytes: int) -> list[Tensor]:
        """Return blocks of pinned memory for `nbytes`, free ones first."""
        count = -(-nbytes // BLOCK)
        taken = self._free[:count]
        self._free = self._free[count:]
        self._pinned_blocks += count - len(taken)
        new = (torch.empty(BLOCK, dtype=torch.uint8, pin_memory=True) for _ in range(count - len(taken)))
        return [*taken, *new]

    def give_back(self, blocks: list[list[Tensor]]) -> None:
        self._free += itertools.chain.from_iterable(blocks)


def _pieces(tensor: Tensor) -> tuple[Tensor, ...]:
    """Return the bytes of a contiguous tensor in pieces of one block."""
    return torch.split(tensor.view(-1).view(torch.uint8), BLOCK)
