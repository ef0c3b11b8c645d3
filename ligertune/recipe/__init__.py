"""The recipe: one YAML file that describes a run, read into frozen sections."""

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
