"""SIGTERM, SIGUSR1 and Ctrl-C. Before training there is nothing to keep: the run leaves at once. From the first step to
the report they are held: the step is finished, saved, and the run leaves; the model that is being written is finished.
A second Ctrl-C leaves at once.

SIGUSR1 is what Slurm is told to send before the time is up (`--signal=USR1@120`).
"""

from __future__ import annotations

import os
import signal
import sys
from types import FrameType

from ligertune.launcher.failures import is_started_rank

SIGNALS = tuple(getattr(signal, name) for name in ("SIGTERM", "SIGINT", "SIGUSR1") if hasattr(signal, name))


class StopRequest:
    """A context in which these signals end the process, and after `hold` only set `received`.

    The handlers from before come back at its end. enabled: else it leaves them as they are all the time.
    """

    def __init__(self, *, enabled: bool = True) -> None:
        self.received: str | None = None
        self._enabled, self._holds = enabled, False
        self._before: dict[int, object] = {}

    def __enter__(self) -> StopRequest:
        if self._enabled:
            self._before = {s: signal.signal(s, self._note) for s in SIGNALS}
        return self

    def __exit__(self, *exc: object) -> None:
        for number, handler in self._before.items():
            signal.signal(number, handler)

    def hold(self) -> None:
        """From now on there is something to lose."""
        self._holds = True

    def _note(self, number: int, frame: FrameType | None) -> None:
        if not self._holds or (self.received and number == signal.SIGINT):
            leave_at_once(number, frame)
        self.received = signal.Signals(number).name


def leave_at_once(number: int, frame: FrameType | None) -> None:
    """End the process with code 130 in the middle of anything; what it writes is complete or absent in any case.

    Not by an exception: in the middle of an import one is taken for a missing module, and in a destructor it is lost.
    """
    # who has not imported it, or not all of it, has no children
    for child in getattr(sys.modules.get("multiprocessing"), "active_children", list)():
        child.terminate()
    shown = "\x1b[?25h\n" if sys.stderr.isatty() else ""  # a progress line hides the cursor
    if not is_started_rank():  # the process that started it says so, or why it ended it
        os.write(2, f"{shown}Stopped by {signal.Signals(number).name}.\n".encode())
    os._exit(130)
