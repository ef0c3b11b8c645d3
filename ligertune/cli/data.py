"""`ligertune data`: show the examples, tokens and labels that a recipe trains on."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Annotated, NamedTuple

import typer

from ligertune.cli.options import Json, Overrides, RecipeFile
from ligertune.cli.render import console as render
from ligertune.progress import importing

if TYPE_CHECKING:
    from transformers import PreTrainedConfig, PreTrainedTokenizerBase

    from ligertune.data.modalities.modality import ModalityReader
    from ligertune.data.prepare import PreparedData, ProgressCallback
    from ligertune.recipe.schema import Recipe


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
            from ligertune.data.preview import preview, preview_examples, preview_summary
            from ligertune.data.statistics import data_statistics
            from ligertune.planning.batch_layout import StatisticsOptions
        found = _prepare_recipe(loaded, display.data)
    shown = preview_examples(found.prepared)
    previews = preview(shown, found.tokenizer, examples, found.reader, labels=found.prepared.labels)
    statistics = data_statistics(
        shown.lengths,
        shown.trained,
        StatisticsOptions.of(loaded, packing=found.packing, processes=world_size()),
        longest=shown.longest_documents,
        documents=shown.documents_per_example,
    )
    summary = preview_summary(found.prepared, shown, previews, statistics)
    data_report.data_preview(summary, previews)
    render.hub_notes()
    if out is not None:
        write_text(out, data_report.data_page(summary, title=f"Data of {recipe.name}"))
        render.text(f"\nWrote {out}")
    if json:
        render.json_report(summary)


class _PreparedRecipe(NamedTuple):
    """Data, tokenizer and reader of a recipe. packing: off if packed rows are not exact, as in training."""

    packing: bool
    prepared: PreparedData
    tokenizer: PreTrainedTokenizerBase
    reader: ModalityReader | None


def _why_not_packed(recipe: Recipe, config: PreTrainedConfig) -> str | None:
    """Return why training does not pack a model that may carry state. Of others this command builds no model."""
    from ligertune.models.read_config import may_carry_state

    if not may_carry_state(config):
        return None
    from ligertune.planning.options import RunOptions
    from ligertune.training.checks import why_not_packed  # imports what building a model takes

    return why_not_packed(RunOptions.of(recipe).build, config)


def _prepare_recipe(recipe: Recipe, progress: ProgressCallback) -> _PreparedRecipe:
    """Read and prepare the data as training does."""
    with importing():
        from ligertune.data.modalities.modality import modality_of
        from ligertune.data.prepare import prepare
        from ligertune.models.load_tokenizer import load_tokenizer
        from ligertune.models.read_config import read_config
        from ligertune.planning.batch_layout import choose_packing
        from ligertune.recipe.feature import part_of_task

        config = read_config(recipe.model)  # transformers imports the code of its kind here
    modality = modality_of(config)
    packing, _ = choose_packing(recipe.data, modality.facts, _why_not_packed(recipe, config))
    tokenizer = load_tokenizer(recipe.model).tokenizer
    reader = modality.load_reader(recipe.model, recipe, tokenizer)
    part = part_of_task(recipe.task)
    prepared = prepare(
        recipe.data,
        tokenizer,
        seed=recipe.train.seed,
        progress=progress,
        reader=reader,
        rows=part.rows(recipe),
        label_options=part.labels(recipe),
    )
    return _PreparedRecipe(packing, prepared, tokenizer, reader)
