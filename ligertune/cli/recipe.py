"""`ligertune recipe` and `ligertune init`: validate, print, describe and convert recipes without importing torch."""

from __future__ import annotations

import shlex
import tempfile
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from ligertune.cli.options import Json, Overrides, RecipeFile
from ligertune.cli.render import console as render

if TYPE_CHECKING:
    from ligertune.recipe.importers.import_state import Import

ADAPTER_RATE = 2e-4  # as the bundled LoRA recipes

recipe_app = typer.Typer(
    help="Check or print a recipe, describe its keys, list the bundled recipes, or import another tool's file."
    "\n\nExample: ligertune recipe check my.yaml",
    no_args_is_help=True,
)


@recipe_app.command()
def check(recipe: RecipeFile, set_: Overrides = None, json: Json = False) -> None:
    """Validate a recipe and report all its errors together, without loading a model or data.

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
    """Print a recipe with every default filled in and every alias replaced by its key.

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
    """Print the JSON schema of a recipe, for editors that complete and validate keys.

    Example: ligertune recipe schema > recipe.schema.json
    """
    from ligertune.recipe import recipe_schema

    render.json_report(recipe_schema())


@recipe_app.command("list")
def list_(json: Json = False) -> None:
    """Print the path and the purpose of each bundled recipe.

    Example: ligertune recipe list
    """
    from ligertune.recipe.read import bundled_recipes, recipe_title

    render.people_on_stderr(json)
    found = {str(path): recipe_title(path) for path in bundled_recipes()}
    for path, title in found.items():
        render.text(f"{path}\n  {title}")
    if json:
        render.json_report(found)


@recipe_app.command("keys")
def print_keys() -> None:
    """Print every recipe key as Markdown: its description, values and default.

    Example: ligertune recipe keys > recipe_keys.md
    """
    from ligertune.recipe.describe import recipe_reference

    render.document(recipe_reference())


@recipe_app.command("import")
def import_(
    file: Annotated[Path, typer.Argument(metavar="FILE", help="YAML file of Axolotl, LLaMA-Factory or TRL.")],
    out: Annotated[
        Path | None, typer.Option("--out", metavar="RECIPE", help="Recipe file to write. Default: stdout.")
    ] = None,
    json: Json = False,
) -> None:
    """Convert a YAML file of Axolotl, LLaMA-Factory or TRL into a recipe, and list the keys that have no counterpart.

    Example: ligertune recipe import axolotl.yml --out my.yaml
    """
    from ligertune.planning.preflight import write_new
    from ligertune.recipe.importers.import_recipe import import_recipe

    # without --out, stdout holds the recipe itself
    render.people_on_stderr(json or out is None)
    found = import_recipe(file)
    if out is not None:
        write_new(out, found.text)
    elif not json:
        render.document(found.text)
    _show_import(found, file)
    if out is not None:
        render.text(f"Wrote {out}. Inspect its data first: ligertune data {shlex.quote(str(out))}")
        render.text(f"Run it: ligertune train {shlex.quote(str(out))}")
    if json:
        render.json_report(found.as_dict())


def _show_import(found: Import, file: Path) -> None:
    """Print what became of each key of the file: keys whose loss changes what is trained are the loudest."""
    from ligertune.errors import plural
    from ligertune.recipe.importers.reasons import HARMLESS, SPEED, TRAINING

    render.text(f"{file} is a file of {found.peer.name}. Translated:")
    for line in found.translated:
        render.text(f"  {line}")
    if found.defaults:
        render.text(f"Defaults of {found.peer.name} that differ from ours, and are written to the recipe:")
        for line in found.defaults:
            render.text(f"  {line}")
    for note in found.notes:
        render.note(note)
    for harm, title in ((TRAINING, "NOT IMPORTED"), (SPEED, "Not imported")):
        items = [item for item in found.left if item.harm == harm]
        if items:
            render.text(f"{title}, {harm} ({plural(len(items), 'key')}):")
        for item in items:
            render.text(f"  {file}:{item.line}: {item}" if item.line else f"  {item}")
    if found.harmless:
        render.text(f"Not imported, {HARMLESS}: {', '.join(found.harmless)}")
    if found.off:
        render.text(f"Empty or off: {', '.join(found.off)}")


def init(
    model: Annotated[str, typer.Argument(help="Hub id or folder of the model.", show_default=False)],
    data: Annotated[list[str], typer.Argument(help="Data sets: hub ids, files, folders or globs.", show_default=False)],
    out: Annotated[Path, typer.Option("--out", metavar="FILE", help="Recipe file to write.")] = Path("recipe.yaml"),
    set_: Overrides = None,
    json: Json = False,
) -> None:
    """Write a recipe for a model and data sets, with every key, its description and its default.

    Example: ligertune init Qwen/Qwen2.5-0.5B my_answers.jsonl --set train.learning_rate=1e-5
    """
    from ligertune.cli.render import run_report
    from ligertune.planning.preflight import check_paths, write_new
    from ligertune.recipe import load_recipe
    from ligertune.recipe.describe import commented_recipe, new_recipe
    from ligertune.recipe.plain_yaml import dump

    render.people_on_stderr(json)
    # validate the short recipe first, so that nothing is written if an override is wrong
    with tempfile.TemporaryDirectory(prefix="ligertune-init-") as folder:
        draft = Path(folder) / "recipe.yaml"
        draft.write_text(dump(new_recipe(model, data)), encoding="utf-8")
        loaded = load_recipe(draft, set_ or [])
    check_paths(loaded)
    changes = list(set_ or [])
    if loaded.method.type in ("lora", "qlora") and "learning_rate" not in loaded.train.model_fields_set:
        changes.append(f"train.learning_rate={ADAPTER_RATE}")
        render.note(f"train.learning_rate is {ADAPTER_RATE} for an adapter (2e-5 in full fine-tuning).")
    write_new(out, commented_recipe(new_recipe(model, data), changes))
    command, recipe = run_report.command(), shlex.quote(str(out))
    render.text(f"Wrote {out}")
    render.text(f"\nInspect the data:  {command} data {recipe}\nTrain:             {command} train {recipe}")
    if json:
        render.json_report({"recipe": str(out), "output_dir": loaded.checkpoint.output_dir})
