"""Prepared data sets on disk, each complete or absent: written aside, flushed, renamed.

An entry is a folder named by its key: the arrays of a `Block` as they are in memory, and `meta.json` with their sizes,
their hashes and what was counted. It is opened by mapping the arrays; one whose bytes are not what `meta.json` says is
thrown away and made anew. Processes that want the same entry wait for the one that makes it: under a launcher that is
the node's first rank, which alone shows its progress.
"""

from __future__ import annotations

import datetime
import hashlib
import json
import os
import shutil
import tempfile
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from functools import cache
from importlib.metadata import version
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
from filelock import FileLock, Timeout

from ligertune.data.examples import ARRAYS, Block, FileTable
from ligertune.data.rows.sources import display_path, find_files, hub_fingerprint

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

    from ligertune.planning.options import DataOptions, DatasetOptions
    from ligertune.vision.reader import ImageReader

# keys of the section that only choose among examples, or how they are made and put together
_AFTERWARDS = {"datasets", "eval_datasets", "val_split", "packing", "padding_free", "num_proc", "cache", "streaming"}
_BESIDE = {"weight"}  # the same of a data set
_VERSIONS = ("transformers", "tokenizers", "jinja2", "numpy")
_READ_AT_ONCE = 1 << 20


def data_key(
    spec: DatasetOptions, data: DataOptions, tokenizer: PreTrainedTokenizerBase, images: ImageReader | None = None
) -> str:
    """SHA-256 over everything above; a data set on the hub stands for itself under the name `datasets` gives it."""
    files = find_files(spec.path)
    template = _template(data, tokenizer)
    parts = {
        "files": [(display_path(file), _hash_of(file)) for file in files] or hub_fingerprint(spec),
        "path": display_path(Path(spec.path)),
        "set": _values(spec, without=_BESIDE),
        "section": _values(data, without=_AFTERWARDS),
        "template": template,
        "today": str(datetime.date.today()) if "strftime_now" in str(template) else None,
        "tokenizer": _tokenizer(tokenizer),
        "images": images.identity() if images else None,
        "code": _own_code(),
        "versions": {name: version(name) for name in _VERSIONS},
    }
    return hashlib.sha256(json.dumps(parts, sort_keys=True, default=str).encode()).hexdigest()


def _values(options: DatasetOptions | DataOptions, *, without: set[str]) -> dict[str, Any]:
    return {name: value for name, value in vars(options).items() if name not in without}


def _hash_of(file: Path) -> str:
    digest = hashlib.sha256()
    with file.open("rb") as content:
        while part := content.read(_READ_AT_ONCE):
            digest.update(part)
    return digest.hexdigest()


def _template(data: DataOptions, tokenizer: PreTrainedTokenizerBase) -> Any:
    """The chat template, and the file that `data.prompt_template` names if it is one."""
    file = Path(data.prompt_template)
    return [tokenizer.chat_template, file.read_bytes().decode("utf-8", "replace") if file.is_file() else None]


def _tokenizer(tokenizer: PreTrainedTokenizerBase) -> list[Any]:
    tokenizer("", add_special_tokens=False)  # sets the backend to neither pad nor cut: both are part of its text
    whole = hashlib.sha256(tokenizer.backend_tokenizer.to_str().encode()).hexdigest()
    return [type(tokenizer).__name__, whole, tokenizer.special_tokens_map, tokenizer.split_special_tokens]


@cache
def _own_code() -> str:
    digest = hashlib.sha256()
    for package in ("data", "vision"):
        for file in sorted((Path(__file__).parents[1] / package).rglob("*.py")):
            digest.update(file.read_bytes())
    return digest.hexdigest()


_META = "meta.json"
_ASIDE = ".writing-"
_STALE = 24 * 3600  # seconds after which what a killed writer left aside is removed
_PATIENCE = 30.0  # seconds that other ranks give the first to begin
_AGAIN = 0.05  # seconds between looks


def cache_home() -> Path:
    """$LIGERTUNE_CACHE, or `ligertune` in the user's folder for caches."""
    given = os.environ.get("LIGERTUNE_CACHE")
    return Path(given or Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "ligertune") / "data"


@dataclass(frozen=True)
class CacheEntry:
    """A data set as the cache keeps it: its examples, and what else its maker said."""

    block: Block
    about: dict[str, Any]


