"""`ligertune data`."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from ligertune.cli.render import console as render


def data(
    recipe: Annotated[Path, typer.Argument(help="YAML recipe.", show_default=False)],
    set_: Annotated[list[str] | None, typer.Option("--set", metavar="KEY=VALUE", help="Override a value.")] = None,
    examples: Annotated[int, typer.Option("--examples", min=0, help="How many examples to show.")] = 3,
    json: Annotated[bool, typer.Option("--json", help="Print everything as JSON on stdout.")] = False,
    out: Annotated[
        Path | None, typer.Option("--out", metavar="FILE.html", help="Write everything as a page.", show_default=False)
    ] = None,
) -> None:
    """Show what a recipe trains on: examples with what is trained marked, lengths, dropped rows, packing, steps.

    Example: ligertune data configs/quickstart/stories260k.yaml --examples 1 --out report.html
    """
    from ligertune.cli.render import data_report as render_data
    from ligertune.hardware import world_size
    from ligertune.planning.preflight import check_paths, check_report_path
    from ligertune.recipe import load_recipe

    render.people_on_stderr(json)
    loaded = load_recipe(recipe, overrides=list(set_ or []))
    check_paths(loaded)
    if out is not None:
        check_report_path(out)

    from ligertune.data.prepare import prepare
    from ligertune.data.preview import looked_at, preview, summary
    from ligertune.data.report_page import page
    from ligertune.data.statistics import outlook
    from ligertune.models.load import load_tokenizer, read_config
    from ligertune.planning.data_summary import StatisticsOptions, resolve_packing
    from ligertune.planning.options import RunOptions
    from ligertune.vision.families import exact_packing
    from ligertune.vision.reader import load_reader

    config = read_config(RunOptions.of(loaded).build.model)
    loaded, _ = resolve_packing(loaded, **exact_packing(config))
    options = RunOptions.of(loaded)
    tokenizer = load_tokenizer(options.build.model).tokenizer
    images = load_reader(options.build.model, options.build.vision, config, tokenizer)
    with render_data.Preparing() as preparing:
        prepared = prepare(options.data, tokenizer, seed=options.build.seed, progress=preparing.show, images=images)
    seen = looked_at(prepared)
    previews = preview(seen, tokenizer, examples, images)
    whole = outlook(seen.lengths, seen.trained, StatisticsOptions.of(loaded, processes=world_size()))
    everything = summary(prepared, seen, previews, whole)
    render_data.data_preview(everything, previews)
    if out is not None:
        out.write_text(page(everything, title=f"Data of {recipe.name}"), encoding="utf-8")
        render.text(f"\nWritten: {out}")
    if json:
        render.json_report(everything)
