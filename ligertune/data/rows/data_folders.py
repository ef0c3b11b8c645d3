"""Folders of data files: the layouts of the hub, and what `datasets` writes with `save_to_disk`.

The data files of a folder are those of its topmost level that has any: in the folder, in `data/`, or in a folder for
each split. Splits have the names that the hub knows: `train.jsonl`, `data/train-00000-of-00002.parquet`, `test/a.csv`.

The patterns of `datasets` (5.2) find the same files in 7 of the 9 layouts of the tests. They are not used, because they
silently leave out files that name no split, add notes and the copies in `backup/`, and search all of /usr for minutes.
"""

from __future__ import annotations

import json
import os
import re
from collections import Counter
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple, NoReturn

from ligertune.data.rows.data_card import card_parts, matches, path_inside
from ligertune.data.rows.data_files import display_path
from ligertune.data.rows.file_readers import FILE_TYPES, READABLE, file_type, reader_of
from ligertune.errors import UserError

DEFAULT_SPLIT = "train"
# words in the names of files and folders, by split, as the hub reads them
_SPLIT_WORDS = {
    "train": ("train", "training"),
    "validation": ("validation", "valid", "val", "dev"),
    "test": ("test", "testing", "eval", "evaluation"),
}
_SPLITS = {word: split for split, words in _SPLIT_WORDS.items() for word in words}
_WORD = re.compile(rf"(?<![^\W_])({'|'.join(_SPLITS)})(?![^\W\d_])", re.IGNORECASE)
_SHARD = re.compile(r"(?:\A|[/-])([\w.]+)-\d{3,}-of-\d{3,}(?:-[0-9a-f]+)?\Z")  # the split of "train_sft-00000-of-00003"
_NO_SPLITS = ("data", "part", "shard", "file", "chunk")  # other words before the number of a shard
_METADATA = {"dataset_infos.json", "dataset_info.json", "dataset_dict.json", "state.json"}
_NOTES = {"readme", "license", "licence", "notice", "changelog", "citation"}
_TEXTS = (".txt", ".md")
_DOCUMENTS = {".doc", ".docx", ".epub", ".htm", ".html", ".odt", ".pdf", ".rst", ".rtf", ".tex"}  # of no known reader
_MAX_DEPTH = 4  # of subfolders: a level for the configuration, one for the split, and two for the rest
_MAX_FOLDERS = 10_000  # of one level, so that a search from / ends
_MAX_METADATA = 1 << 24  # bytes of a file that `datasets` wrote about a data set


class Choice(NamedTuple):
    """Which files of a folder, or of a hub data set, a recipe names."""

    split: str = DEFAULT_SPLIT
    name: str | None = None  # a configuration of README.md
    data_dir: str | None = None
    data_files: tuple[str, ...] = ()


ALL = Choice()


def files_in(folder: Path, choice: Choice = ALL) -> list[Path]:
    """Return the chosen data files of a folder, sorted: those of the split if README.md or their names tell splits."""
    if choice.data_dir is not None:
        folder = _subfolder(folder, choice.data_dir)
    files = _named_files(folder, choice) if choice.data_files else _files_of_split(folder, choice.split, choice.name)
    types = sorted({file_type(file) for file in files})
    if len(types) > 1 and not set(types) <= set(_TEXTS):
        raise UserError(
            f"{folder}: the folder holds files of several types ({', '.join(types)}).",
            hint=f"Choose one, for instance with {folder / ('*' + types[0])}.",
        )
    return files


def unread_files(folder: Path, read: list[Path]) -> dict[str, int]:
    """Return the number of data files and documents in a folder that are not among `read`, by their type.

    Left out are notes, texts next to data files, and all files where splits or `datasets` divide the folder.
    """
    is_divided = any(_split_of(file.relative_to(folder)) for file in read)
    if is_divided or _configured(folder):
        return {}
    kinds = {*READABLE, *_DOCUMENTS}
    if not {file_type(file) for file in read} <= set(_TEXTS):
        kinds -= {*_TEXTS, *_DOCUMENTS}
    level = [folder]
    counts: Counter[str] = Counter()
    for _ in range(_MAX_DEPTH):
        inside = [path for place in level if os.access(place, os.R_OK | os.X_OK) for path in _visible(place)]
        files = [path for path in inside if file_type(path) in kinds and path.is_file() and not _is_note(path)]
        counts.update(file_type(path) for path in files if path not in read)
        level = [path for path in inside if path.is_dir()][:_MAX_FOLDERS]
    return dict(sorted(counts.items()))


def _configured(folder: Path) -> bool:
    """Return whether README.md or `save_to_disk` says which files of a folder are data."""
    saved = any((folder / name).is_file() for name in ("dataset_dict.json", "state.json"))
    return saved or bool(card_parts(folder, None))


def _files_of_split(folder: Path, split: str, name: str | None) -> list[Path]:
    parts = card_parts(folder, name)
    if not parts and name is not None:
        raise no_configurations(str(folder))
    return _chosen(parts or _saved_parts(folder) or _parts(folder), split, folder)


def _subfolder(folder: Path, name: str) -> Path:
    inner = folder / path_inside(name, partial(_refuse, folder, "data_dir"))
    if not inner.is_dir():
        _refuse(folder, "data_dir", f"is {name:.200}, which is no folder in it")
    return inner


def _named_files(folder: Path, choice: Choice) -> list[Path]:
    if choice.name is not None or choice.split != DEFAULT_SPLIT:
        other = "split" if choice.name is None else "name"
        raise UserError(f"{folder}: `data_files` and `{other}` both choose files.", hint=f"Leave `{other}` out.")
    return matches(choice.data_files, folder, partial(_refuse, folder, "data_files"))


