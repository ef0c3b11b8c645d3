"""`ligertune draft`: train an EAGLE-3 draft head for a model."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from ligertune.cli.options import CommandPart, Json, Overrides, RecipeFile
from ligertune.cli.render import console as render
from ligertune.cli.train import Overwrite, Resume, run_overrides, run_recipe


def draft(
    recipe: RecipeFile,
    head: Annotated[Path | None, typer.Option(help="Folder of a draft head to start from (draft.head_path).")] = None,
    set_: Overrides = None,
    resume: Resume = None,
    overwrite: Overwrite = False,
    json: Json = False,
) -> None:
    """Train an EAGLE-3 draft head next to its frozen model (task: draft), and measure how many tokens are accepted.

    Example: ligertune draft recipe.yaml
    """
    from ligertune.recipe.read import load_recipe

    render.people_on_stderr(json)
    start = [] if head is None else [f"draft.head_path={head}"]
    overrides = ["task=draft", *start, *run_overrides(resume, overwrite, set_), *(set_ or [])]
    run_recipe(load_recipe(recipe, overrides=overrides), json)


PART = CommandPart(train=draft, order=3)
