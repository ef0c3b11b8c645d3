"""Resume records: each field of progress.json that a resumed run must agree with, and random states."""

import json
import random
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch
from accelerate import PartialState
from accelerate.checkpointing import save_accelerator_state
from support.quickstart_runs import plan_run

from ligertune.errors import UserError
from ligertune.planning.optimization import LrGroup
from ligertune.planning.plan import Plan
from ligertune.training.checkpoint.checkpoint_record import CheckpointRecord, DamagedRecordError
from ligertune.training.checkpoint.load_checkpoint import restore_random_states, saved_progress

STEP = 4


@pytest.fixture(scope="module")
def plan(tmp_path_factory) -> Plan:
    return plan_run(tmp_path_factory.mktemp("run"), **{"train.max_steps": 10}).plan


@pytest.fixture
def folder(plan, tmp_path) -> Path:
    CheckpointRecord.of(plan, STEP, {"weights": (1, 2)}).write(tmp_path, plan)
    return tmp_path


def changed(plan: Plan, section: str, **fields: object) -> Plan:
    return replace(plan, **{section: replace(getattr(plan, section), **fields)})


OTHERS = {
    "seed": (lambda p: changed(p, "build", seed=7), "train.seed: 42; this recipe has 7"),
    "rows of another length": (lambda p: changed(p, "rows", length=p.rows.length + 8), "this recipe makes"),
    "rows of another kind": (lambda p: changed(p, "rows", kind="packed"), "this recipe makes"),
    "number of rows": (lambda p: changed(p, "rows", count=p.rows.count + 1), "this recipe makes"),
    "accumulation": (
        lambda p: changed(p, "batching", accumulation=2 * p.batching.accumulation),
        "was trained with a global batch of 4 examples; this recipe makes it 8",
    ),
    "what trains": (lambda p: replace(p, n_trainable=p.n_trainable - 64), "this recipe's model is"),
    "learning-rate groups": (
        lambda p: changed(p, "optimizer", lr_groups=(LrGroup("norm", 2.0, None),)),
        "this recipe's optimizer is .* with train.lr_groups of norm",
    ),
    "place of the states": (
        lambda p: changed(p, "optimizer", offload=True),
        "this recipe's optimizer is .* with train.optim_offload",
    ),
    "optimizer": (lambda p: changed(p, "optimizer", name="lion"), "this recipe's optimizer is lion"),
    "ranks of DeepSpeed": (
        lambda p: replace(changed(p, "batching", world_size=2, accumulation=1), strategy="deepspeed_zero2"),
        "DeepSpeed loads only checkpoints of its own strategy",
    ),
}


@pytest.mark.parametrize("name", OTHERS)
def test_a_checkpoint_of_another_run_is_refused(name, plan, folder):
    change, words = OTHERS[name]
    assert saved_progress(folder, plan) == STEP
    with pytest.raises(UserError, match=words):
        saved_progress(folder, change(plan))


def test_deepspeed_needs_the_same_number_of_ranks(plan, tmp_path):
    two = replace(changed(plan, "batching", world_size=2, accumulation=1), strategy="deepspeed_zero3")
    four = changed(changed(two, "batching", world_size=4, micro_batch_size=1), "rows")
    assert two.batching.global_batch_size == four.batching.global_batch_size
    CheckpointRecord.of(two, STEP, {}).write(tmp_path, two)
    with pytest.raises(UserError, match="was written by 2 processes with deepspeed_zero3; this run has 4"):
        saved_progress(tmp_path, four)


@pytest.mark.parametrize("key, value", [("step", 6), ("seed", 7), ("model", "another"), ("files", {})])
def test_an_edited_record_is_damaged(key, value, folder):
    path = folder / "progress.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | {key: value}))
    with pytest.raises(DamagedRecordError, match="checksum"):
        CheckpointRecord.read(folder)


def test_a_resumed_rank_draws_what_it_would_have_drawn(tmp_path):
    """Python, numpy and torch each have a random state of their own."""

    def draw() -> tuple:
        return random.random(), float(np.random.rand()), float(torch.rand(()))

    PartialState(cpu=True)
    save_accelerator_state(str(tmp_path), [], [], [], [], 0, 0, None)
    expected = draw()
    random.seed(1), np.random.seed(1), torch.manual_seed(1)
    assert not set(draw()) & set(expected)
    restore_random_states(tmp_path, rank=0)
    assert draw() == expected
    restore_random_states(tmp_path, rank=3)  # a rank without a file keeps its state
    assert not set(draw()) & set(expected)
