"""`--help` of every command, with an example that parses; shell completion of recipe keys."""

import os
import re
import shlex
import subprocess
import sys

import pytest
import typer
from support.command_line import run_here
from typer.testing import CliRunner

from ligertune.cli.app import app


def leaves(command, path: tuple[str, ...] = ()) -> dict[str, object]:
    """Return all commands by name, such as "recipe check"."""
    if not hasattr(command, "commands"):
        return {" ".join(path): command}
    return {k: v for name, child in command.commands.items() for k, v in leaves(child, (*path, name)).items()}


COMMANDS = leaves(typer.main.get_command(app))


@pytest.mark.parametrize("name", COMMANDS)
def test_every_command_has_an_example_that_parses_and_describes_its_options(name):
    shown = CliRunner().invoke(app, [*name.split(), "--help"]).output
    assert "Example:" in shown
    example = re.search(r"Example: ligertune (.*?)\.?$", COMMANDS[name].help, re.DOTALL | re.MULTILINE).group(1)
    words = shlex.split(example.split(">")[0])
    assert words[: len(name.split())] == name.split(), f"the example of {name} shows another command"
    COMMANDS[name].make_context(name, words[len(name.split()) :])
    assert not [parameter.name for parameter in COMMANDS[name].params if not getattr(parameter, "help", None)]


def test_bash_completes_recipe_keys_after_set():
    typed = "ligertune train r.yaml --set train.lear"
    variables = {"_LIGERTUNE_COMPLETE": "complete_bash", "COMP_WORDS": typed, "COMP_CWORD": "4"}
    code = "import sys; sys.argv[0] = 'ligertune'; from ligertune.cli.app import app; app(prog_name='ligertune')"
    done = subprocess.run(
        [sys.executable, "-c", code], env={**os.environ, **variables}, capture_output=True, text=True, check=False
    )
    assert "train.learning_rate=" in done.stdout, done.stderr


@pytest.mark.parametrize(
    ("command", "option", "says"),
    [
        ("train", "--learning-rate", "--set train.learning_rate=VALUE"),
        ("plan", "--output_dir", "--set checkpoint.output_dir=VALUE"),
        ("train", "--nothing", ""),
        ("generate", "--learning-rate", ""),  # it sets no keys
    ],
)
def test_an_unknown_option_with_the_name_of_a_recipe_key_says_how_it_is_set(command, option, says, tmp_path):
    refused = run_here(command, "r.yaml", option, "1", cwd=tmp_path)
    words = " ".join(refused.err.replace("│", " ").split())
    assert refused.code == 2 and f"No such option: {option}" in words
    assert says in words if says else "--set" not in words


def test_ligertune_alone_prints_its_help_and_is_no_error(tmp_path):
    alone, asked = run_here(cwd=tmp_path), run_here("--help", cwd=tmp_path)
    assert alone.code == asked.code == 0
    assert alone.out.split() == asked.out.split() and "train" in alone.out
    assert run_here("nosuch", cwd=tmp_path).code == 2
