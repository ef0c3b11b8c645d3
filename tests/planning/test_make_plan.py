"""Pinned host memory of a run, and the note when the host has too little."""

from __future__ import annotations

import dataclasses
import re

import pytest
from quickstart_runs import recipe_for, saves

from ligertune.planning.make_plan import host_memory_parts, warn_of_host_memory
from ligertune.planning.plan import Plan
from ligertune.run import plan_for

GIB = 2**30
CHECKPOINTING, OFFLOAD_BOTH = "train.gradient_checkpointing", {"train.gradient_checkpointing": "offload_both"}
OPTIM_OFFLOAD, ASYNC_SAVE = {"train.optim_offload": "true"}, {"checkpoint.async_save": "true", **saves(2)}


@pytest.fixture
def planned(tmp_path):
    """planned(changes, gpus): the plan of a bfloat16 run of packed rows of 512 tokens on GPUs of 80 GiB."""

    def call(changes: dict, gpus: int = 1) -> Plan:
        recipe = recipe_for(tmp_path, **{"data.packing": True, "model.dtype": "bfloat16"}, **changes)
        return plan_for(recipe, for_show=True, memory_gib=80, gpus=gpus).plan

    return call


def test_the_host_memory_of_each_key(planned):
    plan = planned(OFFLOAD_BOTH)
    tokens, states = plan.batching.micro_batch_size * 512, planned({}).bytes
    activations = 5 * tokens * (64 + 172) * 2  # layers, tokens, hidden size + MLP width, bytes
    assert host_memory_parts(plan) == {"train.gradient_checkpointing: offload_both": (activations, 0)}
    assert host_memory_parts(planned(OPTIM_OFFLOAD)) == {"train.optim_offload: true": (states.optimizer, 0)}
    saved = states.weights + states.optimizer
    assert host_memory_parts(planned(ASYNC_SAVE)) == {"checkpoint.async_save: true": (0, saved)}
    assert not host_memory_parts(planned({CHECKPOINTING: "true"}))


def test_too_little_host_memory_gives_a_note(planned):
    plan = planned(OFFLOAD_BOTH, gpus=4)
    [(each, _)] = host_memory_parts(plan).values()
    assert warn_of_host_memory(plan, processes=4, free=4 * each) == plan
    assert warn_of_host_memory(plan, processes=4, free=None) == plan
    *others, note = warn_of_host_memory(plan, processes=4, free=4 * each - 1).notes
    assert others == [*plan.notes] and f"will keep {4 * each / GIB:.1f} GiB there" in note
    assert f"(train.gradient_checkpointing: offload_both, {each / GIB:.1f} GiB per process)" in note


def test_the_note_names_every_key_that_needs_host_memory(planned):
    note = warn_of_host_memory(planned({**OPTIM_OFFLOAD, **ASYNC_SAVE}), processes=1, free=1).notes[-1]
    assert re.search(r"\(train\.optim_offload: true, .* GiB; checkpoint\.async_save: true, .* GiB\):", note)


def test_a_cpu_run_needs_no_pinned_memory(planned):
    plan = planned({CHECKPOINTING: "offload"})
    assert warn_of_host_memory(plan, processes=1, free=0) != plan
    plan = dataclasses.replace(plan, machine=dataclasses.replace(plan.machine, device="cpu"))
    assert warn_of_host_memory(plan, processes=1, free=0) == plan
