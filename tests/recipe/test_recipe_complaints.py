"""Complaints about invalid recipes: complaints.txt is a table of recipes and exact messages."""

import os
from pathlib import Path

import pytest

from ligertune.errors import UserError
from ligertune.recipe import load_recipe

TABLE = (Path(__file__).parent / "complaints.txt").read_text(encoding="utf-8").strip().split("\n\n")
TOO_LARGE = "it holds more than 10,000 keys and values, counting what its aliases repeat."
ALIASES_OF_ALIASES = "a: &a [1]\n" + "".join(
    f"{name}: &{name} [{', '.join([f'*{before}'] * 9)}]\n" for before, name in zip("abcdefgh", "bcdefghi", strict=True)
)
NEEDS = "A recipe needs at least model.model_name_or_path, data.datasets[0].path and checkpoint.output_dir."


@pytest.mark.parametrize("row", TABLE, ids=lambda row: row.partition("\n=> ")[0].replace("\n", "; "))
def test_one_mistake_gets_one_exact_message(row, required, complaints):
    """A row is YAML and the complaint about it; missing required sections are appended."""
    text, _, complaint = row.partition("\n=> ")
    left_out = [line for line in required.splitlines() if line.split()[0] not in text.split()]
    assert complaints("\n".join([text, *left_out])) == [f"recipe.yaml:{complaint}"]


@pytest.mark.parametrize(
    ("content", "complaint"),
    [
        ("", f"recipe.yaml is empty. {NEEDS}"),
        ("# nothing but a comment\n", f"recipe.yaml is empty. {NEEDS}"),
        (
            "- a\n- b\n",
            'recipe.yaml is ["a", "b"] (a list); a recipe is a mapping of sections: model, data, train and others.',
        ),
        ("model:\n  revision: \0\n", "recipe.yaml:2: the character U+0000 is not allowed in YAML."),
        (b"model:\n  revision: \xff\n", "recipe.yaml:2: not UTF-8 text (byte 0xff)."),
        ("model: &a [*a]\n", "recipe.yaml: it is nested too deeply, or an anchor contains itself."),
        (ALIASES_OF_ALIASES, f"recipe.yaml: {TOO_LARGE}"),
        ("x: [" + "1," * 10_000 + "]", f"recipe.yaml: {TOO_LARGE}"),
        ("#" * 2**20 + "\n", "recipe.yaml has 1,048,577 bytes; a recipe has at most 1,048,576."),
        ("[" * 5000, "recipe.yaml: it is nested too deeply, or an anchor contains itself."),
    ],
    ids=["empty", "only a comment", "a list", "NUL", "latin-1", "recursive anchor", "aliases of aliases", "many values",
         "many bytes", "deep nesting"],
)  # fmt: skip
def test_a_file_that_is_not_a_yaml_mapping_gets_one_exact_message(content, complaint, complaints):
    assert complaints(content) == [complaint]


def test_a_folder_and_a_missing_file_are_refused(tmp_path):
    with pytest.raises(UserError, match="is a folder, not a recipe"):
        load_recipe(tmp_path)
    with pytest.raises(UserError, match=r"absent.yaml does not exist. Give the path of a recipe, a YAML file\."):
        load_recipe(tmp_path / "absent.yaml")


def test_devices_and_pipes_are_refused_without_being_read(tmp_path):
    os.mkfifo(tmp_path / "pipe.yaml")
    for path in (tmp_path / "pipe.yaml", Path("/dev/zero")):
        with pytest.raises(UserError, match="is not a regular file"):
            load_recipe(path)


def test_all_complaints_are_reported_in_the_order_of_the_file(complaints):
    text = """\
lr: -1
train: {sede: 1, max_steps: 1, num_train_epochs: 2}
eval: {eval_steps: no}
data: {datasets: [3]}
"""
    assert complaints(text) == [
        "recipe.yaml: checkpoint.output_dir is missing: output folder of the run, relative to the current folder.",
        "recipe.yaml: model.model_name_or_path is missing: hub id or folder of the model.",
        "recipe.yaml:1: train.learning_rate (written as lr) is -1 (an integer); "
        "it must be a number (above 0, at most 1).",
        "recipe.yaml:2: train.max_steps and train.num_train_epochs (line 2) are both given. Keep one of them.",
        "recipe.yaml:2: train.sede is not a recipe key. Did you mean train.seed?",
        'recipe.yaml:3: eval.eval_steps is "no" (a string); '
        "it must be an integer (above 0) or a number (above 0, below 1).",
        "recipe.yaml:4: data.datasets[0] is 3 (an integer); it must be a mapping.",
    ]


def test_a_key_with_an_invalid_value_gets_no_second_complaint(required, complaints):
    found = complaints(required + "train: {max_steps: soon, num_train_epochs: 2}\n")
    assert len(found) == 1 and "train.max_steps is " in found[0]
