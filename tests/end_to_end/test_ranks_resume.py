"""Runs of several ranks (DDP, FSDP, HSDP, context parallel, ZeRO) train and resume as one process does."""

import json
from importlib.util import find_spec
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file
from support.command_line import losses, weights
from support.forked_ranks import on_ranks
from support.quickstart_runs import (
    RESUME,
    TWO_LAYERS,
    detach_loss,
    plan_run,
    recipe_for,
    saves,
    train_ranks,
    unfinished,
)

from ligertune.errors import UserError
from ligertune.run import run
from ligertune.training.resolve import plan_for

SETTINGS = {
    **TWO_LAYERS,
    "train.max_steps": 4,
    "train.global_batch_size": 8,
    "train.per_device_train_batch_size": 4,
    "data.datasets.0.max_samples": 35,
    "data.val_split": 0.2,
    "data.packing": True,
    "eval.eval_strategy": "steps",
    "eval.eval_steps": 2,
    "model.dtype": "float32",
    **saves(2),
}
FSDP = {**SETTINGS, "parallel.strategy": "fsdp", "train.per_device_train_batch_size": 1}
HSDP = {**FSDP, "parallel.dp_replicate_size": 2}  # two replicas, each sharded over two ranks
CONTEXT_PARALLEL = {**FSDP, "parallel.cp_size": 2, "train.per_device_train_batch_size": 4}
DDP = {**SETTINGS, "parallel.strategy": "ddp"}
WAYS = {"fsdp": (2, FSDP), "ddp": (2, DDP), "hsdp": (4, HSDP), "context parallel": (4, CONTEXT_PARALLEL)}


@pytest.fixture(scope="module")
def alone(tmp_path_factory) -> Path:
    """The folder of a run on one process."""
    folder = tmp_path_factory.mktemp("alone")
    train_ranks(1, folder, **SETTINGS)
    return folder / "run"


@pytest.fixture(scope="module")
def ranks_run(tmp_path_factory):
    """ranks_run(way): the folder of a run on the ranks of this way, trained once."""
    runs: dict[str, Path] = {}

    def get(way: str) -> Path:
        if way not in runs:
            ranks, settings = WAYS[way]
            runs[way] = tmp_path_factory.mktemp("ranks")
            train_ranks(ranks, runs[way], **settings)
        return runs[way] / "run"

    return get


def from_step_2(run_folder: Path) -> dict[str, Path]:
    return {"checkpoint.resume_from_checkpoint": run_folder / "checkpoints" / "step-2"}


def test_context_parallel_ranks_have_the_losses_of_one_process(alone, tmp_path):
    assert train_ranks(2, tmp_path, **CONTEXT_PARALLEL) == pytest.approx(losses(alone), rel=1e-5)
    assert losses(tmp_path / "run", "eval_loss") == pytest.approx(losses(alone, "eval_loss"), rel=1e-5)
    batching = json.loads((tmp_path / "run" / "plan.json").read_text(encoding="utf-8"))["batching"]
    assert (batching["accumulation"], batching["world_size"], batching["global_batch_size"]) == (2, 2, 8)


@pytest.mark.slow
@pytest.mark.parametrize("way", WAYS)
def test_one_process_resumes_what_ranks_saved(way, ranks_run, alone, tmp_path):
    assert losses(ranks_run(way)) == pytest.approx(losses(alone), rel=1e-5)
    found, expected = (load_file(folder / "model" / "model.safetensors") for folder in (ranks_run(way), alone))
    assert all(torch.allclose(found[name], expected[name], atol=1e-4) for name in expected)
    resumed = train_ranks(1, tmp_path, **{**SETTINGS, **from_step_2(ranks_run(way))})
    assert resumed == pytest.approx(losses(alone)[2:], rel=1e-5)


@pytest.mark.slow
@pytest.mark.parametrize("way", WAYS)
def test_ranks_resume_what_one_process_saved(way, alone, tmp_path):
    ranks, settings = WAYS[way]
    resumed = train_ranks(ranks, tmp_path, **settings, **from_step_2(alone))
    assert resumed == pytest.approx(losses(alone)[2:], rel=1e-5)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("saved", "ranks", "resumed"),
    [("fsdp", 4, FSDP), ("hsdp", 2, FSDP), ("hsdp", 4, HSDP)],
    ids=["fsdp on more ranks", "hsdp on one replica", "hsdp"],
)
def test_other_numbers_of_ranks_resume(saved, ranks, resumed, ranks_run, tmp_path):
    found, expected = train_ranks(ranks, tmp_path, **resumed, **from_step_2(ranks_run(saved))), losses(ranks_run(saved))
    assert found == (expected[2:] if resumed is HSDP else pytest.approx(expected[2:], rel=1e-5))


@pytest.mark.slow
def test_an_hsdp_checkpoint_holds_one_replica(ranks_run):
    parts = (ranks_run("hsdp") / "checkpoints" / "step-2" / "pytorch_model_fsdp_0").glob("*.distcp")
    assert sum(part.stat().st_size for part in parts) < 1.5 * len(weights(ranks_run("hsdp")))


IN_BACKWARD = {"train.optim_in_backward": "true", "train.max_grad_norm": 0, "train.global_batch_size": "null",
               "train.gradient_accumulation_steps": 1}  # fmt: skip
