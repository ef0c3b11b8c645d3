"""`ligertune export --check`: which models are compared, and what a difference looks like."""

import json
import shutil

import pytest
import torch
from safetensors.torch import load_file, save_file
from support.command_line import run_here
from support.quickstart_runs import train
from torch import nn

from ligertune.errors import UserError
from ligertune.training.checkpoint.export_check import ExportCheck, compare_logits

SETTINGS = {"model.dtype": "float32", "train.max_steps": 2, "checkpoint.save_strategy": "steps",
            "checkpoint.save_steps": 1, "train.learning_rate": 0.01}  # fmt: skip


@pytest.fixture(scope="module")
def adapted(tmp_path_factory):
    """A finished LoRA run with checkpoints: its folder."""
    folder = tmp_path_factory.mktemp("adapted")
    train(folder, **SETTINGS, **{"method.type": "lora", "method.lora_r": 4})
    return folder / "run"


@pytest.fixture(scope="module")
def whole(tmp_path_factory):
    """A finished run of full fine-tuning: its folder."""
    folder = tmp_path_factory.mktemp("whole")
    train(folder, **SETTINGS)
    return folder / "run"


def check(run, *arguments, cwd):
    done = run_here("export", run, "--check", "--json", *arguments, cwd=cwd)
    assert done.code == 0, done.err
    found = json.loads(done.out)["check"]
    assert all(row["is_equal"] and row["relative"] < 1e-5 for row in found["comparisons"])
    return [row["name"] for row in found["comparisons"]], found


def test_an_adapter_is_compared_as_saved_and_as_exported(adapted, tmp_path):
    names, found = check(adapted, "--out", "merged", cwd=tmp_path)
    assert names == ["saved adapter", "exported merged model"]
    assert "rows of" in found["compared_on"]
    names, _ = check(adapted, "--out", "alone", "--adapter", cwd=tmp_path)
    assert names == ["saved adapter", "exported adapter"]


@pytest.mark.slow
def test_full_fine_tuning_and_a_checkpoint(whole, adapted, tmp_path):
    assert check(whole, "--out", "copied", cwd=tmp_path)[0] == ["saved model", "exported model"]
    step_1 = ("--checkpoint", "step-1")
    assert check(whole, *step_1, "--out", "early", cwd=tmp_path)[0] == ["exported model"]
    assert check(adapted, *step_1, "--out", "early_merged", cwd=tmp_path)[0] == ["exported merged model"]


def test_an_earlier_export_is_compared_as_it_is_and_a_changed_weight_is_found(adapted, tmp_path):
    check(adapted, "--out", "merged", cwd=tmp_path)
    file = tmp_path / "merged" / "model.safetensors"
    weights = load_file(file)
    weights["model.layers.0.mlp.up_proj.weight"] *= 1.1
    save_file(weights, file, {"format": "pt"})
    done = run_here("export", adapted, "--out", "merged", "--check", "--json", cwd=tmp_path)
    assert done.code == 1
    assert "the exported merged model in merged computes other logits than the trained one" in done.err
    rows = json.loads(done.out)["check"]["comparisons"]
    assert [row["is_equal"] for row in rows] == [True, False]
    wrong = run_here("export", adapted, "--out", "merged", "--check", "--adapter", cwd=tmp_path)
    assert wrong.code == 2 and "merged holds a whole model, and the export is an adapter" in wrong.err


def test_an_adapter_without_its_run_needs_a_prompt(adapted, tmp_path):
    shutil.copytree(adapted / "model", tmp_path / "adapter")
    done = run_here("export", "adapter", "--out", "merged", "--check", cwd=tmp_path)
    assert done.code == 2 and "belongs to no run" in done.err and "--prompt" in done.err
    names, found = check("adapter", "--out", "merged", "--prompt", "Once upon a time", cwd=tmp_path)
    assert names == ["saved adapter", "exported merged model"] and "of the prompt" in found["compared_on"]


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (("--prompt", "a"), "--prompt belongs to --check"),
        (("--check", "--dry-run"), "--check needs the exported model"),
        (("--check", "--prompt", ""), "--prompt: the text is empty"),
    ],
)
def test_options_that_do_not_fit_are_refused(arguments, words, tmp_path):
    done = run_here("export", "nowhere", *arguments, cwd=tmp_path)
    assert done.code == 2 and words in done.err


class Table(nn.Module):
    """A model whose logits are a row of a table for each token."""

    def __init__(self, table: torch.Tensor) -> None:
        super().__init__()
        self.table = nn.Parameter(table)

    def forward(self, input_ids: torch.Tensor):
        return type("Output", (), {"logits": self.table[input_ids]})


def test_what_rounding_explains_depends_on_the_dtype(tmp_path):
    table, ids = torch.randn(5, 7, generator=torch.Generator().manual_seed(0)), [torch.arange(5)]
    expected = [table]
    rounded = compare_logits("model", tmp_path, Table(table.bfloat16()), ids, expected)
    assert rounded.is_equal and rounded.dtype == "bfloat16" and 1e-4 < rounded.relative < 5e-3
    narrow = compare_logits("model", tmp_path, Table(table.bfloat16().float()), ids, expected)
    assert not narrow.is_equal and narrow.dtype == "float32"
    moved = compare_logits("model", tmp_path, Table(table.roll(1, 1)), ids, expected)
    assert moved.same_argmax < 0.5 and moved.largest > 0.5
    broken = compare_logits("model", tmp_path, Table(table * float("nan")), ids, expected)
    with pytest.raises(UserError, match="computes other logits") as caught:
        ExportCheck((rounded, broken), "5 tokens", ()).raise_if_different()
    assert caught.value.exit_code == 1
