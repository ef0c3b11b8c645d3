"""Measure how many of a model's layers can offload a tensor without making the device wait for the copy.

The GPUs of a host share its memory, so each of them copies slower than one GPU alone. CUDA events measure the time of a
pass over the layers, of the copies, and of the device's waits for them. They are read at the start of the next pass if
the device has reached them, so measuring never waits.
"""

from __future__ import annotations

import torch

ROOM = 0.97  # share of the time of the layers that copies may take


class OffloadPace:
    """The share of layers that offload, spread evenly; all of them until a pass has been measured."""

    def __init__(self) -> None:
        self.share = 1.0
        self._measures = False  # only passes that `begin` are measured
        self._due = 0.0
        self._layers = 0
        self._ends: list[torch.cuda.Event] = []  # of the first layer and of the last one so far
        self._copies: list[tuple[torch.cuda.Event, torch.cuda.Event]] = []
        self._waits: list[tuple[torch.cuda.Event, torch.cuda.Event]] = []

    def begin(self) -> None:
        """Start a pass over the layers, and set the share from the measurements of the last one."""
        spans = [*self._copies, *self._waits, *([tuple(self._ends)] if len(self._ends) == 2 else [])]
        if self._layers > 1 and self._copies and all(end.query() for _, end in spans):
            copies, waits = _milliseconds(self._copies), _milliseconds(self._waits)
            layer = (self._ends[0].elapsed_time(self._ends[1]) - waits) / (self._layers - 1)
            # one layer at least, or there would be nothing left to measure
            self.share = max(offloadable_share(layer, copies / len(self._copies)), 1 / self._layers)
        self._measures = True
        self._due, self._layers, self._ends, self._copies, self._waits = 0.0, 0, [], [], []

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


def _milliseconds(spans: list[tuple[torch.cuda.Event, torch.cuda.Event]]) -> float:
    return sum(began.elapsed_time(ended) for began, ended in spans)
