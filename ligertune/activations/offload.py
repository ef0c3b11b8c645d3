"""Activation offloading: tensors wait in pinned host memory between forward and backward.

The tensor that was stored last is needed first. So a tensor is copied to the host when the next one is stored, and is
prefetched while the one after it is in use; the last one never leaves the device. At most two are on the device at a
time, and one without `overlap`: then the device waits for each copy, which on long rows takes a small part of a
layer's time. The copies run one after another on their own stream, so pinned memory can be reused once its last copy is
queued.

The GPUs of a host share its memory, so each of them copies slower than one GPU alone. `OffloadPace` measures how many
layers can offload a tensor without making the device wait: CUDA events give the time of a pass over the layers, of the
copies, and of the device's waits for them. They are read at the start of the next pass if the device has reached them,
so measuring never waits.
"""

from __future__ import annotations

import weakref

import torch
from torch import Tensor

BLOCK = 32 << 20  # bytes: torch rounds pinned memory up to a power of two, so blocks waste at most one block per tensor
ROOM = 0.97  # share of the time of the layers that copies may take
WRITTEN_OVER = "a tensor of {shape} that the backward needs was written over before its copy to the host had begun"

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

    def begin(self) -> None:
        """Start a pass over the layers, and set the share from the measurements of the last one."""
        spans = [*self._copies, *self._waits]
        if len(self._ends) == 2:
            spans.append((self._ends[0], self._ends[1]))
        if self._layers > 1 and self._copies and _have_ended(spans):
            copies = _milliseconds(self._copies)
            waits = _milliseconds(self._waits)
            layer = (self._ends[0].elapsed_time(self._ends[1]) - waits) / (self._layers - 1)
            # one layer at least, or there would be nothing left to measure
            self.share = max(offloadable_share(layer, copies / len(self._copies)), 1 / self._layers)
        self._measures = True
        self._due = 0.0
        self._layers = 0
        self._ends = []
        self._copies = []
        self._waits = []

    def should_offload(self) -> bool:
        """Count one more layer, and return whether it offloads its tensor."""
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
        if self._measures:
            self._copies.append((began, ended))

    def waited(self, began: torch.cuda.Event, ended: torch.cuda.Event) -> None:
        if self._measures:
            self._waits.append((began, ended))


def offloadable_share(layer: float, copy: float) -> float:
    """Return the share of layers that can copy for `copy` ms each while all layers compute for `layer` ms each."""
    return min(1.0, max(0.0, ROOM * layer / copy)) if copy > 0 else 1.0


def record_event() -> torch.cuda.Event:
    """Record a timing event on the current stream."""
    event = torch.cuda.Event(enable_timing=True)
    event.record()
    return event


def _have_ended(spans: list[Span]) -> bool:
    return all(ended.query() for _, ended in spans)


def _milliseconds(spans: list[Span]) -> float:
    return sum(began.elapsed_time(ended) for began, ended in spans)


class OffloadedTensor:
    """One stored tensor. Its host memory is free again when this object is deleted."""

    def __init__(self, offloader: ActivationOffloader, tensor: Tensor) -> None:
        self._offloader = offloader
        self._tensor: Tensor | None = tensor.detach()  # detach shares the version counter
        self._version = tensor._version
        self._shape = tensor.shape
        self._dtype = tensor.dtype
        self._blocks: list[Tensor] = []
        self._copied: torch.cuda.Event | None = None

    def __del__(self) -> None:
        """Let the next user of this memory wait for a copy that is still running."""
        self._wait_for_copy()

    @property
    def on_device(self) -> bool:
        return self._tensor is not None

    def take(self) -> Tensor:
        """Return the tensor on its device, and prefetch the one stored before it. May be called again."""
        tensor = self.prefetch()
        self._wait_for_copy()
        if self._blocks:
            self._tensor = None
            self._copied = None
        self._offloader.taken(self)
        return tensor

    def offload(self) -> None:
        """Start the copy to the host of a tensor that is on the device."""
        assert self._tensor is not None
        if self._tensor._version != self._version:
            raise RuntimeError(WRITTEN_OVER.format(shape=tuple(self._tensor.shape)))
        source = self._tensor = self._tensor.contiguous()
        if not self._blocks:
            self._blocks = self._offloader.blocks(source.nbytes)
            weakref.finalize(self, self._offloader.give_back, self._blocks)
        self._copied = self._offloader.copy(_pieces(source), self._blocks, to_host=True)

    def release(self) -> None:
        """Free the device's memory: later kernels wait for the copy."""
        if self._copied is not None:
            began = record_event()
            self._wait_for_copy()
            self._offloader.pace.waited(began, record_event())
        self._tensor = None
        self._copied = None

    def prefetch(self) -> Tensor:
        """Start the copy back, unless the tensor is on the device, and return the tensor that the copy fills."""
        if self._tensor is None:
            self._tensor = torch.empty(self._shape, dtype=self._dtype, device=self._offloader.device)
            self._copied = self._offloader.copy(_pieces(self._tensor), self._blocks, to_host=False)
        return self._tensor

    def _wait_for_copy(self) -> None:
        if self._copied is not None:
            torch.cuda.current_stream(self._offloader.device).wait_event(self._copied)


