"""`ligertune train` on a node with several devices: one process for each, started by torch, which is told of signals.

torchrun's agent is not used: it ends ranks 30 seconds after a signal, whether or not they have saved, and its exit code
is its own. Below it stands `torch.distributed.elastic.multiprocessing`, which starts the processes, keeps the output of
all but the first apart, and ends the others when one fails.
"""

from __future__ import annotations

import contextlib
import ctypes
import json
import logging
import os
import shutil
import signal
import sys
import tempfile
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from types import FrameType
from typing import TYPE_CHECKING

from ligertune.launcher.failures import FOLDER, Ended, leave_tracebacks, verdict, words_in
from ligertune.launcher.stalled import ENDED, Standstill, state_of
from ligertune.storage import newest_checkpoint

if TYPE_CHECKING:
    from torch.distributed.elastic.multiprocessing import PContext

    from ligertune.planning.plan import Plan

FORWARDED = tuple(getattr(signal, name) for name in ("SIGTERM", "SIGINT", "SIGUSR1", "SIGHUP") if hasattr(signal, name))
READY, GO = "ready", "go"  # files in FOLDER: one of each rank that waits, and that with which the run begins
STARTER = "LIGERTUNE_STARTER"  # the variable with the process that started a rank
KEPT = "ranks"  # the folder in output_dir with what ranks said, after a failure
PR_SET_PDEATHSIG = 1  # of Linux' prctl


class Ranks:
    """The processes of a run, `python -m ligertune ARGUMENTS` once for each.

    As a context they are begun while the plan is still made: most of their start is importing (`prepare_to_train`).
    Then each waits for `run`, and without it they end with the context, having done nothing.
    """

    def __init__(self, processes: int, arguments: Sequence[str]) -> None:
        self._world, self._arguments = processes, tuple(arguments)
        self._folder = Path(tempfile.mkdtemp(prefix="ligertune-"))
        self._context: PContext | None = None
        self._run = False

    def __enter__(self) -> Ranks:
        from torch.distributed.elastic.multiprocessing import DefaultLogsSpecs, Std, start_processes

        for name in ("api", "subprocess_handler.subprocess_handler"):  # they log what `verdict` says in a sentence
            logging.getLogger(f"torch.distributed.elastic.multiprocessing.{name}").setLevel(logging.CRITICAL)
        os.environ["TORCHELASTIC_SIGNALS_TO_HANDLE"] = "SIGQUIT"  # the others are handled here
        before = {number: signal.getsignal(number) for number in FORWARDED}
        self._store, world = _store(), self._world
        self._context = start_processes(
            name="ligertune",
            entrypoint=sys.executable,
            args=dict.fromkeys(range(world), ("-m", "ligertune", *self._arguments)),
            envs={rank: _environment(rank, world, self._store.port, self._folder) for rank in range(world)},
            logs_specs=DefaultLogsSpecs(str(self._folder), redirects=dict.fromkeys(range(1, world), Std.ALL)),
        )
        for number, handler in before.items():  # a torch that knows no TORCHELASTIC_SIGNALS_TO_HANDLE has taken them
            if handler is not None:
                signal.signal(number, handler)
        return self

    def __exit__(self, *exc: object) -> None:
        self._context.close(signal.SIGKILL)  # those that still wait; the others have ended
        if not self._run:
            shutil.rmtree(self._folder, ignore_errors=True)

    def run(self, plan: Plan, hand_on: Callable[[], str]) -> int:
        """Let them train as planned when all are ready; the exit code. hand_on: makes what `begin_rank` returns there.

        Signals go on to the ranks. A UserError says why ranks failed, if they did.
        """
        self._run, context, begun = True, self._context, False
        with _Signals(context) as signals:
            standstill, given_up = Standstill(plan.parallel.timeout), set()
            while (result := context.wait(timeout=1 if begun else 0.1, period=0.1)) is None:
                if not begun and len(list(self._folder.glob(f"{READY}-*"))) == self._world:
                    _write(self._folder / GO, hand_on())
                    begun = True
                for rank in standstill.over(context.pids()):
                    given_up.add(rank)
                    with contextlib.suppress(ProcessLookupError):
                        os.kill(context.pids()[rank], signal.SIGKILL)
        failures = [Ended(f.local_rank, f.pid, f.exitcode, f.timestamp) for f in result.failures.values()]
        code = _code(plan, failures, signals.received)
        if code is not None:
            shutil.rmtree(self._folder, ignore_errors=True)
            return code
        raise _failure(plan, failures, self._folder, given_up)


