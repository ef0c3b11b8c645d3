"""Launcher: `ligertune train` on a node with several devices starts one process per device and forwards signals.

It uses `torch.distributed.elastic.multiprocessing`, which starts processes, redirects the output of all but the first,
and ends the others when one fails. torchrun's agent does not fit: it kills ranks 30 seconds after a signal, whether or
not they have saved, and replaces their exit codes by its own (torch 2.13: two ranks that save for 40 seconds after
SIGTERM are gone after 34, and the exit code is 1).

Also the variables of Slurm: each task of `srun` is a rank that joins the run as those of torchrun do. accelerate 1.15
reads those of MPI launchers only: under `srun` each task would be a run of one process.
"""

from __future__ import annotations

import contextlib
import ctypes
import json
import logging
import os
import re
import shutil
import signal
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from functools import partial
from pathlib import Path
from types import FrameType
from typing import TYPE_CHECKING, Any

from ligertune.errors import UserError
from ligertune.files.storage import newest_checkpoint, read_object, write_json
from ligertune.launcher.failures import FOLDER, NO_CHECKPOINT, RankExit, diagnose, read_errors, record_traceback
from ligertune.launcher.signals import (
    HANGUP,
    before_leaving,
    heeded_signals,
    leave_closed_terminal,
    left_without_saving,
    say,
    stopped_by,
)

if TYPE_CHECKING:
    from torch.distributed.elastic.multiprocessing import PContext

READY = "ready"  # each waiting rank writes the file READY-RANK into FOLDER
GO = "go"  # then the launcher writes this file
STARTER = "LIGERTUNE_STARTER"  # environment variable: process id of the launcher
KEPT = "ranks"  # folder in output_dir with the ranks' output after a failure
PR_SET_PDEATHSIG = 1  # option of Linux' prctl
# States of a process in Linux' /proc/PID/stat. A process under a debugger is in state t.
STOPPED = "T"
ENDED = "Z"
# Longest time in seconds between two looks at the processes that counts as stopped: a scheduler that suspends the job
# suspends the launcher, too.
LONGEST_LOOK = 2.0


class Ranks:
    """The processes of a run. Each executes `python -m ligertune ARGUMENTS`.

    Entering the context starts them, while the launcher still makes the plan: they spend that time on imports. Then
    they wait for `run`. Leaving the context without `run` ends them.
    """

    _context: PContext  # from __enter__ on

    def __init__(self, processes: int, arguments: Sequence[str]) -> None:
        self._world = processes
        self._arguments = tuple(arguments)
        self._folder = Path(tempfile.mkdtemp(prefix="ligertune-"))
        self._run = False
        self._leaving = before_leaving(partial(shutil.rmtree, self._folder, ignore_errors=True))

    def __enter__(self) -> Ranks:
        from torch.distributed import TCPStore  # type: ignore[attr-defined]  # documented, and not in __all__
        from torch.distributed.elastic.multiprocessing import DefaultLogsSpecs, Std, start_processes

        for name in ("api", "subprocess_handler.subprocess_handler"):  # `diagnose` reports what they log
            logging.getLogger(f"torch.distributed.elastic.multiprocessing.{name}").setLevel(logging.CRITICAL)
        self._leaving.__enter__()
        os.environ["TORCHELASTIC_SIGNALS_TO_HANDLE"] = "SIGQUIT"  # the others are handled here
        before = {number: signal.getsignal(number) for number in heeded_signals()}
        # By this store ranks find each other. Rank 0 could not start it: a free port may be taken until it binds it.
        self._store = TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
        world = self._world
        self._context = start_processes(
            name="ligertune",
            entrypoint=sys.executable,
            args=dict.fromkeys(range(world), ("-m", "ligertune", *self._arguments)),
            envs={rank: _environment(rank, world, self._store.port, self._folder) for rank in range(world)},
            logs_specs=DefaultLogsSpecs(str(self._folder), redirects=dict.fromkeys(range(1, world), Std.ALL)),
        )
        for number, handler in before.items():  # torch versions without that variable have replaced the handlers
            if handler is not None:
                signal.signal(number, handler)
        return self

    def __exit__(self, *exc: Any) -> None:
        self._context.close(signal.SIGKILL)  # ranks that still wait
        self._leaving.__exit__(*exc)
        if not self._run:
            shutil.rmtree(self._folder, ignore_errors=True)

    @property
    def pids(self) -> tuple[int, ...]:
        """The ranks' process ids."""
        return tuple(self._context.pids().values())

    def run(
        self, output_dir: Path, timeout: int, make_message: Callable[[], dict[str, Any]], *, kept: str = NO_CHECKPOINT
    ) -> int:
        """Let the ranks work when all are ready; return the exit code. Raises UserError if ranks failed.

        timeout: seconds that ranks wait for each other in a step. make_message: called when the work starts;
        `begin_rank` returns its result in each rank. kept: see `diagnose`.
        """
        self._run = True
        context = self._context
        started = False
        with _forwarded_signals(context) as received:
            watch = StalledProcesses(timeout)
            stalled: set[int] = set()
            # Before the start a longer look would delay the first step; afterwards `stalled` is called every second.
            while (result := context.wait(timeout=1 if started else 0.1, period=0.1)) is None:
                if not started and len(list(self._folder.glob(f"{READY}-*"))) == self._world:
                    write_json(self._folder / GO, make_message())
                    started = True
                for rank in watch.stalled(context.pids()):
                    stalled.add(rank)
                    with contextlib.suppress(ProcessLookupError):
                        os.kill(context.pids()[rank], signal.SIGKILL)
        exits = [RankExit(f.local_rank, f.pid, f.exitcode, f.timestamp) for f in result.failures.values()]
        code = exit_code(output_dir, exits, received)
        if code is None:
            raise _failure(output_dir, exits, self._folder, timeout=timeout, stalled=stalled, kept=kept)
        shutil.rmtree(self._folder, ignore_errors=True)
        return code


