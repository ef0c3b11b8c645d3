"""Error messages for invalid keys and values: pydantic's errors as sentences, with the accepted values and a guess."""

from __future__ import annotations

import json
from difflib import get_close_matches
from typing import TYPE_CHECKING, Any

from pydantic import ValidationError

from ligertune.recipe.aliases import KEY_OF_ALIAS, OPTIMIZER_NAMES
from ligertune.recipe.document import ITEM, Document, KeyPath, dotted, keys, leaf, parent, schema_key, split
from ligertune.recipe.section import UNUSABLE

if TYPE_CHECKING:
    from pydantic_core import ErrorDetails

KINDS = {
    dict: "a mapping", list: "a list", str: "a string", bool: "a boolean", int: "an integer", float: "a number",
    type(None): "nothing",
}  # fmt: skip
TYPES = {
    "integer": "an integer", "number": "a number", "string": "a string", "null": "null", "array": "a list",
    "object": "a mapping",
}  # fmt: skip
BOUNDS = {
    "minimum": "at least {}", "exclusiveMinimum": "above {}", "maximum": "at most {}", "exclusiveMaximum": "below {}",
    "minItems": "at least {} item", "minLength": "not empty",
}  # fmt: skip
# Names and values that spelling alone would lead to the wrong suggestion.
MEANT_KEYS = {"batch_size": "train.per_device_train_batch_size (rows per device) or train.global_batch_size"}
MEANT_VALUES = {"train.optim": OPTIMIZER_NAMES}


def complain_about(error: ValidationError, document: Document) -> list[KeyPath]:
    """Add one complaint per key that pydantic refused, and return the paths of these keys."""
    faults: dict[KeyPath, ErrorDetails] = {}
    for row in error.errors(include_url=False):
        about_the_key = row["type"] in ("missing", "extra_forbidden")
        faults.setdefault(row["loc"] if about_the_key else _written(row["loc"], document), row)
    around = {path[:length] for path in faults for length in range(len(path))}
    for path, row in faults.items():
        if path in around:  # pydantic also calls a list too short if its items are invalid
            continue
        sentence = {"missing": missing_key, "extra_forbidden": unknown_key}.get(row["type"], wrong_value)
        is_unusable = row["type"] == UNUSABLE
        document.complain(path, f"{document.name(path)} {row['msg']}" if is_unusable else sentence(path, document))
    return list(faults)


def missing_key(path: KeyPath, document: Document) -> str:
    """Describe a required key that is not given."""
    meaning = keys()[schema_key(path)]["description"]
    return f"{dotted(path)} is missing: {meaning[0].lower()}{meaning[1:]}"


def unknown_key(path: KeyPath, document: Document) -> str:
    """Describe a key that does not exist here: the section it belongs to, or else the most similar key."""
    name = str(path[-1])
    section = schema_key(path[:-1])
    # a flat key such as `train.seed: 1` at the top level
    if "." in name and schema_key(split(name)) in keys():
        return f"{name} is written with dots. Write {leaf(name)} under `{parent(name)}`."
    if not name.strip():
        return "an empty name is not a recipe key."
    name = leaf(name)
    full = f"{section}.{leaf(section).partition('_')[0]}_{name}"  # `type` in rope_parameters is rope_type
    if full in keys():
        return f"{dotted(path)} is not a recipe key. Did you mean {full}?"
    homes = [home for key in keys() if leaf(key) == name and (home := parent(key)) != section]
    homes = [home for home in homes if ITEM not in home] or homes
    if homes:
        return f"`{name}` belongs {' or '.join(map(_where, homes))}, not {_where(section)}."
    known = MEANT_KEYS | KEY_OF_ALIAS
    close = known[name] if name in known else _close_key(name, path[:-1])
    return f"{dotted(path)} is not a recipe key." + (f" Did you mean {close}?" if close else "")


