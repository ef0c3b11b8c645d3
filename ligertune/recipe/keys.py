"""Keys by their dotted names: `data.datasets[0].path` in a file, `data.datasets[].path` in the schema."""

from __future__ import annotations

import re
from functools import cache
from typing import Any

from ligertune.recipe.schema import recipe_schema

KeyPath = tuple[str | int, ...]
ITEM = "[]"  # stands for every index of a list


def dotted(path: KeyPath) -> str:
    """("data", "datasets", 0, "path") -> "data.datasets[0].path"."""
    return "".join(f"[{part}]" if isinstance(part, int) else f".{part}" for part in path).removeprefix(".")


def schema_key(path: KeyPath) -> str:
    """The same for any index: "data.datasets[].path"."""
    return re.sub(r"\[\d+\]", ITEM, dotted(path))


def split(key: str) -> KeyPath:
    """The inverse of `dotted`; `data.datasets.0.path` is read too."""
    parts = re.sub(r"\[(\d+)\]", r".\1", key).split(".")
    return tuple(int(part) if part.isdecimal() else part for part in parts)


def parent(key: str) -> str:
    """The section that a schema key stands in; "" is the top level."""
    return key.rpartition(".")[0]


def leaf(key: str) -> str:
    """The last name of a schema key."""
    return key.rpartition(".")[2]


@cache
def keys() -> dict[str, dict[str, Any]]:
    """Schema key -> its JSON schema, for every key, section and list item of the recipe."""
    schema = recipe_schema()
    found: dict[str, dict[str, Any]] = {}

    def visit(key: str, entry: dict[str, Any]) -> None:
        while "$ref" in entry:
            entry = {**schema["$defs"][entry["$ref"].rpartition("/")[2]], **_without_ref(entry)}
        found[key] = entry
        for name, value in entry.get("properties", {}).items():
            visit(f"{key}.{name}".removeprefix("."), value)
        if "items" in entry:
            visit(key + ITEM, entry["items"])

    visit("", schema)
    return found


def _without_ref(entry: dict[str, Any]) -> dict[str, Any]:
    return {name: value for name, value in entry.items() if name != "$ref"}