def _refuse(folder: Path, key: str, what: str) -> NoReturn:
    raise UserError(f"{display_path(folder)}: `{key}` {what}.", hint="Correct it, or leave it out.")


def no_configurations(path: str) -> UserError:
    """Return the error for a `name` where no README.md names configurations."""
    return UserError(
        f"{path} is on this machine: `name` chooses among the parts of a data set on the hub, or among the "
        "`configs` of a folder's README.md.",
        hint="Leave it out and name the file or folder you want in `path`.",
    )


def _chosen(parts: dict[str, list[Path]], split: str, folder: Path) -> list[Path]:
    """Return the files of a split. parts: files by split, "" for those without one."""
    names = ", ".join(name for name in sorted(parts) if name)
    if list(parts) == [""]:
        if split != DEFAULT_SPLIT:
            raise UserError(
                f"{folder}: the names of its files tell no splits apart, and `split` is {split}.",
                hint="Leave `split` out, or name the file you want in `path`.",
            )
        return parts[""]
    if "" in parts:
        raise UserError(
            f"{folder}: some files belong to a split ({names}), and {parts[''][0].name} to none.",
            hint="Name the files you want in `path`, for instance with a glob.",
        )
    asked = split if split in parts else _SPLITS.get(split.lower(), split)
    if asked in parts:
        return parts[asked]
    if len(parts) == 1 and split == DEFAULT_SPLIT:
        return next(iter(parts.values()))
    raise UserError(
        f"{folder} has no split {split}; it has {names}.",
        hint=f"Write data.datasets[].split: {min(parts)}, or name the file in `path`.",
    )


def _parts(folder: Path) -> dict[str, list[Path]]:
    """Return the data files of the topmost level that has any, by split."""
    level = [folder]
    for _ in range(_MAX_DEPTH):
        found = sorted(file for place in level for file in _data_files(place))
        files = _rows_in(found)
        paths = [] if files else [path for place in level for path in _visible(place)]
        folders = [path for path in paths if path.is_dir()][:_MAX_FOLDERS]
        # texts next to rows, or above a folder of them as in the hub's layouts, are notes
        if not files and not any(_rows_in(_data_files(inner)) for inner in folders if _is_part(inner)):
            files = found
        if files:
            parts: dict[str, list[Path]] = {}
            for file in files:
                parts.setdefault(_split_of(file.relative_to(folder)), []).append(file)
            return parts
        level = folders
    raise UserError(f"{folder}: the folder holds no data file.", hint=f"Known: {FILE_TYPES}.")


def _rows_in(files: list[Path]) -> list[Path]:
    return [file for file in files if file_type(file) not in _TEXTS]


def _is_part(folder: Path) -> bool:
    """Return whether the name is that of the data, or of a split, in a data set of the hub."""
    return folder.name.lower() in ("data", *_SPLITS)


def _visible(folder: Path) -> list[Path]:
    try:
        return sorted(path for path in folder.iterdir() if not path.name.startswith((".", "__")))
    except OSError as error:
        raise UserError(f"{display_path(folder)} cannot be read: {error.strerror or error}.") from error


def _data_files(folder: Path) -> list[Path]:
    if all((folder / name).is_file() for name in ("state.json", "dataset_info.json")):
        return _files_of_state(folder)
    return [path for path in _visible(folder) if reader_of(path) and not _is_note(path) and path.is_file()]


def _is_note(path: Path) -> bool:
    return path.name.lower() in _METADATA or (file_type(path) in _TEXTS and path.stem.lower() in _NOTES)


def _split_of(path: Path) -> str:
    """Return the split that a path names, that of a folder first; "" without one."""
    name = path.as_posix()
    name = name[: name.lower().rindex(file_type(path))]
    shard = _SHARD.search(name)
    if shard and shard[1].lower() not in _NO_SPLITS:
        return _SPLITS.get(shard[1].lower(), shard[1])
    word = _WORD.search(name)
    return _SPLITS[word[1].lower()] if word else ""


def _saved_parts(folder: Path) -> dict[str, list[Path]]:
    """Return the files of a DatasetDict that `save_to_disk` wrote, by split; nothing for another folder."""
    if not (folder / "dataset_dict.json").is_file():
        return {}
    splits = _metadata(folder / "dataset_dict.json", "splits")
    return {name: _files_of_state(folder / name) for name in map(_plain_name, splits)}


def _files_of_state(folder: Path) -> list[Path]:
    """Return the files of a Dataset that `save_to_disk` wrote, in the order of its rows."""
    entries = _metadata(folder / "state.json", "_data_files")
    names = [_plain_name(entry.get("filename") if isinstance(entry, dict) else None) for entry in entries]
    for name in names:
        if not (folder / name).is_file():
            raise UserError(f"{display_path(folder / name)}: this file of the data set is missing.")
    return [folder / name for name in names]


def _metadata(file: Path, key: str) -> list[Any]:
    """Return a list in a file that `save_to_disk` wrote."""
    try:
        with file.open("rb") as opened:
            value = json.loads(opened.read(_MAX_METADATA))[key]
    except OSError as error:
        raise UserError(f"{display_path(file)} cannot be read: {error.strerror or error}.") from error
    except (ValueError, LookupError, TypeError, RecursionError):
        value = None
    if not isinstance(value, list) or not value:
        raise UserError(
            f"{display_path(file)}:1: no list `{key}`: the data set is damaged.",
            hint="Save it again with save_to_disk.",
        )
    return value


def _plain_name(name: Any) -> str:
    """Return a name of a file or folder. Raise UserError for one that leads out of the data set."""
    if not isinstance(name, str) or name in ("", ".", "..") or Path(name).name != name:
        raise UserError(f"{name!r:.80} is no name of a file in a data set that save_to_disk wrote.")
    return name
