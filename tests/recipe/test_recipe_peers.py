"""Recipes in the words of other tools, and recipes written back."""

from __future__ import annotations

import pickle

import pytest

from ligertune.recipe import dump_recipe, recipe_schema

FLAT = "base_model: some/model\ndataset: some/data\noutput_dir: runs/one\n"


def test_a_flat_file_reads_as_the_sections(load, required):
    recipe = load(FLAT)
    assert recipe == load(required)
    assert load("model: some/model\ndataset: [some/data]\noutput_dir: runs/one\n") == recipe


def test_notices_come_in_the_order_of_the_file(load):
    assert load(FLAT + "data: {train_on_inputs: false}").notices == (
        "recipe.yaml:1: base_model is read as model.model_name_or_path.",
        "recipe.yaml:2: dataset is read as data.datasets.",
        "recipe.yaml:3: output_dir is read as checkpoint.output_dir.",
        "recipe.yaml:4: data.train_on_inputs is read as data.train_on.",
    )


def test_the_items_of_a_list_have_peers_names_too(load):
    text = "base_model: m\noutput_dir: o\ndata: {datasets: [{path: a}, {path: b, type: chat_template, subset: x}]}\n"
    item = load(text).data.datasets[1]
    assert (item.format, item.name) == ("messages", "x")


def test_a_peers_name_with_the_same_value_as_ours_is_only_noticed(load):
    assert load(FLAT + "lr: 1e-4\ntrain: {learning_rate: 0.0001}\n").train.learning_rate == 1e-4


def test_an_override_by_a_peers_name_writes_over_our_key(load):
    assert load(FLAT + "train: {learning_rate: 1e-3}\n", "lr=1e-4").train.learning_rate == 1e-4


EVERYTHING = """\
model:
  model_name_or_path: some/model
  revision: '12e4567'
  dtype: float32
  init: random
  num_hidden_layers: 2
  tokenizer: {pad_token: '~'}
kernels: {enabled: false, loss: torch}
data: {datasets: [{path: 'a: b', name: 'no', columns: {'on': 'off'}}], system_prompt: "line\\nline \\u2028 é 😀"}
train: {max_steps: 7, global_batch_size: 8, warmup_steps: 0, learning_rate: 1e-7, seed: 0}
eval: {eval_strategy: no}
checkpoint: {output_dir: '2024', save_strategy: off, resume_from_checkpoint: runs/x/checkpoints/step-5}
"""


@pytest.mark.parametrize("text", [FLAT, EVERYTHING], ids=["defaults", "everything"])
def test_what_is_written_back_reads_as_the_same_recipe(text, load):
    recipe = load(text)
    again = load(dump_recipe(recipe))
    assert again == recipe and dump_recipe(again) == dump_recipe(recipe)
    assert pickle.loads(pickle.dumps(recipe)) == recipe


def test_what_is_written_back_holds_every_key_of_the_schema(load):
    schema, dumped = recipe_schema(), load(FLAT).model_dump(mode="json")
    for section, entry in schema["properties"].items():
        if "$ref" in entry:
            assert set(dumped[section]) == set(schema["$defs"][entry["$ref"].rpartition("/")[2]]["properties"])


def test_absolute_paths_survive_a_move_of_the_recipe(load, tmp_path):
    (tmp_path / "some" / "data").mkdir(parents=True)
    recipe = load(FLAT)
    assert recipe.data.datasets[0].path == str(tmp_path / "some" / "data")
    assert load(dump_recipe(recipe)) == recipe
