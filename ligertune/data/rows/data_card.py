"""Configurations of a cloned data set of the hub: `configs` in the front matter of README.md.

    configs:
    - config_name: default
      data_files:
      - {split: train, path: data/train-*.jsonl}
      - {split: test, path: held.jsonl}

`datasets` reads the same forms with `MetadataConfigs`, without limits and without keeping paths inside the folder.
"""

from __future__ import annotations

import glob
import re
from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path, PurePosixPath
from typing import Any, NoReturn

from ligertune.data.rows.data_files import display_path
from ligertune.data.rows.file_readers import reader_of
from ligertune.errors import UserError
from ligertune.recipe.document import Document
from ligertune.recipe.plain_yaml import NotYaml, parse

_CARD = "README.md"
_MAX_CARD = 1 << 20  # bytes of README.md that are read; cards with a hundred configurations have a tenth of that
_FRONT_MATTER = re.compile(r"---[ \t]*\n(.*?\n)---[ \t]*(?:\n|\Z)", re.DOTALL)
# Other keys may hold what no recipe can, and are not read.
_CONFIGS = re.compile(r"^configs:.*\n(?:(?:[ \t-].*)?\n)*", re.MULTILINE)


def card_parts(folder: Path, name: str | None) -> dict[str, list[Path]]:
    """Return the files of a folder by split as README.md names them; nothing if it names none.

    name: of the configuration; None for the default. Raises UserError for a form that is unknown.
    """
    configs = _configs(folder)
    if not configs:
        return {}
    config = _chosen(configs, folder, name)
    patterns = config.get("data_files")
    if config.get("data_dir") is not None:  # datasets 5.2 resolves data_files from the folder and from data_dir
        _refuse(folder, f"of {config['config_name']} has `data_dir`, which is not read here")
    if patterns is None:
        return {}
    refuse = partial(_refuse, folder)
    return {split: matches(paths, folder, refuse) for split, paths in _by_split(patterns, folder).items()}


def _configs(folder: Path) -> list[dict[str, Any]]:
    """Return the configurations of README.md, each with a name."""
    card = folder / _CARD
    if not card.is_file():
        return []
    try:
        with card.open("rb") as opened:
            text = opened.read(_MAX_CARD).decode("utf-8-sig", "replace").replace("\r\n", "\n")
    except OSError as error:
        raise UserError(f"{display_path(card)} cannot be read: {error.strerror or error}.") from error
    front = _FRONT_MATTER.match(text)
    block = _CONFIGS.search(front[1]) if front else None
    if block is None:
        return []
    document = Document(str(card))
    try:
        configs = parse(block[0], document)["configs"]
    except NotYaml as error:
        raise UserError(f"{display_path(card)}: `configs` is not valid YAML: {error}", hint=_HINT) from error
    named = isinstance(configs, list) and all(
        isinstance(config, dict) and isinstance(config.get("config_name"), str) for config in configs
    )
    if not named or document.complaints:
        _refuse(folder, "is no list of entries with a `config_name`")
    return list(configs)


def _chosen(configs: list[dict[str, Any]], folder: Path, name: str | None) -> dict[str, Any]:
    """Return the configuration of that name, or the default one."""
    names = [config["config_name"] for config in configs]
    if len(set(names)) < len(names):
        _refuse(folder, "has two entries of one `config_name`")
    if name is not None:
        found = [config for config in configs if config["config_name"] == name]
    else:
        found = [c for c in configs if len(configs) == 1 or c["config_name"] == "default" or c.get("default") is True]
    if len(found) != 1:
        missing = "one default configuration" if name is None else f"configuration {name}"
        raise UserError(
            f"{display_path(folder / _CARD)}: its `configs` have no {missing}; they are {', '.join(names):.200}.",
            hint=f"Write data.datasets[].name: {names[0]}.",
        )
    return found[0]


def _by_split(patterns: Any, folder: Path) -> dict[str, list[str]]:
    """Return the patterns of each split: those of a text, or a list of texts, are the split train."""
    entries = patterns if isinstance(patterns, list) else [patterns]
    if entries and all(isinstance(entry, str) for entry in entries):
        return {"train": entries}
    by_split: dict[str, list[str]] = {}
    for entry in entries:
        split = entry.get("split") if isinstance(entry, dict) and entry.keys() == {"split", "path"} else None
        paths = entry["path"] if split else None
        paths = paths if isinstance(paths, list) else [paths]
        if not isinstance(split, str) or split in by_split or not all(isinstance(path, str) for path in paths):
            break
        by_split[split] = paths
    if not entries or len(by_split) < len(entries):
        _refuse(
            folder, "has `data_files` that are no path, list of paths, or list of {split, path} with different splits"
        )
    return by_split


def matches(patterns: Sequence[str], folder: Path, refuse: Callable[[str], NoReturn]) -> list[Path]:
    """Return the data files that patterns match, sorted. refuse: raises the error for one that matches none."""
    found: set[Path] = set()
    for pattern in patterns:
        inside = path_inside(pattern, refuse)
        names = glob.glob(inside, root_dir=folder, recursive=True) if glob.has_magic(inside) else [inside]
        files = [folder / name for name in names if (folder / name).is_file() and reader_of(Path(name))]
        if not files:
            refuse(f"names {pattern:.200}, and no data file matches it")
        found.update(files)
    return sorted(found)


def path_inside(path: Any, refuse: Callable[[str], NoReturn]) -> str:
    """Return a relative path. refuse: raises the error for one that leads out of its folder."""
    parts = PurePosixPath(path).parts if isinstance(path, str) else ("..",)
    # a second ** makes the time of a search grow with the square of the files
    if ".." in parts or "\0" in str(path) or "://" in str(path) or parts.count("**") > 1 or str(path).startswith("/"):
        refuse(f"names {path!r:.200}, which is no path inside the folder")
    return str(PurePosixPath(path))


_HINT = "Correct it, or name the files you want in `path`, for instance with a glob."


def _refuse(folder: Path, what: str) -> NoReturn:
    raise UserError(f"{display_path(folder / _CARD)}: `configs` {what}.", hint=_HINT)
