"""The recipe: one YAML file that describes a run, read into frozen sections."""

from importlib import import_module
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

_MODULES = {
    "KernelsSpec": "schema",
    "Recipe": "schema",
    "TrainSpec": "train_sections",
    "contradicts_itself": "rules.check_rules",
    "dump_recipe": "read",
    "load_recipe": "read",
    "recipe_of": "read",
    "recipe_schema": "schema",
}


# Names are imported on first use: the schema imports the sections of modalities, and these import modules of this
# package, which must not import the schema in turn.
def __getattr__(name: str) -> Any:
    if name not in _MODULES:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(import_module(f"{__name__}.{_MODULES[name]}"), name)