def _environment(rank: int, world: int, port: int, folder: Path) -> dict[str, str]:
    """Return the environment variables that torchrun would set, and ours."""
    threads = os.environ.get("OMP_NUM_THREADS") or str(max(1, (os.cpu_count() or 1) // world))
    # Rank 0 writes to the terminal. If another rank dies, `diagnose` says so in one sentence, and NCCL's watchdog
    # would print several lines before it.
    quiet = {"TORCH_CPP_LOG_LEVEL": os.environ.get("TORCH_CPP_LOG_LEVEL", "FATAL")} if rank == 0 else {}
    return {
        **quiet,
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


@contextlib.contextmanager
def _forwarded_signals(context: PContext) -> Iterator[list[int]]:
    """Forward signals to the ranks, which save and exit; yield the list of those received so far."""
    received: list[int] = []

    def forward(number: int, frame: FrameType | None) -> None:
        received.append(number)
        if number == HANGUP:
            leave_closed_terminal()
        # Ranks run in sessions that the terminal does not signal, so Ctrl-C reaches them only from here.
        for pid in context.pids().values():
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, number)

    before = {number: signal.signal(number, forward) for number in heeded_signals()}
    try:
        yield received
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)


def exit_code(output_dir: Path, exits: list[RankExit], received: list[int]) -> int | None:
    """Return the exit code of a run whose ranks finished or were stopped; None if ranks failed.

    received: signals that the launcher forwarded.
    """
    if not exits:  # a stopped rank exits with 0, or torch would end those that still write
        report = read_object(output_dir / "report.json") or {}
        return 130 if report.get("status") == "interrupted" else 0
    left = [one.code == 130 for one in exits]  # by a second Ctrl-C, or by a signal before the first step
    # Without a forwarded signal, torch ends the ranks that outlive a failed one, and they may exit with 130, too.
    if all(left) or (received and any(left)):
        if received:
            again = received.count(signal.SIGINT) > 1
            say(left_without_saving(output_dir) if again else stopped_by(received[-1]), last=True)
        return 130
    for number in received:
        if any(-one.code == number for one in exits):  # ranks without handlers: save_on_signal is off
            signal.signal(number, signal.SIG_DFL)
            signal.raise_signal(number)
    return None


def _failure(
    output_dir: Path, exits: list[RankExit], folder: Path, *, timeout: int, stalled: set[int], kept: str
) -> UserError:
    """Return the error of failed ranks, and keep their output in output_dir if the run had started."""
    errors = read_errors(folder)
    newest = newest_checkpoint(output_dir)
    problem = diagnose(exits, errors, timeout=timeout, newest=newest, stalled=stalled, kept=kept)
    if any(error.expected and error.message == problem.message for error in errors.values()):
        shutil.rmtree(folder, ignore_errors=True)
        return problem
    if (output_dir / "plan.json").is_file():
        place = output_dir / KEPT
        shutil.rmtree(place, ignore_errors=True)
        folder = Path(shutil.move(folder, place))
    problem.hint = f"The output of the ranks is in {folder}. {problem.hint}".strip()
    return problem


def begin_rank(prepare: Callable[[], None]) -> dict[str, Any]:
    """Call `prepare` and wait until the launcher starts training; return its message. First call of a started rank.

    Linux sends this rank SIGTERM when the launcher dies: nothing would watch the run any more.
    """
    sys.excepthook = record_traceback  # ranks do not all print uncaught exceptions
    if sys.platform == "linux":
        ctypes.CDLL(None).prctl(PR_SET_PDEATHSIG, signal.SIGTERM)
    _exit_without(int(os.environ[STARTER]))  # the launcher may have died before prctl
    prepare()
    go = Path(os.environ[FOLDER]) / GO
    (go.parent / f"{READY}-{os.environ['RANK']}").touch()
    while not go.is_file():
        _exit_without(int(os.environ[STARTER]))
        time.sleep(0.02)
    return json.loads(go.read_text(encoding="utf-8"))


def _exit_without(launcher: int) -> None:
    """Exit if the launcher has ended."""
    try:
        os.kill(launcher, 0)
    except ProcessLookupError:
        sys.exit(130)
    if process_state(launcher) == ENDED:  # it has ended, but its parent has not collected its exit code
        sys.exit(130)


class StalledProcesses:
    """Find processes that a signal (SIGSTOP) has stopped for `seconds`. clock: returns seconds.

    Inside a step the other ranks' timeout would notice them. Outside steps that timeout is half an hour, because a
    rank may work alone then; a stopped process does not work.
    """

    def __init__(self, seconds: float, clock: Callable[[], float] = time.monotonic) -> None:
        self._seconds = seconds
        self._clock = clock
        self._looked = clock()
        self._stopped_for = dict[int, float]()

    def stalled(self, pids: Mapping[int, int]) -> list[int]:
        """Return the ranks that have been stopped for that long. pids: rank -> process. Call it every second."""
        now = self._clock()
        passed = min(now - self._looked, LONGEST_LOOK)
        self._looked = now
        stopped = [rank for rank, pid in pids.items() if process_state(pid) == STOPPED]
        known = self._stopped_for
        self._stopped_for = {rank: known[rank] + passed if rank in known else 0.0 for rank in stopped}
        return [rank for rank, seconds in self._stopped_for.items() if seconds >= self._seconds]


def process_state(pid: int) -> str:
    """Return the state letter in Linux' /proc/PID/stat; empty if the process has ended or there is no /proc."""
    try:
        # The program's name is in parentheses and may contain some.
        return Path(f"/proc/{pid}/stat").read_text(encoding="utf-8").rpartition(")")[2].split()[0]
    except OSError:
        return ""


# ---- Slurm


def slurm_variables(environ: Mapping[str, str]) -> dict[str, str]:
    """Return the variables that torch and accelerate read, for one of several srun tasks; {} for other processes.

    Only srun sets SLURM_STEP_NUM_TASKS; batch scripts have SLURM_PROCID and SLURM_NTASKS, too. Raises UserError if
    Slurm shows each task its own GPU only.
    """
    tasks = environ.get("SLURM_STEP_NUM_TASKS", "1")
    if tasks == "1" or "SLURM_PROCID" not in environ or "WORLD_SIZE" in environ:
        return {}
    node = int(environ.get("SLURM_NODEID", "0"))
    on_node = tasks_of_nodes(environ["SLURM_STEP_TASKS_PER_NODE"])[node]
    visible = environ.get("CUDA_VISIBLE_DEVICES") or environ.get("ROCR_VISIBLE_DEVICES") or ""
    if on_node > 1 and visible and visible.count(",") + 1 < on_node:
        raise UserError(
            f"Slurm shows this task the GPUs {visible}, and {on_node} tasks share the node: each task takes the GPU "
            "whose index is its local rank.",
            hint="Give srun --gpus-per-node instead of --gpus-per-task, or --gpu-bind=none.",
        )
    return {
        "RANK": environ["SLURM_PROCID"],
        "WORLD_SIZE": tasks,
        "LOCAL_RANK": environ["SLURM_LOCALID"],
        "LOCAL_WORLD_SIZE": str(on_node),
        "MASTER_ADDR": environ.get("MASTER_ADDR") or first_node(environ["SLURM_STEP_NODELIST"]),
        # two jobs that share a node must not share a port
        "MASTER_PORT": environ.get("MASTER_PORT") or str(20_000 + int(environ["SLURM_JOB_ID"]) % 20_000),
    }


def tasks_of_nodes(tasks_per_node: str) -> list[int]:
    """Return the number of tasks of each node: "4(x2),3" -> [4, 4, 3]."""
    counts = []
    for count, times in re.findall(r"(\d+)(?:\(x(\d+)\))?", tasks_per_node):
        counts += [int(count)] * int(times or 1)
    return counts


def first_node(nodes: str) -> str:
    """Return the first host name of a node list: "gpu[007-009,012],cpu3" -> "gpu007"."""
    found = re.match(r"([^\[,]+)(?:\[(\d+)[^\]]*\]([^,]*))?", nodes)
    if found is None:
        raise UserError(
            f"The environment variable SLURM_STEP_NODELIST is {nodes!r}, which names no node.",
            hint="Set MASTER_ADDR to the name of the first node.",
        )
    return "".join(part or "" for part in found.groups())
