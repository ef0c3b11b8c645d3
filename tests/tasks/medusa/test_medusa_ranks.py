"""Medusa training on two processes: the losses are those of one, under DDP and under FSDP2."""

from __future__ import annotations

import json
import sys

import pytest
from command_line import losses, overrides, run
from safetensors.torch import load_file

from ligertune.recipe import load_recipe
from ligertune.recipe.read import bundled
from ligertune.run import plan_for
from ligertune.run import run as train

pytestmark = pytest.mark.slow

SETTINGS = {
    "train.max_steps": 3,
    "train.global_batch_size": 4,
    "logging.logging_steps": 1,
    "medusa.eval_prompts": 0,
    "data.datasets.0.max_samples": 40,
    "checkpoint.save_strategy": "no",
    "checkpoint.output_dir": "run",
    "model.dtype": "float32",
}
RECIPE = bundled("medusa/stories260k.yaml")


def alone(folder, **changes: object) -> list[float]:
    settings = {**SETTINGS, "train.per_device_train_batch_size": 4, "checkpoint.output_dir": folder, **changes}
    train(plan_for(load_recipe(RECIPE, overrides=overrides(settings)[1::2])), lambda line: None)
    return losses(folder)


@pytest.fixture(scope="module")
def stage_1(tmp_path_factory):
    """(losses, folder of the heads) of one process."""
    folder = tmp_path_factory.mktemp("alone") / "run"
    return alone(folder), folder / "medusa"


def two_ranks(cwd, *launcher: str, **changes: object) -> list[float]:
    start = [
        sys.executable,
        "-m",
        "accelerate.commands.launch",
        *launcher,
        "--num_processes",
        "2",
        "--num_machines",
        "1",
    ]
    quiet = ["--mixed_precision", "no", "--dynamo_backend", "no", "--main_process_port", "0", "-m", "ligertune"]
    settings = {**SETTINGS, "train.per_device_train_batch_size": 1, **changes}
    done = run([*start, *quiet, "train", str(RECIPE), *overrides(settings)], cwd=cwd)
    assert done.code == 0, done.err[-3000:]
    return losses(cwd / "run")


FSDP = ("--use_fsdp", "--fsdp_version", "2")


@pytest.mark.parametrize("launcher", [("--multi_gpu",), FSDP], ids=["ddp", "fsdp2"])
def test_stage_1_has_the_losses_of_one_process(launcher, stage_1, tmp_path):
    expected, heads = stage_1
    assert two_ranks(tmp_path, *launcher) == pytest.approx(expected, rel=1e-5)
    name = "medusa_lm_head.safetensors"
    ours, theirs = load_file(tmp_path / "run/medusa" / name), load_file(heads / name)
    assert ours.keys() == theirs.keys()
    assert all((ours[key] - theirs[key]).abs().max() < 1e-4 for key in ours)
    assert json.loads((tmp_path / "run/medusa/config.json").read_text())["medusa_num_heads"] == 4


@pytest.mark.parametrize("method", ["full", "lora"])
def test_stage_2_under_fsdp_has_the_losses_of_one_process(method, stage_1, tmp_path):
    changes = {"medusa.stage": 2, "medusa.heads_path": stage_1[1], "train.learning_rate": 5e-4, "method.type": method}
    expected = alone(tmp_path / "alone", **changes)
    assert two_ranks(tmp_path, *FSDP, **changes) == pytest.approx(expected, rel=1e-5)
    trained = load_file(tmp_path / "run/model/model.safetensors")
    theirs = load_file(tmp_path / "alone/model/model.safetensors")
    assert trained.keys() == theirs.keys()
    assert all((trained[key] - theirs[key]).abs().max() < 1e-4 for key in theirs)
