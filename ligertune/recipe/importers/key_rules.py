"""Rules of keys.yaml: conversions that depend on the values of several keys of a file."""

from __future__ import annotations

from typing import Any

from ligertune.recipe.document import split
from ligertune.recipe.importers import import_tables as tables
from ligertune.recipe.importers.import_state import Import


def apply_rules(work: Import, group: str) -> None:
    """Apply the rules of a group in their order, each if its conditions hold."""
    # a condition reads what the rules before it left, so that "otherwise" needs no word
    for rule in tables.KEYS["rules"][group]:
        is_for_tool = rule.get("tool", work.peer.name) == work.peer.name
        if not is_for_tool or not all(_holds(work, names, wanted) for names, wanted in rule.get("when", {}).items()):
            continue
        for effect, rows in rule.items():
            if effect == "note":
                work.notes.append(rows)
            elif effect in EFFECTS:
                for names, value in rows.items():
                    for name in names.split():
                        EFFECTS[effect](work, name, value)


def _holds(work: Import, names: str, wanted: Any) -> bool:
    """Report whether one of the keys fulfils a condition."""
    return any(_fits(work.value_at(split(name)), wanted) for name in names.split("|"))


def _fits(value: Any, wanted: Any) -> bool:
    """Report whether a value is one of a list, is as a word says, or is the one that it must be."""
    if isinstance(wanted, list):
        return any(_fits(value, one) for one in wanted)
    # no key of these conditions has one of the words as a value
    words = {
        "given": value is not None,
        "absent": value is None,
        "on": bool(value),
        "off": value is not None and not value,
        "share": isinstance(value, float) and 0 < value < 1,
        "template file": isinstance(value, str) and value.endswith((".jinja", ".jinja2", ".j2")),
    }
    # not 1 for true
    return words[wanted] if wanted in words else type(value) is type(wanted) and value == wanted


def _leave(work: Import, name: str, why: str | list[str]) -> None:
    # a key that is switched off stays: it may have a counterpart that is off, too
    if work.data.get(name) not in (None, "no", False):
        reason = tables.Reason(why) if isinstance(why, str) else tables.Reason(*why)
        work.leave((name,), reason)


def _put(work: Import, name: str, values: dict[str, Any]) -> None:
    for key, value in values.items():
        work.put(key, value, name)


def _move(work: Import, name: str, key: str) -> None:
    if name in work.data:
        work.put(key, work.data.pop(name), name)


EFFECTS = {  # by their names in keys.yaml: functions of the tool's key and the value in the rule
    "leave": _leave,
    "put": _put,
    "move": _move,
    "take": Import.take,
    "set": lambda work, name, value: work.data.update({name: value}),
    "default": lambda work, name, value: work.data.setdefault(name, value),
    "hoist": Import.hoist,
}
