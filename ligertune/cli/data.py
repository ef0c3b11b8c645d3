"""`ligertune data`: show the examples, tokens and labels that a recipe trains on."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from ligertune.cli.options import Json, Overrides, RecipeFile
from ligertune.cli.render import console as render
from ligertune.progress import importing


def data(
    recipe: RecipeFile,
    set_: Overrides = None,
    examples: Annotated[int, typer.Option("--examples", min=0, help="Number of examples to show.")] = 3,
    json: Json = False,
    out: Annotated[
        Path | None, typer.Option("--out", metavar="FILE.html", help="Also write an HTML report.", show_default=False)
    ] = None,
) -> None:
    """Show a recipe's training data: examples with trained tokens marked, lengths, dropped rows, packing and steps.

    Example: ligertune data configs/quickstart/stories260k.yaml --examples 1 --out report.html
    """
    from ligertune.cli.render import data_report
    from ligertune.cli.render.run_display import RunDisplay
    from ligertune.files.storage import write_text
    from ligertune.hardware import world_size
    from ligertune.planning.preflight import check_report_path, check_sources
    from ligertune.recipe.read import load_recipe

    render.people_on_stderr(json)
    loaded = load_recipe(recipe, set_ or [])
    check_sources(loaded)
    if out is not None:
        check_report_path(out)
    with RunDisplay(enabled=render.OUTPUT.console.is_terminal) as display:
        display.begins("reading the data")
        # after the checks above: a wrong recipe is reported without waiting for torch, which these modules import
        with importing():
            from ligertune.data.modalities.modality import modality_of
            from ligertune.data.prepare import prepare
            from ligertune.data.preview import preview, preview_examples, preview_summary
            from ligertune.data.statistics import data_statistics
            from ligertune.models.load_tokenizer import load_tokenizer
            from ligertune.models.read_config import read_config
            from ligertune.planning.batch_layout import StatisticsOptions, choose_packing
            from ligertune.recipe.feature import part_of_task

            config = read_config(loaded.model)  # transformers imports the code of its kind here
        # as in training: packing is switched off if packed rows are not exact
        modality = modality_of(config)
        packing, _ = choose_packing(loaded.data, modality.facts)
        tokenizer = load_tokenizer(loaded.model).tokenizer
        reader = modality.load_reader(loaded.model, loaded, tokenizer)
        part = part_of_task(loaded.task)
        how = {"seed": loaded.train.seed, "progress": display.data, "reader": reader}
        prepared = prepare(loaded.data, tokenizer, rows=part.rows(loaded), label_options=part.labels(loaded), **how)
    shown = preview_examples(prepared)
    previews = preview(shown, tokenizer, examples, reader, labels=prepared.labels)
    pairs = {"longest": shown.longest_documents, "documents": shown.documents_per_example}
    options = StatisticsOptions.of(loaded, packing=packing, processes=world_size())
    statistics = data_statistics(shown.lengths, shown.trained, options, **pairs)
    summary = preview_summary(prepared, shown, previews, statistics)
    data_report.data_preview(summary, previews)
    render.hub_notes()
    if out is not None:
        write_text(out, data_report.data_page(summary, title=f"Data of {recipe.name}"))
        render.text(f"\nWrote {out}")
    if json:
        render.json_report(summary)
