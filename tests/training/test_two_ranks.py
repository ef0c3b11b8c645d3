"""Two ranks, forked from this process: gradient norms, checkpoints, random numbers, resuming on one rank."""

import json
import threading
import time
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
from accelerate import Accelerator
from support.forked_ranks import on_ranks
from support.quickstart_runs import RESUME, TWO_LAYERS, plan_run, saves, train, unfinished
from torch.distributed.checkpoint import FileSystemReader, load
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor

from ligertune.errors import UserError
from ligertune.training.checkpoint.checkpoint_files import Saver, save_checkpoint
from ligertune.training.checkpoint.checkpoint_record import damage_of
from ligertune.training.checkpoint.load_checkpoint import MODEL_SHARDS
from ligertune.training.loop import save_if_finite
from ligertune.training.parallel.distributed import (
    LONG_TIMEOUT,
    ProcessGroupTimeout,
    fsdp_plugin,
    max_over_ranks,
    reshard,
    start_accelerator,
)

SETTINGS = {
    **TWO_LAYERS,
    "data.datasets.0.max_samples": 35,  # an epoch ends inside a step
    "data.val_split": 0.2,
    "eval.eval_strategy": "steps",
    "eval.eval_steps": 3,
    "train.max_steps": 4,
    "train.global_batch_size": 8,
    "train.max_grad_norm": 0.5,
    "model.dtype": "float32",
}
DDP, FSDP = {"parallel.strategy": "ddp"}, {"parallel.strategy": "fsdp"}
ASYNC = {"checkpoint.async_save": True}


def metrics(folder: Path) -> list[tuple]:
    lines = [json.loads(line) for line in (folder / "run" / "metrics.jsonl").read_text().splitlines()]
    return [tuple(line[key] for key in ("loss", "grad_norm", "tokens", "padded_tokens") if key in line)
            or (line["eval_loss"],) for line in lines if "note" not in line and line["step"]]  # fmt: skip


def loss_before_training(folder: Path) -> float:
    lines = [json.loads(line) for line in (folder / "run" / "metrics.jsonl").read_text().splitlines()]
    return next(line["loss_before_training"] for line in lines if "loss_before_training" in line)


@pytest.fixture(scope="module")
def alone_folder(tmp_path_factory) -> Path:
    """One process, which accumulates four micro-batches per step."""
    folder = tmp_path_factory.mktemp("alone")
    train(folder, **SETTINGS)
    return folder


@pytest.fixture(scope="module")
def alone(alone_folder) -> list[tuple]:
    return metrics(alone_folder)


@pytest.mark.parametrize("strategy", ["ddp", "fsdp"])
def test_ranks_train_as_one_process_which_can_resume_their_checkpoint(strategy, alone, alone_folder, tmp_path):
    """Gradient norms are compared, too: AdamW's losses do not depend on the gradients' scale."""
    settings = {**SETTINGS, **saves(2)}
    on_ranks(2, lambda rank: train(tmp_path, **settings, **{"parallel.strategy": strategy}) and None)
    assert [len(line) for line in alone] == [4, 4, 4, 1, 4, 1]
    for found, expected in zip(metrics(tmp_path), alone, strict=True):
        assert found == pytest.approx(expected, rel=1e-5)
    assert loss_before_training(tmp_path) == pytest.approx(loss_before_training(alone_folder), rel=1e-5)
    unfinished(tmp_path)  # as if both ranks had been killed after step 2
    assert train(tmp_path, **settings, **RESUME).resumed_from == 2
    for found, expected in zip(metrics(tmp_path), alone, strict=True):
        assert found == pytest.approx(expected, rel=1e-5)


def test_bfloat16_runs_with_sharded_gradients_are_bit_equal_to_one_process(tmp_path):
    """A norm that differs in its last bit would change the rounding of weights, and losses by more than 1e-3."""
    short = {"data.max_length": 200, "data.max_dropped": 0.9}  # the shorter half: bfloat16 is slow on CPUs
    settings = {**SETTINGS, **short, "model.dtype": "bfloat16", "train.per_device_train_batch_size": 4}
    train(tmp_path / "one", **settings)
    on_ranks(2, lambda rank: train(tmp_path / "two", **settings, **{"parallel.strategy": "fsdp"}) and None)
    assert metrics(tmp_path / "two") == metrics(tmp_path / "one")


def test_the_timeout_of_a_step_is_back_after_a_save():
    timeout = ProcessGroupTimeout(Accelerator(), torch.nn.Linear(1, 1), 60)
    timeout.enter_steps()
    with timeout.extended():
        assert timeout._timeout == LONG_TIMEOUT
    assert timeout._timeout.total_seconds() == 60


def test_a_checkpoint_is_renamed_after_the_slowest_rank_has_written(tmp_path):
    """Rank 1 starts to write half a second late."""

    def save(rank: int) -> None:
        plan = plan_run(tmp_path, **SETTINGS, **DDP).plan
        accelerator = start_accelerator(plan)
        accelerator.register_save_state_pre_hook(lambda *_: time.sleep(0.5 * rank))
        accelerator.prepare(torch.nn.Linear(2, 2))
        save_checkpoint(accelerator, plan, 2)

    on_ranks(2, save)
    folder = tmp_path / "run" / "checkpoints" / "step-2"
    files = {path.name for path in folder.iterdir()}
    assert {"random_states_0.pkl", "random_states_1.pkl"} <= files
    assert json.loads((folder / "progress.json").read_text())["files"].keys() == files - {"progress.json"}


