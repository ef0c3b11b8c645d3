"""`ligertune eval`: the loss and other measures of a trained model on held-out data, next to its base model."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from ligertune.cli.options import Json, Overrides, TrustRemoteCode
from ligertune.cli.render import console as render
from ligertune.errors import UserError, format_duration, plural
from ligertune.progress import importing

if TYPE_CHECKING:
    from ligertune.evaluation.eval_options import EvalOptions
    from ligertune.evaluation.evaluate_run import EvaluationResult


DataSets = Annotated[
    list[str] | None,
    typer.Option(
        "--data",
        metavar="PATH",
        help="Data set to evaluate on: file, folder or hub id. May be repeated. Default: what the run held out.",
        show_default=False,
    ),
]
Predictions = Annotated[
    Path | None,
    typer.Option("--predict", metavar="FILE", help="Write a line of JSON for each example.", show_default=False),
]
BatchSize = Annotated[
    int | None, typer.Option(min=1, max=2**16, help="Rows per pass. Default: the run's, or 4.", show_default=False)
]

MaxSamples = Annotated[
    int | None,
    typer.Option(min=1, help="Maximum number of rows of each data set, or documents of a task.", show_default=False),
]
Tasks = Annotated[
    list[str] | None,
    typer.Option(
        "--tasks",
        metavar="NAME",
        help="Task of lm-evaluation-harness, or a YAML file of one, in place of data. Several: a,b. Needs lm-eval.",
        show_default=False,
    ),
]
IncludePath = Annotated[
    str | None, typer.Option(metavar="FOLDER", help="With --tasks: folder with tasks of yours.", show_default=False)
]
Fewshot = Annotated[
    int | None,
    typer.Option(min=0, help="With --tasks: examples in each prompt. Default: the task's.", show_default=False),
]
Metric = Annotated[
    str | None,
    typer.Option(
        "--metric",
        metavar="exact_match|FILE.py:FUNCTION",
        help="Answer the prompts of the data, and score the answers. Default: eval.metric of the run.",
        show_default=False,
    ),
]
NewTokens = Annotated[
    int | None, typer.Option(min=1, max=2**20, help="With --metric: tokens of the longest answer.", show_default=False)
]
ChatTemplate = Annotated[bool, typer.Option("--chat-template", help="With --tasks: use the model's chat template.")]


def evaluate(
    target: Annotated[
        str,
        typer.Argument(
            help="Folder of a run, a model or an adapter, a recipe that was trained, or a hub id.", show_default=False
        ),
    ],
    data: DataSets = None,
    split: Annotated[str, typer.Option(help="With --data: split of a folder or hub data set.")] = "train",
    max_samples: MaxSamples = None,
    predict: Predictions = None,
    metric: Metric = None,
    max_new_tokens: NewTokens = None,
    tasks: Tasks = None,
    include_path: IncludePath = None,
    num_fewshot: Fewshot = None,
    chat_template: ChatTemplate = False,
    base: Annotated[bool, typer.Option("--base/--no-base", help="Also evaluate the base model of a run.")] = True,
    batch_size: BatchSize = None,
    set_: Overrides = None,
    trust_remote_code: TrustRemoteCode = False,
    json: Json = False,
) -> None:
    """Measure a trained model on held-out data, next to its base model, with standard errors.

    Example: ligertune eval runs/quickstart --data test.jsonl

    The result is written into the folder `evaluations` of the run, and shown on its page report.html.
    """
    from ligertune.evaluation.eval_options import EvalOptions

    render.people_on_stderr(json)
    options = EvalOptions(
        data=tuple(data or ()),
        split=split,
        max_samples=max_samples,
        batch_size=batch_size,
        overrides=tuple(set_ or ()),
        trust_remote_code=trust_remote_code,
        tasks=tuple(name for given in tasks or () for name in given.split(",") if name),
        include_path=include_path,
        num_fewshot=num_fewshot,
        chat_template=chat_template,
        metric=metric,
        max_new_tokens=max_new_tokens,
    )
    options.check()
    if tasks and not options.tasks:
        raise UserError("--tasks names no task.", hint="Write names with commas between them.")
    if predict is not None and options.tasks:
        raise UserError("--predict writes rows of data, and --tasks reads none.", hint="Leave one out.")
    if predict is not None and (predict.is_dir() or not predict.absolute().parent.is_dir()):
        raise UserError(f"--predict: {predict} is no file that can be written.", hint="Name a file in a folder.")
    result, run = _measure(target, options, with_base=base)
    show_result(result)
    _write(result, run, predict)
    if json:
        render.json_report(result.as_dict())


def _write(result: EvaluationResult, run: Path | None, predict: Path | None) -> None:
    """Write the predictions if they are asked for, and the result into the folder of the run."""
    from ligertune.evaluation.evaluate_run import write_predictions, write_result

    if predict is not None:
        count = write_predictions(result, predict)
        render.text(f"predictions: {predict} ({plural(count, 'row')})")
    if run is not None:
        render.text(f"result: {write_result(result, run)}")


def _measure(name: str, options: EvalOptions, *, with_base: bool) -> tuple[EvaluationResult, Path | None]:
    """Return the result, and output_dir of the run that it belongs to, if there is one."""
    with render.status("reading the data ...") as status:
        if options.tasks:
            with importing():
                from ligertune.evaluation.evaluate_tasks import evaluate_tasks

            result, found = evaluate_tasks(name, options, with_base=with_base, say=status.update)
            return result, found.run
        with importing():
            from ligertune.evaluation.eval_target import find_target
            from ligertune.evaluation.evaluate_run import evaluate_target

        found = find_target(name, options)
        result = evaluate_target(
            found,
            with_base=with_base,
            options=options,
            progress=lambda share: status.update(f"evaluating: {share:.0%}"),
        )
    return result, found.run


def show_result(result: EvaluationResult) -> None:
    """Print the measures as a table, with the base model's where it was evaluated."""
    from ligertune.report.evaluation_results import estimate_words

    rows = []
    for row in result.metrics:
        words = [estimate_words(row.value.as_dict())]
        if result.base is not None:
            base = None if row.base is None else row.base.as_dict()
            difference = None if row.difference is None else row.difference.as_dict()
            words = [estimate_words(base), *words, estimate_words(difference, sign=True)]
        rows.append((row.name, *words))
    counts = plural(result.examples, "example")
    if result.tokens:
        counts += f", {plural(result.tokens, 'token')} ({result.labels:,} with a label)"
    title = f"{', '.join(result.data)}: {counts}, {format_duration(result.seconds)}"
    header = ("", "base model", "model", "difference") if result.base is not None else ("", "model")
    render.columns(title, header, rows)
    for note in result.notes:
        render.note(note)
