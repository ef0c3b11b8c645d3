"""`ligertune recipe check`, `show` and `schema`."""

from __future__ import annotations

import json

import pytest
import typer

from ligertune.cli.recipe import recipe_app
from ligertune.cli.render import console as render
from ligertune.errors import UserError
from ligertune.recipe import recipe_schema

FLAT = "base_model: some/model\ndataset: some/data\noutput_dir: runs/one\n"


@pytest.fixture
def recipe(tmp_path):
    path = tmp_path / "recipe.yaml"
    path.write_text(FLAT)
    return path


@pytest.fixture
def run(monkeypatch, capsys):
    """run(*arguments): the command's stdout and stderr."""
    monkeypatch.setattr(render.OUTPUT, "console", render.OUTPUT.console)  # --json moves it

    def run(*arguments: object) -> tuple[str, str]:
        command = typer.main.get_command(recipe_app)
        command([str(argument) for argument in arguments], standalone_mode=False)
        return tuple(capsys.readouterr())

    return run


def test_check_raises_complaints(recipe, run):
    with pytest.raises(UserError, match=r"^--set train\.sede=1: train\.sede is not a recipe key"):
        run("check", recipe, "--set", "train.sede=1")


def test_check_prints_notices_and_ok(recipe, run):
    lines = run("check", recipe)[0].splitlines()
    assert lines[0] == f"{recipe}:1: base_model is read as model.model_name_or_path."
    assert len(lines) == 4 and lines[3] == f"{recipe}: OK"
    stdout, stderr = run("check", recipe, "--json")
    report = json.loads(stdout)
    assert f"{recipe}: OK" in stderr and report["ok"] is True and len(report["notices"]) == 3


def test_show_prints_a_recipe_with_the_same_output(recipe, run, tmp_path):
    shown = run("show", recipe, "--set", "train.max_steps=5")[0]
    again = tmp_path / "again.yaml"
    again.write_text(shown)
    assert "max_steps: 5\n" in shown and shown.startswith("# ")
    assert run("show", again)[0] == shown[shown.index("version:") :]
    assert json.loads(run("show", again, "--json")[0])["train"]["max_steps"] == 5


def test_schema_prints_the_json_schema(run):
    assert json.loads(run("schema")[0]) == recipe_schema()
