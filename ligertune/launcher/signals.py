"""Signal handlers of a run: SIGTERM, SIGUSR1, SIGHUP and SIGINT (Ctrl-C).

Before the first step there is nothing to save, so the process ends at once. From the first step to the report the
signal is recorded and answered with a message: the loop finishes its step, saves a checkpoint and returns, and a model
that is being written is finished. A second Ctrl-C ends the process at once.

Slurm can send SIGUSR1 before a job's time is up (`--signal=USR1@120`). SIGHUP is sent when the terminal goes away, by a
closed window or a lost connection; under `nohup`, which ignores it, it stays ignored.
"""

from __future__ import annotations

import contextlib
import os
import select
import shutil
import signal
import socket
import sys
import textwrap
import threading
from collections.abc import Callable, Iterator
from pathlib import Path
from types import FrameType
from typing import Any

from ligertune.errors import printable
from ligertune.files.storage import newest_checkpoint
from ligertune.hardware import is_main_process
from ligertune.launcher.failures import is_started_rank

# Windows has neither SIGUSR1 nor SIGHUP.
SIGNALS = tuple(getattr(signal, name) for name in ("SIGTERM", "SIGINT", "SIGUSR1", "SIGHUP") if hasattr(signal, name))
HANGUP = getattr(signal, "SIGHUP", None)
END = 0  # not a signal: ends the thread of a StopRequest
STEP = "Stopping after this step and saving"
WRITING = "Training is over; the model and the report are being written"


class StopRequest:
    """A context in which signals end the process, or after `hold` set `received` to the signal's name.

    Python calls a handler only between two bytecodes, so a long backward or a wait for the GPU would delay it. The
    system writes each signal to a socket at once (`signal.set_wakeup_fd`), and a thread reads it.

    enabled: False leaves the earlier handlers in place, and they are restored on exit. from_hold: they stay in place
    until `hold`, so that Ctrl-C is a KeyboardInterrupt of a Python user before. output_dir: of the run, whose newest
    checkpoint the messages name.
    """

    def __init__(self, output_dir: Path | None = None, *, enabled: bool = True, from_hold: bool = False) -> None:
        self.received: str | None = None
        self._output_dir = output_dir
        # Python allows handlers in the main thread only.
        self._enabled = enabled and threading.current_thread() is threading.main_thread()
        self._from_hold = from_hold
        self._installed = False
        self._doing = ""
        # Reentrant: a signal can interrupt the handler of another.
        self._answering = threading.RLock()
        self._before: dict[int, Callable[[int, FrameType | None], Any] | int | None] = {}

    def __enter__(self) -> StopRequest:
        if self._enabled and not self._from_hold:
            self._install()
        return self

    def _install(self) -> None:
        self._installed = True
        self._read, self._write = socket.socketpair()
        self._read.setblocking(False)
        self._write.setblocking(False)
        self._thread = threading.Thread(target=self._watch, name="signals", daemon=True)
        self._thread.start()
        self._before_fd = signal.set_wakeup_fd(self._write.fileno(), warn_on_full_buffer=False)
        self._before = {s: signal.signal(s, self._handle) for s in heeded_signals()}

    def __exit__(self, *exc: object) -> None:
        if not self._installed:
            return
        for number, handler in self._before.items():
            signal.signal(number, handler)
        signal.set_wakeup_fd(self._before_fd)
        self._write.send(bytes([END]))
        self._thread.join()
        self._read.close()
        self._write.close()

    def hold(self, doing: str = STEP) -> None:
        """Record signals from now on instead of ending the process. doing: the beginning of the answer to Ctrl-C."""
        self._doing = doing
        if self._enabled and not self._installed:
            self._install()

    def _handle(self, number: int, frame: FrameType | None) -> None:
        self._answer_all()  # so that `received` is set when a handler has run

    def _watch(self) -> None:
        while True:
            select.select([self._read], [], [])
            if END in self._answer_all():
                return

    def _answer_all(self) -> bytes:
        """Answer the signals that wait in the socket, or wait until the other thread has: both call this."""
        numbers = b""
        with self._answering:
            with contextlib.suppress(BlockingIOError):  # the other one was faster
                numbers = self._read.recv(64)
            for number in numbers:
                if number in SIGNALS:  # Python's own handlers of other signals write theirs, too
                    self._answer(number)
        return numbers

    def _answer(self, number: int) -> None:
        if number == HANGUP:
            leave_closed_terminal()
        if not self._doing:
            leave_at_once(number, None)
        elif self.received and number == signal.SIGINT:
            _leave(left_without_saving(self._output_dir))
        elif not self.received:
            self.received = signal.Signals(number).name
            newest = _newest(self._output_dir)
            kept = f"last checkpoint: {newest}" if newest else "no checkpoint yet"
            if is_main_process() and number == signal.SIGINT:
                say(f"{self._doing}. Press Ctrl-C again to leave now; {kept}")
            elif is_main_process() and not is_started_rank():  # to those the launcher sends SIGTERM after a failure
                say(f"{self.received}: {self._doing}; {kept}")


