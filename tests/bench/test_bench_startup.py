"""scripts/bench startup: time and imports of a command, and of training to its first step."""

import sys

import pytest
from support.script_modules import script_module


@pytest.fixture
def script():
    return script_module("benchmarks.host.startup")


def test_imports_are_a_part_of_the_time_of_a_command(script, tmp_path):
    run = script.measure(script.Case("help", ("--help",)), tmp_path / "cache", tmp_path / "file.json")
    assert 0 < run.imports["typer"] + run.imports["rich"] <= sum(run.imports.values()) < run.wall
    assert run.cpu > 0 and run.phases == {} and "torch" not in run.imports


def test_modules_count_for_the_package_that_holds_them(script, tmp_path):
    """Also those that importlib.import_module imports, and without those that they import in turn."""
    for package, code in (
        ("outer_one", "import time; time.sleep(0.1); import importlib; importlib.import_module('inner_one')"),
        ("inner_one", "import time; time.sleep(0.8)"),
    ):
        (tmp_path / package).mkdir()
        (tmp_path / package / "__init__.py").write_text(code, encoding="utf-8")
    before, loaded = sys.path[:], script.importlib._bootstrap._find_and_load
    times = script.ImportTimes()
    try:
        sys.path.insert(0, str(tmp_path))
        __import__("outer_one")
    finally:
        sys.path[:], script.importlib._bootstrap._find_and_load = before, loaded
    assert 0.1 <= times.seconds["outer_one"] < 0.8 <= times.seconds["inner_one"]


def test_a_command_that_fails_ends_the_benchmark_with_its_error(script, tmp_path):
    case = script.Case("check", ("recipe", "check", "no_such_recipe.yaml"))
    with pytest.raises(SystemExit, match=r"recipe check no_such_recipe\.yaml failed"):
        script.measure(case, tmp_path / "cache", tmp_path / "file.json")


@pytest.mark.slow
def test_training_is_measured_to_its_first_step(script, monkeypatch, capsys):
    monkeypatch.setattr(sys, "argv", ["bench", "startup", "--small", "--repeats", "1", "--only", "train"])
    assert script.main() == 0
    lines = capsys.readouterr().out.splitlines()
    rows = {line[:14].strip(): [float(word) for word in line[14:].split()] for line in lines[2:4]}
    assert list(rows) == ["train", "train, empty"]
    for wall, cpu, imports, *packages in rows.values():
        assert wall > imports > 1 and cpu > 1 and sum(packages) == pytest.approx(imports, abs=0.1)
    assert lines[4].startswith("train: planning ") and ", first step " in lines[4]
