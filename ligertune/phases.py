"""What a run does before its first step, and how long each part takes: a wait without a word looks like a hang."""

from __future__ import annotations

import time
from collections.abc import Callable

# About when the command was given: the console script imports this before anything heavy.
COMMAND_GIVEN = time.perf_counter()


class Phases:
    """One follows the other, from `begun` (perf_counter's) on. `seconds`, by name, of those that are over.

    say: is told what begins.
    """

    def __init__(
        self, say: Callable[[str], None] | None = None, *, first: str = "planning", begun: float | None = None
    ) -> None:
        self.seconds: dict[str, float] = {}
        self._say, self._name = say, first
        self._start = time.perf_counter() if begun is None else begun

    def begin(self, name: str) -> None:
        """The phase before is over."""
        self.end()
        if self._say is not None:
            self._say(f"{name} ...")
        self._name = name

    def end(self) -> None:
        """No other follows. A second call changes nothing."""
        now = time.perf_counter()
        if self._name:
            self.seconds[self._name] = now - self._start
        self._name, self._start = "", now
