"""The recipe: one YAML file that describes a run, read into frozen sections.

Names are imported on first use. The schema is made of the sections of all features, so the `recipe` module of a feature
must be importable before it; and a feature's `command` module, which `--help` loads, must not import pydantic.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from ligertune.recipe.read import dump_recipe, load_recipe, recipe_of
    from ligertune.recipe.rules.check_rules import contradicts_itself
    from ligertune.recipe.schema import KernelsSpec, Recipe, recipe_schema
    from ligertune.recipe.train_sections import TrainSpec

__all__ = [
    "KernelsSpec",
    "Recipe",
    "TrainSpec",
    "contradicts_itself",
    "dump_recipe",
    "load_recipe",
    "recipe_of",
    "recipe_schema",
]

_WHERE = {
    "KernelsSpec": "schema",
    "Recipe": "schema",
    "TrainSpec": "train_sections",
    "contradicts_itself": "rules.check_rules",
    "dump_recipe": "read",
    "load_recipe": "read",
    "recipe_of": "read",
    "recipe_schema": "schema",
}


def __getattr__(name: str) -> Any:
    if name not in _WHERE:
        raise AttributeError(f"module 'ligertune.recipe' has no attribute {name!r}")
    return getattr(importlib.import_module(f"ligertune.recipe.{_WHERE[name]}"), name)
