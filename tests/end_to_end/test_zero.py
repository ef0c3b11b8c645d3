"""DeepSpeed's ZeRO on two processes: the losses of DDP; and what is said where it cannot be."""

from __future__ import annotations

import sys
from importlib.util import find_spec
from pathlib import Path

import pytest
from command_line import losses, overrides, run
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


def on_two(recipe: Path, folder: Path, strategy: str, **changes: object) -> list[float]:
    settings = {**SETTINGS, "checkpoint.output_dir": folder, "parallel.strategy": strategy, **changes}
    done = run([sys.executable, "-m", "ligertune", "train", str(recipe), *overrides(settings)], cwd=folder.parent)
    assert done.code == 0, done.err[-3000:]
    return losses(folder)


@pytest.fixture(scope="module")
def ddp(tmp_path_factory, quickstart) -> Path:
    """The folder of a run with DDP."""
    folder = tmp_path_factory.mktemp("ddp") / "run"
    on_two(quickstart / "stories260k.yaml", folder, "ddp")
    return folder


@installed
@pytest.mark.slow
@pytest.mark.parametrize("strategy", STAGES)
def test_losses_and_model_are_those_of_ddp_and_resumed_ones_too(strategy, ddp, recipe, tmp_path):
    expected = losses(ddp)
    assert on_two(recipe, tmp_path / "run", strategy) == pytest.approx(expected, rel=1e-5)
    ours, theirs = (load_file(folder / "model" / "model.safetensors") for folder in (tmp_path / "run", ddp))
    assert ours.keys() == theirs.keys()
    assert all((ours[name] - theirs[name]).abs().max() < 1e-4 for name in theirs)
    resumed = {"checkpoint.resume_from_checkpoint": tmp_path / "run" / "checkpoints" / "step-2"}
    assert on_two(recipe, tmp_path / "resumed", strategy, **resumed) == losses(tmp_path / "run")[2:]


@installed
@pytest.mark.slow
def test_the_best_adapter_is_kept_of_shared_weights(recipe, tmp_path):
    changes = {"method.type": "lora", "model.dtype": "bfloat16", "data.val_split": 0.2, "eval.eval_strategy": "steps",
               "eval.eval_steps": 2, "checkpoint.load_best_model_at_end": "true"}  # fmt: skip
    found = on_two(recipe, tmp_path / "run", "deepspeed_zero3", **changes)
    assert found[-1] < found[0]
    adapter = load_file(tmp_path / "run" / "model" / "adapter_model.safetensors")
    assert all(weight.numel() for weight in adapter.values())
    assert any(weight.abs().max() > 0 for name, weight in adapter.items() if "lora_B" in name)


@installed
@pytest.mark.slow
def test_what_other_ranks_wrote_is_refused(ddp, recipe, tmp_path, ligertune):
    resumed = {"checkpoint.resume_from_checkpoint": ddp / "checkpoints" / "step-2", "parallel.strategy": STAGES[0]}
    done = ligertune("train", recipe, *overrides({**SETTINGS, "checkpoint.output_dir": tmp_path / "run", **resumed}))
    assert done.code == 2, done.err[-3000:]
    assert "was written by 2 processes with ddp" in done.err


@pytest.mark.skipif(find_spec("deepspeed") is not None, reason="the package deepspeed is installed")
def test_without_the_package_a_sentence_says_what_to_install(recipe, ligertune, tmp_path):
    done = ligertune("train", recipe, *overrides({**SETTINGS, "parallel.strategy": STAGES[0]}))
    assert done.code == 2 and done.err.count("Error:") == 1
    assert "deepspeed_zero2 needs the package deepspeed" in done.err and "ligertune[deepspeed]" in done.err
    assert not (tmp_path / "run").exists()


@pytest.mark.parametrize(
    ("key", "value"),
    [("train.optim", "adafactor"), ("kernels.optimizer", "true"), ("method.type", "qlora"), ("task", "medusa")],
)
def test_what_the_engine_cannot_step_is_refused(key, value, recipe):
    from ligertune.errors import UserError
    from ligertune.recipe import load_recipe

    with pytest.raises(UserError, match=key):
        load_recipe(recipe, overrides=[f"parallel.strategy={STAGES[1]}", f"{key}={value}"])
