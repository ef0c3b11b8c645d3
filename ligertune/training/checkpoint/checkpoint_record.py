"""progress.json, the record of a checkpoint: what it was trained as, and size and checksum of each file.

Nothing in a checkpoint is trusted before this module has compared it with what was written: disks, copies and people
change files. A record that is not what was written is damage, too, and so is one that a version without these fields
wrote. CRC-32 finds damage at several GB/s. It does not protect against forgery: a checkpoint is resumed from where it
was written, and a model from elsewhere is loaded as a model. Pickled files (optimizer and random states) are read by
torch's restricted reader (`weights_only`), which runs no code of theirs. The one exception, the index of FSDP's shards,
is described in docs/security.md.
"""

from __future__ import annotations

import dataclasses
import json
import zlib
from collections.abc import Callable, Collection
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypeVar

from ligertune.files.checked_files import MAX_WHOLE, DamagedFileError, open_regular, read_json_value
from ligertune.files.storage import PROGRESS_FILE, finite, write_text
from ligertune.planning.plan import Plan

T = TypeVar("T")

CHUNK_BYTES = 16 << 20  # of a file in memory; eight threads hold 128 MiB
CHECKSUM = "crc32"  # of the record itself, without this key


class DamagedRecordError(ValueError):
    """A record is not what was written. Its message completes "progress.json ..."."""


@dataclass(frozen=True)
class CheckpointRecord:
    """What a resumed run must agree with, and the files of the checkpoint: relative path -> (bytes, CRC-32)."""

    step: int
    seed: int
    method: dict[str, Any]  # the recipe's section
    model: str
    data_fingerprint: str
    global_batch_size: int
    rows: str
    optimizer: str
    strategy: str
    world_size: int
    files: dict[str, tuple[int, int]]
    base: str = ""  # the base model's dtype, revision and files; checkpoints of earlier versions do not say it

    @classmethod
    def of(cls, plan: Plan, step: int, files: dict[str, tuple[int, int]]) -> CheckpointRecord:
        """Return the record of a checkpoint of this plan."""
        values = dataclasses.asdict(plan)
        return cls(
            step=step,
            seed=plan.build.seed,
            # how the bytes of 4-bit weights are held changes no result, and depends on the strategy
            method=plan.build.method.model_dump(mode="json", exclude={"bnb_4bit_quant_storage"}),
            model=f"{plan.model_family} with {plan.n_parameters:,} parameters, {plan.n_trainable:,} of them trained",
            data_fingerprint=plan.data.fingerprint,
            global_batch_size=plan.batching.global_batch_size,
            rows=_name_rows(values["rows"]),
            optimizer=_name_optimizer(values["optimizer"]),
            strategy=plan.strategy,
            world_size=plan.batching.world_size,
            files=files,
            base="" if plan.base is None else str(plan.base),
        )

    def write(self, folder: Path, plan: Plan) -> None:
        """Write progress.json, which also holds the plan, for people to read."""
        content = {**dataclasses.asdict(self), "plan": plan.as_dict()}
        # The checksum is of what a reader gets: JSON turns tuples into lists and paths into text.
        plain = json.loads(json.dumps(finite(content), default=str))
        write_text(folder / PROGRESS_FILE, json.dumps({**plain, CHECKSUM: _checksum_of(plain)}, indent=1))

    @classmethod
    def read(cls, folder: Path) -> CheckpointRecord:
        """Read a record. Raises DamagedRecordError."""
        try:
            found = read_json_value(folder / PROGRESS_FILE)
        except FileNotFoundError:
            raise DamagedRecordError("is missing") from None
        except (OSError, DamagedFileError) as error:
            reason = error.strerror if isinstance(error, OSError) else str(error)
            raise DamagedRecordError(f"cannot be read ({reason})") from error
        if not isinstance(found, dict):
            raise DamagedRecordError("is not a JSON object")
        kinds = {"int": int, "str": str}
        fields = {field.name: kinds.get(str(field.type), dict) for field in dataclasses.fields(cls)}
        for name, kind in {**fields, CHECKSUM: int}.items():
            if name == "base" and name not in found:
                continue
            if type(found.get(name)) is not kind:  # not isinstance: True is an int, too
                raise DamagedRecordError(f"has no {name}" if name not in found else f"holds a wrong {name}")
        if found.pop(CHECKSUM) != _checksum_of(found):
            raise DamagedRecordError("is not what was written (its checksum differs)")
        if found["step"] < 0:
            raise DamagedRecordError("holds a wrong step")
        found["files"] = _sums(found["files"])
        return cls(**{name: found[name] for name in fields if name in found})


