"""Tables of the import: tools, keys that become ours (keys.yaml), and keys that cannot (unsupported.yaml)."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from ligertune.recipe.aliases import OPTIMIZER_NAMES, UNSET, Alias
from ligertune.recipe.document import Document
from ligertune.recipe.plain_yaml import parse
from ligertune.recipe.section import convert_by

TRAINING = "changes what is trained"
SPEED = "changes speed or memory only"
HARMLESS = "has no effect here"
HARMS = (TRAINING, SPEED, HARMLESS)
KEEP_THE_TOOL = "Keep the other tool for this file."


@dataclass(frozen=True)
class Peer:
    """A tool. signs: keys that identify its files; defaults: its defaults that differ from ours, by our keys.

    nulls: keys whose null is not the default, with the value that it means. sections: those that its files have, and a
    recipe of ligertune does not.
    """

    name: str
    signs: tuple[str, ...]
    defaults: Mapping[str, Any]
    nulls: Mapping[str, Any]
    sections: tuple[str, ...] = ()


@dataclass(frozen=True)
class Reason:
    """Why a key is not imported, and the harm: one of HARMS."""

    why: str
    harm: str = TRAINING


def nested(section: Any) -> Mapping[str, Any]:
    """Return a section of another tool's file; one with another type counts as empty."""
    return section if isinstance(section, Mapping) else {}


def split_names(value: Any) -> list[str]:
    """Return the names of a list, or those that one string separates by commas."""
    return [str(name).strip() for name in (value if isinstance(value, list) else str(value).split(","))]


def _names(value: Any) -> Any:
    if value in ("all", "all-linear"):  # of LLaMA-Factory, and of PEFT
        return "all-linear"
    return split_names(value) if isinstance(value, str) else value


def _read(name: str) -> dict[str, Any]:
    document = Document(name)
    data = parse(Path(__file__).with_name(name).read_text(encoding="utf-8"), document)
    document.raise_complaints()  # a key that is given twice
    return data


def _conversion(named: str | dict[str, Any]) -> Callable[[Any], Any]:
    """Return the function of a row: one of CONVERSIONS by its name, or one that converts by a mapping of values."""
    if isinstance(named, str):
        return CONVERSIONS[named]
    # the keys of a mapping are read as strings, and a switch of the file is a boolean
    words = {"true": True, "false": False}
    return convert_by({words.get(name, name): UNSET if to == "unset" else to for name, to in named.items()})


def each_name(rows: Mapping[str, Any]) -> Iterator[tuple[str, Any]]:
    """Yield the rows of a table whose keys are names, separated by spaces."""
    for names, row in rows.items():
        for name in names.split():
            yield name, row


def _reasons(table: dict[str, list[dict[str, str]]]) -> dict[str, Reason]:
    rows = [(row, harm) for harm, rows in table.items() for row in rows]
    return {key: Reason(row["why"], harm) for row, harm in rows for key in row["keys"].split()}


def likely_peer(data: Mapping[str, Any]) -> tuple[Peer, tuple[str, ...]]:
    """Return the tool whose characteristic keys occur most, and those keys; none if no tool's occur."""
    found = {peer.name: [key for key in data if key in peer.signs] for peer in TOOLS}
    # Axolotl has a list of data sets, too, and base_model next to it
    if "model_name_or_path" in data and isinstance(data.get("datasets"), list):
        found[TRL.name] = [key for key in data if key in (*TRL.signs, "datasets")]
    best = max(TOOLS, key=lambda peer: len(found[peer.name]))
    return best, tuple(found[best.name])


# Read when this module is imported, 30 ms on a CPU: a recipe of ligertune never imports it.
KEYS = _read("keys.yaml")
UNSUPPORTED = _read("unsupported.yaml")
CONVERSIONS = {  # by their names in keys.yaml
    "": lambda value: value,
    "names": _names,
    "optimizer": convert_by(OPTIMIZER_NAMES | KEYS["optimizers"]),
    "enable_thinking": lambda value: {"enable_thinking": value},
    "rest of one": lambda value: 1 - value if type(value) in (int, float) else value,
}

# in this order: of two tools with as many signs in a file, the first one counts
TOOLS = tuple(
    Peer(
        name, tuple(row["signs"].split()), row["defaults"], row.get("nulls", {}), tuple(row.get("sections", "").split())
    )
    for name, row in KEYS["tools"].items()
)
AXOLOTL, LLAMA_FACTORY, TRL, TORCHTUNE, UNSLOTH = TOOLS
IMPORTED = tuple(Alias(key, tuple(names.split()), _conversion(to)) for names, key, to in KEYS["rows"])
TEMPLATES: dict[str, str] = KEYS["templates"]
REASONS = _reasons(UNSUPPORTED["reasons"])
# (our key, value that it does not accept) -> a better reason than the list of those that it does
BETTER_REASONS = {
    (key, value): row["why"]
    for key, rows in UNSUPPORTED["values"].items()
    for row in rows
    for value in row["values"].split()
}
