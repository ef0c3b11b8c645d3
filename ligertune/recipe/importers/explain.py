"""The table of `ligertune recipe import --explain`: each key of a file, its meaning there, what it becomes here."""

from __future__ import annotations

import re
from collections.abc import Iterator
from dataclasses import dataclass
from functools import cache
from pathlib import Path

from ligertune.recipe.complaints import abbreviated
from ligertune.recipe.document import Document, KeyPath, dotted, keys, schema_key, split
from ligertune.recipe.importers.import_state import BECAME, LEFT, Import, one_line
from ligertune.recipe.plain_yaml import parse

MEANING_LENGTH = 70  # of a description of ours, whose first words are taken


@dataclass(frozen=True)
class ExplainedKey:
    """A row of the table: a key of the file, or a default of the tool, whose key is ours."""

    key: str
    value: str
    meaning: str
    here: str


def explain(work: Import) -> list[ExplainedKey]:
    """Return a row for each key of the file, in its order, and then one for each default of the tool."""
    refusals = {line: error.message for line, error in work.refusals if line}
    rows: dict[KeyPath, ExplainedKey] = {}
    for path, _, fate in work.accounts():
        owner = next((path[:n] for n in range(1, len(path)) if work.fates.get(path[:n]) == fate), path)
        if owner in rows:
            continue
        line = work.line_of(owner)
        if line in refusals:
            here = f"refused: {refusals[line].partition(': ')[2]}"
        elif fate.state == BECAME:
            here = work.shown_target(fate)
        elif fate.state == LEFT:
            here = f"not imported: {fate.why}"
        else:
            here = "off"
        value = abbreviated(Document("", work.source).get(owner))
        rows[owner] = ExplainedKey(*map(one_line, (dotted(owner), value, meaning_of(owner, fate.into), here)))
    defaults = (text.partition(": ") for text in work.defaults)
    added = [
        ExplainedKey("(default)", value, f"{work.peer.name}'s default", f"{key}: {value}") for key, _, value in defaults
    ]
    return [*rows.values(), *added]


def meaning_of(path: KeyPath, into: tuple[str, ...] = ()) -> str:
    """Return what a key of another tool means there, in a few words: its own row, what our key means, or its section's.

    into: our keys that it becomes.
    """
    names = [part.removeprefix("type.") for part in map(str, reversed(path)) if not part.isdigit()]
    own = _meaning(".".join(reversed(names[:2]))) or _meaning(names[0])
    if own:
        return own
    for key in into:
        description = keys().get(schema_key(split(key)), {}).get("description")
        if description:
            return re.split(r"[;.](?:\s|$)", description)[0][:MEANING_LENGTH]
    return next(filter(None, map(_meaning, names[1:])), "")


def _meaning(name: str) -> str:
    return next((words for words, pattern in _meanings() if pattern.fullmatch(name)), "")


@cache
def _meanings() -> list[tuple[str, re.Pattern[str]]]:
    return list(_read_meanings())


def _read_meanings() -> Iterator[tuple[str, re.Pattern[str]]]:
    file = Path(__file__).with_name("meanings.yaml")
    document = Document(file.name)
    table = parse(file.read_text(encoding="utf-8"), document)
    document.raise_complaints()  # a meaning that is given twice
    for words, patterns in table.items():
        yield words, re.compile("|".join(f"(?:{pattern})" for pattern in patterns.split()))