def wrong_value(path: KeyPath, document: Document) -> str:
    """Describe a value that has the wrong type, is out of range, or is not one of the choices."""
    value = document.get(path)
    alternatives = _alternatives(path)
    expected = [phrase for entry in alternatives for phrase in _expected(entry)]
    sentence = f"{document.name(path)} is {shown(value)}; it must be {_either(expected)}."
    choices = [choice for entry in alternatives for choice in _choices(entry)]
    if isinstance(value, str):
        meant = MEANT_VALUES.get(schema_key(path), {}).get(value)
        close = [meant] if meant else get_close_matches(value, map(str, choices), n=1)
        if close:
            return f"{sentence} Did you mean {close[0]}?"
    # an unquoted number where a string is expected, such as a revision
    free_text = any(entry.get("type") == "string" and not _choices(entry) for entry in alternatives)
    return f"{sentence} Put it in quotes." if free_text and isinstance(value, int | float) else sentence


def accepted_values(key: str) -> str:
    """Describe the values that a schema key accepts: "auto or an integer (at least 1)"."""
    return _either([phrase for entry in keys()[key].get("anyOf", [keys()[key]]) for phrase in _expected(entry)])


def shown(value: Any) -> str:
    """Format a value as it is written in YAML, with its type."""
    if value is None:
        return "null"
    return f"{abbreviated(value)} ({KINDS[type(value)]})"


def abbreviated(value: Any) -> str:
    """Format a value as YAML, shortened to 60 characters."""
    text = json.dumps(value, ensure_ascii=False)
    return text if len(text) <= 60 else text[:57] + "..."


def _written(path: KeyPath, document: Document) -> KeyPath:
    """Return the part of a pydantic location that the user wrote."""
    # pydantic appends the names of a union's alternatives
    while not document.has(path):
        path = path[:-1]
    return path


def _where(section: str) -> str:
    return f"under `{section}`" if section else "at the top level"


def _close_key(name: str, section: KeyPath) -> str | None:
    """Return the key most similar to `name`, in the same section first; aliases count as their keys."""
    named = [key for key in keys() if key and not key.endswith(ITEM)]
    siblings = {leaf(key): dotted((*section, leaf(key))) for key in named if parent(key) == schema_key(section)}
    # of equal names, the key that is not of a list's items
    anywhere = KEY_OF_ALIAS | {leaf(key): key for key in sorted(named, key=lambda key: ITEM not in key)}
    # keys at other places must be more similar, because there are many more of them
    wanted = name.lower().replace("-", "_")
    for candidates, cutoff in ((siblings, 0.7), (anywhere, 0.8)):
        if close := get_close_matches(wanted, candidates, n=1, cutoff=cutoff):
            return candidates[close[0]]
    return None


def _alternatives(path: KeyPath) -> list[dict[str, Any]]:
    """Return the alternative JSON schemas; a value must match one of them."""
    entry = keys().get(schema_key(path)) or _inner(keys()[schema_key(path[:-1])], path[-1])
    return entry.get("anyOf", [entry])


def _inner(entry: dict[str, Any], step: str | int) -> dict[str, Any]:
    """Return the JSON schema of an item of a list that may be null, or of a value under a free name."""
    kind = "items" if isinstance(step, int) else "additionalProperties"
    return next(option[kind] for option in entry.get("anyOf", [entry]) if kind in option)


def _choices(entry: dict[str, Any]) -> list[Any]:
    return [entry["const"]] if "const" in entry else entry.get("enum", [])


def _expected(entry: dict[str, Any]) -> list[str]:
    """Describe the values that one alternative of a JSON schema accepts; true and false are choices too."""
    if entry.get("type") == "boolean":
        return ["true", "false"]
    if choices := _choices(entry):
        return [str(choice) for choice in choices]
    if choices := _choices(entry.get("items", {})):
        return [f"a list of {_either(list(map(str, choices)))}"]
    bounds = [words.format(f"{entry[name]:.10g}") for name, words in BOUNDS.items() if name in entry]
    return [TYPES[entry["type"]] + (f" ({', '.join(bounds)})" if bounds else "")]


def _either(phrases: list[str]) -> str:
    *others, last = phrases
    return f"{', '.join(others)} or {last}" if others else last
