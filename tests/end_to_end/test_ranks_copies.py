"""HSDP: ranks divide into copies of the model, each shared by the ranks of one; it trains as one process does."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch
from command_line import losses, overrides
from test_resume_elsewhere import FSDP, on

from ligertune.errors import UserError
from ligertune.recipe import load_recipe
from ligertune.run import plan_for

# a step of 8 rows on 4 ranks is accumulated: copies add up their gradients, and meet once
BATCH = {"train.per_device_train_batch_size": 1}
COPIES = {**FSDP, **BATCH, "parallel.dp_replicate_size": 2}


@pytest.fixture(scope="module")
def alone(tmp_path_factory, quickstart) -> Path:
    """The folder of a run with one process."""
    folder = tmp_path_factory.mktemp("alone") / "run"
    on(1, quickstart / "stories260k.yaml", folder)
    return folder


@pytest.fixture(scope="module")
def copies(tmp_path_factory, quickstart) -> Path:
    """That of one with two copies of two ranks."""
    folder = tmp_path_factory.mktemp("copies") / "run"
    on(4, quickstart / "stories260k.yaml", folder, **COPIES)
    return folder


@pytest.mark.slow
def test_two_copies_of_two_ranks_train_as_one_process_does(alone, copies):
    from transformers import AutoModelForCausalLM

    assert losses(copies) == pytest.approx(losses(alone), rel=1e-5)
    plan = json.loads((copies / "plan.json").read_text(encoding="utf-8"))
    assert (plan["strategy"], plan["strategy_why"]) == ("fsdp", "2 copies, each shared by 2 processes")
    ours, info = AutoModelForCausalLM.from_pretrained(copies / "model", output_loading_info=True)
    assert not info["missing_keys"] and not info["unexpected_keys"]
    theirs = AutoModelForCausalLM.from_pretrained(alone / "model").state_dict()
    assert all(torch.allclose(ours.state_dict()[name], theirs[name], atol=1e-4) for name in theirs)


@pytest.mark.slow
def test_a_checkpoint_holds_one_copy(copies):
    parts = copies / "checkpoints" / "step-2" / "pytorch_model_fsdp_0"
    model = (copies / "model" / "model.safetensors").stat().st_size
    assert sum(part.stat().st_size for part in parts.glob("*.distcp")) < 1.5 * model


@pytest.mark.slow
@pytest.mark.parametrize("ranks", [1, 2])
def test_one_process_or_one_copy_goes_on_with_what_two_copies_left(ranks, copies, recipe, tmp_path):
    resumed = {"checkpoint.resume_from_checkpoint": copies / "checkpoints" / "step-2"}
    found = on(ranks, recipe, tmp_path / "run", **FSDP, **BATCH, **resumed)
    assert found == pytest.approx(losses(copies)[2:], rel=1e-5)


@pytest.mark.slow
def test_two_copies_go_on_with_what_they_or_one_process_left(alone, copies, recipe, tmp_path):
    for name, folder in {"theirs": alone, "own": copies}.items():
        resumed = {"checkpoint.resume_from_checkpoint": folder / "checkpoints" / "step-2"}
        assert on(4, recipe, tmp_path / name, **COPIES, **resumed) == pytest.approx(losses(alone)[2:], rel=1e-5)
    assert losses(tmp_path / "own") == losses(copies)[2:]


def test_more_copies_than_processes_can_shard_are_refused_before_processes_start(recipe, tmp_path):
    changes = overrides({**COPIES, "checkpoint.output_dir": tmp_path / "run"})[1::2]
    with pytest.raises(UserError, match="2 copies need a multiple of 2 processes, and at least 4"):
        plan_for(load_recipe(recipe, overrides=changes), processes=2)
    assert not (tmp_path / "run").exists()
