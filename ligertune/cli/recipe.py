"""`ligertune recipe` and `ligertune init`: validate, print, describe and convert recipes without importing torch."""

from __future__ import annotations

import shlex
import tempfile
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from ligertune.cli.options import Json, Overrides, RecipeFile
from ligertune.cli.render import console as render

if TYPE_CHECKING:
    from ligertune.data.rows.row_kind import DetectedTask
    from ligertune.recipe.importers.import_state import Import
    from ligertune.recipe.schema import ModelSpec, Recipe

ADAPTER_RATE = 2e-4  # as in the bundled recipes
Overwrite = Annotated[bool, typer.Option("--overwrite", help="Replace the file that --out names.")]

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
    from ligertune.recipe.read import load_recipe

    render.people_on_stderr(json)
    loaded = load_recipe(recipe, set_ or [])
    for notice in loaded.notices:
        render.sentence(notice)
    render.text(f"{recipe}: OK")
    if json:
        render.json_report({"recipe": str(recipe), "ok": True, "notices": list(loaded.notices)})


@recipe_app.command()
def show(recipe: RecipeFile, set_: Overrides = None, json: Json = False) -> None:
    """Print a recipe with every default filled in and every alias replaced by its key.

    Example: ligertune recipe show my.yaml --set train.max_steps=100
    """
    from ligertune.recipe.read import dump_recipe, load_recipe

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
    from ligertune.recipe.schema import recipe_schema

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
        render.text(path)
        render.sentence(title, indent="  ")
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
    file: Annotated[Path, typer.Argument(metavar="FILE", help="YAML file of another tool.")],
    out: Annotated[
        Path | None, typer.Option("--out", metavar="RECIPE", help="Recipe file to write. Default: stdout.")
    ] = None,
    overwrite: Overwrite = False,
    explain: Annotated[
        bool, typer.Option("--explain", help="Print a table: each key, its meaning there, what it becomes here.")
    ] = False,
    json: Json = False,
) -> None:
    """Convert a YAML file of Axolotl, LLaMA-Factory, TRL, torchtune or unsloth into a recipe, and say what is left out.

    Example: ligertune recipe import axolotl.yml --out my.yaml
    """
    from ligertune.planning.preflight import write_new
    from ligertune.recipe.importers.import_recipe import convert

    # without --out, stdout holds the recipe itself, or the table
    render.people_on_stderr(json or (out is None and not explain))
    found = convert(file)
    rows = _explain_import(found, file) if explain else None
    found.raise_refusals()
    if out is not None:
        _keep_inputs(out, [file])
        write_new(out, found.text, overwrite=overwrite)
    elif not json and not explain:
        render.document(found.text)
    if not explain:
        _show_import(found, file)
    if out is not None:
        render.text(f"Wrote {out}. Inspect its data first: ligertune data {shlex.quote(str(out))}")
        render.text(f"Run it: ligertune train {shlex.quote(str(out))}")
    if json:
        render.json_report(found.as_dict() | ({"explained": rows} if explain else {}))


def _explain_import(found: Import, file: Path) -> list[dict[str, str]]:
    """Print and return what each key of the file means there and becomes here, and the tool's defaults."""
    from dataclasses import asdict

    from ligertune.recipe.importers.explain import explain

    rows = [asdict(row) for row in explain(found)]
    header = ("key", "value there", "meaning there", "here")
    render.columns(f"{file}, a file of {found.peer.name}", header, [tuple(row.values()) for row in rows], texts=True)
    for note in found.notes:
        render.note(note)
    return rows


def _show_import(found: Import, file: Path) -> None:
    """Print what became of each key of the file: keys whose loss changes what is trained are the loudest."""
    from ligertune.errors import plural
    from ligertune.recipe.importers.import_tables import HARMLESS, SPEED, TRAINING

    render.text(f"{file} is a file of {found.peer.name}. Translated:")
    for line in found.translated:
        render.sentence(line, indent="  ")
    if found.defaults:
        render.text(f"Defaults of {found.peer.name} that differ from ours, and are written to the recipe:")
        for line in found.defaults:
            render.sentence(line, indent="  ")
    for note in found.notes:
        render.note(note)
    for harm, title in ((TRAINING, "NOT IMPORTED"), (SPEED, "Not imported")):
        items = [item for item in found.left if item.harm == harm]
        if items:
            render.text(f"{title}, {harm} ({plural(len(items), 'key')}):")
        for item in items:
            render.sentence(f"{file}:{item.line}: {item}" if item.line else str(item), indent="  ")
    if found.harmless:
        render.sentence(f"Not imported, {HARMLESS}: {', '.join(found.harmless)}")
    if found.off:
        render.sentence(f"Empty or off: {', '.join(found.off)}")


