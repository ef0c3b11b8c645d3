"""Files of a run: atomic writes, checked reads, metrics.jsonl, the newest checkpoint, disk errors as one sentence."""

from __future__ import annotations

import bisect
import contextlib
import errno
import json
import math
import os
import re
import shutil
import stat
import uuid
from collections.abc import Iterator
from datetime import datetime, timezone
from pathlib import Path
from typing import Any, BinaryIO

from ligertune.errors import UserError, format_bytes
from ligertune.files.checked_files import DamagedFileError, check_line, open_regular, parse_json_text, read_json_value

DISK_ERRORS = (errno.ENOSPC, errno.EDQUOT, errno.EFBIG, errno.EROFS, errno.EIO)
PROMPT_FILE = "ligertune.json"  # saved with the model: the prompt template of training, and the base as it was trained
PROGRESS_FILE = "progress.json"  # the last file that a checkpoint writes: with it a checkpoint is complete


# ---- atomic folders: a kill leaves the old folder, the new one, or none


def put_in_place(partial: Path, final: Path) -> None:
    """Rename the complete folder `partial` to `final`, replacing what is there."""
    flush(partial)
    remove(final)
    os.replace(partial, final)
    flush(final.parent, files=False)


@contextlib.contextmanager
def new_folder(folder: Path) -> Iterator[Path]:
    """Yield an empty folder next to `folder`, which becomes `folder` when it is complete. An error leaves nothing."""
    aside = folder.with_name(f".{folder.name}.partial")
    remove(aside)
    aside.mkdir(parents=True)
    try:
        yield aside
        put_in_place(aside, folder)
    except BaseException:  # Ctrl-C, too
        shutil.rmtree(aside, ignore_errors=True)
        raise


def remove(folder: Path) -> None:
    """Remove a folder if it exists. It is renamed first, so that a kill does not leave half of it under its name.

    Of a link, only the link is removed.
    """
    if folder.is_symlink():
        folder.unlink()
        return
    if not folder.exists():
        return
    renamed = folder.with_name(f".{folder.name.strip('.').removesuffix('.partial')}.old.partial")
    shutil.rmtree(renamed, ignore_errors=True)
    os.replace(folder, renamed)
    shutil.rmtree(renamed)


def flush(folder: Path, *, files: bool = True) -> None:
    """Write a folder's entries, and its files, to the disk, before a rename relies on them."""
    if os.name != "posix":
        return
    inside = [entry for entry in folder.rglob("*") if entry.is_file()] if files else []
    for path in [*inside, folder]:
        descriptor = os.open(path, os.O_RDONLY)
        try:
            os.fsync(descriptor)
        finally:
            os.close(descriptor)


def remove_leftovers(folder: Path) -> None:
    """Remove partial folders and files that a kill left in `folder`."""
    for left in folder.glob(".*.partial"):
        if left.is_dir() and not left.is_symlink():
            shutil.rmtree(left)
        else:
            left.unlink()


# ---- atomic files: a link is replaced, and its target is never written


def check_replaceable(path: Path) -> None:
    """Raise UserError unless `path` is free, a regular file, or a link to one: nothing else may be replaced."""
    if not os.path.lexists(path):
        return
    # /dev/stdout and /dev/fd/1 are links: replacing them would harm every program of the machine
    is_stream = path.is_symlink() and os.readlink(path).startswith(("/proc/", "/dev/"))
    is_dangling = path.is_symlink() and not path.exists()
    if is_stream or not (is_dangling or path.is_file()):
        raise UserError(
            f"{path} is {name_kind(path)}, and nothing is written there.", hint="Remove it, or name another place."
        )


def name_kind(path: Path) -> str:
    """Return what a path is: "a folder", "a named pipe", "a link to /elsewhere"."""
    if path.is_symlink():
        return f"a link to {os.readlink(path)}"
    mode = path.stat().st_mode
    kinds = {stat.S_IFDIR: "a folder", stat.S_IFIFO: "a named pipe", stat.S_IFSOCK: "a socket", stat.S_IFREG: "a file"}
    return kinds.get(stat.S_IFMT(mode), "a device")


def write_bytes(path: Path, content: bytes) -> None:
    """Write a file atomically: another name of an earlier file (a hard link), and the target of a link, stay as is."""
    check_replaceable(path)
    partial = path.with_name(f".{uuid.uuid4().hex}.partial")
    try:
        with partial.open("xb") as file:
            file.write(content)
        os.replace(partial, path)
    except OSError:
        partial.unlink(missing_ok=True)
        raise


def write_text(path: Path, text: str) -> None:
    """Write a UTF-8 text file atomically, as `write_bytes` does."""
    write_bytes(path, text.encode())


def write_json(path: Path, content: dict[str, Any]) -> None:
    """Write a JSON file atomically, without secrets. A number that is not finite is null."""
    write_text(path, mask_secrets(json.dumps(finite(content), indent=1, default=str)) + "\n")


def finite(value: Any) -> Any:
    """Return a copy of nested JSON values with None in place of NaN and infinity, which JSON does not have."""
    if isinstance(value, dict):
        return {key: finite(one) for key, one in value.items()}
    if isinstance(value, list | tuple):
        return [finite(one) for one in value]
    return None if isinstance(value, float) and not math.isfinite(value) else value


