"""Medusa training on two ranks has the losses of one process, with DDP and with FSDP2."""

import json

import pytest
from safetensors.torch import load_file
from support.command_line import losses
from support.forked_ranks import on_ranks
from support.tasks.medusa_runs import WEIGHTS, train_medusa

pytestmark = pytest.mark.slow

SETTINGS = {
    "train.max_steps": 3,
    "train.global_batch_size": 4,
    "logging.logging_steps": 1,
    "medusa.eval_prompts": 0,
    "data.datasets.0.max_samples": 40,
    "checkpoint.save_strategy": "no",
    "model.dtype": "float32",
}


def one_process(folder, **changes: object) -> list[float]:
    return train_medusa(folder, **{**SETTINGS, "train.per_device_train_batch_size": 4, **changes})[0]


def two_ranks(folder, **changes: object) -> list[float]:
    settings = {**SETTINGS, "train.per_device_train_batch_size": 1, **changes}
    on_ranks(2, lambda rank: train_medusa(folder, **settings) and None)
    return losses(folder)


def assert_same_weights(one, other) -> None:
    found, expected = load_file(one), load_file(other)
    assert found.keys() == expected.keys()
    assert all((found[key] - expected[key]).abs().max() < 1e-4 for key in expected)


@pytest.fixture(scope="module")
def stage_1(tmp_path_factory):
    """(losses, folder) of one process."""
    folder = tmp_path_factory.mktemp("one") / "run"
    return one_process(folder), folder


@pytest.mark.parametrize("strategy", ["ddp", "fsdp"])
def test_stage_1_has_the_losses_of_one_process(strategy, stage_1, tmp_path):
    expected, folder = stage_1
    assert two_ranks(tmp_path / "run", **{"parallel.strategy": strategy}) == pytest.approx(expected, rel=1e-5)
    assert_same_weights(tmp_path / "run" / WEIGHTS, folder / WEIGHTS)
    assert json.loads((tmp_path / "run/medusa/config.json").read_text())["medusa_num_heads"] == 4


@pytest.mark.parametrize("method", ["full", "lora"])
def test_stage_2_under_fsdp_has_the_losses_of_one_process(method, stage_1, tmp_path):
    changes = {"medusa.stage": 2, "medusa.heads_path": stage_1[1] / "medusa", "train.learning_rate": 5e-4}
    changes |= {"method.type": method}
    expected = one_process(tmp_path / "one", **changes)
    found = two_ranks(tmp_path / "run", **changes, **{"parallel.strategy": "fsdp"})
    assert found == pytest.approx(expected, rel=1e-5)
    assert_same_weights(tmp_path / "run/model/model.safetensors", tmp_path / "one/model/model.safetensors")