class BlockedSaver(Saver):
    """A saver whose threads begin to write when `may_write` is set."""

    def __init__(self, *arguments: object) -> None:
        super().__init__(*arguments)
        self.may_write = threading.Event()

    def write_shards(self, *arguments: object) -> None:
        assert self.may_write.wait(30)
        super().write_shards(*arguments)


def test_shards_of_a_step_are_written_while_the_next_step_changes_them(tmp_path):
    """An error of one rank ends the save on all of them, and the checkpoint before it stays."""

    def save(rank: int) -> dict[str, list]:
        plan = plan_run(tmp_path, **SETTINGS, **FSDP, **ASYNC).plan
        accelerator = start_accelerator(plan)
        torch.manual_seed(0)
        model = fully_shard(torch.nn.Linear(4, 2), mesh=init_device_mesh("cpu", (2,)))
        optimizer = torch.optim.AdamW(model.parameters(), lr=1.0)
        model(torch.ones(1, 4)).sum().backward()
        optimizer.step()
        saver = BlockedSaver(accelerator, plan, model, optimizer)
        found = {name: value.full_tensor().tolist() for name, value in model.state_dict().items()}
        saver.save(1)
        optimizer.step()
        saver.may_write.set()
        saver.finish()
        saver.may_write.clear()
        saver.save(2)
        accelerator.wait_for_everyone()
        if rank == 0:
            (plan.output_dir / "checkpoints" / ".step-2.partial" / MODEL_SHARDS).write_text("a file in its place")
        accelerator.wait_for_everyone()
        saver.may_write.set()
        with pytest.raises(UserError, match=r"step 2 could not be written .*\(File exists\). The newest .*step-1"):
            saver.finish()
        return found

    expected, _ = on_ranks(2, save)
    checkpoints = tmp_path / "run" / "checkpoints"
    assert [path.name for path in checkpoints.iterdir()] == ["step-1"]
    weights = {name: torch.empty_like(torch.tensor(value)) for name, value in expected.items()}
    load({"model": weights}, storage_reader=FileSystemReader(checkpoints / "step-1" / MODEL_SHARDS), no_dist=True)
    assert {name: value.tolist() for name, value in weights.items()} == expected
    assert damage_of(checkpoints / "step-1") is None


def test_weights_that_stay_gathered_are_sharded_again_after_an_evaluation(tmp_path):
    plan = plan_run(tmp_path, **SETTINGS, **FSDP, **{"parallel.reshard_after_forward": False}).plan
    assert fsdp_plugin(replace(plan, strategy="fsdp")).reshard_after_forward is False
    assert fsdp_plugin(replace(plan_run(tmp_path, **SETTINGS).plan, strategy="fsdp")).reshard_after_forward is True

    def evaluate(rank: int) -> tuple[bool, bool]:
        start_accelerator(plan_run(tmp_path, **SETTINGS, **FSDP).plan)
        mesh = init_device_mesh("cpu", (2,))
        model = torch.nn.Sequential(torch.nn.Linear(4, 4), torch.nn.Linear(4, 2))
        for layer in model:
            fully_shard(layer, mesh=mesh, reshard_after_forward=False)
        fully_shard(model, mesh=mesh)
        with torch.no_grad():
            model(torch.ones(1, 4))
        gathered = not any(isinstance(p, DTensor) for p in model.parameters())
        reshard(model)
        return gathered, all(isinstance(p, DTensor) for p in model.parameters())

    assert on_ranks(2, evaluate) == [(True, True)] * 2


def test_autocast_rounds_neither_losses_nor_gradients_under_fsdp(tmp_path):
    """accelerate gives a plugin without a policy one that does, on a GPU."""
    plugin = fsdp_plugin(replace(plan_run(tmp_path, **SETTINGS).plan, strategy="fsdp"))
    plugin.set_mixed_precision("bf16")
    policy = plugin.mixed_precision_policy
    assert (policy.param_dtype, policy.reduce_dtype, policy.output_dtype) == (None, None, None)


def test_ranks_draw_different_random_numbers_and_the_same_after_a_restart(tmp_path):
    def draw(rank: int) -> tuple:
        accelerator = start_accelerator(plan_run(tmp_path, **SETTINGS, **DDP).plan)
        return torch.rand(3).tolist(), max_over_ranks(accelerator, {"a": 1 + rank, "b": 5 - rank})

    first, second = on_ranks(2, draw), on_ranks(2, draw)
    assert first == second and first[0] != first[1]
    assert [largest for _, largest in first] == [{"a": 2, "b": 5}] * 2


def test_no_rank_saves_after_a_gradient_of_one_rank_that_is_not_finite(tmp_path):
    def save(rank: int) -> None:
        plan = plan_run(tmp_path, **SETTINGS, **DDP).plan
        check = SimpleNamespace(is_finite=lambda norm: bool(norm.isfinite()), error=lambda: UserError("not finite"))
        training = SimpleNamespace(plan=plan, accelerator=start_accelerator(plan), loss_check=check)
        with pytest.raises(UserError, match="not finite"):
            save_if_finite(training, SimpleNamespace(grad_norm=torch.tensor(float("nan") if rank else 1.0)))

    on_ranks(2, save)


def test_a_resumed_run_draws_the_same_dropout(tmp_path):
    """With LoRA dropout of one half, the loss of step 3 depends on the random state after step 2 and its evaluation."""
    settings = {**SETTINGS, **saves(2), "method.type": "lora", "method.lora_r": 4, "method.lora_dropout": 0.5,
                "train.max_steps": 3, "eval.eval_steps": 1}  # fmt: skip
    found = []
    for resume, step in (({}, 0), (RESUME, 2)):
        assert train(tmp_path, **settings, **resume).resumed_from == step
        found.append(metrics(tmp_path))
        unfinished(tmp_path)
    assert found[0] == found[1]
