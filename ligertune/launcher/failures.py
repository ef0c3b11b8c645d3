"""Rank failures: each failing rank writes its error to a file; the launcher diagnoses the cause from all of them."""

from __future__ import annotations

import json
import os
import signal
import traceback
from collections.abc import Collection
from dataclasses import asdict, dataclass
from pathlib import Path
from types import TracebackType

from ligertune.errors import UserError, plural
from ligertune.hardware import rank

FOLDER = "LIGERTUNE_RANKS"  # environment variable: the folder into which ranks write their errors
# Seconds. Ranks that end later than this after the first one did not fail by themselves: the launcher ended them.
AT_ONCE = 5
NO_CHECKPOINT = "There is no checkpoint."
# Parts of torch's messages when a rank waited too long. gloo raises; NCCL's watchdog aborts the process.
TIMED_OUT = ("timed out", "timeout")


@dataclass(frozen=True)
class RankError:
    """The error of a rank: a UserError, or the last line of a traceback (`expected` is False)."""

    message: str
    hint: str
    exit_code: int
    expected: bool


@dataclass(frozen=True)
class RankExit:
    """How a rank's process ended. code: its exit code, or minus the signal. at: seconds since the epoch."""

    rank: int
    pid: int
    code: int
    at: float


def is_started_rank() -> bool:
    """Return whether `ligertune train` started this process as one of several ranks."""
    return FOLDER in os.environ


def write_error(problem: UserError) -> None:
    """Hand this rank's error to the launcher, which prints it once for all ranks."""
    _write(RankError(problem.message, problem.hint, problem.exit_code, expected=True))


def record_traceback(kind: type[BaseException], error: BaseException, trace: TracebackType | None) -> None:
    """Write an uncaught exception of this rank to files, as its sys.excepthook."""
    text = "".join(traceback.format_exception(kind, error, trace))
    (Path(os.environ[FOLDER]) / f"rank-{rank()}.txt").write_text(text, encoding="utf-8")
    lines = str(error).strip().splitlines() or [""]
    _write(RankError(f"{kind.__name__}: {lines[0]}", "", 1, expected=False))


def _write(error: RankError) -> None:
    (Path(os.environ[FOLDER]) / f"rank-{rank()}.json").write_text(json.dumps(asdict(error)), encoding="utf-8")


def read_errors(folder: Path) -> dict[int, RankError]:
    """Return the errors that ranks wrote, by rank."""
    found = {int(path.stem.partition("-")[2]): path for path in folder.glob("rank-*.json")}
    return {rank: RankError(**json.loads(path.read_text(encoding="utf-8"))) for rank, path in sorted(found.items())}


def diagnose(
    exits: list[RankExit],
    errors: dict[int, RankError],
    *,
    timeout: int,
    newest: Path | None,
    stalled: Collection[int] = (),
    kept: str = NO_CHECKPOINT,
) -> UserError:
    """Return the error of a run with failed ranks, which names the rank that caused the others to fail.

    timeout: seconds that ranks wait for each other in a step. newest: the newest checkpoint. stalled: ranks that the
    launcher killed because they were stopped for that long. kept: a sentence on what work without checkpoints has left.

    When one rank fails, the others lose their connection to it, or the launcher ends them. So a killed rank is more
    likely the cause than any error, and a UserError is more likely than a traceback.
    """
    left = kept
    resume = ""
    if newest:
        left = f"The newest complete checkpoint is {newest}."
        resume = "Continue with --resume."
    first = min(one.at for one in exits)
    early = [one for one in exits if one.at - first < AT_ONCE]
    late = [one for one in exits if one.at - first >= AT_ONCE]
    timed_out = any(_waited_too_long(one, errors.get(one.rank)) for one in early)
    silent = [one for one in exits if one.rank in stalled] or (late if timed_out else [])
    if silent:
        return UserError(
            f"{_name(silent)} did not answer for {plural(timeout, 'second')} and was ended. {left}",
            hint=f"{resume} parallel.timeout sets how long ranks wait for each other in a step.".strip(),
            exit_code=1,
        )
    killed = [one for one in early if one.code < 0 and -one.code != signal.SIGTERM]
    if killed:
        return UserError(f"{_name(killed)} {_how_killed(killed[0])}. {left}", hint=resume, exit_code=1)
    for error in errors.values():
        if error.expected:
            return UserError(error.message, hint=error.hint, exit_code=error.exit_code)
    one = next((one for one in early if one.rank in errors), early[0])
    reason = errors[one.rank].message if one.rank in errors else f"exit code {one.code}"
    return UserError(f"{_name([one])} failed ({reason}). {left}", hint=resume, exit_code=1)


def _how_killed(one: RankExit) -> str:
    name = signal.Signals(-one.code).name
    why = ", which the system sends when the host runs out of memory" if name == "SIGKILL" else ""
    return f"was killed by {name}{why}"


def _waited_too_long(one: RankExit, error: RankError | None) -> bool:
    """Return whether a rank ended because it waited too long for another one."""
    if -one.code == signal.SIGABRT:
        return True
    return error is not None and not error.expected and any(part in error.message.lower() for part in TIMED_OUT)


def _name(exits: list[RankExit]) -> str:
    return " and ".join(f"rank {one.rank} (process {one.pid})" for one in exits).capitalize()
