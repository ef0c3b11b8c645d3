"""What a stranger meets first: every command says what it does, with an example that parses; shells complete."""

from __future__ import annotations

import re
import shlex
import subprocess
import sys

import pytest
import typer
from typer.testing import CliRunner

from ligertune.cli.app import app


def leaves(command, path: tuple[str, ...] = ()) -> dict[str, object]:
    """ "recipe check" -> its command, for all that do something."""
    if not hasattr(command, "commands"):
        return {" ".join(path): command}
    return {k: v for name, child in command.commands.items() for k, v in leaves(child, (*path, name)).items()}


COMMANDS = leaves(typer.main.get_command(app))


@pytest.mark.parametrize("name", COMMANDS)
def test_every_command_has_an_example_that_parses(name):
    shown = CliRunner().invoke(app, [*name.split(), "--help"]).output
    assert "Example:" in shown
    example = re.search(r"Example: ligertune (.*?)\.?$", COMMANDS[name].help, re.DOTALL | re.MULTILINE).group(1)
    words = shlex.split(example.split(">")[0])
    assert words[: len(name.split())] == name.split(), f"the example of {name} is one of another command"
    COMMANDS[name].make_context(name, words[len(name.split()) :])


@pytest.mark.parametrize("name", COMMANDS)
def test_every_option_says_what_it_does(name):
    for parameter in COMMANDS[name].params:
        assert getattr(parameter, "help", None), f"{name} {parameter.name}"


def test_shells_complete_keys_after_set():
    """As bash asks; `ligertune --install-completion` makes it ask."""
    asked = "ligertune train r.yaml --set train.lear"
    variables = {"_LIGERTUNE_COMPLETE": "complete_bash", "COMP_WORDS": asked, "COMP_CWORD": "4"}
    code = "import sys; sys.argv[0] = 'ligertune'; from ligertune.cli.app import app; app(prog_name='ligertune')"
    import os

    done = subprocess.run(
        [sys.executable, "-c", code], env={**os.environ, **variables}, capture_output=True, text=True, check=False
    )
    assert "train.learning_rate=" in done.stdout, done.stderr
