"""`ligertune recipe check|show|schema`, as a user types them."""

from __future__ import annotations

import json

import pytest
from typer.testing import CliRunner

from ligertune.cli.recipe import recipe_app
from ligertune.errors import UserError
from ligertune.recipe import recipe_schema

FLAT = "base_model: some/model\ndataset: some/data\noutput_dir: runs/one\n"


@pytest.fixture
def recipe(tmp_path):
    path = tmp_path / "recipe.yaml"
    path.write_text(FLAT)
    return path


def run(*arguments: object) -> str:
    done = CliRunner().invoke(recipe_app, [str(argument) for argument in arguments])
    if done.exception is not None:
        raise done.exception
    return done.stdout


def test_check_says_ok_after_the_notices(recipe, capfd):
    printed = run("check", recipe) or capfd.readouterr().out
    assert f"{recipe}:1: base_model is read as model.model_name_or_path." in printed
    assert printed.rstrip().endswith(f"{recipe}: OK")


def test_check_raises_the_complaint(recipe):
    with pytest.raises(UserError, match=r"^--set train\.sede=1: train\.sede is not a key"):
        run("check", recipe, "--set", "train.sede=1")


def test_check_json_is_one_report(recipe):
    report = json.loads(run("check", recipe, "--json"))
    assert report["ok"] is True and len(report["notices"]) == 3


def test_what_show_prints_is_a_recipe_that_shows_the_same(recipe, tmp_path):
    shown = run("show", recipe, "--set", "train.max_steps=5")
    again = tmp_path / "again.yaml"
    again.write_text(shown)
    assert "max_steps: 5\n" in shown and shown.startswith("# ")
    assert run("show", again) == shown[shown.index("version:") :]
    assert json.loads(run("show", again, "--json"))["train"]["max_steps"] == 5


def test_schema_prints_the_json_schema():
    assert json.loads(run("schema")) == recipe_schema()
