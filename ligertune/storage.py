"""Files of a run: atomic folders, metrics.jsonl, the newest checkpoint, and disk errors as one sentence."""

from __future__ import annotations

import contextlib
import errno
import json
import os
import re
import shutil
from collections.abc import Iterator
from datetime import datetime, timezone
from pathlib import Path

from ligertune.errors import UserError

DISK_ERRORS = (errno.ENOSPC, errno.EDQUOT, errno.EFBIG, errno.EROFS, errno.EIO)
PROGRESS_FILE = "progress.json"  # the last file that a checkpoint writes: with it a checkpoint is complete


# ---- atomic folders: a kill leaves the old folder, the new one, or none


def put_in_place(partial: Path, final: Path) -> None:
    """Rename the complete folder `partial` to `final`, replacing what is there."""
    flush(partial)
    remove(final)
    os.replace(partial, final)
    flush(final.parent, files=False)


def remove(folder: Path) -> None:
    """Remove a folder if it exists. It is renamed first, so that a kill does not leave half of it under its name."""
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
    """Remove partial folders that a kill left in `folder`."""
    for left in folder.glob(".*.partial"):
        if left.is_dir():
            shutil.rmtree(left)


def write_json(path: Path, content: dict) -> None:
    """Write a JSON file atomically, without secrets."""
    partial = path.with_name(path.name + ".partial")
    partial.write_text(mask_secrets(json.dumps(content, indent=1, default=str)) + "\n", encoding="utf-8")
    os.replace(partial, path)


# variables whose values are secrets, and what secrets look like that were written into a command or a recipe
_SECRET_VARIABLES = (
    "HF_TOKEN", "HUGGING_FACE_HUB_TOKEN", "WANDB_API_KEY", "MLFLOW_TRACKING_PASSWORD", "MLFLOW_TRACKING_TOKEN",
    "AWS_SECRET_ACCESS_KEY", "AWS_SESSION_TOKEN",
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
    step = None if folder is None else (read_object(folder / PROGRESS_FILE) or {}).get("step")
    return (folder, step) if type(step) is int else None


# ---- metrics.jsonl: one line per logged step, readable during the run


def utc_now() -> str:
    """Return date and time in UTC, ISO 8601: "2026-11-25T03:58:11.042+00:00"."""
    return datetime.now(timezone.utc).isoformat(timespec="milliseconds")


class MetricsFile:
    """Append-only writer of metrics.jsonl. For a resumed run it first drops the lines after `resumed_from`."""

    def __init__(self, path: Path, *, resumed_from: int, enabled: bool) -> None:
        self._path, self.enabled = path, enabled
        if enabled:
            kept = [line for line in read_metrics(path) if line["step"] <= resumed_from] if resumed_from else []
            partial = path.with_suffix(".partial")
            partial.write_text("".join(json.dumps(line) + "\n" for line in kept), encoding="utf-8")
            os.replace(partial, path)

    def lines(self) -> list[dict]:
        """Return the lines written so far."""
        return read_metrics(self._path)

    def write(self, line: dict) -> None:
        """Append one line. The file is closed after it, so that readers see it at once."""
        if self.enabled:
            with self._path.open("a", encoding="utf-8") as out:
                out.write(json.dumps(line) + "\n")


# Types of the values of metrics.jsonl that a resumed run or a report computes with. None: GaLore has no grad_norm.
LINE_TYPES = {
    **dict.fromkeys(("step", "tokens", "padded_tokens", "trained_tokens"), (int,)),
    **dict.fromkeys(("loss", "eval_loss", "loss_before_training"), (int, float)),
    **dict.fromkeys(("learning_rate", "grad_norm", "tokens_per_second", "seconds"), (int, float, type(None))),
}


def read_metrics(path: Path) -> list[dict]:
    """Return all lines of metrics.jsonl that are not damaged. A last line that a kill cut off is skipped, too."""
    return [line for _, line in _metrics_lines(path) if line is not None]


def damaged_lines(path: Path) -> list[tuple[int, int]]:
    """Return (line number, highest step in the lines before it) of each damaged line of metrics.jsonl."""
    damaged, last = [], 0
    for number, line in _metrics_lines(path):
        if line is None:
            damaged.append((number, last))
        else:
            last = max(last, line["step"])
    return damaged


def _metrics_lines(path: Path) -> Iterator[tuple[int, dict | None]]:
    """Yield (number, line) of metrics.jsonl; None for one that is damaged. The rest after the last \\n is left out."""
    if path.is_file():
        for number, text in enumerate(path.read_bytes().split(b"\n")[:-1], start=1):
            line = _parse_object(text)
            wrong = (
                line is None
                or "step" not in line
                or any(name in line and type(line[name]) not in kinds for name, kinds in LINE_TYPES.items())
            )
            yield number, None if wrong else line


def read_object(path: Path) -> dict | None:
    """Return the object in a JSON file; None if there is no such file, or something else in it."""
    try:
        return _parse_object(path.read_bytes())
    except OSError:
        return None


def _parse_object(text: bytes) -> dict | None:
    try:
        found = json.loads(text)
    except (ValueError, RecursionError):
        return None
    return found if isinstance(found, dict) else None


# ---- disk errors


@contextlib.contextmanager
def writing(what: str) -> Iterator[None]:
    """Turn a full or failing disk into a UserError. `what` names the file in its message."""
    from safetensors import SafetensorError

    try:
        yield
    except (OSError, SafetensorError, RuntimeError) as problem:  # torch and safetensors wrap the system's error
        reason = disk_error(problem)
        if reason is None:
            raise
        raise cannot_write(what, reason) from problem


def disk_error(problem: BaseException) -> str | None:
    """Return what the disk refused, or None for any other error."""
    if isinstance(problem, OSError):
        return os.strerror(problem.errno) if problem.errno in DISK_ERRORS else None
    text = str(problem)
    if "inline_container" in text:  # torch.save reports where its file ended, not why
        return "the file could not be written to its end"
    return next((os.strerror(code) for code in DISK_ERRORS if f"(os error {code})" in text), None)


def cannot_write(what: str, reason: str, *, trains: bool = True) -> UserError:
    """Return the error of a full or failing disk. trains: the command is a run, which can be resumed."""
    resume = ", then continue with --resume from the newest complete checkpoint" if trains else ""
    return UserError(
        f"{what} could not be written: {reason}.",
        hint=f"Make room (`ligertune doctor` shows the free disk){resume}.",
        exit_code=1,
    )
