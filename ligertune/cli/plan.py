"""`ligertune plan`."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from ligertune.cli.render import console as render


def plan(
    recipe: Annotated[Path, typer.Argument(help="YAML recipe.", show_default=False)],
    set_: Annotated[list[str] | None, typer.Option("--set", metavar="KEY=VALUE", help="Override a value.")] = None,
    fit: Annotated[bool, typer.Option("--fit", help="Find the largest micro batch and the longest row.")] = False,
    memory: Annotated[
        float | None, typer.Option("--memory", min=0.1, help="GiB of a device; this machine's if not given.")
    ] = None,
    gpus: Annotated[int | None, typer.Option("--gpus", min=1, help="Devices, sharing the states by FSDP.")] = None,
    json: Annotated[bool, typer.Option("--json", help="Print the plan as JSON on stdout.")] = False,
) -> None:
    """Show what a recipe will do and the memory it will take, without loading the model.

    Example: ligertune plan configs/llama/llama-3-8b-alpaca.yaml --fit --memory 80
    """
    from dataclasses import asdict

    from ligertune.cli.render import data_report as render_data
    from ligertune.recipe import load_recipe

    render.people_on_stderr(json)
    loaded = load_recipe(recipe, overrides=[*(set_ or []), "checkpoint.resume_from_checkpoint=never"])

    from ligertune.hardware import choose_processes
    from ligertune.planning.memory.fit import fits_of
    from ligertune.run import plan_for  # torch comes in here, not with --help

    processes = choose_processes(loaded.parallel.num_processes, loaded.parallel.strategy) if gpus is None else gpus
    with render_data.Preparing(enabled=True) as preparing:
        made = plan_for(loaded, preparing.show, for_show=True, memory_gib=memory, gpus=gpus, processes=processes).plan
    render.plan(made)
    found = fits_of(made) if fit else None
    render.memory(made, found)
    if json:
        render.json_report({**made.as_dict(), "fit": found and [asdict(row) for row in found]})