OPTIMIZERS = {
    "galore": ({**DDP, "train.optim": "galore_adamw", "train.galore.rank": 8, "train.galore.update_proj_gap": 2}, {}),
    "offload": ({**DDP, "train.optim_offload": "true"}, {}),
    "async save": ({**DDP, "checkpoint.async_save": "true"}, {}),
    "async save of shards": ({**FSDP, "checkpoint.async_save": "true"}, {}),
    "in the backward": ({**FSDP, **IN_BACKWARD, "train.per_device_train_batch_size": 4},
                        {"train.per_device_train_batch_size": 8}),
}  # fmt: skip


@pytest.mark.slow
@pytest.mark.parametrize("name", OPTIMIZERS)
def test_two_ranks_train_as_one_process_does_and_resume_to_the_same_bits(name, tmp_path):
    settings, one_process = OPTIMIZERS[name]
    settings = {**settings, "train.max_steps": 5}
    expected = train_ranks(1, tmp_path / "alone", **{**settings, "parallel.strategy": "auto", **one_process})
    found = train_ranks(2, tmp_path / "ranks", **settings)
    assert found == pytest.approx(expected, rel=1e-4)
    run_folder = unfinished(tmp_path / "ranks")  # its newest checkpoint is that of step 4
    before = weights(run_folder)
    assert train_ranks(2, tmp_path / "ranks", **settings, **RESUME) == found
    assert weights(run_folder) == before


@pytest.mark.slow
@pytest.mark.parametrize("settings", [DDP, FSDP], ids=["ddp", "fsdp"])
def test_a_step_without_gradients_ends_the_run_on_every_rank(settings, tmp_path):
    def message(rank: int) -> str:
        try:
            run(plan_run(tmp_path, **settings, **{"train.max_grad_norm": 0}), lambda line: None, change=detach_loss)
        except UserError as problem:
            return str(problem)

    assert all("No gradient reached any" in said for said in on_ranks(2, message))


def test_ranks_that_do_not_fit_the_recipe_are_refused(tmp_path):
    with pytest.raises(UserError, match="2 processes share each row, and this run has 3"):
        plan_for(recipe_for(tmp_path, **CONTEXT_PARALLEL), processes=3)


def test_a_context_parallel_rank_is_planned_for_its_part_of_a_row(tmp_path):
    recipes = (
        recipe_for(tmp_path, **{"parallel.strategy": "fsdp", "data.packing": True, "parallel.cp_size": size})
        for size in (4, 1)
    )
    shared, whole = (plan_for(recipe, processes=4).plan for recipe in recipes)
    assert shared.batching.row_ranks == 1 and shared.batching.global_batch_size * 4 == whole.batching.global_batch_size
    assert shared.bytes == whole.bytes and shared.peak.total < whole.peak.total


ZERO = ["deepspeed_zero2", "deepspeed_zero3"]
needs_deepspeed = pytest.mark.skipif(find_spec("deepspeed") is None, reason="needs the package deepspeed")


@needs_deepspeed
@pytest.mark.slow
@pytest.mark.parametrize("strategy", ZERO)
def test_zero_trains_and_resumes_as_ddp_does(strategy, ranks_run, tmp_path):
    settings, ddp = {**SETTINGS, "parallel.strategy": strategy}, ranks_run("ddp")
    assert train_ranks(2, tmp_path, **settings) == pytest.approx(losses(ddp), rel=1e-5)
    found, expected = (load_file(folder / "model" / "model.safetensors") for folder in (tmp_path / "run", ddp))
    assert found.keys() == expected.keys()
    assert all((found[name] - expected[name]).abs().max() < 1e-4 for name in expected)
    resumed = train_ranks(2, tmp_path / "resumed", **settings, **from_step_2(tmp_path / "run"))
    assert resumed == losses(tmp_path / "run")[2:]


@needs_deepspeed
@pytest.mark.slow
def test_the_best_adapter_is_gathered_from_weights_that_zero_shards(tmp_path):
    changes = {"method.type": "lora", "model.dtype": "bfloat16", "checkpoint.load_best_model_at_end": "true"}
    found = train_ranks(2, tmp_path, **{**SETTINGS, **changes, "parallel.strategy": "deepspeed_zero3"})
    assert found[-1] < found[0]
    adapter = load_file(tmp_path / "run" / "model" / "adapter_model.safetensors")
    assert all(weight.numel() for weight in adapter.values())
    assert any(weight.abs().max() > 0 for name, weight in adapter.items() if "lora_B" in name)


@needs_deepspeed
@pytest.mark.slow
def test_zero_refuses_a_checkpoint_of_ddp(ranks_run, tmp_path):
    settings = {**SETTINGS, "parallel.strategy": "deepspeed_zero2", **from_step_2(ranks_run("ddp"))}
    with pytest.raises((UserError, AssertionError), match="was written by 2 processes with ddp"):
        train_ranks(2, tmp_path, **settings)


@pytest.mark.parametrize(
    ("key", "value"),
    [("train.optim", "adafactor"), ("kernels.optimizer", "true"), ("method.type", "qlora"), ("task", "medusa")],
)
def test_zero_refuses_keys_that_deepspeed_does_not_support(key, value, tmp_path):
    with pytest.raises(UserError, match=key):
        recipe_for(tmp_path, **{"parallel.strategy": "deepspeed_zero3", key: value})
