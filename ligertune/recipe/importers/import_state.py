"""The state of an import: the other tool's document while it becomes a recipe, and what became of each of its keys."""

from __future__ import annotations

import copy
import json
from collections.abc import Iterator
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from typing import Any

from ligertune.errors import UserError, printable
from ligertune.recipe.complaints import abbreviated
from ligertune.recipe.document import Document, KeyPath, Place, dotted, split
from ligertune.recipe.importers.import_tables import HARMS, KEEP_THE_TOOL, TRAINING, UNSUPPORTED, Peer, Reason

NOTHING = (None, False, "", "none", "no")  # an unknown key with one of these values switches nothing on
BECAME = "imported"
LEFT = "not imported"
OFF = "off"
FALSE_MATTERS = UNSUPPORTED["false_matters"].split()
UNTRACED = "ligertune does not read it with the other keys of this file"


def is_off(value: Any) -> bool:
    """Report whether an unknown key with this value switches nothing on."""
    return value in ([], {}) or (not isinstance(value, list | dict) and value in NOTHING)


def one_line(text: str) -> str:
    """Return one line without control characters: a key may hold escapes of a terminal, or the end of a comment."""
    return printable(text, one_line=True)


@dataclass(frozen=True)
class Fate:
    """What became of a key of the file. into: keys of the recipe; why, harm: of a key that was not imported."""

    state: str
    into: tuple[str, ...] = ()
    why: str = ""
    harm: str = ""


@dataclass(frozen=True)
class Left:
    """A key that was not imported: its line, name and value, the recipe's key, the reason and the harm."""

    line: int
    key: str
    value: str
    why: str
    harm: str = TRAINING
    ours: str = ""

    @property
    def order(self) -> tuple[int, int, str]:
        """Keys that change what is trained are first."""
        return HARMS.index(self.harm), self.line, self.key

    def __str__(self) -> str:
        name = f"{self.key} ({self.ours})" if self.ours and self.ours != self.key else self.key
        return f"{name}: {self.value} ({self.why})"


