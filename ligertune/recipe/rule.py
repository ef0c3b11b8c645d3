"""What a rule between keys is."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from ligertune.recipe.schema import Recipe


@dataclass(frozen=True)
class Rule:
    """`keys` contradict each other where `broken`; `says` names them as {0}, {1} and may quote the recipe."""

    keys: tuple[str, ...]
    broken: Callable[[Recipe], bool]
    says: str


def at(recipe: Recipe, key: str) -> object:
    """The value of `section.name`."""
    section, _, name = key.partition(".")
    return getattr(getattr(recipe, section), name)