class ActivationOffloader:
    """The stored tensors of one model and their pinned memory. On a CPU tensors stay where they are.

    overlap: copy while the device computes, which needs memory for one more tensor.
    """

    def __init__(self, *, overlap: bool = True) -> None:
        self._overlap = overlap
        self.device: torch.device | None = None
        self._stream: torch.cuda.Stream | None = None
        self.pace = OffloadPace()
        self._filling = False  # no tensor was taken since the first one was stored
        self._free: list[Tensor] = []
        self._stored: list[weakref.ref[OffloadedTensor]] = []
        self._leaving: OffloadedTensor | None = None

    def store_if_fast(self, tensor: Tensor) -> OffloadedTensor | None:
        """Store `tensor` if the link to the host can copy it without making the device wait; else return None."""
        if not tensor.is_cuda:
            return self.store(tensor)
        if not self._filling:
            self.pace.begin()
            self._filling = True
        return self.store(tensor) if self.pace.should_offload() else None

    def store(self, tensor: Tensor) -> OffloadedTensor:
        """Store `tensor`. It must not be written over before the next one is stored."""
        if tensor.is_cuda and self._stream is None:
            self.device = tensor.device
            self._stream = torch.cuda.Stream(tensor.device)
        self._release_leaving()
        last = self._last()
        if self._stream is not None and last is not None and last.on_device:
            last.offload()
            self._leaving = last
            if not self._overlap:
                self._release_leaving()
        stored = OffloadedTensor(self, tensor)
        self._stored.append(weakref.ref(stored))
        return stored

    def taken(self, tensor: OffloadedTensor) -> None:
        """Forget a tensor and prefetch the one stored before it, unless that one is still on the device."""
        self._filling = False
        self._stored = [ref for ref in self._stored if ref() not in (None, tensor)]
        last = self._last()
        if self._leaving is not last:
            self._release_leaving()
        self._leaving = None
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

    def _last(self) -> OffloadedTensor | None:
        while self._stored and self._stored[-1]() is None:
            self._stored.pop()
        return self._stored[-1]() if self._stored else None

    def copy(self, pieces: tuple[Tensor, ...], blocks: list[Tensor], *, to_host: bool) -> torch.cuda.Event:
        """Queue copies after the work that the device has been given so far; return the event of their end."""
        assert self._stream is not None  # `store` makes it for the first tensor of a GPU
        self._stream.wait_stream(torch.cuda.current_stream(self.device))
        with torch.cuda.stream(self._stream):
            began = record_event()
            for piece, block in zip(pieces, blocks, strict=True):
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
        new = (torch.empty(BLOCK, dtype=torch.uint8, pin_memory=True) for _ in range(count - len(taken)))
        return [*taken, *new]

    def give_back(self, blocks: list[Tensor]) -> None:
        self._free += blocks


def _pieces(tensor: Tensor) -> tuple[Tensor, ...]:
    """Return the bytes of a contiguous tensor in pieces of one block."""
    return torch.split(tensor.view(-1).view(torch.uint8), BLOCK)
