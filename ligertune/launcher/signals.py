"""Signal handlers of a run: SIGTERM, SIGUSR1 and SIGINT (Ctrl-C).

Before the first step there is nothing to save, so the process ends at once. From the first step to the report the
handler only records the signal: the loop finishes its step, saves a checkpoint and returns, and a model that is being
written is finished. A second Ctrl-C ends the process at once.

Slurm can send SIGUSR1 before a job's time is up (`--signal=USR1@120`).
"""

from __future__ import annotations

import os
import signal
import sys
from types import FrameType

from ligertune.launcher.failures import is_started_rank

SIGNALS = tuple(getattr(signal, name) for name in ("SIGTERM", "SIGINT", "SIGUSR1") if hasattr(signal, name))


class StopRequest:
    """A context whose signal handlers end the process, or after `hold` set `received` to the signal's name.

    The earlier handlers are restored on exit. enabled: False leaves the earlier handlers in place.
    """

    def __init__(self, *, enabled: bool = True) -> None:
        self.received: str | None = None
        self._enabled, self._holds = enabled, False
        self._before: dict[int, object] = {}

    def __enter__(self) -> StopRequest:
        if self._enabled:
            self._before = {s: signal.signal(s, self._handle) for s in SIGNALS}
        return self

    def __exit__(self, *exc: object) -> None:
        for number, handler in self._before.items():
            signal.signal(number, handler)

    def hold(self) -> None:
        """Record signals from now on instead of ending the process."""
        self._holds = True

    def _handle(self, number: int, frame: FrameType | None) -> None:
        if not self._holds or (self.received and number == signal.SIGINT):
            leave_at_once(number, frame)
        self.received = signal.Signals(number).name


def leave_at_once(number: int, frame: FrameType | None) -> None:
    """End the process with code 130. Files are written atomically, so none is left incomplete.

    An exception would not do: inside an import it looks like a missing module, and inside a destructor it is lost.
    """
    # A process without multiprocessing in sys.modules has no children.
    for child in getattr(sys.modules.get("multiprocessing"), "active_children", list)():
        child.terminate()
    shown = "\x1b[?25h\n" if sys.stderr.isatty() else ""  # a progress line hides the cursor
    if not is_started_rank():  # the launcher prints the reason for all of its ranks
        os.write(2, f"{shown}Stopped by {signal.Signals(number).name}.\n".encode())
    os._exit(130)
