"""Cache of prepared data sets on disk. An entry is complete or absent: it is written to another folder and renamed.

An entry is a folder named by its key. It holds the arrays of a Block, and `meta.json` with their SHA-256 and the row
counts. Entries are memory-mapped; one whose bytes do not match `meta.json` is made again. Processes that need the same
entry wait for the one that makes it: in a distributed run, the first rank of the node.
"""

from __future__ import annotations

import datetime
import hashlib
import json
import os
import shutil
import tempfile
import time
from collections.abc import Callable
from contextlib import ExitStack
from dataclasses import dataclass, replace
from functools import cache
from importlib.metadata import version
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
from filelock import FileLock, Timeout

from ligertune.data.examples import ARRAYS, Block, FileNames, Preparation
from ligertune.data.rows.data_files import display_path
from ligertune.data.rows.row_kind import row_code
from ligertune.data.rows.sources import files_of, hub_rows
from ligertune.data.templates.bounded_jinja import template_path
from ligertune.errors import UserError
from ligertune.files.checked_files import open_regular, read_json_value
from ligertune.files.storage import flush, remove, write_text

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

    from ligertune.planning.options import DatasetOptions

_VERSIONS = ("transformers", "tokenizers", "jinja2", "numpy")
_META = "meta.json"
_OWN_HASH = "sha256_of_meta"
_MAX_META_BYTES = 2**30  # it names each image file: 1 GiB holds ten million paths
_PARTIAL = ".writing-"
_MAX_AGE_OF_PARTIAL = 24 * 3600  # seconds after which the folder of a killed writer is removed
_MAX_IDLE = 30.0  # seconds that other ranks wait for the first to begin
_POLL = 0.05  # seconds


def data_key(spec: DatasetOptions, preparation: Preparation) -> str:
    """Return the SHA-256 of everything that examples depend on: files, options, template, tokenizer, code, versions.

    A hub data set is represented by the fingerprint that `datasets` computes.
    """
    data = preparation.data
    tokenizer = preparation.tokenizer
    reader = preparation.reader
    file = template_path(data.prompt_template)
    file_text = None
    if file.is_file():
        with file.open("rb") as opened:
            file_text = opened.read(1 << 20).decode("utf-8", "replace")  # a longer one is refused
    template = [tokenizer.chat_template, file_text]
    parts = {
        "files": [(display_path(found), _hash_of(found)) for found in files_of(spec)]
        or hub_rows(spec, download=True)._fingerprint,
        "path": display_path(Path(spec.path)),
        "dataset": {name: value for name, value in vars(spec).items() if name != "weight"},
        "data": preparation.example_options,
        "template": template,
        "today": str(datetime.date.today()) if "strftime_now" in str(template) else None,
        "tokenizer": _tokenizer(tokenizer),
        "reader": reader.identity() if reader else None,
        "rows": preparation.rows,
        "problem_type": preparation.problem_type,
        "code": _own_code(),
        "versions": {name: version(name) for name in _VERSIONS},
    }
    return hashlib.sha256(json.dumps(parts, sort_keys=True, default=str).encode()).hexdigest()


def _hash_of(file: Path) -> str:
    digest = hashlib.sha256()
    try:
        with file.open("rb") as opened:
            while chunk := opened.read(1 << 20):
                digest.update(chunk)
    except OSError as error:  # not one of the cache, which is reported otherwise
        raise UserError(f"{display_path(file)} cannot be read: {error.strerror or error}.") from error
    return digest.hexdigest()


def _tokenizer(tokenizer: PreTrainedTokenizerBase) -> list[Any]:
    tokenizer("", add_special_tokens=False)  # sets the backend to neither pad nor truncate: its text contains both
    backend = hashlib.sha256(tokenizer.backend_tokenizer.to_str().encode()).hexdigest()
    return [type(tokenizer).__name__, backend, tokenizer.special_tokens_map, tokenizer.split_special_tokens]


@cache
def _own_code() -> list[str]:
    """Return the SHA-256 of each module that examples depend on, those of features that bring rows included."""
    root = Path(__file__).parents[1]
    # a feature's whole folder: which of its modules make examples is not known here
    folders = (root / "data", *row_code())
    return [_hash_of(file) for folder in folders for file in sorted(folder.rglob("*.py"))]


def cache_home() -> Path:
    """Return the folder of all entries: `data` in $LIGERTUNE_CACHE, or in `ligertune` of the user's cache folder."""
    given = os.environ.get("LIGERTUNE_CACHE")
    return Path(given or Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "ligertune") / "data"


@dataclass(frozen=True)
class CacheEntry:
    """A prepared data set: its examples, and what the function that made it returned about them."""

    block: Block
    about: dict[str, Any]
    cached: bool = True  # False if this call made it


