"""`ligertune train`."""

from __future__ import annotations

import contextlib
import os
import signal
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from ligertune.cli.complete import recipe_keys
from ligertune.cli.render import console as render

if TYPE_CHECKING:
    from ligertune.recipe import Recipe


def train(
    recipe: Annotated[Path, typer.Argument(help="YAML recipe.", show_default=False)],
    set_: Annotated[
        list[str] | None,
        typer.Option("--set", metavar="KEY=VALUE", help="Override a value.", autocompletion=recipe_keys),
    ] = None,
    resume: Annotated[bool, typer.Option("--resume", help="Continue from the newest complete checkpoint.")] = False,
    overwrite: Annotated[bool, typer.Option("--overwrite", help="Replace the run in output_dir.")] = False,
    json: Annotated[bool, typer.Option("--json", help="Print the report as JSON on stdout.")] = False,
) -> None:
    """Fine-tune a model as the recipe says.

    Example: ligertune train configs/quickstart/stories260k.yaml --set train.learning_rate=1e-3
    """
    from ligertune.recipe import load_recipe

    render.people_on_stderr(json)
    overrides = list(set_ or [])
    if resume:
        overrides.append("checkpoint.resume_from_checkpoint=auto")
    if overwrite:
        overrides.append("checkpoint.overwrite=true")
    train_as(load_recipe(recipe, overrides=overrides), recipe, json)


def train_as(loaded: Recipe, path: Path, json: bool) -> None:
    """Run a recipe that was read from `path`, and show its plan, progress and report.

    On several devices this process makes the plan and refuses what is to be refused. One more for each of them comes
    here meanwhile, and waits for that.
    """
    from ligertune.cli.render import data_report as render_data
    from ligertune.cli.render import heads_report as render_medusa
    from ligertune.hardware import choose_processes, is_launched, is_main_process
    from ligertune.launcher import slurm
    from ligertune.launcher.failures import is_started_rank
    from ligertune.launcher.processes import Ranks, begin_rank
    from ligertune.planning.preflight import check_output_dir, check_paths
    from ligertune.progress import COMMAND_GIVEN, Phases, taken_over
    from ligertune.run import plan_for, prepare_to_train, run
    from ligertune.train.signals import leave_at_once

    signal.signal(signal.SIGINT, leave_at_once)  # until the ranks or the run take it; KeyboardInterrupt can be lost
    check_paths(loaded)  # what is not there is said before torch comes in, which counts the devices
    os.environ.update(slurm.variables(os.environ))
    started, main = is_started_rank(), is_main_process()
    if started:
        phases = taken_over(begin_rank(prepare_to_train), render.begins if main else None)
    else:
        check_output_dir(loaded)
        phases = Phases(render.begins if main else None, begun=COMMAND_GIVEN)
    with phases, contextlib.ExitStack() as stack:
        if main and not started:
            render.begins("planning ...")
        processes = choose_processes(loaded.parallel.num_processes, loaded.parallel.strategy)
        ranks = None
        if processes > 1 and not is_launched():
            ranks = stack.enter_context(Ranks(processes, sys.argv[1:]))
        with render_data.Preparing(enabled=main and not started) as preparing:
            job = plan_for(loaded, preparing.show, processes=processes)
        if main and not started:
            render.plan(job.plan)
        if ranks is not None:
            phases.begin("starting the processes")
            raise typer.Exit(ranks.run(job.plan, phases.handed_on))
        with render.Progress(job.plan.schedule.total_steps) as progress:
            phases.say = progress.begins if main else None
            report = run(job, progress.show, phases=phases)
    if main:
        render.report(report)
        if report.medusa is not None:
            render_medusa.report(report.medusa)
        render.next_step(report, str(path))
        if json:
            render.json_report(report.as_dict())
    if report.status == "interrupted" and not started:
        raise typer.Exit(130)
