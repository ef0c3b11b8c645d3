"""Every key of the recipe's medusa section has an effect; a resumed run is bit-exact."""

import pytest
import torch
from safetensors.torch import load_file
from support.tasks.medusa_runs import WEIGHTS, train_medusa

from ligertune.features.medusa.medusa_run import report_on
from ligertune.planning.options import RunOptions
from ligertune.recipe import load_recipe

pytestmark = pytest.mark.slow

SHORT = {
    "train.max_steps": 4,
    "train.per_device_train_batch_size": 1,
    "train.warmup_ratio": 0.0,
    "logging.logging_steps": 1,
    "checkpoint.save_strategy": "no",
    "medusa.num_heads": 2,
    "medusa.eval_prompts": 0,
    "data.datasets.0.max_samples": 30,
    "data.val_split": 0.1,
}


@pytest.fixture(scope="module")
def train(tmp_path_factory):
    """Train a short run with changes; return (losses, report, folder)."""

    def go(folder=None, **changes: object) -> tuple[list[float], dict, object]:
        return train_medusa(folder or tmp_path_factory.mktemp("run") / "run", **{**SHORT, **changes})

    return go


@pytest.fixture(scope="module")
def usual(train):
    return train()


@pytest.fixture(scope="module")
def stage_2(usual):
    """Settings of a second stage that starts from the usual first one."""
    return {"medusa.stage": 2, "medusa.heads_path": usual[2] / "medusa", "train.learning_rate": 5e-4}


STAGE_1 = {"num_heads": 3, "num_layers": 2, "lm_head": "shared", "decay_coefficient": 0.5}


@pytest.mark.parametrize("key", STAGE_1)
def test_a_key_changes_the_first_stage(key, train, usual):
    assert train(**{f"medusa.{key}": STAGE_1[key]})[0] != usual[0]


@pytest.fixture(scope="module")
def joint(train, stage_2):
    return train(**stage_2)


STAGE_2 = {"heads_coefficient": 0.4, "heads_warmup_ratio": 0.9, "lr_multiplier": 1.0, "self_distillation": True}


@pytest.mark.parametrize("key", STAGE_2)
def test_a_key_changes_the_second_stage(key, train, stage_2, joint):
    assert train(**stage_2, **{f"medusa.{key}": STAGE_2[key]})[0] != joint[0]


def test_the_second_stage_starts_from_the_heads_and_trains_both(usual, joint):
    before, after = load_file(usual[2] / WEIGHTS), load_file(joint[2] / WEIGHTS)
    assert before.keys() == after.keys() and all((before[name] != after[name]).any() for name in before)
    assert (joint[2] / "model" / "model.safetensors").is_file() and not (usual[2] / "model").exists()
    assert joint[1]["n_trainable"] == joint[1]["n_parameters"] > usual[1]["n_trainable"]


def test_an_adapter_trains_in_the_second_stage_and_is_merged(train, stage_2, joint, quickstart, tmp_path):
    changes = {**stage_2, "method.type": "lora", "method.lora_r": 4, "medusa.eval_prompts": 1}
    saved = {"checkpoint.save_strategy": "steps", "checkpoint.save_steps": 2, "folder": tmp_path / "run"}
    found, report, folder = train(**changes, **saved)
    assert found[0] == pytest.approx(joint[0][0], rel=1e-6) and found != joint[0]
    assert report["n_trainable"] < report["n_parameters"] / 2
    assert not (folder / "model" / "adapter_config.json").exists()
    before = load_file(quickstart / "stories260K" / "model.safetensors")
    after = load_file(folder / "model" / "model.safetensors")
    assert before.keys() == after.keys()
    moved = {name for name in before if not torch.equal(before[name], after[name])}
    assert moved == {name for name in before if name.endswith("_proj.weight")}
    assert report["medusa"]["decoding"]["identical"] == 1  # saved heads and saved model belong together
    weights = load_file(folder / WEIGHTS)
    (folder / "report.json").unlink()
    assert train(**changes, **saved, **{"checkpoint.resume_from_checkpoint": "auto"})[0] == found
    resumed = load_file(folder / WEIGHTS)
    assert all(torch.equal(resumed[name], t) for name, t in weights.items())
    report_on(RunOptions.of(load_recipe(folder / "resolved_recipe.yaml")))


def test_an_adapter_on_bfloat16_weights(train, stage_2, joint):
    changes = {"method.type": "lora", "model.dtype": "bfloat16", "medusa.eval_prompts": 1}
    found, report, folder = train(**stage_2, **changes)
    assert found[0] == pytest.approx(joint[0][0], rel=1e-2)
    assert load_file(folder / "model" / "model.safetensors")["model.norm.weight"].dtype is torch.bfloat16
    assert report["medusa"]["decoding"]["prompts"] == 1
    assert train(**stage_2, **changes, **{"kernels.enabled": False})[0] == pytest.approx(found, rel=1e-2)


def test_kernels_off_gives_the_same_losses(train, usual):
    """With the loss from all logits at once, and unpatched modules."""
    found, report, _ = train(**{"kernels.enabled": False})
    assert found == pytest.approx(usual[0], rel=1e-4)
    assert report["kernels"] == ()


def test_packing_gives_the_losses_of_single_examples(train):
    """One step is the whole epoch, packed or with one example per row."""
    whole = {"train.max_steps": "null", "train.num_train_epochs": 1, "train.per_device_train_batch_size": 27}
    packed = train(**whole)[0]
    alone = train(**whole, **{"data.packing": False})[0]
    assert packed == pytest.approx(alone, rel=1e-5)


@pytest.mark.parametrize("stage", [1, 2])
def test_resume_is_bit_exact(train, stage_2, stage, tmp_path):
    changes = {"checkpoint.save_strategy": "steps", "checkpoint.save_steps": 2, "folder": tmp_path / "run"}
    changes |= stage_2 if stage == 2 else {}
    expected, _, folder = train(**changes)
    weights = load_file(folder / WEIGHTS)
    (folder / "report.json").unlink()  # as if the run had been killed after step 2
    found, report, _ = train(**changes, **{"checkpoint.resume_from_checkpoint": "auto"})
    assert report["resumed_from"] == 2
    assert found == expected
    resumed = load_file(folder / WEIGHTS)
    assert all((resumed[name] == t).all() for name, t in weights.items())
