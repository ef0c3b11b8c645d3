"""scripts/bench_against: the speed of this tree and of another commit's."""

import json
from argparse import Namespace

import pytest
from support.command_line import ROOT
from support.script_modules import load_script


@pytest.fixture
def script():
    return load_script("bench_against")


@pytest.mark.parametrize(("length", "batches"), [(512, (4, 16, 32)), (4096, (1, 2, 4))])
def test_longer_rows_come_in_batches_of_as_many_tokens(script, length, batches):
    assert script.batches_of(Namespace(small=False, length=length), "llama") == batches
    assert script.batches_of(Namespace(small=False, length=length), "packed") == (8,)


def test_a_mixture_has_published_widths_and_fewer_layers(script, tmp_path):
    options = Namespace(small=False, corpus=tmp_path, out=tmp_path, length=512)
    settings = script.settings_of(options, "moe")
    config = json.loads((settings["model.model_name_or_path"] / "config.json").read_text(encoding="utf-8"))
    assert (config["num_experts"], config["num_experts_per_tok"], config["hidden_size"]) == (64, 8, 2048)
    assert settings["model.num_hidden_layers"] == 8 and settings["train.per_device_train_batch_size"] == 16


@pytest.mark.parametrize(
    ("this", "other", "slower"),
    [
        ([99.2], [100.0], False),  # by less than 1 %
        ([98.0], [100.0], True),
        ([98.0, 94.0], [100.0], False),  # runs of the same tree differ by more
        ([98.0, 99.5], [100.0, 98.5], False),  # the best of each
    ],
)
def test_a_row_is_slower_if_its_best_run_is_and_runs_of_a_tree_agree(script, this, other, slower):
    row = script.Measured({"this": [(speed, 0.0) for speed in this], "other": [(speed, 0.0) for speed in other]})
    assert row.is_slower is slower


@pytest.mark.slow
def test_a_small_run_measures_every_row_in_both_trees(script, tmp_path, monkeypatch, capsys):
    arguments = ["--small", "--only", "llama,lora,packed,moe", "--steps", "2", "--seconds", "0", "--out", str(tmp_path)]
    monkeypatch.setattr("sys.argv", ["bench_against", str(ROOT), *arguments])
    script.main()  # tells whether a row is slower: two steps on a CPU may be
    table = capsys.readouterr().out.split("ratio")[1]
    assert "failed" not in table
    assert [line.split("  ")[0] for line in table.splitlines()[1:]] == [
        "llama batch 1", "llama batch 2", "lora", "packed", "moe"
    ]  # fmt: skip
