"""Folders of data files: the hub's layouts, folders of `save_to_disk`, and the files of one split.

As on the hub, words in the names of files and folders say to which split a file belongs: train-00000-of-00002.parquet,
data/test.jsonl, validation/a.csv. A folder whose names hold no such word is one data set, of the split `train`.
"""

from __future__ import annotations

import os
import re
from collections.abc import Collection
from pathlib import Path

from ligertune.data.rows.data_files import file_type
from ligertune.errors import UserError
from ligertune.storage import read_object

SPLIT_WORDS = {
    "train": ("train", "training"),
    "validation": ("validation", "valid", "dev", "val"),
    "test": ("test", "testing", "eval", "evaluation"),
}
# Files that `datasets` and the hub write next to the data.
_ABOUT_DATA = {"dataset_info.json", "dataset_infos.json", "dataset_dict.json", "state.json", "config.json"}
_MAX_DEPTH = 4  # folders below the one that is named; deeper ones are hardly meant
_MAX_ENTRIES = 100_000  # so that a wrong path, such as / or a home folder, is refused within seconds


def files_in_folder(folder: Path, split: str, known: Collection[str], known_types: str) -> list[Path]:
    """Return the data files of a split, sorted. known: endings of data files; known_types: their names in a sentence.

    Raises UserError if there are none, or files of several types.
    """
    if (folder / "dataset_dict.json").is_file():  # of DatasetDict.save_to_disk
        return _saved_data_set(_saved_split(folder, split))
    if (folder / "state.json").is_file() and (folder / "dataset_info.json").is_file():
        _check_no_split(folder, split)
        return _saved_data_set(folder)
    found = sorted(file for file in folder.iterdir() if _is_data(file, known))
    found = found or _files_below(folder, known)
    files = [file for file in found if file_type(file) != ".txt"] or found  # a .txt next to data is a licence or note
    if not files:
        raise UserError(f"{folder}: the folder holds no data file.", hint=f"Known: {known_types}.")
    return _of_one_type(folder, _of_split(folder, files, split))


def split_of(path: Path) -> str | None:
    """Return the split that the words of a relative path name, those of the file before those of its folders."""
    for part in reversed(path.parts):
        words = re.split(r"[-._ ]|(?<=[a-z])(?=[0-9])", part.lower())
        for name, known in SPLIT_WORDS.items():
            if any(word in known for word in words):
                return name
    return None


def _is_data(file: Path, known: Collection[str]) -> bool:
    hidden = file.name.startswith(".")
    return not hidden and file.name not in _ABOUT_DATA and file_type(file) in known and file.is_file()


def _files_below(folder: Path, known: Collection[str]) -> list[Path]:
    """Return the data files in the folders of a folder, which is not a file system's root or a home of everything."""
    found, seen = [], 0
    for place, folders, names in os.walk(folder):
        below = Path(place).relative_to(folder)
        folders[:] = sorted(name for name in folders if not name.startswith((".", "__")))
        if len(below.parts) >= _MAX_DEPTH:
            folders.clear()
        seen += len(names)
        if seen > _MAX_ENTRIES:
            raise UserError(f"{folder}: the folder holds more than {_MAX_ENTRIES:,} files.", hint="Name the data.")
        found += [file for name in sorted(names) if _is_data(file := Path(place) / name, known)]
    return found


def _of_split(folder: Path, files: list[Path], split: str) -> list[Path]:
    """Return the files of a split. Raises UserError if there are none."""
    by_split: dict[str | None, list[Path]] = {}
    for file in files:
        by_split.setdefault(split_of(file.relative_to(folder)), []).append(file)
    if set(by_split) == {None}:
        _check_no_split(folder, split)
        return files
    named = sorted(name for name in by_split if name)
    wanted = next((name for name, words in SPLIT_WORDS.items() if split in (name, *words)), split)
    if wanted not in by_split:
        raise _no_such_split(folder, split, named)
    if None in by_split:
        other = by_split[None][0].relative_to(folder)
        raise UserError(
            f"{folder}: the folder holds the split{'s' * (len(named) > 1)} {', '.join(named)}, and {other}, whose name "
            "says no split.",
            hint="Name the files in `path`, or move the others.",
        )
    return by_split[wanted]


def _no_such_split(folder: Path, split: str, named: Collection[str]) -> UserError:
    return UserError(
        f"{folder}: the folder has no split `{split}`; it has {', '.join(named)}.",
        hint=f"Write data.datasets[].split: {next(iter(named))}, or name the file in `path`.",
    )


def _check_no_split(folder: Path, split: str) -> None:
    if split != "train":
        raise UserError(
            f"{folder}: the names of its files say no split, and the recipe asks for `{split}`.",
            hint="Leave `split` out, or name the file you want in `path`.",
        )


def _of_one_type(folder: Path, files: list[Path]) -> list[Path]:
    types = sorted({file_type(file) for file in files})
    if len(types) > 1:
        raise UserError(
            f"{folder}: the folder holds files of several types ({', '.join(types)}).",
            hint=f"Choose one, for instance with {folder / ('*' + types[0])}.",
        )
    return files


def _saved_split(folder: Path, split: str) -> Path:
    """Return the folder of a split of a DatasetDict."""
    names = (read_object(folder / "dataset_dict.json") or {}).get("splits")
    if not isinstance(names, list) or not all(isinstance(name, str) and Path(name).name == name for name in names):
        raise UserError(f"{folder / 'dataset_dict.json'} does not list the names of splits.")
    if split not in names:
        raise _no_such_split(folder, split, names or ["none"])
    return folder / split


def _saved_data_set(folder: Path) -> list[Path]:
    """Return the files of a folder that Dataset.save_to_disk wrote, in order."""
    state = read_object(folder / "state.json") or {}
    entries = state.get("_data_files")
    entries = entries if isinstance(entries, list) else []
    names = [entry.get("filename") if isinstance(entry, dict) else None for entry in entries]
    if not names or not all(isinstance(name, str) and Path(name).name == name for name in names):
        raise UserError(f"{folder / 'state.json'} does not list the files of a data set.")
    missing = next((name for name in names if not (folder / name).is_file()), None)
    if missing:
        raise UserError(f"{folder}: {missing} is missing, which state.json lists.")
    return [folder / name for name in names]
