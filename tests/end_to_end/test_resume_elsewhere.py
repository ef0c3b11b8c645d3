"""A run that goes on with another number of processes, which share the model or do not: the losses are the same."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest
from command_line import losses, overrides
from command_line import run as run_command
from safetensors.torch import load_file

from ligertune.recipe import load_recipe
from ligertune.run import plan_for
from ligertune.run import run as train

SETTINGS = {
    "train.max_steps": 4,
    "train.global_batch_size": 8,
    "train.per_device_train_batch_size": 4,
    "logging.logging_steps": 1,
    "checkpoint.save_steps": 2,
    "data.val_split": 0,
    "data.datasets.0.max_samples": 35,
    "model.dtype": "float32",
}


def on(ranks: int, recipe: Path, folder: Path, **changes: object) -> list[float]:
    """Losses of a run with one process, or with several that this machine starts."""
    settings = {**SETTINGS, "checkpoint.output_dir": folder, **changes}
    if ranks == 1:
        train(plan_for(load_recipe(recipe, overrides=overrides(settings)[1::2])), lambda line: None)
    else:
        several = overrides({**settings, "parallel.num_processes": ranks})
        done = run_command([sys.executable, "-m", "ligertune", "train", str(recipe), *several], cwd=folder.parent)
        assert done.code == 0, done.err[-3000:]
    return losses(folder)


FSDP = {"parallel.strategy": "fsdp"}


@pytest.fixture(scope="module")
def alone(tmp_path_factory, quickstart) -> Path:
    """The folder of a run with one process."""
    folder = tmp_path_factory.mktemp("alone") / "run"
    on(1, quickstart / "stories260k.yaml", folder)
    return folder


@pytest.mark.slow
def test_two_ranks_go_on_with_what_one_left(alone, recipe, tmp_path):
    resumed = {"checkpoint.resume_from_checkpoint": alone / "checkpoints" / "step-2"}
    assert on(2, recipe, tmp_path / "run", **FSDP, **resumed) == pytest.approx(losses(alone)[2:], rel=1e-5)
    ours, theirs = (load_file(folder / "model" / "model.safetensors") for folder in (tmp_path / "run", alone))
    assert all((ours[name] - theirs[name]).abs().max() < 1e-4 for name in theirs)


@pytest.mark.slow
@pytest.mark.parametrize("strategy", ["fsdp", "ddp"])
def test_one_goes_on_with_what_two_ranks_left(strategy, alone, recipe, tmp_path):
    found = on(2, recipe, tmp_path / "two", **{"parallel.strategy": strategy})
    assert found == pytest.approx(losses(alone), rel=1e-5)
    resumed = {"checkpoint.resume_from_checkpoint": tmp_path / "two" / "checkpoints" / "step-2"}
    assert on(1, recipe, tmp_path / "one", **resumed) == pytest.approx(found[2:], rel=1e-5)


@pytest.mark.slow
def test_ranks_that_share_a_model_go_on_as_more_or_fewer(alone, recipe, tmp_path):
    batch = {"train.per_device_train_batch_size": 2}
    on(2, recipe, tmp_path / "two", **FSDP, **batch)
    resumed = {"checkpoint.resume_from_checkpoint": tmp_path / "two" / "checkpoints" / "step-2"}
    assert on(4, recipe, tmp_path / "four", **FSDP, **batch, **resumed) == pytest.approx(losses(alone)[2:], rel=1e-5)
