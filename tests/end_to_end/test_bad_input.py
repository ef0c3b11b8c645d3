"""Bad input gets one clear sentence, exit code 2 and no traceback; nothing heavy is imported where it need not be."""

from __future__ import annotations

import json
import sys

import pytest
from command_line import overrides, run

GOOD = {"instruction": "Say hello.", "input": "", "output": "Hello."}


def write(path, *records) -> str:
    path.write_text("\n".join(r if isinstance(r, str) else json.dumps(r) for r in records) + "\n", encoding="utf-8")
    return str(path)


# name -> (overrides, words that the sentence must hold)
CASES = {
    "unknown key": ({"train.learning_rat": 1e-3}, ["train.learning_rat", "train.learning_rate"]),
    "key in the wrong section": ({"model.learning_rate": 1e-3}, ["learning_rate", "train"]),
    "wrong type": ({"train.learning_rate": "fast"}, ["train.learning_rate", "fast"]),
    "missing data file": ({"data.datasets.0.path": "nowhere.jsonl"}, ["nowhere.jsonl", "data.datasets[0].path"]),
    "missing model folder": ({"model.model_name_or_path": "./no-model"}, ["./no-model", "model.model_name_or_path"]),
    "a dtype that the device lacks": ({"model.dtype": "float16"}, ["model.dtype: float16"]),
}
WITHOUT_TORCH = ("unknown key", "key in the wrong section", "wrong type", "missing data file", "missing model folder")


@pytest.mark.parametrize("name", CASES)
def test_one_sentence_and_exit_code_2(name, ligertune, recipe):
    settings, words = CASES[name]
    done = ligertune("train", recipe, *overrides(settings))
    assert_refused(done, words)


@pytest.mark.parametrize("name", WITHOUT_TORCH)
def test_torch_is_not_imported_for_it(name, recipe, tmp_path):
    code = (
        "import sys; from ligertune.cli.app import main\n"
        "try: main()\n"
        "except SystemExit as end: assert end.code == 2, end.code\n"
        "assert 'torch' not in sys.modules"
    )
    done = run([sys.executable, "-c", code, "train", str(recipe), *overrides(CASES[name][0])], cwd=tmp_path)
    assert done.code == 0, done.err


def test_an_empty_data_set(ligertune, recipe, tmp_path):
    path = write(tmp_path / "empty.jsonl")
    assert_refused(ligertune("train", recipe, "--set", f"data.datasets.0.path={path}"), ["empty.jsonl"])


def test_a_data_set_of_which_nothing_is_trained(ligertune, recipe, tmp_path):
    path = write(tmp_path / "silent.jsonl", {**GOOD, "output": ""}, {**GOOD, "output": ""})
    assert_refused(ligertune("train", recipe, "--set", f"data.datasets.0.path={path}"), ["silent.jsonl"])


def test_a_row_that_is_not_an_object_is_named_by_file_and_line(ligertune, recipe, tmp_path):
    path = write(tmp_path / "rows.jsonl", GOOD, GOOD, "[1, 2]", GOOD)
    assert_refused(ligertune("train", recipe, "--set", f"data.datasets.0.path={path}"), ["rows.jsonl:3"])


def test_an_output_folder_that_holds_a_run(ligertune, recipe, tmp_path):
    (tmp_path / "runs" / "quickstart").mkdir(parents=True)
    (tmp_path / "runs" / "quickstart" / "plan.json").write_text("{}")
    assert_refused(ligertune("train", recipe), ["already holds a run", "plan.json"])
    assert (tmp_path / "runs" / "quickstart" / "plan.json").read_text() == "{}"


def test_a_missing_recipe(ligertune):
    assert_refused(ligertune("train", "nowhere.yaml"), ["nowhere.yaml"])


def test_examples_longer_than_the_model_reaches(ligertune, recipe, tmp_path):
    path = write(tmp_path / "long.jsonl", GOOD, {**GOOD, "output": "many words " * 300})
    done = ligertune("train", recipe, "--set", f"data.datasets.0.path={path}", "--set", "data.max_length=4096")
    assert_refused(done, ["context", "512", "data.max_length"])


def assert_refused(done, words) -> None:
    assert done.code == 2, done.err
    assert "Traceback" not in done.err
    said = [line for line in done.err.splitlines() if line.startswith("Error:")]
    assert len(said) == 1, done.err
    for word in words:
        assert word in said[0]
