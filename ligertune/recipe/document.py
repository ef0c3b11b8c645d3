"""Unvalidated recipe: plain values with their line numbers, collected complaints, and helpers for dotted keys.

A key is `data.datasets[0].path` in a file and `data.datasets[].path` in the schema.
"""

from __future__ import annotations

import re
from dataclasses import dataclass, field
from functools import cache
from typing import Any

from ligertune.errors import UserError
from ligertune.recipe.schema import recipe_schema

KeyPath = tuple[str | int, ...]
ITEM = "[]"  # any index of a list, in schema keys
_NOTHING = object()  # where a document has no value


def dotted(path: KeyPath) -> str:
    """Join a path to a dotted key: ("data", "datasets", 0, "path") -> "data.datasets[0].path"."""
    return "".join(f"[{part}]" if isinstance(part, int) else f".{part}" for part in path).removeprefix(".")


def schema_key(path: KeyPath) -> str:
    """Join a path to the key of the schema: ("data", "datasets", 0, "path") -> "data.datasets[].path"."""
    return re.sub(r"\[\d+\]", ITEM, dotted(path))


@cache
def split(key: str) -> KeyPath:
    """Split a dotted key into a path; accepts `data.datasets.0.path` as well as `data.datasets[0].path`."""
    parts = re.sub(r"\[(\d+)\]", r".\1", key).split(".")
    return tuple(int(part) if part.isdecimal() else part for part in parts)


def parent(key: str) -> str:
    """Return the section of a schema key; "" is the top level."""
    return key.rpartition(".")[0]


def leaf(key: str) -> str:
    """Return the last name of a schema key."""
    return key.rpartition(".")[2]


@cache
def keys() -> dict[str, dict[str, Any]]:
    """Return the JSON schema of every key, section and list item, by schema key."""
    schema = recipe_schema()
    found: dict[str, dict[str, Any]] = {}

    def visit(key: str, entry: dict[str, Any]) -> None:
        entry = dict(entry)
        while "$ref" in entry:
            # the key's own description and default replace those of the section that it refers to
            name = entry.pop("$ref").rpartition("/")[2]
            entry = {**schema["$defs"][name], **entry}
        found[key] = entry
        for name, value in entry.get("properties", {}).items():
            visit(f"{key}.{name}".removeprefix("."), value)
        if "items" in entry:
            visit(key + ITEM, entry["items"])

    visit("", schema)
    return found


@dataclass(frozen=True, order=True)
class Place:
    """Where a value was written: a line of the file, or an override. Overrides sort after lines."""

    override: str
    line: int
    file: str
    written: str = ""  # the alias that the user wrote for the key

    def __str__(self) -> str:
        return self.override or (f"{self.file}:{self.line}" if self.line else self.file)


@dataclass(frozen=True, order=True)
class Remark:
    """A complaint or a notice, with the place in the recipe that it is about."""

    place: Place
    sentence: str

    def __str__(self) -> str:
        return f"{self.place}: {self.sentence}"


@dataclass
class Document:
    """The values of one recipe with the places of its keys, and the complaints and notices about them."""

    file: str
    data: dict[str, Any] = field(default_factory=dict)
    places: dict[KeyPath, Place] = field(default_factory=dict)
    complaints: list[Remark] = field(default_factory=list)
    notices: list[Remark] = field(default_factory=list)
    n_values: int = 0  # keys and values that were read

    def place(self, path: KeyPath) -> Place:
        """Return the place of `path`, or of the nearest section around it."""
        while path and path not in self.places:
            path = path[:-1]
        return self.places.get(path, Place("", 0, self.file))

    def name(self, path: KeyPath) -> str:
        """Return the dotted key, and the alias that the user wrote for it."""
        written = self.places[path].written if path in self.places else ""
        return f"{dotted(path)} (written as {written})" if written else dotted(path)

    def mention(self, path: KeyPath) -> str:
        """Return the dotted key with its line, for a complaint about another place."""
        if path not in self.places:
            return dotted(path)
        place = self.places[path]
        written = f"written as {place.written}" if place.written else ""
        where = place.override or (f"line {place.line}" if place.line else "")  # no line: a default of another tool
        about = ", ".join(filter(None, (written, where)))
        return f"{dotted(path)} ({about})" if about else dotted(path)

    def complain(self, path: KeyPath, sentence: str) -> None:
        self.complain_at(self.place(path), sentence)

    def complain_at(self, place: Place, sentence: str) -> None:
        self.complaints.append(Remark(place, sentence))

    def notice(self, place: Place, sentence: str) -> None:
        self.notices.append(Remark(place, sentence))

    def raise_complaints(self) -> None:
        """Raise all complaints as one UserError, in the order of the file; do nothing if there are none."""
        if self.complaints:
            raise UserError("\n".join(map(str, sorted(set(self.complaints)))))

    def get(self, path: KeyPath) -> Any:
        """Return the value at `path`. Raises KeyError if there is none."""
        value = self._find(path)
        if value is _NOTHING:
            raise KeyError(dotted(path))
        return value

    def has(self, path: KeyPath) -> bool:
        return self._find(path) is not _NOTHING

    def _find(self, path: KeyPath) -> Any:
        """Return the value at `path`, or _NOTHING."""
        value: Any = self.data
        for part in path:
            in_list = isinstance(value, list) and isinstance(part, int) and part < len(value)
            in_dict = isinstance(value, dict) and part in value
            if not (in_list or in_dict):
                return _NOTHING
            value = value[part]
        return value

    def put(self, path: KeyPath, value: Any, place: Place) -> None:
        """Set a value, creating the sections around it. Raises KeyError if another value is in the way."""
        for length in range(1, len(path)):
            # an empty section reads as null
            if not self.has(path[:length]) or self.get(path[:length]) is None:
                self._set(path[:length], [] if isinstance(path[length], int) else {})
        self._set(path, value)
        # the places of keys inside the old value are gone with it
        elsewhere = {at: old for at, old in self.places.items() if at[: len(path)] != path}
        self.places = elsewhere | {path: place}

    def remove(self, path: KeyPath) -> None:
        """Delete the key at `path` from its section."""
        del self.get(path[:-1])[path[-1]]

    def _set(self, path: KeyPath, value: Any) -> None:
        container = self.get(path[:-1])
        last = path[-1]
        if isinstance(container, dict) and isinstance(last, str):
            container[last] = value
        elif isinstance(container, list) and isinstance(last, int) and last <= len(container):
            container[last : last + 1] = [value]  # one past the end appends
        else:
            raise KeyError(dotted(path))
