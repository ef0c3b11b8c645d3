"""`ligertune draft`, `ligertune generate RUN --draft DRAFT`, and `ligertune export DRAFT --check`."""

from __future__ import annotations

from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from ligertune.cli.options import CommandPart, GenerateRequest, Json, Overrides, RecipeFile
from ligertune.cli.render import console as render
from ligertune.cli.train import Overwrite, Resume, run_overrides, run_recipe
from ligertune.errors import UserError
from ligertune.features.draft.head_folders import draft_folders

if TYPE_CHECKING:
    from ligertune.recipe.schema import Recipe

CHECKED_TEXT = "A draft head reads three states of its target for each token of a text, and drafts the next ones."


def draft(
    recipe: RecipeFile,
    head: Annotated[Path | None, typer.Option(help="Folder of a draft head to start from (draft.head_path).")] = None,
    run: Annotated[
        Path | None,
        typer.Option("--from", metavar="RUN", help="Continue the base's head on the model that this run fine-tuned."),
    ] = None,
    set_: Overrides = None,
    resume: Resume = None,
    overwrite: Overwrite = False,
    measure: Annotated[
        bool, typer.Option("--measure", help="Decode with the head in output_dir and measure it, without training.")
    ] = False,
    json: Json = False,
) -> None:
    """Train an EAGLE-3 draft head next to its frozen model (task: draft), and measure how many tokens are accepted.

    Example: ligertune draft recipe.yaml
    """
    from ligertune.recipe.read import load_recipe

    render.people_on_stderr(json)
    start = [] if head is None else [f"draft.head_path={head}"]
    overrides = ["task=draft", *start, *run_overrides(resume, overwrite, set_), *(set_ or [])]
    loaded = load_recipe(recipe, overrides=overrides)
    if run is not None:
        loaded = _continued(loaded, recipe, overrides, run)
    if not measure:
        run_recipe(loaded, json)
        return
    from ligertune.cli.render import run_report
    from ligertune.planning.options import RunOptions

    with render.waiting("loading and decoding ..."):
        from ligertune.features.draft.decode.measure_run import measure_run, measurement_tables

        found = measure_run(RunOptions.of(loaded))
    run_report.show_tables(measurement_tables(found))
    if json:
        render.json_report(found)


def _continued(loaded: Recipe, path: Path, overrides: list[str], run: Path) -> Recipe:
    """Return the recipe that continues the head on the model of `run`, and say on stderr what was taken from where."""
    from ligertune.features.draft.continued_head import continue_head
    from ligertune.hardware import is_main_process
    from ligertune.recipe.read import load_recipe

    given = [one for one in overrides if one.startswith("checkpoint.output_dir=")]
    others = [one for one in overrides if one not in given]
    base = load_recipe(path, overrides=others)
    found = continue_head(base, run, output_dir=loaded.checkpoint.output_dir if given else None)
    if is_main_process():
        render.note(str(found))
    return load_recipe(path, overrides=[*others, *found.overrides()])


def answer_with_draft(
    request: GenerateRequest,
    *,
    draft: Annotated[
        str | None,
        typer.Option("--draft", metavar="DRAFT", help="Decode with the draft head in this folder.", show_default=False),
    ] = None,
    draft_tokens: Annotated[
        int, typer.Option(min=1, max=32, help="With --draft: tokens that the head drafts per forward pass.")
    ] = 3,
) -> Any:  # answers or None; typer evaluates annotations, and the module of answers imports torch
    """Return the answers to the prompts, decoded with a draft head; None without --draft."""
    if draft is None:
        return None
    if request.images:
        raise UserError("--image does not work with --draft.", hint="Leave one of them out.")
    from ligertune.planning.saved_model import check_can_generate, find_saved_model

    saved = find_saved_model(request.model, key="MODEL")
    check_can_generate(saved, key="MODEL")
    from ligertune.decode.generate import Decoding, load_model
    from ligertune.features.draft.decode.draft_generate import generate_with_draft, load_draft

    loaded = load_model(saved.name, raw=request.raw, trust_remote_code=request.trust_remote_code)
    if request.system is not None:
        loaded = loaded.with_system(request.system)
    head = load_draft(draft, loaded)
    decoding = Decoding(request.max_new_tokens, request.temperature, request.top_p)
    return (
        generate_with_draft(loaded, head, prompt, decoding, draft_tokens=draft_tokens, seed=request.seed)
        for prompt in request.prompts
    )


def check_draft_files(folder: Path, prompt: str | None, trust_remote_code: bool) -> list[dict[str, Any]] | None:
    """Compare the layouts of a head, in `folder` or below it, with each other and with their target.

    Return a row for each, or None if `folder` holds no head. Raises UserError for the first difference.
    """
    folders = draft_folders(folder)
    if not folders:
        return None
    from ligertune.decode.generate import load_model
    from ligertune.features.draft.files.draft_check import check_draft_head
    from ligertune.features.draft.files.draft_files import read_draft_head, target_of_draft

    loaded = load_model(target_of_draft(folders[0]), raw=True, trust_remote_code=trust_remote_code)
    ids = loaded.tokenizer(prompt or CHECKED_TEXT)["input_ids"]
    first = read_draft_head(folders[0], loaded.model.config)
    return [asdict(check_draft_head(one, loaded.model, first, ids)) for one in folders]


PART = CommandPart(train=draft, decode=answer_with_draft, check=check_draft_files, order=3)
