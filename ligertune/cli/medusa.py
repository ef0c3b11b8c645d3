"""`ligertune medusa`."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from ligertune.cli.render import console as render

if TYPE_CHECKING:
    from ligertune.recipe import Recipe


def medusa(
    recipe: Annotated[Path | None, typer.Argument(help="YAML recipe; without one a bundled recipe is used.")] = None,
    heads: Annotated[int | None, typer.Option(help="How many tokens further ahead are guessed.")] = None,
    layers: Annotated[int | None, typer.Option(help="Residual blocks of each head.")] = None,
    stage: Annotated[int | None, typer.Option(help="1 trains the heads, 2 the model with them.")] = None,
    model: Annotated[str | None, typer.Option(help="Folder of the model, or a hub id.")] = None,
    data: Annotated[str | None, typer.Option(help="Data set: a file, a folder or a hub id.")] = None,
    from_: Annotated[str | None, typer.Option("--from", help="Folder of trained heads to start from.")] = None,
    set_: Annotated[list[str] | None, typer.Option("--set", metavar="KEY=VALUE", help="Override a value.")] = None,
    resume: Annotated[bool, typer.Option("--resume", help="Continue from the newest complete checkpoint.")] = False,
    overwrite: Annotated[bool, typer.Option("--overwrite", help="Replace the run in output_dir.")] = False,
    report: Annotated[bool, typer.Option("--report", help="Measure the heads in output_dir; train nothing.")] = False,
    json: Annotated[bool, typer.Option("--json", help="Print the report as JSON on stdout.")] = False,
) -> None:
    """Train Medusa heads, which guess several tokens ahead, and measure what they save in decoding.

    Example: ligertune medusa --heads 5
    """
    from ligertune.cli.train import train_as
    from ligertune.launcher.failures import is_started_rank
    from ligertune.recipe import load_recipe

    render.people_on_stderr(json)
    path = recipe or default_recipe(stage)
    if recipe is None and not is_started_rank():
        render.text(f"No recipe given: using {path}")
    options = {
        "medusa.num_heads": heads,
        "medusa.num_layers": layers,
        "medusa.stage": stage,
        "medusa.heads_path": from_,
        "model.model_name_or_path": model,
        "data.datasets": None if data is None else f"[{{path: {data!r}}}]",
        "checkpoint.resume_from_checkpoint": "auto" if resume else None,
        "checkpoint.overwrite": "true" if overwrite else None,
    }
    given = [f"{key}={value}" for key, value in options.items() if value is not None]
    loaded = load_recipe(path, overrides=["task=medusa", *given, *(set_ or [])])
    if report:
        _measure(loaded, json)
    else:
        train_as(loaded, path, json)


def default_recipe(stage: int | None) -> Path:
    """The bundled recipe for this machine: a tiny model where there is no GPU."""
    from ligertune.hardware import this_machine
    from ligertune.recipe.bundled import bundled

    model = "stories260k" if this_machine().vendor == "cpu" else "qwen2.5-7b"
    return bundled(f"medusa/{model}{'-stage2' if stage == 2 else ''}.yaml")


def _measure(loaded: Recipe, json: bool) -> None:
    from ligertune.cli.render import heads_report as render_medusa
    from ligertune.decode.medusa_run import report_on
    from ligertune.planning.options import RunOptions

    found = report_on(RunOptions.of(loaded))
    render_medusa.report(found.as_dict())
    if json:
        render.json_report(found.as_dict())
