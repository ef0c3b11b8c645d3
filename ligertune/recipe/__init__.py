"""The recipe: one YAML file that says everything about a run, read into frozen sections."""

from ligertune.recipe.read import dump_recipe, load_recipe
from ligertune.recipe.rules import contradicts_itself
from ligertune.recipe.schema import (
    DatasetSpec,
    DataSpec,
    KernelsSpec,
    LoggingSpec,
    MethodSpec,
    ModelSpec,
    ParallelSpec,
    Recipe,
    ReportSpec,
    TokenizerSpec,
    VisionSpec,
    recipe_schema,
)
from ligertune.recipe.train_sections import CheckpointSpec, EvalSpec, GaloreSpec, MedusaSpec, TrainSpec

__all__ = [
    "CheckpointSpec",
    "DataSpec",
    "DatasetSpec",
    "EvalSpec",
    "GaloreSpec",
    "KernelsSpec",
    "LoggingSpec",
    "MedusaSpec",
    "MethodSpec",
    "ModelSpec",
    "ParallelSpec",
    "Recipe",
    "ReportSpec",
    "TokenizerSpec",
    "TrainSpec",
    "VisionSpec",
    "contradicts_itself",
    "dump_recipe",
    "load_recipe",
    "recipe_schema",
]
