"""Parts of a recipe that modalities bring: sections and rules.

A modality is a package in `ligertune.data.modalities` with a module `recipe`, which defines PART.
"""

from __future__ import annotations

import importlib
import pkgutil
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from functools import cache
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from ligertune.recipe.rules.rule import Rule
    from ligertune.recipe.section import Section

MODALITIES = "ligertune.data.modalities"


@dataclass(frozen=True)
class RecipePart:
    """What a modality adds to recipes. sections: name -> class with defaults for all keys."""

    # Defaults, because the recipe of a model without this modality leaves the section out.
    sections: Mapping[str, type[Section]] = field(default_factory=dict)
    rules: tuple[Rule, ...] = ()


@cache
def modality_parts() -> tuple[RecipePart, ...]:
    """Return the recipe parts of all modalities."""
    return tuple(importlib.import_module(f"{name}.recipe").PART for name in _subpackages(MODALITIES))


def _subpackages(package: str) -> Iterator[str]:
    """Yield the dotted names of the packages in a package."""
    # By name, because the recipe is below the data: its modules must not import a modality.
    folders = importlib.import_module(package).__path__
    yield from (f"{package}.{module.name}" for module in pkgutil.iter_modules(folders) if module.ispkg)
