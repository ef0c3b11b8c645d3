"""`ligertune data`."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from ligertune.cli import render, render_data


def data(
    recipe: Annotated[Path, typer.Argument(help="YAML recipe.", show_default=False)],
    set_: Annotated[list[str] | None, typer.Option("--set", metavar="KEY=VALUE", help="Override a value.")] = None,
    examples: Annotated[int, typer.Option("--examples", min=0, help="How many examples to show.")] = 3,
    json: Annotated[bool, typer.Option("--json", help="Print everything as JSON on stdout.")] = False,
) -> None:
    """Show what a recipe trains on: rendered examples with what is trained marked, lengths, dropped rows.

    Example: ligertune data configs/quickstart/stories260k.yaml --examples 1
    """
    from ligertune.preflight import check_paths
    from ligertune.recipe import load_recipe

    render.people_on_stderr(json)
    loaded = load_recipe(recipe, overrides=list(set_ or []))
    check_paths(loaded)

    from ligertune.data.prepare import prepare
    from ligertune.data.preview import preview, summary
    from ligertune.model.load import load_tokenizer

    tokenizer = load_tokenizer(loaded.model).tokenizer
    prepared = prepare(loaded.data, tokenizer, seed=loaded.train.seed)
    previews = preview(prepared, tokenizer, examples)
    render_data.data_preview(prepared, previews)
    if json:
        render.json_report(summary(prepared, previews))
