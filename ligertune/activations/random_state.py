"""Random numbers of layers that run again in the backward: the second run draws those of the first.

torch.utils.checkpoint saves the whole state of the GPU's generator before each layer, which a CUDA graph cannot record.
Most layers draw nothing, and the generator counts what it has drawn: two numbers show whether a layer did.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from typing import NamedTuple

import torch
from torch import Tensor


class _State(NamedTuple):
    cpu: Tensor
    drawn_on_gpu: int  # random numbers of the current GPU, counted since its seed


class RandomNumbers:
    """What the layers of a model have drawn."""

    def __init__(self) -> None:
        self.drew = False  # any layer, in any first run


class RandomNumbersOfLayer:
    """What one call of a layer drew, for the call in the backward."""

    def __init__(self, model: RandomNumbers) -> None:
        self._model = model
        self._begin: _State | None = None  # None: it drew nothing

    @contextlib.contextmanager
    def first(self) -> Iterator[None]:
        """Run the layer. Raises RuntimeError if a CUDA graph would record a layer that draws."""
        if is_recording():
            if self._model.drew:
                raise RuntimeError("layers that are checkpointed draw random numbers")
            yield
            return
        begin = _state()
        yield
        end = _state()
        if begin.drawn_on_gpu != end.drawn_on_gpu or not torch.equal(begin.cpu, end.cpu):
            self._begin = begin
            self._model.drew = True

    @contextlib.contextmanager
    def again(self) -> Iterator[None]:
        """Run the layer with the random numbers of its first run."""
        if self._begin is None:
            yield
            return
        now = _state()
        _restore(self._begin)
        try:
            yield
        finally:
            _restore(now)


def is_recording() -> bool:
    """Return whether a CUDA graph is recorded."""
    return torch.cuda.is_available() and torch.cuda.is_current_stream_capturing()


def _generator() -> torch.Generator | None:
    """Return the generator of the current GPU; None if no GPU is used."""
    return torch.cuda.default_generators[torch.cuda.current_device()] if torch.cuda.is_initialized() else None


def _state() -> _State:
    generator = _generator()
    return _State(torch.get_rng_state(), 0 if generator is None else generator.get_offset())


def _restore(state: _State) -> None:
    torch.set_rng_state(state.cpu)
    generator = _generator()
    if generator is not None:
        generator.set_offset(state.drawn_on_gpu)
