"""`ligertune train`, `medusa` and `distill`: run a recipe and show its plan, progress and report."""

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
from ligertune.progress import hashing_triton, importing

if TYPE_CHECKING:
    from ligertune.cli.render.run_display import RunDisplay
    from ligertune.progress import Phases
    from ligertune.recipe import Recipe


class ResumeFrom(str, Enum):
    """Values of --resume. Without a value it is `newest`."""

    newest = "newest"
    auto = "auto"


class TrainCommand(TyperCommand):
    """A command whose `--resume` may stand without a value: click would take the recipe after it for the value."""

    def parse_args(self, ctx: typer.Context, args: list[str]) -> list[str]:
        return super().parse_args(ctx, _with_resume_value(args))


def _with_resume_value(arguments: Sequence[str]) -> list[str]:
    """Join `--resume auto` to `--resume=auto`, and write a bare `--resume` as `--resume=newest`."""
    values = tuple(one.value for one in ResumeFrom)
    written = []
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
    from ligertune.recipe import load_recipe

    render.people_on_stderr(json)
    run_recipe(load_recipe(recipe, [*(set_ or []), *_run_overrides(resume, overwrite)]), json)


def medusa(
    recipe: Annotated[Path | None, typer.Argument(help="Recipe (YAML file). Default: a bundled recipe.")] = None,
    heads: Annotated[int | None, typer.Option(help="Number of heads (medusa.num_heads).")] = None,
    layers: Annotated[int | None, typer.Option(help="Residual blocks per head (medusa.num_layers).")] = None,
    stage: Annotated[
        int | None, typer.Option(help="1: train the heads only. 2: train the model and the heads (medusa.stage).")
    ] = None,
    model: Annotated[str | None, typer.Option(help="Hub id or folder of the model.")] = None,
    data: Annotated[str | None, typer.Option(help="Data set: hub id, file or folder.")] = None,
    from_: Annotated[str | None, typer.Option("--from", help="Folder of trained heads to start from.")] = None,
    set_: Overrides = None,
    resume: Resume = None,
    overwrite: Overwrite = False,
    report: Annotated[
        bool, typer.Option("--report", help="Measure the trained heads in output_dir, without training.")
    ] = False,
    json: Json = False,
) -> None:
    """Train Medusa heads for speculative decoding, then measure their accuracy and the decoding speed-up.

    Example: ligertune medusa --heads 5
    """
    from ligertune.launcher.failures import is_started_rank
    from ligertune.recipe import load_recipe

    render.people_on_stderr(json)
    path = recipe or default_medusa_recipe(stage)
    if recipe is None and not is_started_rank():
        render.text(f"No recipe given: using {path}")
    options = {
        "medusa.num_heads": heads,
        "medusa.num_layers": layers,
        "medusa.stage": stage,
        "medusa.heads_path": from_,
        "model.model_name_or_path": model,
        "data.datasets": None if data is None else f"[{{path: {data!r}}}]",
    }
    given = [f"{key}={value}" for key, value in options.items() if value is not None]
    # --set comes last, so that it wins over the options
    overrides = ["task=medusa", *given, *_run_overrides(resume, overwrite), *(set_ or [])]
    loaded = load_recipe(path, overrides=overrides)
    if not report:
        run_recipe(loaded, json)
        return
    from ligertune.cli.render import run_report
    from ligertune.features.medusa.medusa_run import report_on
    from ligertune.launcher.run_lock import locked_folder
    from ligertune.planning.feature_spec import feature_of
    from ligertune.planning.options import RunOptions

    with locked_folder(Path(loaded.checkpoint.output_dir)):
        found = report_on(RunOptions.of(loaded)).as_dict()
    run_report.show_tables(feature_of("medusa").result_tables(found))
    if json:
        render.json_report(found)


def distill(
    recipe: RecipeFile,
    write: Annotated[
        Path | None,
        typer.Option(
            help="Write the teacher's largest log-probabilities (distill.top_k) to this folder; train nothing."
        ),
    ] = None,
    set_: Overrides = None,
    resume: Resume = None,
    overwrite: Overwrite = False,
    json: Json = False,
) -> None:
    """Train a student towards a teacher's distributions (task: distill), or write those for later runs.

    Example: ligertune distill recipe.yaml --write teacher_log_probs
    """
    from ligertune.planning.preflight import check_out_folder, make_out_folder
    from ligertune.recipe import load_recipe

    render.people_on_stderr(json)
    overrides = ["task=distill", *_run_overrides(resume, overwrite), *(set_ or [])]
    if write is None:
        run_recipe(load_recipe(recipe, overrides=overrides), json)
        return
    loaded = load_recipe(recipe, overrides=[*overrides, "distill.teacher_file=null"])
    check_out_folder(write, "--write")
    make_out_folder(write.parent, "--write")
    with importing():
        from ligertune.features.distill.teacher_files import write_teacher_file
        from ligertune.training.resolve import plan_for
    job = plan_for(loaded, for_show=True, processes=1)
    found = write_teacher_file(
        job.plan,
        job.data,
        write,
        pad_token_id=job.tokenizer.pad_token_id,
        vocab_size=job.config.get_text_config().vocab_size,
        show=render.text,
    )
    render.text(f"Wrote {write}. Train from it: distill.teacher_file: {write}")
    if json:
        render.json_report({**vars(found), "folder": str(write)})


def _run_overrides(resume: ResumeFrom | None, overwrite: bool) -> list[str]:
    chosen = [f"checkpoint.resume_from_checkpoint={resume.value}"] if resume else []
    return [*chosen, "checkpoint.overwrite=true"] if overwrite else chosen


def default_medusa_recipe(stage: int | None) -> Path:
    """Return the bundled Medusa recipe for this machine: a tiny model if there is no GPU."""
    from ligertune.hardware import this_machine
    from ligertune.recipe.read import bundled

    model = "stories260k" if this_machine().vendor == "cpu" else "qwen2.5-7b"
    return bundled(f"medusa/{model}{'-stage2' if stage == 2 else ''}.yaml")


def run_recipe(loaded: Recipe, json: bool) -> None:
    """Run a loaded recipe: plan, start one process per device if there are several, train, and report.

    With several devices, the process that the user started makes the plan, checks it, and starts the ranks. The ranks
    run this function too; each waits until the plan of the first process has passed its checks.
    Raises typer.Exit(130) if the run was interrupted, and UserError for invalid input.
    """
    from ligertune.cli.render import run_report
    from ligertune.cli.render.run_display import RunDisplay
    from ligertune.hardware import choose_processes, is_launched, is_main_process
    from ligertune.launcher import slurm
    from ligertune.launcher.failures import is_started_rank
    from ligertune.launcher.processes import Ranks, begin_rank
    from ligertune.launcher.run_lock import check_not_in_use
    from ligertune.planning.preflight import check_output_dir, check_sources
    from ligertune.progress import COMMAND_GIVEN, Phases, taken_over

    check_sources(loaded)  # report missing files before torch is imported, which takes seconds

    os.environ.update(slurm.variables(os.environ))
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
        from ligertune.training.output_dir import output_dir_of
        from ligertune.training.resolve import plan_for

        job = plan_for(loaded, display.data, processes=processes)
        display.planned(job.plan.schedule.total_steps, job.plan.measurement.warmup_steps)
        if main and not started:
            run_report.show_plan(job.plan)
        if ranks is not None:
            stack.enter_context(output_dir_of(job.plan, processes=ranks.pids))
            phases.begin("starting the processes")
            raise typer.Exit(ranks.run(job.plan, lambda: _hand_on(phases, display)))
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
