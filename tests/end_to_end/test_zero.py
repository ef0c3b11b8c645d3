"""DeepSpeed ZeRO on two processes: the losses of DDP, and the refusals."""

from __future__ import annotations

from importlib.util import find_spec
from pathlib import Path

import pytest
from command_line import losses
from quickstart_runs import saves, train_ranks
from safetensors.torch import load_file

from ligertune.errors import UserError

SETTINGS = {
    "train.max_steps": 4,
    "train.global_batch_size": 8,
    "data.val_split": 0,
    "data.datasets.0.max_samples": 35,
    "model.dtype": "float32",
    **saves(2),
}
STAGES = ["deepspeed_zero2", "deepspeed_zero3"]
needs_deepspeed = pytest.mark.skipif(find_spec("deepspeed") is None, reason="needs the package deepspeed")


def train_two_ranks(folder: Path, strategy: str, **changes: object) -> list[float]:
    return train_ranks(2, folder, **{**SETTINGS, "parallel.strategy": strategy, **changes})


@pytest.fixture(scope="module")
def ddp(tmp_path_factory) -> Path:
    """The folder of a DDP run."""
    folder = tmp_path_factory.mktemp("ddp")
    train_two_ranks(folder, "ddp")
    return folder / "run"


@needs_deepspeed
@pytest.mark.slow
@pytest.mark.parametrize("strategy", STAGES)
def test_losses_model_and_resumed_losses_are_those_of_ddp(strategy, ddp, tmp_path):
    assert train_two_ranks(tmp_path, strategy) == pytest.approx(losses(ddp), rel=1e-5)
    found, expected = (load_file(folder / "model" / "model.safetensors") for folder in (tmp_path / "run", ddp))
    assert found.keys() == expected.keys()
    assert all((found[name] - expected[name]).abs().max() < 1e-4 for name in expected)
    resumed = {"checkpoint.resume_from_checkpoint": tmp_path / "run" / "checkpoints" / "step-2"}
    assert train_two_ranks(tmp_path / "resumed", strategy, **resumed) == losses(tmp_path / "run")[2:]


@needs_deepspeed
@pytest.mark.slow
def test_the_best_adapter_is_gathered_from_sharded_weights(tmp_path):
    changes = {"method.type": "lora", "model.dtype": "bfloat16", "data.val_split": 0.2, "eval.eval_strategy": "steps",
               "eval.eval_steps": 2, "checkpoint.load_best_model_at_end": "true"}  # fmt: skip
    found = train_two_ranks(tmp_path, "deepspeed_zero3", **changes)
    assert found[-1] < found[0]
    adapter = load_file(tmp_path / "run" / "model" / "adapter_model.safetensors")
    assert all(weight.numel() for weight in adapter.values())
    assert any(weight.abs().max() > 0 for name, weight in adapter.items() if "lora_B" in name)


@needs_deepspeed
@pytest.mark.slow
def test_a_checkpoint_of_ddp_ranks_is_refused(ddp, tmp_path):
    resumed = {"checkpoint.resume_from_checkpoint": ddp / "checkpoints" / "step-2"}
    with pytest.raises((UserError, AssertionError), match="was written by 2 processes with ddp"):
        train_two_ranks(tmp_path, STAGES[0], **resumed)


@pytest.mark.parametrize(
    ("key", "value"),
    [("train.optim", "adafactor"), ("kernels.optimizer", "true"), ("method.type", "qlora"), ("task", "medusa")],
)
def test_keys_that_deepspeed_does_not_support_are_refused(key, value, recipe):
    from ligertune.recipe import load_recipe

    with pytest.raises(UserError, match=key):
        load_recipe(recipe, overrides=[f"parallel.strategy={STAGES[1]}", f"{key}={value}"])