@dataclass
class Import:
    """An import. text: the recipe at the end; its comments list the keys that were not imported.

    defaults: the other tool's, where ours differ; notes: on what to check; refusals: reasons not to import the file.
    fates: by the path in the file; a list or a section has one if all that it holds shares it.
    """

    peer: Peer
    document: Document
    folder: Path
    defaults: list[str] = field(default_factory=list)
    notes: list[str] = field(default_factory=list)
    refusals: list[tuple[int, UserError]] = field(default_factory=list)
    fates: dict[KeyPath, Fate] = field(default_factory=dict)
    more_left: list[Left] = field(default_factory=list)  # parts of a value, such as one of several trackers
    text: str = ""
    # where keys of the document stood in the file: flat names of keys of a section, and items of data.datasets
    origins: dict[KeyPath, KeyPath] = field(default_factory=dict)
    source: dict[str, Any] = field(init=False)
    lines: dict[KeyPath, int] = field(init=False)

    def __post_init__(self) -> None:
        # converters change the document in place, and the report names what the file held
        self.source = copy.deepcopy(self.document.data)
        self.lines = {path: place.line for path, place in self.document.places.items()}

    @property
    def data(self) -> dict[str, Any]:
        return self.document.data

    # ---- what converters do with a key

    def path_of(self, written: str) -> KeyPath:
        """Return the path in the file of a top-level key, or of one that stood in a section."""
        return self.origins.get((written,), (written,))

    def line_of(self, path: KeyPath) -> int:
        """Return the line of a key in the file, or of the section around it."""
        while path and path not in self.lines:
            path = path[:-1]
        return self.lines.get(path, 0)

    def place_of(self, written: str) -> Place:
        return Place("", self.line_of(self.path_of(written)), self.document.file)

    def value_at(self, path: KeyPath) -> Any:
        """Return the value of the document, None if there is none: null keys are removed before the conversion."""
        return self.document.get(path) if self.document.has(path) else None

    def find_file(self, path: Path) -> Path | None:
        """Return a file below the folder of the tool's file, or below the one in which the tool runs."""
        return next((place for place in (self.folder / path, path) if place.is_file()), None)

    def trace(self, path: KeyPath, *into: str) -> None:
        """Record that a key of the file became these keys of the recipe."""
        # one key may become several: targets of an adapter become layers and parameters of experts
        before = self.fates.get(path)
        earlier = before.into if before and before.state == BECAME else ()
        self.fates[path] = Fate(BECAME, tuple(dict.fromkeys((*earlier, *into))))

    def take(self, name: str, *into: str, default: Any = None) -> Any:
        """Remove a top-level key that is converted to these keys of the recipe, and return its value."""
        if name not in self.data:
            return default
        self.trace(self.path_of(name), *into)
        return self.data.pop(name)

    def hoist(self, section: str, names: dict[str, str]) -> None:
        """Move keys of a section to the top level, under flat names; what stays in the section is left there.

        "*" stands for all other keys, which keep their names.
        """
        values = self.data.get(section)
        if not isinstance(values, dict):
            return
        for name in (*names, *(list(values) if "*" in names else ())):
            flat = names.get(name, name)
            if name in values and flat not in self.data:  # a key at the top level counts, as in the tools
                self.origins[flat,] = (*self.path_of(section), name)
                self.data[flat] = values.pop(name)
        if not values:
            del self.data[section]

    def rename(self, name: str, other: str) -> None:
        """Convert a top-level key under another name of the tool."""
        if name in self.data and other not in self.data:
            self.origins[other,] = self.path_of(name)
            self.data[other] = self.data.pop(name)

    def put(self, key: str, value: Any, written: str) -> None:
        """Set a recipe key from the tool's key `written`, unless the recipe has it already."""
        self.trace(self.path_of(written), key)
        # of two keys of the tool with one counterpart, the first one that is converted counts
        if not self.document.has(split(key)):
            self.document.put(split(key), value, replace(self.place_of(written), written=written))

    def lose(self, path: KeyPath, reason: Reason, *into: str) -> None:
        """Record why a key of the file is not imported."""
        self.fates[path] = Fate(LEFT, into, reason.why, reason.harm)

    def leave(self, path: KeyPath, reason: Reason, *, even_off: bool = False) -> None:
        """Remove a key of the document and record the reason; without `even_off`, not for a value that is off."""
        value = self.document.get(path)
        key = dotted(path)
        # the file may write a key of the recipe in several keys: each of them is lost
        sources = [at for at, fate in self.fates.items() if fate.state == BECAME and _is_for(key, fate.into)]
        self.document.remove(path)
        # a default that contradicts the file is no key of the file
        defaults = [text for text in self.defaults if not text.startswith(f"{key}: ")]
        if not sources and defaults != self.defaults:
            self.defaults = defaults
            self.notes.append(f"{self.peer.name}'s default of {key} is left out: {reason.why}")
            return
        ours = (key,) if sources else ()
        for at in sources or [self.source_of(path)]:
            matters = even_off or (at[-1] in FALSE_MATTERS and value is not None)
            if is_off(value) and not matters:
                self.fates[at] = Fate(OFF)
            else:
                self.lose(at, reason, *ours)

    def source_of(self, path: KeyPath) -> KeyPath:
        """Return where a key of the document stood in the file."""
        for length in range(len(path), 0, -1):  # an item of a list before the list
            if path[:length] in self.origins:
                return (*self.origins[path[:length]], *path[length:])
        return path

    def refuse(self, name: str, what: str, hint: str = KEEP_THE_TOOL) -> None:
        """Record that an objective or a method cannot be kept. The import goes on, to find all reasons."""
        place = self.place_of(name)
        shown = one_line(dotted(self.path_of(name)))
        self.refusals.append((place.line, UserError(f"{place}: {shown}{one_line(what)}", hint=hint)))

    def raise_refusals(self) -> None:
        """Raise UserError with all reasons, each with what to do about it."""
        if not self.refusals:
            return
        # in the order of the file: a user repairs all of them in one pass
        found = sorted(self.refusals, key=lambda row: row[0])
        hints = {error.hint for _, error in found}
        common = KEEP_THE_TOOL if KEEP_THE_TOOL in hints else ""
        if len(hints) == 1:
            (common,) = hints
        # a hint that all share is said once, at the end
        lines = [error.message if error.hint == common else str(error) for _, error in found]
        raise UserError("\n".join(dict.fromkeys(lines)), hint=common)

    # ---- what became of the keys of the file

    def accounts(self) -> Iterator[tuple[KeyPath, Any, Fate]]:
        """Yield (path, value, fate) of every key of the file that holds no other keys."""
        # a key that no converter reads is loud
        forgotten = Fate(LEFT, (), UNTRACED, TRAINING)
        for path, value in leaves(self.source):
            owner = self._owner(path)
            # for these keys the tool gives null a meaning
            is_empty = value is None and path[0] not in self.peer.nulls
            off = is_empty if owner in self.fates else is_off(value)
            yield path, value, Fate(OFF) if off else self.fates.get(owner, forgotten)

    def _owner(self, path: KeyPath) -> KeyPath:
        """Return the key, or the innermost section around it that has a fate."""
        return next((path[:n] for n in range(len(path), 0, -1) if path[:n] in self.fates), path)

    @property
    def left(self) -> list[Left]:
        """The keys that were not imported, those that change what is trained first."""
        rows: dict[str, Left] = {}
        for path, _, fate in self.accounts():
            if fate.state != LEFT:
                continue
            # a section that is left as a whole is one row
            whole = next((path[:n] for n in range(1, len(path)) if self.fates.get(path[:n]) == fate), path)
            shown = one_line(abbreviated(Document("", self.source).get(whole)))
            key = one_line(dotted(whole))
            ours = "".join(fate.into[:1])
            rows.setdefault(key, Left(self.line_of(whole), key, shown, one_line(fate.why), fate.harm, ours))
        return sorted([*rows.values(), *self.more_left], key=lambda item: item.order)

    @property
    def translated(self) -> list[str]:
        """One line per imported key: "lr -> train.learning_rate: 0.1"."""
        became = {self._owner(path): fate for path, _, fate in self.accounts() if fate.state == BECAME}
        return [f"{one_line(dotted(path))} -> {self.shown_target(fate)}" for path, fate in became.items()]

    def shown_target(self, fate: Fate) -> str:
        """Return the first of the recipe's keys that is in the recipe, with its value."""
        for key in fate.into:  # one of them may have been left out, or be a default
            if self.document.has(split(key)):
                return f"{key}: {one_line(abbreviated(self.document.get(split(key))))}"
        return f"{fate.into[0]}, whose default says the same" if fate.into else "the default"

    @property
    def off(self) -> list[str]:
        """Names of the keys that are empty, or switch nothing on."""
        return [one_line(dotted(path)) for path, _, fate in self.accounts() if fate.state == OFF]

    @property
    def harmless(self) -> list[str]:
        """Names of the keys that have no effect on training, speed or memory here."""
        return [item.key for item in self.left if item.harm == HARMS[-1]]

    def as_dict(self) -> dict[str, Any]:
        """Return the import as plain values, for `--json`. keys: every key of the file, and what became of it."""
        keys = []
        for path, value, fate in self.accounts():
            # JSON has no NaN and no Infinity: they become words
            shown = json.loads(json.dumps(value), parse_constant=str)
            keys.append({"key": one_line(dotted(path)), "line": self.line_of(path), "value": shown, **asdict(fate)})
        return {
            "peer": self.peer.name,
            "text": self.text,
            "keys": keys,
            "translated": self.translated,
            "left": [asdict(item) for item in self.left],
            "off": self.off,
            "defaults": self.defaults,
            "notes": self.notes,
            "notices": [str(notice) for notice in sorted(self.document.notices)],
        }


def leaves(value: Any, path: KeyPath = ()) -> Iterator[tuple[KeyPath, Any]]:
    """Yield (path, value) of every key that holds no other keys; a list counts as one value if it holds no mapping."""
    if isinstance(value, dict) and value:
        for name, inner in value.items():
            yield from leaves(inner, (*path, name))
    elif isinstance(value, list) and any(isinstance(item, dict) for item in value):
        for index, inner in enumerate(value):
            yield from leaves(inner, (*path, index))
    else:
        yield path, value


def _is_for(key: str, targets: tuple[str, ...]) -> bool:
    """Report whether a key of the recipe, or one inside it, is among the targets."""
    return any(target == key or target.startswith((f"{key}.", f"{key}[")) for target in targets)
