"""Answers on disk: JSON lines that are appended as answers finish, so that a killed run continues where it was.

Each process appends to its own file. A line counts once it ends with a line break; what a kill cut off is removed
before the next line is written, and that answer is generated again.
"""

from __future__ import annotations

import hashlib
import json
import os
import threading
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from ligertune.errors import UserError
from ligertune.files.storage import (
    check_replaceable,
    mask_secrets,
    name_kind,
    open_to_append,
    read_object,
    write_json,
    writing,
)

SETTINGS_FILE = "sample.json"
ANSWERS = "answers-*.jsonl"
SPEED_FILES = "speed-*.json"  # of each process: tokens and seconds of this call
SCORED_FILE = "scored.jsonl"
KEPT_FILE = "kept.jsonl"
REPORT_FILE = "report.json"
# A group of lines is written to the disk together: fsync takes milliseconds, and answers of a small model less.
GROUP_LINES = 64
GROUP_SECONDS = 1.0


@dataclass(frozen=True)
class StoredAnswer:
    """An answer as a line of a file. prompt, number: its place among the prompts, and among their answers.

    ids, log_probs: of its tokens; empty if a server answered. tokens: their number. finish: stop or length.
    """

    prompt: int
    number: int
    text: str
    finish: str
    tokens: int
    ids: tuple[int, ...] = ()
    log_probs: tuple[float, ...] = ()

    @property
    def key(self) -> tuple[int, int]:
        return (self.prompt, self.number)


class AnswerWriter:
    """Appends answers to one file, in groups that reach the disk when they are large or a second old.

    A thread writes old groups: the next answer may finish minutes later. Its error is raised by the next call.
    """

    def __init__(self, path: Path) -> None:
        with writing(str(path), trains=False):
            _remove_torn_line(path)
            self._file = open_to_append(path)
        self._path = path
        self._lines: list[bytes] = []
        self._lock = threading.Lock()
        self._closed = threading.Event()
        self._error: UserError | None = None
        self._thread = threading.Thread(target=self._flush_old, name="answers", daemon=True)
        self._thread.start()

    def add(self, answer: StoredAnswer) -> None:
        """Append an answer. Raises UserError for a full disk."""
        # replace: half of a surrogate pair has no UTF-8
        line = json.dumps(vars(answer), ensure_ascii=False).encode("utf-8", "replace") + b"\n"
        with self._lock:
            self._lines.append(line)
            if len(self._lines) >= GROUP_LINES:
                self._write()
        if self._error is not None:
            raise self._error

    def close(self) -> None:
        """Write what is left, and close the file."""
        self._closed.set()
        self._thread.join()
        with self._lock:
            self._write()
            self._file.close()

    def _write(self) -> None:
        """Write the group, and wait until the disk has it."""
        if self._lines:
            with writing(str(self._path), trains=False):
                self._file.write(b"".join(self._lines))
                self._file.flush()
                os.fsync(self._file.fileno())
            self._lines.clear()

    def _flush_old(self) -> None:
        while not self._closed.wait(GROUP_SECONDS):
            try:
                with self._lock:
                    self._write()
            except UserError as problem:
                self._error = problem
                return


def _remove_torn_line(path: Path) -> None:
    """Cut off what stands after the last line break."""
    if not path.is_file():
        return
    with path.open("rb+") as file:
        end = file.seek(0, os.SEEK_END)
        while end:
            start = max(0, end - 2**16)
            file.seek(start)
            place = file.read(end - start).rfind(b"\n")
            if place >= 0:
                end = start + place + 1
                break
            end = start
        file.truncate(end)


def read_answers(folder: Path) -> dict[tuple[int, int], StoredAnswer]:
    """Return the finished answers of all processes, by prompt and number, in this order.

    A line that a kill or a crash of the system has damaged is no answer: it is generated again.
    """
    found: dict[tuple[int, int], StoredAnswer] = {}
    for path in sorted(folder.glob(ANSWERS)):
        for answer in _answers_in(path):
            found.setdefault(answer.key, answer)
    return dict(sorted(found.items()))


def _answers_in(path: Path) -> Iterator[StoredAnswer]:
    with path.open("rb") as file:
        for line in file:
            if not line.endswith(b"\n"):
                return
            answer = _parsed(line)
            if answer is not None:
                yield answer


def _parsed(line: bytes) -> StoredAnswer | None:
    """Return the answer of a line; None for a damaged line."""
    try:
        values = json.loads(line)
        answer = StoredAnswer(
            prompt=values["prompt"],
            number=values["number"],
            text=values["text"],
            finish=values["finish"],
            tokens=values["tokens"],
            ids=tuple(values["ids"]),
            log_probs=tuple(values["log_probs"]),
        )
    except (ValueError, LookupError, TypeError, RecursionError):
        return None
    numbers = (answer.prompt, answer.number, answer.tokens)
    # isinstance would accept true and false
    is_right = all(type(one) is int for one in numbers) and isinstance(answer.text, str)
    return answer if is_right and answer.finish in ("stop", "length") else None


# ---- the settings that a folder's answers were made with


def fingerprint(prompts: Sequence[Any]) -> str:
    """Return a hash of JSON values."""
    digest = hashlib.sha256()
    for prompt in prompts:
        digest.update(json.dumps(prompt, sort_keys=True, default=str).encode("utf-8", "replace") + b"\n")
    return digest.hexdigest()[:32]


def check_answer_folder(folder: Path, key: str) -> None:
    """Raise UserError unless a folder is new, empty, or holds answers of this command."""
    if not os.path.lexists(folder):
        return
    if not folder.is_dir():
        raise UserError(f"{key}: {folder} is {name_kind(folder)}.", hint="Name a folder.")
    for name in (SETTINGS_FILE, SCORED_FILE, KEPT_FILE, REPORT_FILE):
        check_replaceable(folder / name)
    # the lock of the folder begins with a dot
    others = [path.name for path in folder.iterdir() if not path.name.startswith(".")]
    if others and read_object(folder / SETTINGS_FILE) is None:
        raise UserError(
            f"{key}: {folder} holds {sorted(others)[0]} and no answers of ligertune sample.",
            hint="Name another folder.",
        )


def claim_folder(folder: Path, settings: Mapping[str, Any], key: str) -> None:
    """Record the settings in a new folder, or compare them with those of its answers. Raises UserError."""
    kept = json.loads(mask_secrets(json.dumps(settings)))  # as the file holds it
    found = read_object(folder / SETTINGS_FILE)
    if found is None:
        with writing(str(folder / SETTINGS_FILE), trains=False):
            write_json(folder / SETTINGS_FILE, kept)
        return
    for name, value in kept.items():
        if found.get(name) != value:
            raise UserError(
                f"{key}: the answers in {folder} were made with {name}: {_shown(found.get(name))}, and the recipe says "
                f"{_shown(value)}.",
                hint="Name another folder, or write --overwrite to begin again.",
            )


def _shown(value: Any) -> str:
    text = json.dumps(value, ensure_ascii=False)
    return text if len(text) <= 80 else f"{text[:77]}..."


def remove_answers(folder: Path) -> None:
    """Remove the files of an earlier call from a folder, the settings last: a kill in between leaves them."""
    names = [SCORED_FILE, KEPT_FILE, REPORT_FILE]
    for path in [*folder.glob(ANSWERS), *folder.glob(SPEED_FILES), *(folder / name for name in names)]:
        path.unlink(missing_ok=True)
    (folder / SETTINGS_FILE).unlink(missing_ok=True)
