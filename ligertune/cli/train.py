"""`ligertune train`: run a recipe and show its plan, progress and report. Commands of features run theirs here."""

from __future__ import annotations

import contextlib
import os
import sys
from collections.abc import Sequence
from enum import Enum
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer
from typer.core import TyperCommand

from ligertune.cli.options import Json, Overrides, RecipeFile
from ligertune.cli.render import console as render
from ligertune.errors import UserError
from ligertune.progress import hashing_triton, importing

if TYPE_CHECKING:
    from ligertune.cli.render.run_display import RunDisplay
    from ligertune.progress import Phases
    from ligertune.recipe.schema import Recipe
    from ligertune.training.setup import Job


class ResumeFrom(str, Enum):
    """Values of --resume. Without a value it is `newest`."""

    newest = "newest"
    auto = "auto"


class TrainCommand(TyperCommand):
    """A command whose `--resume` may stand without a value: click would take the recipe after it for the value."""

    def parse_args(self, ctx: Any, args: list[str]) -> list[str]:
        return super().parse_args(ctx, _with_resume_value(args))


def _with_resume_value(arguments: Sequence[str]) -> list[str]:
    """Join `--resume auto` to `--resume=auto`, and write a bare `--resume` as `--resume=newest`."""
    values = tuple(one.value for one in ResumeFrom)
    written: list[str] = []
    for argument in arguments:
        if written and written[-1] == "--resume":
            written[-1] = f"--resume={argument if argument in values else ResumeFrom.newest.value}"
            if argument in values:
                continue
        written.append(argument)
    return [f"--resume={ResumeFrom.newest.value}" if one == "--resume" else one for one in written]


Resume = Annotated[
    ResumeFrom | None,
    typer.Option(
        "--resume",
        metavar="[auto]",
        show_default=False,
        help="Continue from the newest complete checkpoint; `--resume auto` starts the run if there is none.",
    ),
]
Overwrite = Annotated[bool, typer.Option("--overwrite", help="Replace the run in checkpoint.output_dir.")]


def train(
    recipe: RecipeFile, set_: Overrides = None, resume: Resume = None, overwrite: Overwrite = False, json: Json = False
) -> None:
    """Fine-tune a model on the recipe's data.

    Example: ligertune train configs/quickstart/stories260k.yaml --set train.learning_rate=1e-3
    """
    from ligertune.recipe.read import load_recipe

    render.people_on_stderr(json)
    run_recipe(load_recipe(recipe, [*(set_ or []), *run_overrides(resume, overwrite, set_)]), json)


def run_overrides(resume: ResumeFrom | None, overwrite: bool, given: Sequence[str] | None) -> list[str]:
    """Return --resume and --overwrite as overrides of recipe keys. Raises UserError if `given` sets the same key."""
    if resume and any(one.startswith("checkpoint.resume_from_checkpoint=") for one in given or ()):
        raise UserError(
            "--resume and --set checkpoint.resume_from_checkpoint both say where to continue.",
            hint="Leave --resume out to continue from a checkpoint that you name.",
        )
    chosen = [f"checkpoint.resume_from_checkpoint={resume.value}"] if resume else []
    return [*chosen, "checkpoint.overwrite=true"] if overwrite else chosen


def plan_only(loaded: Recipe) -> Job:
    """Plan a recipe for one process, for commands of features that read its data and train nothing."""
    with importing():
        from ligertune.training.resolve import plan_for
    return plan_for(loaded, for_show=True, processes=1)


def run_recipe(loaded: Recipe, json: bool) -> None:
    """Run a loaded recipe: plan, start one process per device if there are several, train, and report.

    With several devices, the process that the user started makes the plan, checks it, and starts the ranks. The ranks
    run this function too; each waits until the plan of the first process has passed its checks.
    Raises typer.Exit(130) if the run was interrupted, and UserError for invalid input.
    """
    from ligertune.cli.render import run_report
    from ligertune.cli.render.run_display import RunDisplay
    from ligertune.hardware import choose_processes, is_launched, is_main_process
    from ligertune.launcher.failures import is_started_rank
    from ligertune.launcher.processes import Ranks, begin_rank, slurm_variables
    from ligertune.launcher.run_lock import check_not_in_use
    from ligertune.planning.preflight import check_output_dir, check_sources
    from ligertune.progress import COMMAND_GIVEN, Phases, taken_over

    check_sources(loaded)  # report missing files before torch is imported, which takes seconds

    os.environ.update(slurm_variables(os.environ))
    started = is_started_rank()
    main = is_main_process()
    display = RunDisplay(enabled=main)
    if started:
        phases = taken_over(begin_rank(_import_run), display.begins)
    else:
        check_not_in_use(Path(loaded.checkpoint.output_dir))
        check_output_dir(loaded.checkpoint)
        phases = Phases(display.begins, begun=COMMAND_GIVEN)
    with phases, display, contextlib.ExitStack() as stack:
        if not started:
            display.begins("planning")
        processes = choose_processes(loaded.parallel.num_processes, loaded.parallel.strategy)
        ranks = None
        # Start the ranks before planning: they import torch while this process plans.
        if processes > 1 and not is_launched():
            ranks = stack.enter_context(Ranks(processes, sys.argv[1:]))
        _import_run()
        from ligertune.run import run
        from ligertune.training.checkpoint.output_dir import output_dir_of
        from ligertune.training.resolve import plan_for

        job = plan_for(loaded, display.data, processes=processes)
        display.planned(job.plan.schedule.total_steps, job.plan.measurement.warmup_steps)
        if main and not started:
            run_report.show_plan(job.plan)
        if ranks is not None:
            stack.enter_context(output_dir_of(job.plan, processes=ranks.pids))
            phases.begin("starting the processes")
            timeout = job.plan.parallel.timeout
            raise typer.Exit(ranks.run(job.plan.output_dir, timeout, lambda: _hand_on(phases, display)))
        report = run(job, display.line, phases=phases, display=display)
    if main:
        run_report.show_report(report)
        run_report.next_step(report, sys.argv[1:], launched=is_launched() and not started)
        if json:
            render.json_report(report.as_dict())
    if report.status == "interrupted" and not started:
        raise typer.Exit(130)


def _hand_on(phases: Phases, display: RunDisplay) -> dict[str, Any]:
    """Stop drawing, because the first rank draws from now on, and return the phases for it."""
    display.stop()
    return phases.handed_on()


def _import_run() -> None:
    """Import all that a run needs. Ranks do it while the process that started them makes the plan."""
    with importing():
        import torch
        from ligertune_kernels.launcher import TRITON_INSTALLED

        with hashing_triton(TRITON_INSTALLED and torch.cuda.is_available()):
            import ligertune.run  # noqa: F401
