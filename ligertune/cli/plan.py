"""`ligertune plan`: print a recipe's plan and its predicted peak memory."""

from __future__ import annotations

from enum import Enum
from typing import Annotated, Any

import typer
from typer.core import TyperCommand

from ligertune.cli.options import Json, Overrides, RecipeFile
from ligertune.cli.render import console as render
from ligertune.progress import importing


class Fit(str, Enum):
    """What `--fit` looks for. Without a value: batch."""

    batch = "batch"
    context = "context"


class PlanCommand(TyperCommand):
    """A command whose `--fit` may stand without a value: click would take the recipe after it for the value."""

    def parse_args(self, ctx: Any, args: list[str]) -> list[str]:
        written = []
        for argument, following in zip(args, [*args[1:], ""], strict=True):
            alone = argument == "--fit" and following not in [*Fit]
            written.append(f"--fit={Fit.batch.value}" if alone else argument)
        return super().parse_args(ctx, written)


def plan(
    recipe: RecipeFile,
    set_: Overrides = None,
    fit: Annotated[
        Fit | None,
        typer.Option(
            "--fit",
            metavar="[context]",
            help="Also find the largest micro-batch and the longest row that "
            "fit; context: the longest row, by memory settings.",
        ),
    ] = None,
    memory: Annotated[
        float | None, typer.Option("--memory", min=0.1, max=1e6, help="GiB per device. Default: this machine's device.")
    ] = None,
    gpus: Annotated[int | None, typer.Option("--gpus", min=1, help="Plan for this many devices of one host.")] = None,
    price: Annotated[
        float | None, typer.Option("--price", min=0.0, help="Price of a GPU for an hour, for the cost of the run.")
    ] = None,
    json: Json = False,
) -> None:
    """Print what a recipe will do and its predicted peak memory, without loading the model.

    Example: ligertune plan configs/llama/llama-3-8b-alpaca.yaml --fit --memory 80
    """
    from dataclasses import asdict

    from ligertune.cli.render import run_report
    from ligertune.cli.render.run_display import RunDisplay
    from ligertune.planning.preflight import check_sources
    from ligertune.recipe.read import load_recipe

    render.people_on_stderr(json)
    # a plan needs no checkpoint to resume from
    loaded = load_recipe(recipe, overrides=[*(set_ or []), "checkpoint.resume_from_checkpoint=never"])
    check_sources(loaded)

    with RunDisplay(enabled=render.OUTPUT.console.is_terminal) as display:
        display.begins("planning")
        # after these checks: a wrong recipe is reported without waiting for torch, which these modules import
        with importing():
            from ligertune.hardware import choose_processes
            from ligertune.planning.memory.fit import largest_fits, longest_contexts
            from ligertune.training.resolve import plan_for

        spec = loaded.parallel
        processes = choose_processes(spec.num_processes, spec.strategy) if gpus is None else gpus
        made = plan_for(loaded, display.data, for_show=True, memory_gib=memory, gpus=gpus, processes=processes).plan
    run_report.show_plan(made, price=price)
    fits = largest_fits(made) if fit is Fit.batch else None
    contexts = longest_contexts(made) if fit is Fit.context else None
    run_report.show_memory(made, fits)
    if contexts is not None:
        run_report.show_contexts(made, contexts)
    if json:
        found = contexts if fits is None else fits
        render.json_report({**made.as_dict(), "fit": found and [asdict(row) for row in found]})
