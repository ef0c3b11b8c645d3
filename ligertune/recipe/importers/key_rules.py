"""Rules of keys.yaml: conversions that depend on the values of several keys of a file."""

from __future__ import annotations

import re
from collections.abc import Callable
from typing import Any

from ligertune.recipe.complaints import abbreviated
from ligertune.recipe.document import split
from ligertune.recipe.feature import trains_on_pairs
from ligertune.recipe.importers import import_tables as tables
from ligertune.recipe.importers.import_state import Import
from ligertune.recipe.importers.import_tables import each_name
from ligertune.recipe.importers.named_conversions import CONVERSIONS, set_interval
from ligertune.recipe.importers.peer_datasets import DATASET_CONVERSIONS
from ligertune.recipe.importers.sectioned_files import SECTION_CONVERSIONS

Conditions = dict[str, Any]
# functions that a rule calls by their names
CONVERTERS = CONVERSIONS | DATASET_CONVERSIONS | SECTION_CONVERSIONS


def apply_rules(work: Import, rules: list[dict[str, Any]]) -> None:
    """Apply rules in their order, each if its conditions hold."""
    # a condition reads what the rules before it left, so that "otherwise" needs no word
    for rule in rules:
        if not conditions_hold(work, rule.get("when", {})):
            continue
        for effect, rows in rule.items():
            if effect in WHOLE_EFFECTS:
                WHOLE_EFFECTS[effect](work, rows)
            elif effect != "when":
                for name, value in each_name(rows):
                    EFFECTS[effect](work, name, value)


def conditions_hold(work: Import, when: Conditions | list[Conditions]) -> bool:
    """Report whether all conditions hold; of a list, all conditions of one of its rows."""
    alternatives = when if isinstance(when, list) else [when]
    return any(all(_holds(work, names, wanted) for names, wanted in one.items()) for one in alternatives)


def _holds(work: Import, names: str, wanted: Any) -> bool:
    """Report whether one of the keys fulfils a condition."""
    if names in ("is", "is not"):
        return conditions_hold(work, tables.KEYS["facts"][wanted]) == (names == "is")
    if names == "tool":
        return work.peer.name in wanted
    return any(_fits(work.value_at(split(name)), wanted) for name in names.split("|"))


def _fits(value: Any, wanted: Any) -> bool:
    """Report whether a value is one of a list, is as a word says, or is the one that it must be."""
    if isinstance(wanted, list):
        return any(_fits(value, one) for one in wanted)
    if isinstance(wanted, dict) and "holds" in wanted:
        return isinstance(value, list) and any(_fits(item, wanted["holds"]) for item in value)
    if isinstance(wanted, dict):
        return value is not None and not _fits(value, wanted["not"])
    # a list of names as one text, as most tools accept it, too
    if isinstance(wanted, str) and wanted.startswith("/"):
        return value is not None and re.search(wanted.strip("/"), str(value)) is not None
    if wanted in WORDS:
        return bool(WORDS[wanted](value))
    # not 1 for true
    return type(value) is type(wanted) and value == wanted


# ---- effects of a rule


def _leave(work: Import, name: str, why: str | list[str]) -> None:
    # a key that is switched off stays: it may have a counterpart that is off, too
    if work.data.get(name) not in (None, "no", False):
        _remove(work, name, why)


def _remove(work: Import, name: str, why: str | list[str]) -> None:
    if name in work.data:
        reason = tables.Reason(why) if isinstance(why, str) else tables.Reason(*why)
        work.leave((name,), reason)


def _refuse(work: Import, name: str, sentence: str | list[str]) -> None:
    words = [sentence] if isinstance(sentence, str) else sentence
    value = work.data[name]
    # a name without quotes
    shown = value[:60] if isinstance(value, str) else abbreviated(value)
    work.refuse(name, words[0].replace("{value}", shown), *words[1:])


def _put(work: Import, name: str, values: dict[str, Any]) -> None:
    # a rule may name several spellings of a key; a file has one of them
    if name in work.data:
        for key, value in values.items():
            work.put(key, value, name)


def _override(work: Import, name: str, values: dict[str, Any]) -> None:
    # qlora replaces the lora that another key says; `take` accounts for the key of the file
    for key, value in values.items():
        work.document.put(split(key), value, work.document.place((name,)))


def _move(work: Import, name: str, key: str) -> None:
    if name in work.data:
        work.put(key, work.data.pop(name), name)


def _copy(work: Import, name: str, other: str) -> None:
    if other in work.data:
        work.data.setdefault(name, work.data[other])


# of conditions; no key of these conditions has one of the words as a value
WORDS: dict[str, Callable[[Any], Any]] = {
    "given": lambda value: value is not None,
    "absent": lambda value: value is None,
    "on": bool,
    "off": lambda value: value is not None and not value,
    "share": lambda value: isinstance(value, float) and 0 < value < 1,
    "whole": lambda value: isinstance(value, int),
    "list": lambda value: isinstance(value, list),
    "section": lambda value: isinstance(value, dict) and value,
    "a task of pairs": trains_on_pairs,
    "template file": lambda value: isinstance(value, str) and value.endswith((".jinja", ".jinja2", ".j2")),
}
# functions of a rule's value
WHOLE_EFFECTS: dict[str, Callable[[Import, Any], Any]] = {
    "then": apply_rules,
    "note": lambda work, text: work.notes.append(text),
    "drop": lambda work, name: work.document.remove(split(name)),
    "call": lambda work, name: CONVERTERS[name](work),
}
# functions of the tool's key and the value in the rule
EFFECTS: dict[str, Callable[[Import, str, Any], Any]] = {
    "leave": _leave,
    "remove": _remove,
    "refuse": _refuse,
    "put": _put,
    "override": _override,
    "move": _move,
    "copy": _copy,
    "take": Import.take,
    "set": lambda work, name, value: work.data.update({name: value}),
    "default": lambda work, name, value: work.data.setdefault(name, value),
    "rename": Import.rename,
    "hoist": Import.hoist,
    "per epoch": set_interval,
}
