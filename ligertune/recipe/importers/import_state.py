"""The state of an import: the other tool's document while it becomes a recipe, and what was left of it."""

from __future__ import annotations

from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

from ligertune.errors import UserError
from ligertune.recipe.complaints import abbreviated
from ligertune.recipe.document import Document, KeyPath, Place, dotted, split
from ligertune.recipe.importers.peers import Peer
from ligertune.recipe.importers.reasons import FALSE_MATTERS

NOTHING = (None, False, "", "none", "no")  # an unknown key with one of these values switches nothing on


@dataclass(frozen=True, order=True)
class Left:
    """A key that was not imported: its line, name and value, and the reason."""

    line: int
    key: str
    value: str
    why: str


@dataclass
class Import:
    """An import. text: the recipe at the end; its comments list the keys that were not imported.

    left: keys that were not imported; defaults: the other tool's, where ours differ; notes: on what to check.
    """

    peer: Peer
    document: Document
    folder: Path
    left: list[Left] = field(default_factory=list)
    defaults: list[str] = field(default_factory=list)
    notes: list[str] = field(default_factory=list)
    text: str = ""

    @property
    def data(self) -> dict[str, Any]:
        return self.document.data

    @property
    def translated(self) -> list[str]:
        """One line per key of the file that the recipe has under another name: "lr -> train.learning_rate: 0.1"."""
        rows = [
            (place.line, f"{place.written} -> {dotted(path)}: {abbreviated(self.document.get(path))}")
            for path, place in self.document.places.items()
            if place.written and self.document.has(path)
        ]
        return [text for _, text in sorted(rows)]

    def as_dict(self) -> dict[str, Any]:
        """Return the import as plain values, for `--json`."""
        notices = [str(notice) for notice in sorted(self.document.notices)]
        left = [asdict(item) for item in self.left]
        return {
            "peer": self.peer.name, "text": self.text, "translated": self.translated, "left": left,
            "defaults": self.defaults, "notes": self.notes, "notices": notices,
        }  # fmt: skip

    def leave(self, path: KeyPath, why: str) -> None:
        """Remove a key and record the reason, unless its value switches nothing on."""
        value = self.document.get(path)
        matters = path[-1] in FALSE_MATTERS and value is not None
        if matters or (value not in NOTHING and value not in ([], {})):
            self.left.append(Left(self.document.place(path).line, dotted(path), abbreviated(value), why))
        self.document.remove(path)

    def put(self, key: str, value: Any, written: str) -> None:
        """Set a recipe key from the tool's key `written`, unless the recipe has it already."""
        if not self.document.has(split(key)):
            line = self.document.place((written,)).line
            self.document.put(split(key), value, Place("", line, self.document.file, written))

    def refusal(self, name: str, what: str, hint: str = "Keep the other tool for this file.") -> UserError:
        """Return the error for a file with an objective or a method that cannot be kept."""
        return UserError(f"{self.document.place((name,))}: {name}{what}", hint=hint)
