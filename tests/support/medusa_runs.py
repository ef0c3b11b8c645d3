"""Plan and train short runs of the bundled Medusa recipe in this process."""

from pathlib import Path

from command_line import losses, overrides

from ligertune.recipe import load_recipe
from ligertune.recipe.read import bundled
from ligertune.run import run
from ligertune.training.resolve import plan_for
from ligertune.training.setup import Job

MEDUSA = bundled("medusa/stories260k.yaml")
WEIGHTS = "medusa/medusa_lm_head.safetensors"


def plan_medusa(folder: Path, **changes: object) -> Job:
    """Return the planned run of the recipe with these changes and `folder` as output_dir."""
    settings = {"checkpoint.output_dir": folder, **changes}
    return plan_for(load_recipe(MEDUSA, overrides=overrides(settings)[1::2]))


def train_medusa(folder: Path, **changes: object) -> tuple[list[float], dict, Path]:
    """Train; return (losses, report, folder)."""
    report = run(plan_medusa(folder, **changes), lambda line: None).as_dict()
    return losses(folder), report, folder
