"""The recipe of the run that a run continues, whose chosen settings it keeps."""

from __future__ import annotations

from pathlib import Path

from ligertune.errors import UserError
from ligertune.files.storage import checkpoint_to_resume
from ligertune.recipe.read import load_recipe
from ligertune.recipe.schema import Recipe


def continued_recipe(recipe: Recipe) -> Recipe | None:
    """Return the resolved recipe of the run whose checkpoint `recipe` continues from, or None."""
    checkpoint = recipe.checkpoint
    wanted = checkpoint.resume_from_checkpoint
    found = None if wanted == "never" else checkpoint_to_resume(Path(checkpoint.output_dir), wanted)
    if found is None:
        return None
    run = found[0].absolute().parent.parent
    try:
        return load_recipe(run / "resolved_recipe.yaml")
    except UserError:  # it was removed, or an earlier version wrote it
        return None