def open_to_append(path: Path) -> BinaryIO:
    """Open a regular file of a run to append to it. Raises OSError for a link, and for anything else."""
    # Windows has neither flag, and no named pipes in folders. With O_NONBLOCK a pipe without a reader is an error.
    flags = getattr(os, "O_NOFOLLOW", 0) | getattr(os, "O_NONBLOCK", 0) | getattr(os, "O_BINARY", 0)
    file = os.fdopen(os.open(path, os.O_WRONLY | os.O_CREAT | os.O_APPEND | flags, 0o666), "ab")
    if not stat.S_ISREG(os.fstat(file.fileno()).st_mode):
        file.close()
        raise OSError(errno.EPERM, "It is not a regular file", str(path))
    return file


# variables whose values are secrets, and what secrets look like that were written into a command or a recipe
_SECRET_VARIABLES = (
    "HF_TOKEN", "HUGGING_FACE_HUB_TOKEN", "WANDB_API_KEY", "MLFLOW_TRACKING_PASSWORD", "MLFLOW_TRACKING_TOKEN",
    "AWS_SECRET_ACCESS_KEY", "AWS_SESSION_TOKEN", "OPENAI_API_KEY",
)  # fmt: skip
_SECRET = re.compile(r"\bhf_\w{16,}|\bwandb_v\d+_\w{16,}|(?<=://)[^/\s:@\"']+:[^/\s@\"']+(?=@)")
_SHORTEST_SECRET = 8  # a variable with less is a placeholder, and may be part of a word


def mask_secrets(text: str) -> str:
    """Return the text of a report with MASKED, a word in JSON, YAML and HTML, for tokens and passwords."""
    for value in (os.environ.get(name, "") for name in _SECRET_VARIABLES):
        if len(value) >= _SHORTEST_SECRET:
            text = text.replace(value, "MASKED")
    return _SECRET.sub("MASKED", text)


# ---- checkpoints


def step_folders(output_dir: Path) -> list[tuple[int, Path]]:
    """Return (N, folder) of each `checkpoints/step-N` of a run, lowest first, complete or not."""
    folder = output_dir / "checkpoints"
    if not folder.is_dir():
        return []
    # at most 18 digits: such a step fits in 64 bits
    named = [(int(m[1]), entry) for entry in folder.iterdir() if (m := re.fullmatch(r"step-(\d{1,18})", entry.name))]
    return sorted(named)


def complete_checkpoints(output_dir: Path) -> list[Path]:
    """Return the complete `checkpoints/step-N` of a run, oldest first."""
    return [folder for _, folder in step_folders(output_dir) if os.path.isfile(folder / PROGRESS_FILE)]


def newest_checkpoint(output_dir: Path) -> Path | None:
    """Return the complete checkpoint with the highest step, or None."""
    return next(reversed(complete_checkpoints(output_dir)), None)


def checkpoint_to_resume(output_dir: Path, wanted: str) -> tuple[Path, int] | None:
    """Return (checkpoint, its step) that a run continues from if it is undamaged, or None without one.

    wanted: checkpoint.resume_from_checkpoint: auto, newest or a folder.
    """
    folder = newest_checkpoint(output_dir) if wanted in ("auto", "newest") else Path(wanted)
    if folder is None:
        return None
    step = (read_object(folder / PROGRESS_FILE) or {}).get("step")
    return (folder, step) if type(step) is int else None


# ---- metrics.jsonl: one line per logged step, readable during the run


def utc_now() -> str:
    """Return date and time in UTC, ISO 8601: "2026-11-25T03:58:11.042+00:00"."""
    return datetime.now(timezone.utc).isoformat(timespec="milliseconds")


class MetricsFile:
    """Append-only writer of metrics.jsonl. enabled: false on all ranks but the main one."""

    def __init__(self, path: Path, *, enabled: bool) -> None:
        self._path = path
        self.enabled = enabled

    def begin(self, *, after: int) -> None:
        """Drop the lines after the step that a run is resumed from; 0 drops all."""
        if self.enabled:
            kept = [line for line in read_metrics(self._path) if line["step"] <= after] if after else []
            write_text(self._path, "".join(json.dumps(finite(line)) + "\n" for line in kept))

    def lines(self) -> list[dict[str, Any]]:
        """Return the lines written so far."""
        return read_metrics(self._path)

    def write(self, line: dict[str, Any]) -> None:
        """Append one line. The file is closed after it, so that readers see it at once.

        A number that is not finite is null: a gradient norm under fp16, or a metric of a Python user.
        """
        if self.enabled:
            with open_to_append(self._path) as out:
                out.write(json.dumps(finite(line), allow_nan=False).encode() + b"\n")


# A line holds numbers, and sample answers of eval.sample_prompts: a few KB. A file of 1 GiB has two million lines.
MAX_LINE_BYTES = 4 * 2**20
MAX_METRICS_BYTES = 2**30


