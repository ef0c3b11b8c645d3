"""What a process of a run leaves when it fails, and what the one that started it makes of that: one sentence."""

from __future__ import annotations

import json
import os
import signal
import sys
import traceback
from collections.abc import Collection
from dataclasses import asdict, dataclass
from pathlib import Path
from types import TracebackType

from ligertune.errors import UserError
from ligertune.hardware import rank

FOLDER = "LIGERTUNE_RANKS"  # the variable that names the folder in which ranks leave word
AT_ONCE = 5  # seconds: a rank that ends later than the first by more has not failed by itself, it was ended
# How torch says that a rank waited too long: gloo in an error, NCCL by ending the process.
TIMED_OUT = ("timed out", "timeout")


@dataclass(frozen=True)
class Word:
    """What a failed rank left: a sentence for the user, or the last line of a traceback."""

    message: str
    hint: str
    exit_code: int
    expected: bool  # a UserError


@dataclass(frozen=True)
class Ended:
    """How the process of a rank ended. code: its exit code, or minus the signal. at: seconds since the epoch."""

    rank: int
    pid: int
    code: int
    at: float


def is_started_rank() -> bool:
    """Whether `ligertune train` started this process as one of several."""
    return FOLDER in os.environ


def leave_word(problem: UserError) -> None:
    """Tell the process that started this one what it has to say to the user."""
    _write(Word(problem.message, problem.hint, problem.exit_code, expected=True))


def leave_tracebacks() -> None:
    """From now on, an error that nobody expected is written down instead of printed by every rank."""
    sys.excepthook = _leave_traceback


def _leave_traceback(kind: type[BaseException], error: BaseException, trace: TracebackType | None) -> None:
    text = "".join(traceback.format_exception(kind, error, trace))
    (Path(os.environ[FOLDER]) / f"rank-{rank()}.txt").write_text(text, encoding="utf-8")
    lines = str(error).strip().splitlines() or [""]
    _write(Word(f"{kind.__name__}: {lines[0]}", "", 1, expected=False))


def _write(word: Word) -> None:
    (Path(os.environ[FOLDER]) / f"rank-{rank()}.json").write_text(json.dumps(asdict(word)), encoding="utf-8")


def words_in(folder: Path) -> dict[int, Word]:
    """Rank -> what it left."""
    found = {int(path.stem.partition("-")[2]): path for path in folder.glob("rank-*.json")}
    return {rank: Word(**json.loads(path.read_text(encoding="utf-8"))) for rank, path in sorted(found.items())}


def verdict(
    ended: list[Ended],
    words: dict[int, Word],
    *,
    timeout: int,
    newest: Path | None,
    given_up: Collection[int] = (),
) -> UserError:
    """The sentence on ranks of which some failed.

    timeout: seconds that a rank waits for another in a step. newest: the last checkpoint. given_up: ranks that were
    ended because they stood still for that long.

    Where one fails, the others fail for want of it, or are ended. So a rank that was killed comes before what ranks
    say; and of what they say, what they understood comes before a traceback.
    """
    left = f"The newest complete checkpoint is {newest}." if newest else "There is no checkpoint."
    resume = "Go on with --resume." if newest else ""
    first = min(one.at for one in ended)
    early = [one for one in ended if one.at - first < AT_ONCE]
    late = [one for one in ended if one.at - first >= AT_ONCE]
    waited = [one for one in early if _waited_too_long(one, words.get(one.rank))]
    silent = [one for one in ended if one.rank in given_up] or (late if waited else [])
    if silent:
        return UserError(
            f"{_named(silent)} did not answer for {timeout} seconds, and was given up. {left}",
            hint=f"{resume} parallel.timeout is how long ranks wait for each other in a step.".strip(),
            exit_code=1,
        )
    killed = [one for one in early if one.code < 0 and -one.code != signal.SIGTERM]
    if killed:
        name = signal.Signals(-killed[0].code).name
        why = ", as the system does where the host's memory runs out" if name == "SIGKILL" else ""
        return UserError(f"{_named(killed)} was killed by {name}{why}. {left}", hint=resume, exit_code=1)
    for word in words.values():
        if word.expected:
            return UserError(word.message, hint=word.hint, exit_code=word.exit_code)
    one = next((one for one in early if one.rank in words), early[0])
    said = words[one.rank].message if one.rank in words else f"exit code {one.code}"
    return UserError(f"{_named([one])} failed ({said}). {left}", hint=resume, exit_code=1)


def _waited_too_long(one: Ended, word: Word | None) -> bool:
    return -one.code == signal.SIGABRT or (
        word is not None and not word.expected and any(sign in word.message.lower() for sign in TIMED_OUT)
    )


def _named(ranks: list[Ended]) -> str:
    return " and ".join(f"rank {one.rank} (process {one.pid})" for one in ranks).capitalize()
