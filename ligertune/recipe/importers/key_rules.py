"""Rules of keys.yaml: conversions that depend on the values of several keys of a file."""

from __future__ import annotations

from typing import Any

from ligertune.recipe.document import split
from ligertune.recipe.importers.import_state import Import
from ligertune.recipe.importers.import_tables import KEYS, Reason


def apply_rules(work: Import, group: str) -> None:
    """Apply the rules of a group in their order, each if its condition holds; the effects of a rule have an order."""
    for rule in KEYS["rules"][group]:
        if work.peer.name != rule.get("tool", work.peer.name):
            continue
        if not all(_holds(work.value_at(split(key)), wanted) for key, wanted in rule.get("when", {}).items()):
            continue
        for effect, rows in rule.items():
            for names, value in rows.items() if effect in EFFECTS else ():
                for name in names.split():
                    EFFECTS[effect](work, name, value)
        if "note" in rule:
            work.notes.append(rule["note"])


def _holds(value: Any, wanted: Any) -> bool:
    """Report whether a value fulfils one condition: a list of conditions, a word, or the value that it must be."""
    if isinstance(wanted, list):
        return any(_holds(value, one) for one in wanted)
    words = {
        "given": value is not None,
        "absent": value is None,
        "on": bool(value),
        "off": value is not None and not value,
        "share": isinstance(value, float) and 0 < value < 1,
    }
    # not 1 for true
    return words[wanted] if wanted in words else type(value) is type(wanted) and value == wanted


def _leave(work: Import, name: str, why: str | list[str]) -> None:
    if work.data.get(name) not in (None, "no", False):
        work.leave((name,), Reason(why) if isinstance(why, str) else Reason(*why))


def _put(work: Import, name: str, values: dict[str, Any]) -> None:
    for key, value in values.items():
        work.put(key, value, name)
    work.data.pop(name, None)


def _move(work: Import, name: str, key: str) -> None:
    if name in work.data:
        work.put(key, work.data.pop(name), name)


def _set(work: Import, name: str, value: Any) -> None:
    work.data[name] = value


def _set_default(work: Import, name: str, value: Any) -> None:
    work.data.setdefault(name, value)


EFFECTS = {
    "leave": _leave,
    "put": _put,
    "move": _move,
    "take": Import.take,
    "set": _set,
    "default": _set_default,
    "hoist": Import.hoist,
}