def read_metrics(path: Path) -> list[dict[str, Any]]:
    """Return all lines of metrics.jsonl that are not damaged. A last line that a kill cut off is skipped, too."""
    return [line for _, line in _metrics_lines(path) if line is not None]


def damaged_lines(path: Path) -> list[tuple[int, int]]:
    """Return (line number, highest step in the lines before it) of each damaged line of metrics.jsonl."""
    damaged = []
    last = 0
    for number, line in _metrics_lines(path):
        if line is None:
            damaged.append((number, last))
        else:
            last = max(last, line["step"])
    return damaged


def _metrics_lines(path: Path) -> list[tuple[int, dict[str, Any] | None]]:
    """Return (number, line) of metrics.jsonl; None for one that is damaged. The rest after the last \\n is left out."""
    if not path.is_file():
        return []
    found: list[tuple[int, dict[str, Any] | None]] = []
    with open_regular(path) as file:
        size = os.fstat(file.fileno()).st_size
        if size > MAX_METRICS_BYTES:
            raise UserError(
                f"{path} has {format_bytes(size)}, and at most {format_bytes(MAX_METRICS_BYTES)} are read.",
                hint="Is it the file of this run? Move it away.",
            )
        while text := file.readline(MAX_LINE_BYTES):
            is_whole = text.endswith(b"\n")
            while text and not text.endswith(b"\n"):  # the rest of a line that is too long
                text = file.readline(MAX_LINE_BYTES)
            if text:
                found.append((len(found) + 1, _parse_line(text) if is_whole else None))
    in_order = _in_order([(line["step"], _what_of(line)) for _, line in found if line is not None])
    return [(number, None if line is None or not next(in_order) else line) for number, line in found]


def _parse_line(text: bytes) -> dict[str, Any] | None:
    try:
        return check_line(parse_json_text(text))
    except DamagedFileError:
        return None


def _what_of(line: dict[str, Any]) -> str:
    """Return the number that a run writes once per step, or an empty string: notes and answers may be several."""
    return next((name for name in ("loss", "eval_loss", "loss_before_training") if name in line), "")


def _in_order(lines: list[tuple[int, str]]) -> Iterator[bool]:
    """Yield whether each (step, what) belongs to the longest series of lines whose steps never decrease.

    So one line with a wrong step, however high, is damage, and the lines after it are not. The second line of a step
    that says the same is damage, too: tokens and evaluations would count twice.
    """
    lowest_ends: list[int] = []  # [n]: the lowest step that ends a series of n + 1 lines
    piles: list[list[int]] = []  # [n]: the lines that end one, whose steps decrease
    for index, (step, _) in enumerate(lines):
        place = bisect.bisect_right(lowest_ends, step)
        if place == len(piles):
            piles.append([])
            lowest_ends.append(step)
        piles[place].append(index)
        lowest_ends[place] = step
    kept: set[int] = set()
    limit = lowest_ends[-1] if lines else 0
    for pile in reversed(piles):
        index = next(index for index in pile if lines[index][0] <= limit)
        kept.add(index)
        limit = lines[index][0]
    said: set[tuple[int, str]] = set()
    for index, line in enumerate(lines):
        is_right = index in kept and not (line[1] and line in said)
        if is_right:
            said.add(line)
        yield is_right


def read_object(path: Path) -> dict[str, Any] | None:
    """Return the object in a JSON file; None if there is no such file, or something else in it."""
    try:
        found = read_json_value(path)
    except (OSError, DamagedFileError):
        return None
    return found if isinstance(found, dict) else None


# ---- disk errors


@contextlib.contextmanager
def writing(what: str, *, trains: bool = True) -> Iterator[None]:
    """Turn a full or failing disk into a UserError. `what` names the file in its message; trains: see cannot_write."""
    try:
        yield
    except UserError:
        raise
    except Exception as problem:  # torch, safetensors and tokenizers wrap the system's error in types of their own
        reason = disk_error(problem)
        if reason is None:
            raise
        raise cannot_write(what, reason, trains=trains) from problem


def disk_error(problem: BaseException) -> str | None:
    """Return what the disk refused, or None for any other error."""
    if isinstance(problem, OSError) and problem.errno is not None:
        return os.strerror(problem.errno) if problem.errno in DISK_ERRORS else None
    text = str(problem)
    if "inline_container" in text:  # torch.save reports where its file ended, not why
        return "the file could not be written to its end"
    # "(os error 28)": Rust. "[Errno 28]": the list of errors that shutil.copytree raises.
    codes = [code for code in DISK_ERRORS if f"(os error {code})" in text or f"[Errno {code}]" in text]
    return os.strerror(codes[0]) if codes else None


def cannot_write(what: str, reason: str, *, trains: bool = True) -> UserError:
    """Return the error of a full or failing disk. trains: the command is a run, which can be resumed."""
    resume = ", then continue with --resume from the newest complete checkpoint" if trains else ""
    return UserError(
        f"{what} could not be written: {reason}.",
        hint=f"Make room (`ligertune doctor` shows the free disk){resume}.",
        exit_code=1,
    )


def model_name(path: str) -> str:
    """Return a hub id as it is, and of a folder its name."""
    return Path(path).name if Path(path).is_absolute() else path