def init(
    model: Annotated[str, typer.Argument(help="Hub id or folder of the model.", show_default=False)],
    data: Annotated[list[str], typer.Argument(help="Data sets: hub ids, files, folders or globs.", show_default=False)],
    out: Annotated[Path, typer.Option("--out", metavar="FILE", help="Recipe file to write.")] = Path("recipe.yaml"),
    overwrite: Overwrite = False,
    set_: Overrides = None,
    json: Json = False,
) -> None:
    """Write a recipe for a model and data sets, with the task that fits the data, and every key and its default.

    Example: ligertune init Qwen/Qwen2.5-0.5B my_answers.jsonl --set train.learning_rate=1e-5
    """
    from ligertune.cli.render import run_report
    from ligertune.planning.preflight import check_new_file, check_paths, write_new
    from ligertune.recipe.describe import commented_recipe, new_recipe
    from ligertune.recipe.feature import part_of_task

    render.people_on_stderr(json)
    changes = list(set_ or [])
    loaded = _draft(model, data, changes)
    check_paths(loaded)
    check_new_file(out, overwrite=overwrite)
    _keep_inputs(out, [Path(dataset.path) for dataset in loaded.data.datasets])
    remarks = _fit_task(loaded, changes)
    loaded = _draft(model, data, changes)
    if loaded.method.type in ("lora", "qlora") and "learning_rate" not in loaded.train.model_fields_set:
        rate = part_of_task(loaded.task).adapter_learning_rate or ADAPTER_RATE
        changes.append(f"train.learning_rate={rate}")
        render.note(f"train.learning_rate is {rate} for an adapter ({loaded.train.learning_rate} in full fine-tuning).")
    context = _known_context(loaded.model)
    if context is not None and context < loaded.data.max_length and "max_length" not in loaded.data.model_fields_set:
        changes.append(f"data.max_length={context}")
        render.note(f"data.max_length is {context}, the context of the model.")
    write_new(out, commented_recipe(new_recipe(model, data), changes, remarks), overwrite=overwrite)
    command = run_report.command()
    recipe = shlex.quote(str(out))
    for remark in remarks:
        render.text(remark)
    render.text(f"Wrote {out}")
    render.text(f"\nInspect the data:  {command} data {recipe}\nTrain:             {command} train {recipe}")
    if json:
        render.json_report({
            "recipe": str(out), "output_dir": loaded.checkpoint.output_dir, "task": loaded.task, "remarks": remarks,
        })  # fmt: skip


def _draft(model: str, data: list[str], changes: list[str]) -> Recipe:
    """Load the short recipe with overrides, so that nothing is written if one of them is wrong."""
    from ligertune.recipe.describe import new_recipe
    from ligertune.recipe.plain_yaml import dump
    from ligertune.recipe.read import load_recipe

    with tempfile.TemporaryDirectory(prefix="ligertune-init-") as folder:
        draft = Path(folder) / "recipe.yaml"
        draft.write_text(dump(new_recipe(model, data)), encoding="utf-8")
        return load_recipe(draft, changes)


def _known_context(model: ModelSpec) -> int | None:
    """Return the model's context in tokens; None if a recipe changes it, or config.json is not on this machine."""
    if model.rope_parameters.model_fields_set:
        return None
    from huggingface_hub import try_to_load_from_cache
    from huggingface_hub.errors import HFValidationError

    from ligertune.files.checked_files import read_json_value

    file: object = Path(model.model_name_or_path).expanduser() / "config.json"
    try:
        if not Path(str(file)).is_file():
            file = try_to_load_from_cache(model.model_name_or_path, "config.json", revision=model.revision)
        values = read_json_value(Path(file)) if isinstance(file, str | Path) else {}
    except (OSError, ValueError, HFValidationError):  # what is wrong with the file is said where the model is read
        return None
    places = [values, values.get("text_config")] if isinstance(values, dict) else []
    names = ("max_position_embeddings", "n_positions")
    lengths = [place.get(name) for place in places if isinstance(place, dict) for name in names]
    return next((length for length in lengths if type(length) is int and length >= 2), None)


def _columns_override(index: int, columns: dict[str, str]) -> str:
    names = ", ".join(f"{ours}: {name!r}" for ours, name in columns.items())
    return f"data.datasets.{index}.columns={{{names}}}"


def _fit_task(recipe: Recipe, changes: list[str]) -> list[str]:
    """Append the overrides for the task that fits the data, unless the user names it; return the reasons."""
    from ligertune.data.rows.data_files import display_path
    from ligertune.data.shapes.detect_task import detect_task
    from ligertune.errors import UserError
    from ligertune.recipe.feature import part_of_task
    from ligertune.recipe.importers.import_state import one_line

    if "task" in recipe.model_fields_set:
        return []
    found = [(display_path(Path(spec.path)), spec, detect_task(spec)) for spec in recipe.data.datasets]
    known = [(name, detected) for name, _, detected in found if detected is not None]
    kinds = {(detected.task, tuple(detected.settings.items())): name for name, detected in known}
    if len(kinds) > 1:
        tasks = " and ".join(f"{name} is data of task: {kind[0]}" for kind, name in kinds.items())
        raise UserError(f"{tasks}.", hint="Write a recipe for each of them.")
    if not known or known[0][1].task == recipe.task:
        return []
    detected = known[0][1]
    given = recipe.model_dump(exclude_unset=True)
    part = part_of_task(detected.task)
    changes[0:0] = [f"task={detected.task}", *_settings_overrides(detected, given)]
    rate_is_free = recipe.method.type == "full" and "learning_rate" not in recipe.train.model_fields_set
    if part.learning_rate is not None and rate_is_free:
        changes.append(f"train.learning_rate={part.learning_rate}")
    for index, (_, spec, one) in enumerate(found):
        if one is not None and one.columns and not spec.columns:
            changes.append(_columns_override(index, one.columns))
    reasons = [f"{detected.choice}, because {name} {one.why}." for name, one in known]
    others = [part.other_tasks[detected.choice]] if detected.choice in part.other_tasks else []
    return [one_line(reason) for reason in reasons] + others


def _settings_overrides(detected: DetectedTask, given: dict[str, dict[str, Any]]) -> list[str]:
    """Return the overrides for the keys of a detected task that the user did not give."""
    keys = {key: key.split(".") for key in detected.settings}
    free = [key for key, (section, name) in keys.items() if name not in given.get(section, {})]
    return [f"{key}={detected.settings[key]}" for key in free]


def _keep_inputs(out: Path, inputs: list[Path]) -> None:
    """Raise UserError if the file to write is one of those that are read."""
    from ligertune.errors import UserError

    if out.exists() and any(path.exists() and path.samefile(out) for path in inputs):
        raise UserError(f"--out: {out} is the file that is read.", hint="Name another file.")