class CacheWriter:
    """Appends blocks to the files of an entry, so that they need not stay in memory."""

    def __init__(self, folder: Path, stack: ExitStack) -> None:
        """Open the files of an entry; `stack` closes them."""
        self._folder = folder
        self._names = FileNames()
        self._files = {name: stack.enter_context((folder / name).open("wb")) for name in ARRAYS}
        self._hashes = {name: hashlib.sha256() for name in ARRAYS}

    def add(self, block: Block) -> None:
        """Append a block."""
        block = self._names.renumbered(block)
        for name, dtype in ARRAYS.items():
            array = np.ascontiguousarray(getattr(block, name), dtype=dtype)
            self._files[name].write(array.data)
            self._hashes[name].update(array.data)

    def finish(self, about: dict[str, Any]) -> None:
        """Write `meta.json`."""
        meta = {
            "sha256": {name: digest.hexdigest() for name, digest in self._hashes.items()},
            **self._names.as_fields(),
            "about": about,
        }
        write_text(self._folder / _META, json.dumps({**meta, _OWN_HASH: _hash_of_meta(meta)}, indent=1))


def load_or_make(key: str, make: Callable[[CacheWriter], dict[str, Any]], *, first: bool = True) -> CacheEntry:
    """Return the entry of this key. Without a valid one, `make` writes its blocks and returns JSON about them.

    first: whether this process makes the entry, among the processes of a distributed run.
    """
    home = cache_home()
    home.mkdir(parents=True, exist_ok=True)
    folder = home / key
    if not first:
        _wait_for(folder)
    if found := _open_entry(folder):
        return found
    with FileLock(home / f"{key}.lock"):
        if found := _open_entry(folder):  # another process may have made it in the meantime
            return found
        _write(folder, make)
        found = _open_entry(folder)
    if found is None:
        raise OSError(f"{folder} does not contain what was just written")
    return replace(found, cached=False)


def _open_entry(folder: Path) -> CacheEntry | None:
    """Memory-map an entry; None if it is absent or damaged."""
    try:
        meta = read_json_value(folder / _META, most=_MAX_META_BYTES)
        if meta.pop(_OWN_HASH) != _hash_of_meta(meta):
            return None
        arrays = {name: _memory_map(folder / name, dtype) for name, dtype in ARRAYS.items()}
        hashes = {name: hashlib.sha256(array.data).hexdigest() for name, array in arrays.items()}
        block = Block.from_arrays(arrays, meta)
        return CacheEntry(block, meta["about"]) if hashes == meta["sha256"] else None
    except (OSError, ValueError, LookupError, TypeError, AttributeError):
        return None


def _hash_of_meta(meta: dict[str, Any]) -> str:
    return hashlib.sha256(json.dumps(meta, sort_keys=True).encode()).hexdigest()


def _memory_map(path: Path, dtype: str) -> np.ndarray:
    open_regular(path).close()  # a pipe or a device is damage
    return np.memmap(path, dtype=dtype, mode="c") if path.stat().st_size else np.zeros(0, dtype=dtype)


def _write(folder: Path, make: Callable[[CacheWriter], dict[str, Any]]) -> None:
    """Write an entry to a temporary folder and rename that, replacing a damaged entry.

    Some NFS mounts grant the lock to each host, so that two make an entry at once. The first one stays: its maker has
    opened it, or is about to.
    """
    for old in folder.parent.glob(_PARTIAL + "*"):
        if time.time() - old.stat().st_mtime > _MAX_AGE_OF_PARTIAL:
            shutil.rmtree(old, ignore_errors=True)
    partial = Path(tempfile.mkdtemp(prefix=_PARTIAL, dir=folder.parent))
    try:
        with ExitStack() as stack:
            writer = CacheWriter(partial, stack)
            writer.finish(make(writer))
        flush(partial)
        if folder.exists() and _open_entry(folder) is None:
            remove(folder)
        try:
            os.replace(partial, folder)
        except OSError:  # the folder is not empty
            if _open_entry(folder) is None:
                raise
        flush(folder.parent, files=False)
    finally:
        shutil.rmtree(partial, ignore_errors=True)


def _wait_for(folder: Path) -> None:
    """Wait until the entry exists, or until no process has been making it for a while."""
    lock = FileLock(folder.with_name(f"{folder.name}.lock"))
    idle = 0.0
    while not folder.exists() and idle < _MAX_IDLE:
        try:
            with lock.acquire(timeout=0):
                idle += _POLL
        except Timeout:
            idle = 0.0
        time.sleep(_POLL)
