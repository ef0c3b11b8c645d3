"""The console script: commands, and what becomes of errors. Heavy imports stand inside the commands."""

from __future__ import annotations

import signal
import sys

import typer

from ligertune import progress as phases  # noqa: F401  before anything heavy: it looks at the clock
from ligertune.errors import UserError
from ligertune.imports import importing

app = typer.Typer(
    name="ligertune",
    help="Fine-tune language models on your own GPUs: fast exact kernels, one YAML recipe, an honest report.",
    no_args_is_help=True,
    pretty_exceptions_enable=False,
    context_settings={"help_option_names": ["-h", "--help"]},
)


def _register() -> None:
    with importing():
        from ligertune.cli.bench import bench
        from ligertune.cli.compare import compare
        from ligertune.cli.data import data
        from ligertune.cli.doctor import doctor
        from ligertune.cli.export import export
        from ligertune.cli.generate import generate
        from ligertune.cli.init import init
        from ligertune.cli.medusa import medusa
        from ligertune.cli.plan import plan
        from ligertune.cli.recipe import recipe_app
        from ligertune.cli.train import train

    for command in (init, train, medusa, plan, compare, bench, data, generate, export, doctor):
        app.command()(command)
    app.add_typer(recipe_app, name="recipe")


_register()


@app.callback(invoke_without_command=True)
def root(version: bool = typer.Option(False, "--version", help="Print the version and leave.", is_eager=True)) -> None:
    """Fine-tune language models on your own GPUs: fast exact kernels, one YAML recipe, an honest report."""
    if version:
        from ligertune import __version__
        from ligertune.cli.render import console as render

        render.document(f"ligertune {__version__}")
        raise typer.Exit


def _leave_on_signals() -> None:
    """SIGTERM and SIGUSR1 end a command with code 130, as Ctrl-C does; what trains holds them."""
    from ligertune.train.signals import leave_at_once

    for name in ("SIGTERM", "SIGUSR1"):
        if hasattr(signal, name):
            signal.signal(getattr(signal, name), leave_at_once)


def main() -> None:
    """0 done, 1 failed while running, 2 the input was wrong, 130 interrupted."""
    _leave_on_signals()
    try:
        app()
    except UserError as problem:
        _say(problem)
        sys.exit(problem.exit_code)
    except OSError as problem:
        from ligertune.storage import cannot_write, reason_of

        reason = reason_of(problem)
        if reason is None:
            raise
        _say(cannot_write(str(problem.filename or "A file"), reason))
        sys.exit(1)
    except KeyboardInterrupt:
        sys.exit(130)


def _say(problem: UserError) -> None:
    """On stderr; one of several processes leaves it to the one that started them, which says it once."""
    from ligertune.launcher.failures import is_started_rank, leave_word

    if is_started_rank():
        leave_word(problem)
        return
    from ligertune.cli.render import console as render

    render.error(problem)
