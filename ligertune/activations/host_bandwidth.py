"""How many of a model's layers can send a tensor to the host without making the device wait for the link.

Several GPUs of a host share its memory, and copy less each than one of them alone. What a pass over the layers took,
what the copies took and what the device waited for them is measured with events, and read when the next pass begins,
if the device has come that far: nothing waits for the measuring.
"""

from __future__ import annotations

import torch

ROOM = 0.97  # of the time that the layers take, for the copies


class Pace:
    """The share of layers that send theirs, spread evenly: all of them until something has been measured."""

    def __init__(self) -> None:
        self.share = 1.0
        self._measures = False  # without passes that begin, nothing is kept of what is measured
        self._due = 0.0
        self._layers = 0
        self._ends: list[torch.cuda.Event] = []  # of the first layer and of the last one so far
        self._copies: list[tuple[torch.cuda.Event, torch.cuda.Event]] = []
        self._waits: list[tuple[torch.cuda.Event, torch.cuda.Event]] = []

    def begin(self) -> None:
        """A pass over the layers begins: learn from the one before."""
        spans = [*self._copies, *self._waits, *([tuple(self._ends)] if len(self._ends) == 2 else [])]
        if self._layers > 1 and self._copies and all(end.query() for _, end in spans):
            copies, waits = _milliseconds(self._copies), _milliseconds(self._waits)
            layer = (self._ends[0].elapsed_time(self._ends[1]) - waits) / (self._layers - 1)
            # one layer at least, or there would be nothing to measure any more
            self.share = max(share_of(layer, copies / len(self._copies)), 1 / self._layers)
        self._measures = True
        self._due, self._layers, self._ends, self._copies, self._waits = 0.0, 0, [], [], []

    def sends(self) -> bool:
        """One more layer: does it send what it has?"""
        self._layers += 1
        self._ends = [*self._ends[:1], now()]
        return self.is_due()

    def is_due(self) -> bool:
        """Of every so many, the share."""
        self._due += self.share
        if self._due < 1.0 - 1e-9:  # which sums of shares may miss
            return False
        self._due -= 1.0
        return True

    def copied(self, began: torch.cuda.Event, ended: torch.cuda.Event) -> None:
        if self._measures:
            self._copies.append((began, ended))

    def waited(self, began: torch.cuda.Event, ended: torch.cuda.Event) -> None:
        if self._measures:
            self._waits.append((began, ended))


def share_of(layer: float, copy: float) -> float:
    """Of layers that take `layer` ms each, those that can copy for `copy` ms in that time."""
    return min(1.0, max(0.0, ROOM * layer / copy)) if copy > 0 else 1.0


def now() -> torch.cuda.Event:
    """The moment at which the device gets here."""
    event = torch.cuda.Event(enable_timing=True)
    event.record()
    return event


def _milliseconds(spans: list[tuple[torch.cuda.Event, torch.cuda.Event]]) -> float:
    return sum(began.elapsed_time(ended) for began, ended in spans)
