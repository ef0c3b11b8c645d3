"""A resumed run takes the optimizer's settings from its recipe, and the states from the checkpoint."""

import shutil
from pathlib import Path

import pytest
import torch
from support.command_line import RECIPE, losses, run_here
from support.quickstart_runs import saves, train

STEPS = {**saves(2), "train.max_steps": 5, "checkpoint.save_total_limit": 4}
NORMS = {"parameters": "norm", "learning_rate": 1e-4}


@pytest.fixture(scope="module", params=["adamw_torch", "muon"])
def stopped(request, tmp_path_factory) -> tuple[str, Path]:
    """An optimizer, and a run with it whose newest checkpoint is that of step 2."""
    folder = tmp_path_factory.mktemp("stopped")
    train(folder, **STEPS, **{"train.optim": request.param, "train.lr_groups": [NORMS]})
    shutil.rmtree(folder / "run" / "checkpoints" / "step-4")
    (folder / "run" / "report.json").unlink()
    return request.param, folder


def resumed(stopped: tuple[str, Path], folder: Path, **changes: object) -> list[dict]:
    """Return the groups of the optimizer after step 4."""
    optim, before = stopped
    shutil.copytree(before, folder, dirs_exist_ok=True)
    settings = {
        **STEPS,
        "train.optim": optim,
        "train.lr_groups": [NORMS],
        "checkpoint.resume_from_checkpoint": "newest",
    }
    train(folder, **{**settings, "checkpoint.overwrite": False, **changes})
    states = torch.load(folder / "run" / "checkpoints" / "step-4" / "optimizer.bin", weights_only=True)
    return states["param_groups"]


def test_changed_settings_take_effect(stopped, tmp_path) -> None:
    rate = 1e-2
    changes = {
        "train.weight_decay": 0.5,
        "train.adam_epsilon": 1e-2,
        "train.learning_rate": rate,
        "train.lr_scheduler_type": "constant",
        "train.warmup_ratio": 0.0,
    }
    groups = resumed(stopped, tmp_path, **changes)
    assert max(group["weight_decay"] for group in groups) == 0.5
    assert all(group["eps"] == 1e-2 for group in groups if "betas" in group)
    # the norms' own rate stays what the recipe says, whatever the others'
    assert {round(group["lr"], 9) for group in groups} == {rate, NORMS["learning_rate"]}
    assert losses(tmp_path / "run") != losses(stopped[1] / "run")


def test_unchanged_settings_give_the_same_losses(stopped, tmp_path) -> None:
    resumed(stopped, tmp_path)
    assert losses(tmp_path / "run") == losses(stopped[1] / "run")


def test_two_places_to_continue_from_are_refused(tmp_path) -> None:
    named = "checkpoint.resume_from_checkpoint=elsewhere"
    done = run_here("train", RECIPE, "--resume", "--set", named, cwd=tmp_path)
    assert done.code == 2 and "Leave --resume out to continue from a checkpoint that you name." in done.err
