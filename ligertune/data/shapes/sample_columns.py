"""Columns of a data set's first rows: which hold texts, lists of turns, or dialogues with role markers."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from functools import cached_property
from typing import Any

from ligertune.data.rows.conversation import ROLES
from ligertune.data.rows.data_files import Record
from ligertune.data.shapes.column_names import TURN_NAMES, value_of
from ligertune.data.shapes.marked_texts import is_marked_text
from ligertune.data.shapes.turn_lists import ROLE_KEYS, as_turns, is_turn, turns_in

_ROWS = 100  # rows whose values are looked at: as many as a stream has read when it begins
_DEPTH = 3  # of nested names


class SampleColumns:
    """Names of the columns of the first rows, and what the values of the first 100 are."""

    def __init__(self, first: Sequence[Record]) -> None:
        self.names = {column for record in first for column in record.row}
        self.rows = [record.row for record in first[:_ROWS]]
        self.found = ", ".join(sorted(self.names)) or "none"

    def __contains__(self, name: str) -> bool:
        return name in self.names

    def values(self, name: str) -> list[Any]:
        """Return the values of a column, nested names included, that are not null."""
        return [value for value in (value_of(row, name) for row in self.rows) if value is not None]

    def spelled(self, names: Sequence[str]) -> list[str]:
        """Return those of the names that the data set has, in any case, as it writes them and in their order."""
        by_name = {name.lower(): name for name in sorted(self.names, reverse=True)}
        return [by_name[name.lower()] for name in names if name.lower() in by_name]

    def is_text(self, name: str) -> bool:
        """Return whether most values are texts. Lists of turns in JSON, cells of a csv, are no texts."""
        values = self.values(name)
        return 2 * sum(isinstance(value, str) for value in values) > len(values) and not self.is_turns(name)

    def is_turns(self, name: str) -> bool:
        """Return whether the first value is a list of turns: its turns have roles, or the column's name says so."""
        return bool(self.roles(name))

    def roles(self, name: str) -> set[str]:
        """Return the roles of the first value that is a list of turns."""
        return next((roles for roles in map(self._roles, self.values(name), [name] * _ROWS) if roles), set())

    def _roles(self, value: Any, name: str) -> set[str]:
        value = turns_in(value)
        if not isinstance(value, list | dict) or not value:
            return set()
        if isinstance(value, list) and not isinstance(value[0], dict) and name.lower() not in TURN_NAMES:
            return set()
        turns = [value] if is_turn(value) else as_turns(value)
        if not isinstance(turns, list) or not all(isinstance(turn, dict) for turn in turns):
            return set()
        words = [next((turn[key] for key in ROLE_KEYS if isinstance(turn.get(key), str)), "") for turn in turns]
        roles = {ROLES.get(word.strip().lower(), "") for word in words}
        return set() if "" in roles else roles

    @cached_property
    def dialogues(self) -> list[str]:
        """Columns whose texts are dialogues with role markers, most of them."""
        return [name for name in sorted(self.names) if self.is_text(name) and self._is_dialogue(name)]

    def _is_dialogue(self, name: str) -> bool:
        values = self.values(name)
        return 2 * sum(isinstance(value, str) and is_marked_text(value) for value in values) > len(values)

    @cached_property
    def nested(self) -> list[str]:
        """Nested names of texts and lists of turns: in objects, and of the first item of lists."""
        row = {name: values[0] for name in sorted(self.names) if (values := self.values(name))}
        return [name for name in _names_in(row) if "." in name and (self.is_text(name) or self.is_turns(name))]


def _names_in(value: Any, prefix: str = "", depth: int = 0) -> Iterator[str]:
    """Yield the nested names of what is in an object, down to _DEPTH. Of a list, only the first item counts."""
    items = value.items() if isinstance(value, dict) else [("0", value[0])] if isinstance(value, list) and value else ()
    for key, inner in items:
        name = f"{prefix}{key}"
        yield name
        if depth < _DEPTH:
            yield from _names_in(inner, f"{name}.", depth + 1)
