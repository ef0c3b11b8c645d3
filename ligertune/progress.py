"""Start-up phases: what a run does before its first step, how long each phase takes, and heavy imports."""

from __future__ import annotations

import gc
import sys
import threading
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import AbstractContextManager, contextmanager
from typing import Any

# About the time of the command: the console script imports this module before anything heavy.
COMMAND_GIVEN = time.perf_counter()
LogLine = Callable[[dict[str, Any]], None]  # receives each line of metrics.jsonl

# Where these are installed, transformers imports them with its model classes: for losses of object detection and for
# assisted decoding, which no command uses. That takes about a second.
UNUSED = ("scipy", "sklearn")


@contextmanager
def importing() -> Iterator[None]:
    """Make imports faster: no garbage collection runs, and the packages in `UNUSED` are not imported.

    torch and transformers create half a million objects, and hardly any of them is garbage. Collections take a third of
    the time of importing transformers and of ending the process. The imported objects are excluded from later
    collections. Without new imports this does nothing.

    The packages in `UNUSED` count as not installed meanwhile. Later imports find them, but transformers then remembers
    that they were absent. Where it has found one before, its model classes import it.
    """
    enabled = gc.isenabled()
    known = len(sys.modules)
    gc.disable()
    hidden = [package for package in UNUSED if package not in sys.modules]
    # an import of a module that is None raises ModuleNotFoundError; the stubs do not know of such entries
    sys.modules.update(dict.fromkeys(hidden))  # type: ignore[arg-type]
    if utils := sys.modules.get("transformers.utils.import_utils"):
        for package in hidden:
            if getattr(utils, f"is_{package}_available")():  # it looks once, and has looked before
                del sys.modules[package]
    try:
        yield
    finally:
        for package in hidden:
            if sys.modules.get(package, package) is None:
                del sys.modules[package]
        if len(sys.modules) > known:
            gc.freeze()
        if enabled:
            gc.enable()


@contextmanager
def hashing_triton(wanted: bool) -> Iterator[None]:
    """Let a thread compute the hash of Triton meanwhile, if `wanted`: the first launch of a kernel waits for it.

    Triton looks up compiled kernels by a hash of its own files, among them a library of 460 MB, which each process
    computes once. Hashing releases the interpreter lock, so another core does it during imports. The thread ends with
    the context: data preparation forks.
    """
    if not wanted:
        yield
        return
    from triton.runtime.cache import triton_key

    thread = threading.Thread(target=triton_key, name="hash of Triton")
    thread.start()
    try:
        yield
    finally:
        thread.join()


class Display:
    """What a run shows of its progress: nothing. The command line draws it on the terminal."""

    def begins(self, name: str, seconds: float = 0.0) -> None:
        """Show that a phase begins, or that it has lasted so many seconds."""

    def step(self, step: int) -> None:
        """Show that a step is finished. Called after every step, without a GPU synchronisation."""


class Phases(AbstractContextManager["Phases"]):
    """Consecutive phases of a start-up. `seconds` holds the duration of each finished phase by name.

    say: is called with a phase's name when it begins, and every `every` seconds with its duration so far, because a
    silent wait looks like a hang. begun: time.perf_counter() at the start of the first phase. As a context, it ends the
    last phase.
    """

    def __init__(
        self,
        say: Callable[[str, float], None] | None = None,
        *,
        first: str = "planning",
        begun: float | None = None,
        before: Mapping[str, float] | None = None,
        every: float = 30.0,
    ) -> None:
        self.seconds: dict[str, float] = dict(before or {})
        self.say = say
        self._name = first
        self._start = time.perf_counter() if begun is None else begun
        self._changed = threading.Event()
        self._over = False
        self._every = every
        if say is not None:
            threading.Thread(target=self._remind, args=(say,), name="phases", daemon=True).start()

    def __exit__(self, *exc: object) -> None:
        self.end()

    def begin(self, name: str) -> None:
        """End the current phase and begin the next one."""
        self._close()
        if self.say is not None:
            self.say(name, 0.0)
        self._name = name
        self._changed.set()

    def end(self) -> None:
        """End the last phase. A second call does nothing."""
        self._close()
        self._over = True
        self._changed.set()

    def handed_on(self) -> dict[str, Any]:
        """Return the state, for JSON. Another process continues with `taken_over`. This one is silent then."""
        self._over = True
        self._changed.set()
        begun = time.time() - (time.perf_counter() - self._start)
        return {"phase": self._name, "begun": begun, "seconds": self.seconds}

    def _close(self) -> None:
        now = time.perf_counter()
        if self._name:
            before = self.seconds.get(self._name, 0.0)  # of a first try that ran out of memory
            self.seconds[self._name] = before + now - self._start
        self._name = ""
        self._start = now

    def _remind(self, say: Callable[[str, float], None]) -> None:
        while not self._over:
            if self._changed.wait(self._every):
                self._changed.clear()
            elif name := self._name:
                say(name, time.perf_counter() - self._start)


def taken_over(there: dict[str, Any], say: Callable[[str, float], None] | None) -> Phases:
    """Continue the phases of the process whose `handed_on` returned `there`."""
    begun = time.perf_counter() - (time.time() - there["begun"])
    return Phases(say, first=there["phase"], begun=begun, before=there["seconds"])
