"""Results that the second run of a checkpointed layer, in the backward, knows from the first one.

ligertune's checkpointing enters `knowing` around both runs. Elsewhere nothing is known, and everything is computed.
"""

from __future__ import annotations

import contextlib
import threading
from collections.abc import Callable, Iterator
from typing import Protocol

import torch

Result = tuple[torch.Tensor, ...]
_thread = threading.local()  # a backward runs in its own thread


class KnownResults(Protocol):
    """What a running layer knows."""

    def result(self, compute: Callable[[], Result]) -> Result:
        """Return what `compute` returns; in the second run, what it returned in the first one, which has the same bits.

        The first tensor may be large. The others, such as statistics of rows, are small.
        """
        ...

    def attended(self, out: torch.Tensor) -> None:
        """Take note of the output of attention, with its autograd history."""
        ...


@contextlib.contextmanager
def knowing(results: KnownResults) -> Iterator[None]:
    """Let ops in this thread ask `results`."""
    outer = getattr(_thread, "results", None)
    _thread.results = results
    try:
        yield
    finally:
        _thread.results = outer


def known_results() -> KnownResults | None:
    """Return what to ask in this thread; None outside of `knowing`, without gradients, and under torch.compile."""
    if torch.compiler.is_compiling() or not torch.is_grad_enabled():
        return None
    return getattr(_thread, "results", None)
