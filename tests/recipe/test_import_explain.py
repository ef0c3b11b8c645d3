"""`ligertune recipe import --explain`: each key, its meaning there, and what it becomes here."""

import json
from pathlib import Path

import pytest
from typer.testing import CliRunner

from ligertune.cli.app import app
from ligertune.errors import UserError

AXOLOTL = """\
base_model: a/b
adapter: lora
lora_r: 8
datasets: [{path: x/y, type: alpaca, shards: 3}]
sequence_len: 9
bf16: true
fp16:
embedding_lr: 0.1
"""


@pytest.fixture
def explained(tmp_path, monkeypatch):
    """explained(text, *options): the result of the command, and its rows by key if it printed JSON."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("COLUMNS", "160")  # cells of a narrow table are cut into lines

    def explained(text: str, *options: str):
        Path("tool.yml").write_text(text)
        done = CliRunner().invoke(app, ["recipe", "import", "tool.yml", "--explain", *options])
        rows = {row["key"]: row for row in json.loads(done.stdout)["explained"]} if "--json" in options else {}
        return done, rows

    return explained


def test_each_key_has_its_value_its_meaning_and_what_it_becomes(explained):
    done, rows = explained(AXOLOTL, "--json")
    assert done.exit_code == 0
    keys = ["base_model", "adapter", "lora_r", "datasets[0].path", "datasets[0].type", "datasets[0].shards"]
    assert list(rows)[:10] == [*keys, "sequence_len", "bf16", "fp16", "embedding_lr"]
    assert rows["lora_r"] == {
        "key": "lora_r", "value": "8", "meaning": "rank of the adapter", "here": "method.lora_r: 8",
    }  # fmt: skip
    assert rows["adapter"]["here"] == 'method.type: "lora"'
    assert rows["bf16"]["here"] == 'model.dtype: "bfloat16"' and rows["fp16"]["here"] == "off"
    assert rows["datasets[0].shards"]["meaning"] == "part of the rows"
    assert rows["datasets[0].shards"]["here"].startswith("not imported: a part of a data set is")
    assert rows["embedding_lr"]["here"] == "not imported: write an item of train.lr_groups for the embedding"


def test_the_tools_defaults_are_rows_too(explained):
    done, _ = explained(AXOLOTL)
    lines = [line.split() for line in done.stdout.splitlines() if line.startswith("(default)")]
    assert ["(default)", "1", "Axolotl's", "default", "train.per_device_train_batch_size:", "1"] in lines
    assert ["(default)", "false", "Axolotl's", "default", "data.packing:", "false"] in lines


def test_the_table_replaces_the_recipe_on_stdout_and_out_still_writes_it(explained):
    done, _ = explained(AXOLOTL, "--out", "new.yaml")
    header = done.stdout.splitlines()[1].split("  ")
    assert [name.strip() for name in header if name.strip()] == ["key", "value there", "meaning there", "here"]
    assert "\nmodel:" not in done.stdout and "model_name_or_path: a/b" in Path("new.yaml").read_text()


def test_a_refused_file_is_explained_before_the_reasons(explained):
    done, _ = explained(AXOLOTL + "rl: grpo\n")
    assert isinstance(done.exception, UserError) and done.exception.exit_code == 2
    (row,) = [line for line in done.stdout.splitlines() if line.startswith("rl ")]
    assert "objective of training" in row and "refused: rl: grpo is not supported" in row
    assert "method.lora_r: 8" in done.stdout  # the other keys are explained, too


@pytest.mark.parametrize(
    ("key", "meaning"),
    [
        ("tokenizer.path", "file of the tokenizer"),
        ("datasets[0].path", "where the data sets are"),
        ("optimizer.lr", "learning rate"),
        ("revision_of_model", "version of the model"),
    ],
)
def test_a_name_means_what_its_section_says(key, meaning, explained):
    torchtune = """\
model: {_component_: torchtune.models.qwen2.qwen2_0_5b}
tokenizer: {path: vocab.json, max_seq_len: 8}
checkpointer: {checkpoint_dir: m}
dataset: {_component_: torchtune.datasets.alpaca_dataset}
optimizer: {lr: 0.1}
"""
    is_torchtune = key.startswith(("tokenizer", "optimizer"))
    _, rows = explained(torchtune if is_torchtune else f"{AXOLOTL}revision_of_model: main\n", "--json")
    assert rows[key]["meaning"] == meaning