def _write(path: Path, text: str) -> None:
    """Whoever finds the file finds all of it."""
    part = path.with_name(f"{path.name}.part")
    part.write_text(text, encoding="utf-8")
    part.rename(path)


def _store() -> object:
    """What ranks find each other by. It is this process's: a port that is free now may not be when rank 0 wants it."""
    from torch.distributed import TCPStore

    return TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)


def _environment(rank: int, world: int, port: int, folder: Path) -> dict[str, str]:
    """As torchrun sets it."""
    threads = os.environ.get("OMP_NUM_THREADS") or str(max(1, (os.cpu_count() or 1) // world))
    return {
        "RANK": str(rank),
        "LOCAL_RANK": str(rank),
        "WORLD_SIZE": str(world),
        "LOCAL_WORLD_SIZE": str(world),
        "MASTER_ADDR": "127.0.0.1",
        "MASTER_PORT": str(port),
        "TORCHELASTIC_USE_AGENT_STORE": "True",
        "TORCHELASTIC_RESTART_COUNT": "0",
        "OMP_NUM_THREADS": threads,
        FOLDER: str(folder),
        STARTER: str(os.getpid()),
    }


class _Signals:
    """A context that passes signals on to the ranks, which save and leave."""

    def __init__(self, context: PContext) -> None:
        self.received: list[int] = []
        self._context = context
        self._before: dict[int, object] = {}

    def __enter__(self) -> _Signals:
        self._before = {number: signal.signal(number, self._pass_on) for number in FORWARDED}
        return self

    def __exit__(self, *exc: object) -> None:
        for number, handler in self._before.items():
            signal.signal(number, handler)

    def _pass_on(self, number: int, frame: FrameType | None) -> None:
        self.received.append(number)
        # ranks are in sessions of their own: Ctrl-C on the terminal reaches them from here only
        for pid in self._context.pids().values():
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, number)


def _code(plan: Plan, failures: list[Ended], received: list[int]) -> int | None:
    """The exit code of ranks that ended as one process may; None where some failed."""
    if not failures:  # a rank that a signal stopped leaves with 0, or torch would end those that still write
        report = json.loads((plan.output_dir / "report.json").read_text(encoding="utf-8"))
        return 130 if report["status"] == "interrupted" else 0
    left = [one.code == 130 for one in failures]  # a second Ctrl-C, or one before the first step
    # Without a signal to all, the ranks that outlive one that failed are ended by torch, and may leave in that way.
    if all(left) or (received and any(left)):
        if received:
            os.write(2, f"Stopped by {signal.Signals(received[-1]).name}.\n".encode())
        return 130
    for number in received:
        if any(-one.code == number for one in failures):  # without save_on_signal, or before the first step
            signal.signal(number, signal.SIG_DFL)
            signal.raise_signal(number)
    return None


def _failure(plan: Plan, failures: list[Ended], folder: Path, given_up: set[int]) -> Exception:
    """The sentence; what the ranks said is kept in output_dir, if the run had begun."""
    words = words_in(folder)
    newest = newest_checkpoint(plan.output_dir)
    problem = verdict(failures, words, timeout=plan.parallel.timeout, newest=newest, given_up=given_up)
    if any(word.expected and word.message == problem.message for word in words.values()):
        shutil.rmtree(folder, ignore_errors=True)
        return problem
    if (plan.output_dir / "plan.json").is_file():
        kept = plan.output_dir / KEPT
        shutil.rmtree(kept, ignore_errors=True)
        folder = Path(shutil.move(folder, kept))
    problem.hint = f"What the ranks said is in {folder}. {problem.hint}".strip()
    return problem


def begin_rank(prepare: Callable[[], None]) -> str:
    """In a process that `Ranks` started, before anything else: `prepare`, and wait for the plan; what was handed on.

    Linux is asked to send SIGTERM when the starter dies: nobody would watch the run, and another may be started.
    """
    leave_tracebacks()
    if sys.platform == "linux":
        ctypes.CDLL(None).prctl(PR_SET_PDEATHSIG, signal.SIGTERM)
    _leave_without(int(os.environ[STARTER]))  # if it died before that
    prepare()
    go = Path(os.environ[FOLDER]) / GO
    (go.parent / f"{READY}-{os.environ['RANK']}").touch()
    while not go.is_file():
        _leave_without(int(os.environ[STARTER]))
        time.sleep(0.02)
    return go.read_text(encoding="utf-8")


def _leave_without(starter: int) -> None:
    try:
        os.kill(starter, 0)
    except ProcessLookupError:
        sys.exit(130)
    if state_of(starter) == ENDED:  # and nobody has asked how
        sys.exit(130)
