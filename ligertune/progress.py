"""What a run does before its first step, and how long each part takes: a wait without a word looks like a hang."""

from __future__ import annotations

import json
import threading
import time
from collections.abc import Callable, Mapping

# About when the command was given: the console script imports this before anything heavy.
COMMAND_GIVEN = time.perf_counter()


class Phases:
    """One follows the other, from `begun` (perf_counter's) on. `seconds`, by name, of those that are over.

    say: is told what begins, and `every` so many seconds how long that has taken; as a context, until it is left.
    """

    def __init__(
        self,
        say: Callable[[str], None] | None = None,
        *,
        first: str = "planning",
        begun: float | None = None,
        before: Mapping[str, float] | None = None,
        every: float = 3.0,
    ) -> None:
        self.seconds: dict[str, float] = dict(before or {})
        self.say = say
        self._name, self._start = first, time.perf_counter() if begun is None else begun
        self._changed, self._over, self._every = threading.Event(), False, every
        if say is not None:
            threading.Thread(target=self._remind, name="phases", daemon=True).start()

    def __enter__(self) -> Phases:
        return self

    def __exit__(self, *exc: object) -> None:
        self.end()

    def begin(self, name: str) -> None:
        """The phase before is over."""
        self._close()
        if self.say is not None:
            self.say(f"{name} ...")
        self._name = name
        self._changed.set()

    def end(self) -> None:
        """No other follows. A second call changes nothing."""
        self._close()
        self._over = True
        self._changed.set()

    def handed_on(self) -> str:
        """With this another process goes on in the middle of a phase (`taken_over`); here no more is said."""
        self._over = True
        self._changed.set()
        begun = time.time() - (time.perf_counter() - self._start)
        return json.dumps({"phase": self._name, "begun": begun, "seconds": self.seconds})

    def _close(self) -> None:
        now = time.perf_counter()
        if self._name:
            self.seconds[self._name] = now - self._start
        self._name, self._start = "", now

    def _remind(self) -> None:
        while not self._over:
            if self._changed.wait(self._every):
                self._changed.clear()
            elif name := self._name:
                self.say(f"{name} ... {time.perf_counter() - self._start:.0f} s")


def taken_over(handed_on: str, say: Callable[[str], None] | None) -> Phases:
    """Those of the process that handed on."""
    there = json.loads(handed_on)
    begun = time.perf_counter() - (time.time() - there["begun"])
    return Phases(say, first=there["phase"], begun=begun, before=there["seconds"])
