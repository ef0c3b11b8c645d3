"""`ligertune recipe check|show|list|keys|schema|import`: nothing here loads a model, or torch."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from ligertune.cli.complete import recipe_keys
from ligertune.cli.render import console as render

recipe_app = typer.Typer(
    help="Check a recipe, show it whole, explain its keys, list the bundled ones, or import another tool's."
    "\n\nExample: ligertune recipe check my.yaml",
    no_args_is_help=True,
)

RecipeFile = Annotated[Path, typer.Argument(metavar="RECIPE", help="YAML recipe.", show_default=False)]
Overrides = Annotated[
    list[str] | None,
    typer.Option("--set", metavar="KEY=VALUE", help="Override a value.", autocompletion=recipe_keys),
]
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


@recipe_app.command("list")
def list_(json: Json = False) -> None:
    """Print the paths of the recipes that come with ligertune, and what each is for.

    Example: ligertune recipe list
    """
    from ligertune.recipe.bundled import bundled_recipes, what_it_is_for

    render.people_on_stderr(json)
    found = {str(path): what_it_is_for(path) for path in bundled_recipes()}
    for path, words in found.items():
        render.text(f"{path}\n  {words}")
    if json:
        render.json_report(found)


@recipe_app.command("keys")
def print_keys() -> None:
    """Print every key of a recipe in Markdown: what it does, what it takes, its default.

    Example: ligertune recipe keys > recipe_keys.md
    """
    from ligertune.recipe.describe import recipe_reference

    render.document(recipe_reference())


@recipe_app.command("import")
def import_(
    file: Annotated[Path, typer.Argument(metavar="FILE", help="YAML of Axolotl, LLaMA-Factory or TRL.")],
    out: Annotated[
        Path | None, typer.Option("--out", metavar="RECIPE", help="Write it here instead of on stdout.")
    ] = None,
    json: Json = False,
) -> None:
    """Turn a YAML file of Axolotl, LLaMA-Factory or TRL into a recipe, and list what has no counterpart.

    Example: ligertune recipe import axolotl.yml --out my.yaml
    """
    from ligertune.planning.preflight import write_new
    from ligertune.recipe.importers.import_recipe import import_recipe

    render.people_on_stderr(json or out is None)
    found = import_recipe(file)
    if out is not None:
        write_new(out, found.text)
    elif not json:
        render.document(found.text)
    for item in found.left:
        where = f"{file}:{item.line}" if item.line else str(file)
        render.text(f"{where}: not taken over: {item.key}: {item.value} ({item.why})")
    if out is not None:
        render.text(f"Written: {out}, from a file of {found.peer}'s. Look at it, then: ligertune data {out}")
    if json:
        render.json_report(found.as_dict())
