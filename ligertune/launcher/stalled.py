"""Which processes stand still: stopped by a signal they answer nobody, whatever a run is about to do.

Within a step the others' patience ends (`train.patience`). Elsewhere it is half an hour, as one may work alone; but a
stopped process works on nothing.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping
from pathlib import Path

STOPPED, ENDED = "T", "Z"  # of Linux' /proc/PID/stat; one that a debugger holds is in t
MOST = 2.0  # seconds that one look counts: a scheduler that suspends a job stops the one who looks, too


class Standstill:
    """Asked again and again, about every second: for how long was each process seen stopped? clock: seconds."""

    def __init__(self, seconds: float, clock: Callable[[], float] = time.monotonic) -> None:
        self._seconds, self._clock = seconds, clock
        self._looked, self._stood = clock(), dict[int, float]()

    def over(self, pids: Mapping[int, int]) -> list[int]:
        """The ranks, of rank -> process, that have been stopped for so long. None where there is no /proc."""
        now = self._clock()
        passed, self._looked = min(now - self._looked, MOST), now
        stopped = [rank for rank, pid in pids.items() if state_of(pid) == STOPPED]
        self._stood = {rank: self._stood[rank] + passed if rank in self._stood else 0.0 for rank in stopped}
        return [rank for rank, stood in self._stood.items() if stood >= self._seconds]


def state_of(pid: int) -> str:
    """A letter of Linux' /proc/PID/stat; empty if the process has ended, or where there is no /proc."""
    try:
        # the name of the program is in brackets, and may hold some
        return Path(f"/proc/{pid}/stat").read_text(encoding="utf-8").rpartition(")")[2].split()[0]
    except OSError:  # ended, or no Linux
        return ""
