"""The `ligertune` console script: register the commands, and turn exceptions into messages and exit codes.

Commands import torch and transformers inside their functions, so that `--help` takes under 0.7 s.
"""

from __future__ import annotations

import contextlib
import errno
import os
import re
import sys
from collections.abc import Callable, Iterator
from typing import Any

import typer
from typer.core import TyperCommand, TyperGroup

from ligertune import progress  # noqa: F401  first: it records when the process started
from ligertune.errors import UserError, panics_as_errors, printable
from ligertune.progress import importing


class _Commands(TyperGroup):
    """The group of all commands. What a user typed is escaped in its errors: "No such option"."""

    # contexts are of type Any: they are click's, and typer keeps a copy of click that it does not export
    def make_context(self, *args: Any, **kwargs: Any) -> Any:
        with _escaped_usage_errors():
            return super().make_context(*args, **kwargs)

    def invoke(self, ctx: Any) -> Any:
        with _escaped_usage_errors():
            return super().invoke(ctx)


@contextlib.contextmanager
def _escaped_usage_errors() -> Iterator[None]:
    try:
        yield
    except Exception as problem:
        if hasattr(problem, "format_message"):
            usage_error: Any = problem  # click's
            usage_error.message = printable(usage_error.message + _recipe_keys_of(usage_error), one_line=True)
        raise


def _recipe_keys_of(usage_error: Any) -> str:
    """Return how the recipe key is set that an unknown option is called like; else an empty text."""
    option = getattr(usage_error, "option_name", None)
    context = usage_error.ctx
    if option is None or context is None or not any("--set" in each.opts for each in context.command.params):
        return ""
    from ligertune.recipe.document import keys

    name = option.lstrip("-").replace("-", "_")
    named = [key for key in keys() if key.rpartition(".")[2] == name and "[]" not in key]
    return f". It is a key of the recipe: --set {named[0]}=VALUE" if named else ""


app = typer.Typer(
    name="ligertune",
    cls=_Commands,
    help="Fine-tune language models on your own GPUs: fast exact kernels, one YAML recipe, an honest report.",
    pretty_exceptions_enable=False,
    context_settings={"help_option_names": ["-h", "--help"]},
)

# of the system, about a path that the user gave: in whichever function it is opened first
_PATH_ERRORS = (errno.EACCES, errno.EPERM, errno.ENAMETOOLONG, errno.ELOOP, errno.ENOTDIR, errno.EISDIR)

with importing():
    from ligertune.cli.data import data
    from ligertune.cli.doctor import doctor
    from ligertune.cli.export import export
    from ligertune.cli.generate import chat, generate, serve
    from ligertune.cli.measure.bench import bench
    from ligertune.cli.measure.compare import compare
    from ligertune.cli.measure.evaluate import evaluate
    from ligertune.cli.measure.report import report
    from ligertune.cli.options import command_parts
    from ligertune.cli.plan import PlanCommand, plan
    from ligertune.cli.recipe import init, recipe_app
    from ligertune.cli.render import console as render
    from ligertune.cli.train import TrainCommand, train

    TRAINERS = (train, *(part.train for part in command_parts()))

# in the order of `ligertune --help`
_COMMANDS: tuple[Callable[..., None], ...] = (
    init, data, plan, train, generate, chat, serve, evaluate, report, export, compare, bench, *TRAINERS[1:], doctor
)  # fmt: skip
_NAMES = {evaluate: "eval"}  # a function of this name would hide Python's own
_KINDS: dict[Callable[..., None], type[TyperCommand]] = {plan: PlanCommand, **dict.fromkeys(TRAINERS, TrainCommand)}
for command in _COMMANDS:
    app.command(_NAMES.get(command), cls=_KINDS.get(command))(command)
app.add_typer(recipe_app, name="recipe")


@app.callback(invoke_without_command=True)
def root(
    context: typer.Context,
    version: bool = typer.Option(False, "--version", help="Print the version and exit.", is_eager=True),
) -> None:
    """Fine-tune language models on your own GPUs: fast exact kernels, one YAML recipe, an honest report."""
    if version:
        from ligertune import __version__

        render.document(f"ligertune {__version__}")
        raise typer.Exit
    if context.invoked_subcommand is None:  # typer's no_args_is_help ends with exit code 2, which means wrong input
        render.document(context.get_help())


def main() -> None:
    """Run the command. Exit codes: 0 done, 1 failed while running, 2 invalid input, 130 interrupted."""
    from ligertune.launcher.signals import handle_by_leaving

    handle_by_leaving()  # also of Ctrl-C: Python can lose a KeyboardInterrupt inside an import
    render.escape_libraries()
    try:
        with panics_as_errors():
            app()
    except UserError as problem:
        _report(problem)
        sys.exit(problem.exit_code)
    except OSError as problem:  # a full disk or a missing permission can surface in any library
        from ligertune.files.storage import cannot_write, disk_error

        reason = disk_error(problem)
        if problem.errno in _PATH_ERRORS and problem.filename is not None:
            _report(UserError(f"{os.fsdecode(problem.filename)} cannot be used: {os.strerror(problem.errno)}."))
            sys.exit(2)
        if reason is None:
            raise
        trains = sys.argv[1:2] in [[command.__name__] for command in TRAINERS]
        what = problem.filename or ("A file" if trains else "The output")
        _report(cannot_write(str(what), reason, trains=trains))
        if problem.filename is None:
            _drop_unwritten_output()
        sys.exit(1)
    except (MemoryError, RuntimeError) as problem:
        # torch's allocator of host memory raises a plain RuntimeError
        if not isinstance(problem, MemoryError) and "can't allocate memory" not in str(problem):
            raise
        asked = re.search(r"\d{4,} bytes|[\d.]+ \w?iB", str(problem))
        what = f": it tried to allocate {asked[0]}" if asked else ""
        advice = "Lower the sizes that the command or its files ask for, or free memory."
        _report(UserError(f"The host ran out of memory{what}.", hint=advice, exit_code=1))
        sys.exit(1)
    except KeyboardInterrupt:
        sys.exit(130)


def _drop_unwritten_output() -> None:
    """Send what stdout still holds nowhere: Python writes it once more as it exits, fails again and exits with 120."""
    nowhere = os.open(os.devnull, os.O_WRONLY)
    os.dup2(nowhere, sys.stdout.fileno())
    os.close(nowhere)


def _report(problem: UserError) -> None:
    """Print the error to stderr. A rank hands it to the process that started the ranks, which prints it once."""
    from ligertune.launcher.failures import is_started_rank, write_error

    if is_started_rank():
        write_error(problem)
    else:
        render.error(problem)