class CacheWriter:
    """Blocks to files, one behind the other: what was written is not kept in memory."""

    def __init__(self, folder: Path) -> None:
        self._folder, self._names = folder, FileTable()
        self._stack = ExitStack()
        self._files = {name: self._stack.enter_context((folder / name).open("wb")) for name in ARRAYS}
        self._hashes = {name: hashlib.sha256() for name in ARRAYS}

    def add(self, block: Block) -> None:
        block = self._names.renamed(block)
        for name, dtype in ARRAYS.items():
            array = np.ascontiguousarray(getattr(block, name), dtype=dtype)
            self._files[name].write(array)
            self._hashes[name].update(array)

    def finish(self, about: dict[str, Any]) -> None:
        """All of it on the disk, `meta.json` last."""
        sizes = {name: file.tell() for name, file in self._files.items()}
        for file in self._files.values():
            _flush(file)
        self._stack.close()
        hashes = {name: digest.hexdigest() for name, digest in self._hashes.items()}
        meta = {"sizes": sizes, "sha256": hashes, "files": self._names.files, "about": about}
        meta["pictures"] = self._names.pictures
        with (self._folder / _META).open("w", encoding="utf-8") as file:
            json.dump(meta, file, indent=1)
            _flush(file)

    def close(self) -> None:
        self._stack.close()


def load_or_make(key: str, make: Callable[[CacheWriter], dict[str, Any]], *, first: bool = True) -> CacheEntry:
    """The entry of this key; if there is no sound one, `make` writes its blocks and gives what is to be said of them.

    `first`: whether this process is the one to make it, if several of one run come at once.
    """
    home = cache_home()
    home.mkdir(parents=True, exist_ok=True)
    folder = home / key
    if not first:
        _wait_for(folder)
    found = open_entry(folder)
    if found is not None:
        return found
    with FileLock(home / f"{key}.lock"):
        found = open_entry(folder)  # another process may have made it meanwhile
        if found is None:
            _write(folder, make)
            found = open_entry(folder)
    if found is None:
        raise OSError(f"{folder} is not what was just written")
    return found


def open_entry(folder: Path) -> CacheEntry | None:
    """The entry, mapped; None if there is none, or if it is not whole."""
    try:
        meta = json.loads((folder / _META).read_text(encoding="utf-8"))
        arrays = {name: _mapped(folder / name, dtype, meta["sizes"][name]) for name, dtype in ARRAYS.items()}
        hashes = {name: hashlib.sha256(array).hexdigest() for name, array in arrays.items()}
        block = Block.from_arrays(arrays, meta["files"], meta["pictures"])
        return CacheEntry(block, meta["about"]) if hashes == meta["sha256"] else None
    except (OSError, ValueError, LookupError, TypeError):
        return None


def _mapped(path: Path, dtype: str, size: int) -> np.ndarray:
    if path.stat().st_size != size:
        raise ValueError(f"{path}: {path.stat().st_size} bytes, expected {size}")
    return np.memmap(path, dtype=dtype, mode="c") if size else np.zeros(0, dtype=dtype)


def _write(folder: Path, make: Callable[[CacheWriter], dict[str, Any]]) -> None:
    """Makes the entry aside and renames it; a reader sees all of it or nothing."""
    with _aside(folder.parent) as aside:
        writer = CacheWriter(aside)
        try:
            writer.finish(make(writer))
        finally:
            writer.close()
        _flush_folder(aside)
        _make_room(folder)
        try:
            aside.rename(folder)
        except OSError:
            if not folder.exists():  # else a writer that no lock held back was quicker, with the same content
                raise
    _flush_folder(folder.parent)


def _make_room(folder: Path) -> None:
    """Moves away an entry that is not whole, or it would have been opened: a folder is not renamed over another."""
    with _aside(folder.parent) as aside:
        if folder.exists():
            folder.rename(aside / "broken")


@contextmanager
def _aside(home: Path) -> Iterator[Path]:
    for old in home.glob(_ASIDE + "*"):
        if time.time() - old.stat().st_mtime > _STALE:
            shutil.rmtree(old, ignore_errors=True)
    aside = Path(tempfile.mkdtemp(prefix=_ASIDE, dir=home))
    try:
        yield aside
    finally:
        shutil.rmtree(aside, ignore_errors=True)


def _wait_for(folder: Path) -> None:
    """Until the entry is there, or until nobody has been making it for a while."""
    lock, idle = FileLock(folder.with_name(f"{folder.name}.lock")), 0.0
    while not folder.exists() and idle < _PATIENCE:
        try:
            lock.acquire(timeout=0)
            lock.release()
            idle += _AGAIN
        except Timeout:
            idle = 0.0
        time.sleep(_AGAIN)


def _flush(file: Any) -> None:
    file.flush()
    os.fsync(file.fileno())


def _flush_folder(folder: Path) -> None:
    """A rename is on the disk when its folder is; Windows cannot open one."""
    if os.name == "posix":
        handle = os.open(folder, os.O_RDONLY)
        try:
            os.fsync(handle)
        finally:
            os.close(handle)
