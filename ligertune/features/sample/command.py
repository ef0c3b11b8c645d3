"""`ligertune sample`: answers to the prompts of a recipe, scored and kept as training data."""

from __future__ import annotations

import contextlib
import sys
from typing import TYPE_CHECKING, Annotated

import typer

from ligertune.cli.options import CommandPart, Json, Overrides, RecipeFile
from ligertune.cli.render import console as render
from ligertune.errors import UserError, format_rate, plural
from ligertune.progress import importing

if TYPE_CHECKING:
    from ligertune.features.sample.sample_report import SampleReport
    from ligertune.planning.options import RunOptions


def sample(
    recipe: RecipeFile,
    set_: Overrides = None,
    overwrite: Annotated[
        bool, typer.Option("--overwrite", help="Remove the answers of an earlier call, and begin again.")
    ] = False,
    json: Json = False,
) -> None:
    """Answer the prompts of a recipe several times, score the answers, and keep the good ones as training data.

    Example: ligertune sample recipe.yaml --set sample.source=runs/first --set sample.score=rules.py:score

    A call that was interrupted continues where it was.
    """
    from ligertune.features.sample.recipe import FOLDER_KEY
    from ligertune.launcher.failures import is_started_rank
    from ligertune.planning.options import RunOptions
    from ligertune.recipe.read import load_recipe

    render.people_on_stderr(json)
    overrides = [*(set_ or []), "checkpoint.resume_from_checkpoint=never"]
    loaded = load_recipe(recipe, overrides=overrides, output_key=FOLDER_KEY)
    options = RunOptions.of(loaded)
    if is_started_rank():
        _answer_as_rank(options)
        return
    _check_launched()
    from ligertune.planning.preflight import check_sources

    check_sources(loaded)
    report = _sample(options, overwrite=overwrite)
    show_report(report)
    render.hub_notes()
    if json:
        render.json_report(report.as_dict())
    if not report.kept:
        raise UserError(
            "No answer is kept, so there is nothing to train on.",
            hint="Look at the scores above: lower sample.threshold, or raise sample.num_generations.",
            exit_code=1,
        )


def _check_launched() -> None:
    from ligertune.hardware import is_launched, world_size

    if is_launched() and world_size() > 1:
        raise UserError(
            "ligertune sample starts its own processes, and a launcher has started this one.",
            hint="Run it without torchrun, accelerate launch or srun: parallel.num_processes says how many.",
        )


def _import() -> None:
    with importing():
        import ligertune.features.sample.sample_run  # noqa: F401


def _answer_as_rank(options: RunOptions) -> None:
    """Answer this process's share of the prompts, once the first process has checked everything."""
    from ligertune.hardware import rank, world_size
    from ligertune.launcher.processes import begin_rank

    begin_rank(_import)
    from ligertune.features.sample.sample_run import generate, prepare_sampling

    job = prepare_sampling(options)
    generate(job, lambda share: None, rank=rank(), world=world_size())


def _sample(options: RunOptions, *, overwrite: bool) -> SampleReport:
    """Answer, score and keep; return the report. Raises UserError, and typer.Exit if ranks were interrupted."""
    from ligertune.features.sample.recipe import SampleSpec
    from ligertune.features.sample.scoring.score_functions import ScoreFunctions
    from ligertune.hardware import choose_processes
    from ligertune.launcher.processes import Ranks

    spec = options.build.section(SampleSpec)
    with contextlib.ExitStack() as stack, render.status("checking the score functions ...") as status:
        # a fault in the user's file is reported before torch is imported, which takes seconds
        functions = stack.enter_context(ScoreFunctions(spec.score, spec.score_timeout))
        processes = 1
        if spec.url is None:
            processes = choose_processes(options.parallel.num_processes, options.parallel.strategy)
        ranks = stack.enter_context(Ranks(processes, sys.argv[1:])) if processes > 1 else None
        status.update("reading the data ...")
        _import()
        from ligertune.features.sample.sample_run import generate, open_job, score_and_keep

        others = ranks.pids if ranks else ()
        job = stack.enter_context(open_job(options, functions, overwrite=overwrite, processes=others))
        if ranks is None:
            status.update("loading the model ...")
            generate(job, lambda share: status.update(f"answering: {share:.0%}"))
        else:
            status.update(f"answering with {processes} processes ...")
            kept = "Finished answers are kept: run the command again to continue."
            code = ranks.run(job.folder, options.parallel.timeout, dict, kept=kept)
            if code:
                raise typer.Exit(code)
        status.update("scoring ...")
        return score_and_keep(job, functions, lambda share: status.update(f"scoring: {share:.0%}"))


def show_report(report: SampleReport) -> None:
    """Print the report for people."""
    rows = [
        ("source", report.source),
        ("answers", f"{report.answers:,}: {report.num_generations} to each of {plural(report.prompts, 'prompt')}"),
        ("kept", f"{plural(report.kept, 'row')} (sample.keep: {report.keep})"),
        ("tokens of an answer", f"{report.tokens.mean:.1f} on average, {report.tokens.quantiles['100']:.0f} at most"),
        ("cut at max_new_tokens", f"{report.truncated_share:.1%}"),
    ]
    if report.speed.rate is not None:
        rows.append(("tokens/s", format_rate(report.speed.rate)))
    if report.score is not None:
        rows += [
            ("score", f"{report.score.mean:.4g} on average (standard deviation {report.score.std:.3g})"),
            (f"best of {report.num_generations}", f"{report.best_of:.4g} on average"),
            ("quantiles", ", ".join(f"{name} %: {value:.4g}" for name, value in report.score.quantiles.items())),
        ]
    rows += [(f"score of {name}", f"{mean:.4g} on average") for name, mean in report.functions.items()]
    render.table("Sampled answers", rows)
    if report.histogram is not None:
        _show_histogram(report)
    for title, found in (("best", report.best), ("worst", report.worst)):
        cells = [(f"{one.score:.4g}", one.prompt, one.answer) for one in found]
        if cells:
            render.columns(f"Examples: {title}", ("score", "prompt", "answer"), cells, texts=True)
    for note in report.notes:
        render.note(note)
    render.text(f"Train on them:  data.datasets: [{{path: {report.files['kept']}}}]")


def _show_histogram(report: SampleReport) -> None:
    assert report.histogram is not None
    most = max(report.histogram.counts)
    rows = []
    for value, count in zip(report.histogram.values, report.histogram.counts, strict=True):
        name = f"{value:.4g}" if not report.histogram.width else f"{value:.4g} to {value + report.histogram.width:.4g}"
        rows.append((name, f"{'█' * round(40 * count / most)} {count:,}"))
    render.columns("Scores", ("score", "answers"), rows, texts=True)


PART = CommandPart(train=sample, order=3)