def _sums(files: dict[str, Any]) -> dict[str, tuple[int, int]]:
    """Return name -> (bytes, CRC-32). Raises DamagedRecordError, also for a name that leads out of the checkpoint."""
    for name, sums in files.items():
        is_pair = isinstance(sums, list) and len(sums) == 2
        if not is_pair or any(type(number) is not int or not 0 <= number <= MAX_WHOLE for number in sums):
            raise DamagedRecordError("holds wrong files")
        if not name or "\0" in name or Path(name).is_absolute() or ".." in Path(name).parts:
            raise DamagedRecordError("names a file outside of the checkpoint")
    return {name: tuple(sums) for name, sums in files.items()}


def _checksum_of(content: dict[str, Any]) -> int:
    return zlib.crc32(json.dumps(content, sort_keys=True).encode())


def _name_rows(rows: dict[str, Any]) -> str:
    """Return what decides which examples are in a step."""
    return f"{rows['count']} {rows['kind']} rows of at most {rows['length']} tokens"


def _name_optimizer(optimizer: dict[str, Any]) -> str:
    """Return what decides the shapes and the order of an optimizer's states."""
    rank = f" at train.galore.rank: {optimizer['galore']['rank']}" if optimizer["name"] == "galore_adamw" else ""
    groups = ", ".join(group["parameters"] for group in optimizer["lr_groups"])
    place = "".join(f" with train.optim_{name}" for name in ("offload", "in_backward") if optimizer[name])
    return f"{optimizer['name']}{rank}{place}{f' with train.lr_groups of {groups}' if groups else ''}"


# ---- damage


def damage_of(folder: Path, *, only: Collection[str] | None = None) -> str | None:
    """Return how a checkpoint differs from what was written, or None. only: names of the files to compare."""
    try:
        files = CheckpointRecord.read(folder).files
    except DamagedRecordError as problem:
        return f"{PROGRESS_FILE} {problem}"
    return difference(folder, files if only is None else {name: files[name] for name in only if name in files})


def difference(folder: Path, files: dict[str, tuple[int, int]]) -> str | None:
    """Return how the files of a folder differ from these sizes and checksums, or None."""
    if not files:
        return "it lists no files"
    for name, (size, _) in files.items():  # before reading: a file that grew may be endless
        path = folder / name
        if path.is_file() and path.stat().st_size != size:
            return f"{name} has {path.stat().st_size} bytes instead of {size}"
    found = _in_threads(_checksum_or_fault, folder, files)
    for name, (_, crc) in files.items():
        if isinstance(found[name], str):
            return f"{name} {found[name]}"
        if found[name][1] != crc:
            return f"{name} is not what was written (its checksum differs)"
    return None


def file_checksums(folder: Path, names: Collection[str] | None = None) -> dict[str, tuple[int, int]]:
    """Return relative path -> (bytes, CRC-32). Raises OSError and DamagedFileError for a file that cannot be read.

    names: the files; all but progress.json by default.
    """
    if names is None:
        paths = (path for path in folder.rglob("*") if path.is_file() and path.name != PROGRESS_FILE)
        names = sorted(path.relative_to(folder).as_posix() for path in paths)
    return _in_threads(_checksum, folder, names)


def _in_threads(read: Callable[[Path], T], folder: Path, names: Collection[str]) -> dict[str, T]:
    with ThreadPoolExecutor(max_workers=8) as pool:  # zlib releases the GIL
        return dict(zip(names, pool.map(lambda name: read(folder / name), names), strict=True))


def _checksum_or_fault(path: Path) -> tuple[int, int] | str:
    """Return (bytes, CRC-32), or why the file cannot be read."""
    try:
        return _checksum(path)
    except FileNotFoundError:
        return "is missing"
    except OSError as error:
        return f"cannot be read ({error.strerror})"
    except DamagedFileError as error:
        return str(error)


def _checksum(path: Path) -> tuple[int, int]:
    size = 0
    crc = 0
    with open_regular(path) as file:
        while chunk := file.read(CHUNK_BYTES):
            size += len(chunk)
            crc = zlib.crc32(chunk, crc)
    return size, crc
