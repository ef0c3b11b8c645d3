"""Files that another process wrote: only regular ones are opened, and JSON becomes values of known types and ranges.

pydantic's `TypeAdapter` in strict mode accepts 10^30 for a whole number, infinity and NaN (tried with pydantic 2.14).
"""

from __future__ import annotations

import json
import math
import os
import stat
import sys
import types
import typing
from dataclasses import MISSING, fields
from pathlib import Path
from typing import TYPE_CHECKING, Any, BinaryIO, TypeVar

if TYPE_CHECKING:
    from _typeshed import DataclassInstance

MAX_JSON_BYTES = 64 * 2**20  # of a file that ligertune writes: its largest, report.json, has some 100 KB
MAX_JSON_DEPTH = 64  # containers within containers; Python's own limit, about 1,000, varies with the caller's stack
MAX_WHOLE = 2**63 - 1  # of whole numbers: larger ones overflow numpy, torch and float

T = TypeVar("T", bound="DataclassInstance")


class DamagedFileError(ValueError):
    """A file is not what it has to be. The message completes "PATH ...": "is not a regular file"."""


def open_regular(path: Path) -> BinaryIO:
    """Open a file to read bytes. Raises DamagedFileError for a folder, a pipe or a device, which may never end."""
    if not stat.S_ISREG(os.stat(path).st_mode):
        raise DamagedFileError("is not a regular file")
    return path.open("rb")


def read_json_value(path: Path, *, most: int = MAX_JSON_BYTES) -> Any:
    """Return the value in a JSON file of at most `most` bytes. Raises DamagedFileError and OSError."""
    with open_regular(path) as file:
        text = file.read(most + 1)
    if len(text) > most:
        raise DamagedFileError(f"has more than {most >> 20} MiB")
    return parse_json_text(text)


def parse_json_text(text: bytes | str) -> Any:
    """Return the value of a JSON text. Raises DamagedFileError, also for one that is nested too deeply."""
    try:
        found = json.loads(text)
    except RecursionError:
        raise DamagedFileError("is not a valid JSON file: it is nested too deeply") from None
    except ValueError as error:  # also of a number with thousands of digits
        raise DamagedFileError(f"is not a valid JSON file: {str(error).splitlines()[0]}") from None
    if _is_deep(found):
        raise DamagedFileError("is not a valid JSON file: it is nested too deeply")
    return found


def _is_deep(value: Any) -> bool:
    level = [value]
    for _ in range(MAX_JSON_DEPTH):
        containers = [one for one in level if isinstance(one, dict | list)]
        if not containers:
            return False
        level = [inner for one in containers for inner in (one.values() if isinstance(one, dict) else one)]
    return True


# ---- typed values


def read_fields(kind: type[T], path: Path) -> T:
    """Return the dataclass `kind` from the object in a JSON file. Raises DamagedFileError and OSError."""
    return parse_fields(kind, read_json_value(path))


def parse_fields(kind: type[T], values: Any) -> T:
    """Return the dataclass `kind` from a JSON object, whose other keys are left out. Raises DamagedFileError.

    The types are those of its annotations: str, bool, int, float, literals, and one of them or None. Numbers are
    finite. A field with metadata {"range": (smallest, largest)} must lie in it.
    """
    if not isinstance(values, dict):
        raise DamagedFileError("does not hold an object {...}")
    hints = typing.get_type_hints(kind)
    found = {}
    for field in fields(kind):
        if field.name not in values:
            if field.default is MISSING:
                raise DamagedFileError(f"lacks {field.name}")
            continue
        value = values[field.name]
        smallest, largest = field.metadata.get("range", (-MAX_WHOLE, MAX_WHOLE))
        if not _fits(value, hints[field.name], smallest, largest):
            raise DamagedFileError(f"holds a wrong {field.name}: {_shown(value)}")
        found[field.name] = float(value) if hints[field.name] is float else value
    return kind(**found)


def _fits(value: Any, hint: Any, smallest: float, largest: float) -> bool:
    if isinstance(hint, types.UnionType):
        return any(_fits(value, one, smallest, largest) for one in typing.get_args(hint))
    if typing.get_origin(hint) is typing.Literal:
        return value in typing.get_args(hint)
    if hint is float:
        return is_number(value) and smallest <= value <= largest
    if hint is int:
        return type(value) is int and smallest <= value <= largest
    return type(value) is hint  # str, bool, None


def _is_measured(value: Any) -> bool:
    """Return whether a JSON value is a number that a run measures: float32 holds it, and a chart shows it."""
    return is_number(value) and abs(value) <= MAX_FLOAT32


def is_number(value: Any) -> bool:
    """Return whether a JSON value is a number that a float holds."""
    return type(value) in (int, float) and abs(value) <= sys.float_info.max


def _shown(value: Any) -> str:
    """Return the beginning of a value, as it stands in the file."""
    return str(value)[:40] if isinstance(value, int) and abs(value) > MAX_WHOLE else json.dumps(value)[:40]


# ---- lines of metrics.jsonl

MAX_FLOAT32 = 3.4028235e38
_COUNTS = ("step", "tokens", "padded_tokens", "trained_tokens", "images", "image_tokens")
_FINITE = ("loss", "eval_loss", "loss_before_training")
_SPEEDS = ("learning_rate", "tokens_per_second", "images_per_second", "seconds", "remaining_seconds", "epoch")
_TEXTS = ("note", "time")


def check_line(line: Any) -> dict[str, Any]:
    """Return a line of metrics.jsonl. Raises DamagedFileError if a run or a report cannot compute with its values."""
    if not isinstance(line, dict) or "step" not in line:
        raise DamagedFileError("is not a line of a run")
    for name, value in line.items():
        if not _fits_line(name, value):
            raise DamagedFileError(f"holds a wrong {name}")
    return line


def _is_sample(value: Any) -> bool:
    """Return whether a value is an object of texts with a prompt and its answer."""
    if not isinstance(value, dict) or not {"prompt", "answer"} <= value.keys():
        return False
    return all(isinstance(text, str) for text in value.values())


def _fits_line(name: str, value: Any) -> bool:
    if name in _COUNTS:
        return type(value) is int and 0 <= value <= MAX_WHOLE
    if name in _FINITE:  # a run ends at a loss that is not finite
        return _is_measured(value)
    if name in _SPEEDS:
        return value is None or _is_measured(value)
    if name in _TEXTS:
        return isinstance(value, str)
    if name == "samples":
        return isinstance(value, list) and all(map(_is_sample, value))
    if name == "peak_memory":
        return isinstance(value, dict) and all(isinstance(one, str) or is_number(one) for one in value.values())
    # Measures of a task. GaLore has no grad_norm (null), and under fp16 it may be infinite in a skipped step.
    is_infinite = type(value) is float and not math.isfinite(value)
    return value is None or is_infinite or _is_measured(value)
