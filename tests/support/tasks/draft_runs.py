"""Plan and train short runs of the bundled recipe for draft heads in this process."""

import json
from pathlib import Path

from ligertune.recipe import load_recipe
from ligertune.recipe.read import bundled
from ligertune.run import run
from ligertune.training.resolve import plan_for
from ligertune.training.setup import Job
from support.command_line import losses, overrides

DRAFT = bundled("draft/stories260k.yaml")


def plan_draft(folder: Path, **changes: object) -> Job:
    """Return the planned run of the recipe with these changes and `folder` as output_dir."""
    settings = {"checkpoint.output_dir": folder, **changes}
    return plan_for(load_recipe(DRAFT, overrides=overrides(settings)[1::2]))


def train_draft(folder: Path, **changes: object) -> tuple[list[float], dict]:
    """Train; return (losses, report)."""
    report = run(plan_draft(folder, **changes), lambda line: None).as_dict()
    return losses(folder), report


def evaluations(folder: Path) -> list[dict]:
    """Return the evaluations of a run."""
    lines = (json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines())
    return [line for line in lines if "eval_loss" in line]
