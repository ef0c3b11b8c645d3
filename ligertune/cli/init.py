"""`ligertune init`."""

from __future__ import annotations

import shlex
from pathlib import Path
from typing import Annotated

import typer

from ligertune.cli.complete import recipe_keys
from ligertune.cli.render import console as render


def init(
    model: Annotated[str, typer.Argument(help="Hub id or folder of a model.", show_default=False)],
    data: Annotated[list[str], typer.Argument(help="Data sets: hub ids, files, folders or globs.", show_default=False)],
    out: Annotated[Path, typer.Option("--out", metavar="FILE", help="The recipe to write.")] = Path("recipe.yaml"),
    set_: Annotated[
        list[str] | None,
        typer.Option("--set", metavar="KEY=VALUE", help="Write a value.", autocompletion=recipe_keys),
    ] = None,
    json: Annotated[bool, typer.Option("--json", help="Print what was written as JSON on stdout.")] = False,
) -> None:
    """Write a recipe for a model and data: every key with what it does, to be changed where you like.

    Example: ligertune init Qwen/Qwen2.5-0.5B my_answers.jsonl --set train.learning_rate=1e-5
    """
    import tempfile

    from ligertune.planning.preflight import check_paths, write_new
    from ligertune.recipe import load_recipe
    from ligertune.recipe.describe import commented_recipe, new_recipe
    from ligertune.recipe.plain_yaml import dump

    render.people_on_stderr(json)
    with tempfile.TemporaryDirectory(prefix="ligertune-init-") as folder:
        trial = Path(folder) / "recipe.yaml"
        trial.write_text(dump(new_recipe(model, data)), encoding="utf-8")
        loaded = load_recipe(trial, set_ or [])
    check_paths(loaded)
    write_new(out, commented_recipe(new_recipe(model, data), set_ or []))
    command, recipe = render.command(), shlex.quote(str(out))
    render.text(f"Written: {out}")
    render.text(f"\nSee what it trains on:  {command} data {recipe}\nTrain:                  {command} train {recipe}")
    if json:
        render.json_report({"recipe": str(out), "output_dir": loaded.checkpoint.output_dir})
