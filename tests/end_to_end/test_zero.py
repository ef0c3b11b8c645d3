"""DeepSpeed ZeRO on two processes: the losses of DDP, and the refusals."""

from __future__ import annotations

from importlib.util import find_spec
from pathlib import Path

import pytest
from command_line import losses, overrides, run, train_command
from safetensors.torch import load_file

SETTINGS = {
    "parallel.num_processes": 2,
    "train.max_steps": 4,
    "train.global_batch_size": 8,
    "train.per_device_train_batch_size": 2,
    "logging.logging_steps": 1,
    "checkpoint.save_steps": 2,
    "data.val_split": 0,
    "data.datasets.0.max_samples": 35,
    "model.dtype": "float32",
}
STAGES = ["deepspeed_zero2", "deepspeed_zero3"]
installed = pytest.mark.skipif(find_spec("deepspeed") is None, reason="needs the package deepspeed")


def train_two_ranks(folder: Path, strategy: str, **changes: object) -> list[float]:
    settings = {**SETTINGS, "checkpoint.output_dir": folder, "parallel.strategy": strategy, **changes}
    done = run(train_command(**settings), cwd=folder.parent)
    assert done.code == 0, done.err[-3000:]
    return losses(folder)


@pytest.fixture(scope="module")
def ddp(tmp_path_factory) -> Path:
    """The folder of a DDP run."""
    folder = tmp_path_factory.mktemp("ddp") / "run"
    train_two_ranks(folder, "ddp")
    return folder


@installed
@pytest.mark.slow
@pytest.mark.parametrize("strategy", STAGES)
def test_losses_model_and_resumed_losses_are_those_of_ddp(strategy, ddp, tmp_path):
    assert train_two_ranks(tmp_path / "run", strategy) == pytest.approx(losses(ddp), rel=1e-5)
    found, expected = (load_file(folder / "model" / "model.safetensors") for folder in (tmp_path / "run", ddp))
    assert found.keys() == expected.keys()
    assert all((found[name] - expected[name]).abs().max() < 1e-4 for name in expected)
    resumed = {"checkpoint.resume_from_checkpoint": tmp_path / "run" / "checkpoints" / "step-2"}
    assert train_two_ranks(tmp_path / "resumed", strategy, **resumed) == losses(tmp_path / "run")[2:]


@installed
@pytest.mark.slow
def test_the_best_adapter_is_gathered_from_sharded_weights(tmp_path):
    changes = {"method.type": "lora", "model.dtype": "bfloat16", "data.val_split": 0.2, "eval.eval_strategy": "steps",
               "eval.eval_steps": 2, "checkpoint.load_best_model_at_end": "true"}  # fmt: skip
    found = train_two_ranks(tmp_path / "run", "deepspeed_zero3", **changes)
    assert found[-1] < found[0]
    adapter = load_file(tmp_path / "run" / "model" / "adapter_model.safetensors")
    assert all(weight.numel() for weight in adapter.values())
    assert any(weight.abs().max() > 0 for name, weight in adapter.items() if "lora_B" in name)


@installed
@pytest.mark.slow
def test_a_checkpoint_of_ddp_ranks_is_refused(ddp, tmp_path):
    resumed = {"checkpoint.resume_from_checkpoint": ddp / "checkpoints" / "step-2", "parallel.strategy": STAGES[0]}
    done = run(train_command(**{**SETTINGS, "checkpoint.output_dir": tmp_path / "run", **resumed}), cwd=tmp_path)
    assert done.code == 2, done.err[-3000:]
    assert "was written by 2 processes with ddp" in done.err


@pytest.mark.skipif(find_spec("deepspeed") is not None, reason="the package deepspeed is installed")
def test_without_deepspeed_the_message_says_how_to_install_it(recipe, ligertune, tmp_path):
    done = ligertune("train", recipe, *overrides({**SETTINGS, "parallel.strategy": STAGES[0]}))
    assert done.code == 2 and done.err.count("Error:") == 1
    assert "deepspeed_zero2 needs the package deepspeed" in done.err and "ligertune[deepspeed]" in done.err
    assert not (tmp_path / "run").exists()


@pytest.mark.parametrize(
    ("key", "value"),
    [("train.optim", "adafactor"), ("kernels.optimizer", "true"), ("method.type", "qlora"), ("task", "medusa")],
)
def test_keys_that_deepspeed_does_not_support_are_refused(key, value, recipe):
    from ligertune.errors import UserError
    from ligertune.recipe import load_recipe

    with pytest.raises(UserError, match=key):
        load_recipe(recipe, overrides=[f"parallel.strategy={STAGES[1]}", f"{key}={value}"])