def heeded_signals() -> tuple[signal.Signals, ...]:
    """Return the signals to handle: SIGHUP only if the process was not started to outlive its terminal (`nohup`)."""
    return tuple(s for s in SIGNALS if s != HANGUP or signal.getsignal(s) != signal.SIG_IGN)


def handle_by_leaving() -> None:
    """Let each signal end this process with one line and exit code 130. A run replaces these handlers by its own."""
    for number in heeded_signals():
        signal.signal(number, leave_at_once)


def left_without_saving(output_dir: Path | None) -> str:
    """Return the message of a run that a second Ctrl-C ended."""
    newest = _newest(output_dir)
    kept = f"the last checkpoint is {newest}" if newest else "there is no checkpoint"
    return f"Left without saving; {kept}."


def leave_at_once(number: int, frame: FrameType | None) -> None:
    """End the process with code 130. Files are written atomically, so none is left incomplete.

    An exception would not do: inside an import it looks like a missing module, and inside a destructor it is lost.
    """
    if number == HANGUP:
        leave_closed_terminal()
    _leave(stopped_by(number))


def stopped_by(number: int) -> str:
    """Return the message of a run that a signal ended before it could save."""
    return f"Stopped by {signal.Signals(number).name}."


# (process, action): what `before_leaving` registered. A forked child inherits them, and must not run them.
_ACTIONS: list[tuple[int, Callable[[], object]]] = []


@contextlib.contextmanager
def before_leaving(action: Callable[[], object]) -> Iterator[None]:
    """Call `action` if a signal ends the process inside this context, where no `finally` runs. It must be quick."""
    entry = (os.getpid(), action)
    _ACTIONS.append(entry)
    try:
        yield
    finally:
        _ACTIONS.remove(entry)


def _leave(message: str) -> None:
    for process, action in reversed(_ACTIONS):
        if process == os.getpid():
            with contextlib.suppress(Exception):
                action()
    # A process without multiprocessing in sys.modules has no children.
    for child in getattr(sys.modules.get("multiprocessing"), "active_children", list)():
        child.terminate()
    if is_main_process() and not is_started_rank():  # our launcher prints the reason for all of its ranks
        say(message, last=True)
    os._exit(130)


def _newest(output_dir: Path | None) -> str:
    """Return "step 50" for the newest checkpoint of a run, or an empty string."""
    folder = newest_checkpoint(output_dir) if output_dir is not None else None
    return folder.name.replace("-", " ") if folder is not None else ""


def leave_closed_terminal() -> None:
    """Let stdout and stderr lead nowhere if their terminal is gone: each write to it would be an error."""
    for descriptor in (1, 2):
        try:
            os.write(descriptor, b"")
        except OSError:
            nowhere = os.open(os.devnull, os.O_WRONLY)
            os.dup2(nowhere, descriptor)
            os.close(nowhere)


def say(message: str, *, last: bool = False) -> None:
    """Write a line to stderr, above a progress bar. last: the process ends, so that its hidden cursor is shown again.

    Not through Python's streams, whose locks the interrupted code may hold.
    """
    message = printable(message)
    if os.isatty(2):
        lines = textwrap.fill(message, shutil.get_terminal_size().columns)
        message = f"\r\x1b[2K{lines}"  # over the bar, which is drawn again below
        message += "\x1b[?25h" if last else ""
    with contextlib.suppress(OSError):  # standard error may be closed
        os.write(2, f"{message}\n".encode())


def _forget_signals() -> None:
    """Let a forked child handle its own signals: its handlers would write to the socket of its parent."""
    with contextlib.suppress(ValueError):
        signal.set_wakeup_fd(-1)


if hasattr(os, "register_at_fork"):
    os.register_at_fork(after_in_child=_forget_signals)
