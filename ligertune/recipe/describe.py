"""The recipe's keys in words, from the schema: a commented recipe to start from, and the reference of all keys."""

from __future__ import annotations

import json
import re
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

from ligertune.recipe.aliases import use_our_names
from ligertune.recipe.complaints import accepted_values
from ligertune.recipe.document import ITEM, Document, keys, leaf, parent, split
from ligertune.recipe.plain_yaml import dump
from ligertune.recipe.read import apply_overrides
from ligertune.recipe.train_sections import EITHER_OR

# What most people change first: written out, where all others are shown as comments.
FIRST = (
    "version",
    "data.val_split",
    "data.max_length",
    "train.per_device_train_batch_size",
    "train.gradient_accumulation_steps",
    "train.num_train_epochs",
    "train.learning_rate",
    "train.gradient_checkpointing",
)
NO_DEFAULT = "(required)"


def new_recipe(model: str, datasets: Sequence[str]) -> dict[str, Any]:
    """The keys that no recipe can do without."""
    return {
        "model": {"model_name_or_path": model},
        "data": {"datasets": [{"path": path} for path in datasets]},
        "checkpoint": {"output_dir": name_of_run(model, datasets[0])},
    }


def name_of_run(model: str, dataset: str) -> str:
    """runs/MODEL-DATA, from the last parts of both names."""
    data = re.sub(r"(\.(jsonl?|parquet|csv|txt|gz))+$|[*?\[\]]", "", Path(dataset).name)
    return "runs/" + "-".join(filter(None, (Path(model).name.lower(), data.lower())))


def commented_recipe(data: dict[str, Any], overrides: Sequence[str] = ()) -> str:
    """YAML with every key and what it does; what is not in `data` or set stands behind a `#` with its default.

    The overrides are sound: `load_recipe` has read them.
    """
    document = Document("the new recipe", data)
    apply_overrides(document, overrides)
    use_our_names(document)
    lines = [
        "# A recipe of ligertune. Lines behind a # show a key's default: take the # away to write another value.",
        "# `ligertune recipe check FILE` says what is wrong with it, `ligertune data FILE` what it would train on.",
    ]
    for key in _children(""):
        lines += _written(key, document, depth=0)
    return "\n".join(lines) + "\n"


def _written(key: str, document: Document, depth: int) -> Iterator[str]:
    """A key's line, or a section's with its own keys below."""
    entry, indent, path = keys()[key], "  " * depth, split(key)
    if entry.get("type") == "object" and "properties" in entry:
        yield f"{indent}{leaf(key)}:  # {entry['description']}"
        for child in _children(key):
            yield from _written(child, document, depth + 1)
    elif document.has(path) and entry.get("type") == "array" and key + ITEM in keys():
        yield f"{indent}{leaf(key)}:  # {entry['description']}"
        for index in range(len(document.get(path))):
            yield from _item(key + ITEM, document.get((*path, index)), indent + "  ")
    elif document.has(path):
        yield f"{indent}{leaf(key)}: {_value(document.get(path))}  # {entry['description']}"
    else:
        rival = EITHER_OR.get(leaf(key), "")
        first = "" if key in FIRST and not document.has((*path[:-1], rival)) else "# "
        yield f"{indent}{first}{leaf(key)}: {_value(entry.get('default'))}  # {entry['description']}"


def _item(section: str, given: dict[str, Any], indent: str) -> Iterator[str]:
    """One entry of a list of sections: what is given, then the rest as comments."""
    names = sorted((leaf(key) for key in _children(section)), key=lambda name: name not in given)
    for i, name in enumerate(names):
        entry = keys()[f"{section}.{name}"]
        value = given.get(name, entry.get("default"))
        mark = "- " if i == 0 else "  " if name in given else "  # "
        yield f"{indent}{mark}{name}: {_value(value)}  # {entry['description']}"


def _value(value: Any) -> str:
    """On one line."""
    if isinstance(value, (dict, list, tuple)):
        return json.dumps(value, ensure_ascii=False)
    return dump({"x": value}).strip().removeprefix("x: ")


def _children(section: str) -> list[str]:
    return [key for key in keys() if key and not key.endswith(ITEM) and parent(key) == section]


def recipe_reference() -> str:
    """Every key in Markdown: what it does, what it takes, its default."""
    sections = [key for key, entry in keys().items() if "properties" in entry]
    parts = [
        "# Keys of the recipe\n\nMade by `ligertune recipe keys` from the schema; do not edit. "
        "`[]` stands for each entry of a list.\n"
    ]
    for section in sections:
        rows = [key for key in _children(section) if "properties" not in keys()[key]]
        if not rows:
            continue
        title = f"`{section}`: {keys()[section]['description']}" if section else "At the top level"
        parts.append(f"## {title}\n\n| key | does | takes | default |\n|---|---|---|---|\n" + "".join(map(_row, rows)))
    return "\n".join(parts)


def _row(key: str) -> str:
    entry = keys()[key]
    default = f"`{_value(entry['default'])}`" if "default" in entry else NO_DEFAULT
    cells = (f"`{key}`", entry["description"], accepted_values(key), default)
    return "| " + " | ".join(cell.replace("|", "\\|") for cell in cells) + " |\n"


def matching_keys(incomplete: str) -> list[str]:
    """Keys that begin so, for shells that complete `--set`."""
    names = [key.replace(ITEM, ".0") for key, entry in keys().items() if key and "properties" not in entry]
    return [f"{name}=" for name in names if name.startswith(incomplete) and not name.endswith(".0")]
