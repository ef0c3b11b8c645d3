"""Tensors that wait in pinned host memory from the forward to the backward, copied beside the computing.

What was put last is asked for first. So a tensor leaves the device when the next one is put, and comes back while the
one behind it is in use; the last one never leaves. At most two are on the device at a time. The copies run on a stream
of their own, one after another, so that host memory can be used again as soon as its last copy is in line.
"""

from __future__ import annotations

import weakref

import torch
from torch import Tensor

from ligertune.activations.host_bandwidth import Pace, now

BLOCK = 32 << 20  # bytes: torch rounds pinned memory up to a power of two, and so it wastes at most one block a tensor
WRITTEN_OVER = "a tensor of {shape} that the backward needs was written over before its copy to the host had begun"


class Waiting:
    """One tensor that was put away. Its host memory is free again when nobody holds this any more."""

    def __init__(self, store: HostStore, tensor: Tensor) -> None:
        self._store = store
        self._tensor: Tensor | None = tensor.detach()  # the version stays shared
        self._version = tensor._version
        self._like = tensor.shape, tensor.dtype
        self._blocks: list[Tensor] = []
        self._copied: torch.cuda.Event | None = None

    def __del__(self) -> None:
        """Whoever gets this memory next waits for a copy that is still under way."""
        if self._copied is not None:
            torch.cuda.current_stream(self._store.device).wait_event(self._copied)

    @property
    def on_device(self) -> bool:
        return self._tensor is not None

    def take(self) -> Tensor:
        """The tensor, on its device; the one that was put before it sets out. It may be asked for again."""
        self.come()
        if self._copied is not None:
            torch.cuda.current_stream(self._store.device).wait_event(self._copied)
        tensor = self._tensor
        if self._blocks:
            self._tensor, self._copied = None, None
        self._store.taken(self)
        return tensor

    def leave(self) -> None:
        """Begin to copy it to the host."""
        if self._tensor._version != self._version:
            raise RuntimeError(WRITTEN_OVER.format(shape=tuple(self._tensor.shape)))
        source = self._tensor = self._tensor.contiguous()
        if not self._blocks:
            self._blocks = self._store.blocks(source.nbytes)
            weakref.finalize(self, self._store.give_back, self._blocks)
        self._copied = self._store.copy(_pieces(source), self._blocks, to_host=True)

    def gone(self) -> None:
        """Give up the device's memory: what is computed from here on waits for the copy."""
        if self._copied is not None:
            began = now()
            torch.cuda.current_stream(self._store.device).wait_event(self._copied)
            self._store.pace.waited(began, now())
        self._tensor, self._copied = None, None

    def come(self) -> None:
        """Begin to copy it back, if it is not there."""
        if self._tensor is None:
            shape, dtype = self._like
            self._tensor = torch.empty(shape, dtype=dtype, device=self._store.device)
            self._copied = self._store.copy(_pieces(self._tensor), self._blocks, to_host=False)


class HostStore:
    """The tensors of one model that wait, and the host memory in which they do. On a CPU they stay where they are."""

    def __init__(self) -> None:
        self.device: torch.device | None = None
        self._stream: torch.cuda.Stream | None = None
        self.pace = Pace()
        self._filling = False  # nothing was taken since the first was put
        self._free: list[Tensor] = []
        self._line: list[weakref.ref[Waiting]] = []
        self._leaving: Waiting | None = None

    def put_if_fast(self, tensor: Tensor) -> Waiting | None:
        """Keep `tensor` if the link to the host can take it without making the device wait; else None."""
        if not tensor.is_cuda:
            return self.put(tensor)
        if not self._filling:
            self.pace.begin()
            self._filling = True
        return self.put(tensor) if self.pace.sends() else None

    def put(self, tensor: Tensor) -> Waiting:
        """Keep `tensor`. It must not be written over before the next one has been put."""
        if tensor.is_cuda and self._stream is None:
            self.device, self._stream = tensor.device, torch.cuda.Stream(tensor.device)
        self._settle()
        last = self._last()
        if self._stream is not None and last is not None and last.on_device:
            last.leave()
            self._leaving = last
        waiting = Waiting(self, tensor)
        self._line.append(weakref.ref(waiting))
        return waiting

    def taken(self, waiting: Waiting) -> None:
        """Forget it, and fetch the one before it, unless that has not left yet."""
        self._filling = False
        self._line = [ref for ref in self._line if ref() not in (None, waiting)]
        last = self._last()
        if self._leaving is not last:
            self._settle()
        self._leaving = None
        if last is not None:
            last.come()

    def passed(self) -> None:
        """Others are asked for before what was put last: what is leaving does so."""
        self._filling = False
        self._settle()

    def _settle(self) -> None:
        if self._leaving is not None:
            self._leaving.gone()
            self._leaving = None

    def _last(self) -> Waiting | None:
        while self._line and self._line[-1]() is None:
            self._line.pop()
        return self._line[-1]() if self._line else None

    def copy(self, pieces: tuple[Tensor, ...], blocks: list[Tensor], *, to_host: bool) -> torch.cuda.Event:
        """Queue the copies behind what the device has been given to do so far."""
        self._stream.wait_stream(torch.cuda.current_stream(self.device))
        with torch.cuda.stream(self._stream):
            began = now()
            for piece, block in zip(pieces, blocks, strict=True):
                of_block = block[: piece.numel()]
                if to_host:
                    of_block.copy_(piece, non_blocking=True)
                else:
                    piece.copy_(of_block, non_blocking=True)
            ended = now()
        if to_host:
            self.pace.copied(began, ended)
        return ended

    def blocks(self, nbytes: int) -> list[Tensor]:
        """Pinned memory for so many bytes."""
        wanted = -(-nbytes // BLOCK)
        taken, self._free = self._free[:wanted], self._free[wanted:]
        new = (torch.empty(BLOCK, dtype=torch.uint8, pin_memory=True) for _ in range(wanted - len(taken)))
        return [*taken, *new]

    def give_back(self, blocks: list[Tensor]) -> None:
        self._free += blocks


def _pieces(tensor: Tensor) -> tuple[Tensor, ...]:
    """The bytes of a contiguous tensor, a block's at a time."""
    return tensor.view(-1).view(torch.uint8).split(BLOCK)
