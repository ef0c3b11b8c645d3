"""`ligertune recipe check|show|schema`: nothing here loads a model, or torch."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from ligertune.cli import render

recipe_app = typer.Typer(help="Check a recipe, show it with every default, or print its schema.", no_args_is_help=True)

RecipeFile = Annotated[Path, typer.Argument(metavar="RECIPE", help="YAML recipe.", show_default=False)]
Overrides = Annotated[list[str] | None, typer.Option("--set", metavar="KEY=VALUE", help="Override a value.")]
Json = Annotated[bool, typer.Option("--json", help="Print JSON on stdout.")]


@recipe_app.command()
def check(recipe: RecipeFile, set_: Overrides = None, json: Json = False) -> None:
    """Say what is wrong with a recipe, all of it at once, without loading anything.

    Example: ligertune recipe check my.yaml
    """
    from ligertune.recipe import load_recipe

    render.people_on_stderr(json)
    loaded = load_recipe(recipe, set_ or [])
    for notice in loaded.notices:
        render.text(notice)
    render.text(f"{recipe}: OK")
    if json:
        render.json_report({"recipe": str(recipe), "ok": True, "notices": list(loaded.notices)})


@recipe_app.command()
def show(recipe: RecipeFile, set_: Overrides = None, json: Json = False) -> None:
    """Print a recipe with every default filled in, under our names.

    Example: ligertune recipe show my.yaml --set train.max_steps=100
    """
    from ligertune.recipe import dump_recipe, load_recipe

    loaded = load_recipe(recipe, set_ or [])
    if json:
        render.json_report(loaded.model_dump(mode="json"))
        return
    notices = "".join(f"# {notice}\n" for notice in loaded.notices)
    render.document(notices + dump_recipe(loaded))


@recipe_app.command()
def schema() -> None:
    """Print the JSON schema of a recipe, for editors that complete and check keys.

    Example: ligertune recipe schema > recipe.schema.json
    """
    from ligertune.recipe import recipe_schema

    render.json_report(recipe_schema())
