"""`ligertune distill`: train a student, or write the teacher's log-probabilities for later runs."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from ligertune.cli.options import CommandPart, Json, Overrides, RecipeFile
from ligertune.cli.render import console as render
from ligertune.cli.train import Overwrite, Resume, plan_only, run_overrides, run_recipe
from ligertune.progress import importing


def distill(
    recipe: RecipeFile,
    write: Annotated[
        Path | None,
        typer.Option(
            help="Write the teacher's largest log-probabilities (distill.top_k) to this folder; train nothing."
        ),
    ] = None,
    set_: Overrides = None,
    resume: Resume = None,
    overwrite: Overwrite = False,
    json: Json = False,
) -> None:
    """Train a student towards a teacher's distributions (task: distill), or write those for later runs.

    Example: ligertune distill recipe.yaml --write teacher_log_probs
    """
    from ligertune.planning.preflight import check_out_folder, make_out_folder
    from ligertune.recipe.read import load_recipe

    render.people_on_stderr(json)
    overrides = ["task=distill", *run_overrides(resume, overwrite, set_), *(set_ or [])]
    if write is None:
        run_recipe(load_recipe(recipe, overrides=overrides), json)
        return
    loaded = load_recipe(recipe, overrides=[*overrides, "distill.teacher_file=null"])
    check_out_folder(write, "--write")
    make_out_folder(write.parent, "--write")
    with importing():
        from ligertune.features.distill.teacher_files import write_teacher_file
    job = plan_only(loaded)
    found = write_teacher_file(
        job.plan,
        job.data,
        write,
        pad_token_id=job.tokenizer.pad_token_id,
        vocab_size=job.config.get_text_config().vocab_size,
        show=render.text,
    )
    render.text(f"Wrote {write}. Train from it: distill.teacher_file: {write}")
    if json:
        render.json_report({**vars(found), "folder": str(write)})


PART = CommandPart(train=distill, order=2)
