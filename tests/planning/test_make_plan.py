"""Precision and cadence of a run, its pinned host memory, and the note when the host has too little."""

import re
from dataclasses import replace

import pytest
from support.quickstart_runs import recipe_for, saves

from ligertune.errors import UserError
from ligertune.hardware import Machine
from ligertune.planning.make_plan import check_context, host_memory_parts, warn_of_host_memory
from ligertune.planning.optimization import Cadence, make_schedule
from ligertune.planning.plan import Plan
from ligertune.planning.precision import choose_precision
from ligertune.planning.preflight import clear_run
from ligertune.training.resolve import plan_for

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


def test_the_plan_counts_the_tokens_that_train(tmp_path):
    job = plan_for(recipe_for(tmp_path))
    tokens, trained = (int(count.sum()) for count in (job.data.train.lengths, job.data.train.trained))
    assert (job.plan.data.tokens, job.plan.data.trained_tokens) == (tokens, trained)
    assert job.plan.memory.labelled == trained / tokens < 0.9


def test_the_host_memory_of_each_key(planned):
    plan = planned(OFFLOAD_BOTH)
    tokens, states = plan.batching.micro_batch_size * 512, planned({}).bytes
    activations = 5 * tokens * (64 + 172) * 2  # layers, tokens, hidden size + MLP width, bytes
    assert host_memory_parts(plan) == {"train.gradient_checkpointing: offload_both": (activations, 0)}
    assert host_memory_parts(planned(OPTIM_OFFLOAD)) == {"train.optim_offload: true": (states.optimizer, 0)}
    saved = states.weights + states.optimizer
    assert host_memory_parts(planned(ASYNC_SAVE)) == {"checkpoint.async_save: true": (0, saved)}
    shards = planned({**ASYNC_SAVE, "parallel.strategy": "fsdp"}, gpus=4)
    own = shards.bytes.weights + shards.bytes.optimizer  # each process copies its part
    assert host_memory_parts(shards) == {"checkpoint.async_save: true": (own, 0)}
    adapter = planned({**ASYNC_SAVE, "parallel.strategy": "fsdp", "method.type": "lora"}, gpus=4)
    own = adapter.bytes.trained + adapter.bytes.optimizer
    assert host_memory_parts(adapter) == {"checkpoint.async_save: true": (own, 0)}
    assert not host_memory_parts(planned({CHECKPOINTING: "true"}))


def test_too_little_host_memory_gives_a_note(planned):
    plan = planned(OFFLOAD_BOTH, gpus=4)
    [(each, _)] = host_memory_parts(plan).values()
    assert warn_of_host_memory(plan, processes=4, free=4 * each) == plan
    assert warn_of_host_memory(plan, processes=4, free=None) == plan
    *others, note = warn_of_host_memory(plan, processes=4, free=4 * each - 1).notes
    assert others == [*plan.notes] and f"will keep {4 * each / GIB:.1f} GiB there" in note
    assert f"(train.gradient_checkpointing: offload_both, {each / GIB:.1f} GiB per process)" in note


def test_memory_that_ranks_share_counts_once_and_that_of_each_process_for_each(planned):
    plan = planned({**OFFLOAD_BOTH, **ASYNC_SAVE, "parallel.strategy": "ddp"})  # four such ranks on a host
    each, once = (sum(sizes) for sizes in zip(*host_memory_parts(plan).values(), strict=True))
    assert each and once
    assert warn_of_host_memory(plan, processes=4, free=4 * each + once) == plan
    assert warn_of_host_memory(plan, processes=4, free=4 * each + once - 1) != plan


def test_the_note_names_every_key_that_needs_host_memory(planned):
    plan = planned({**OPTIM_OFFLOAD, **ASYNC_SAVE})
    needed = sum(map(sum, host_memory_parts(plan).values()))
    assert warn_of_host_memory(plan, processes=1, free=needed) == plan
    note = warn_of_host_memory(plan, processes=1, free=needed - 1).notes[-1]
    assert re.search(r"\(train\.optim_offload: true, .* GiB; checkpoint\.async_save: true, .* GiB\):", note)


def test_a_cpu_run_needs_no_pinned_memory(planned):
    plan = planned({CHECKPOINTING: "offload"})
    assert warn_of_host_memory(plan, processes=1, free=0) != plan
    plan = replace(plan, machine=replace(plan.machine, device="cpu"))
    assert warn_of_host_memory(plan, processes=1, free=0) == plan


GPU = Machine("nvidia", "cuda", "NVIDIA H100 80GB HBM3", "sm90", 1, 80 << 30, True, 989e12, 3.35e12, 1, "2.11")
OLD_GPU = replace(GPU, name="Tesla V100", arch="sm70", has_bfloat16=False, peak_flops=None)
CPU = replace(GPU, vendor="cpu", device="cpu", name="CPU", arch="x86_64", peak_flops=None)


@pytest.mark.parametrize(
    ("dtype", "machine", "weights", "autocast"),
    [
        ("auto", GPU, "bfloat16", "no"),
        ("auto", OLD_GPU, "float32", "fp16"),
        ("auto", CPU, "float32", "no"),
        ("bfloat16", CPU, "bfloat16", "no"),
        ("float16", GPU, "float32", "fp16"),
        ("float32", GPU, "float32", "no"),
    ],
)
def test_dtype_on_a_machine(dtype, machine, weights, autocast):
    precision = choose_precision(dtype, machine)
    assert (precision.weights, precision.autocast) == (weights, autocast)


@pytest.mark.parametrize(("dtype", "machine"), [("bfloat16", OLD_GPU), ("float16", CPU)])
def test_an_unsupported_dtype_is_refused_with_a_hint(dtype, machine):
    with pytest.raises(UserError, match=f"model.dtype: {dtype}") as caught:
        choose_precision(dtype, machine)
    assert "Write model.dtype" in caught.value.hint


def test_warm_up_steps_by_ratio_by_number_and_of_a_constant_rate(tmp_path):
    ratio = {"train.warmup_ratio": 0.031}
    given = ratio, {"train.warmup_steps": 0}, {**ratio, "train.lr_scheduler_type": "constant_with_warmup"}
    recipes = [recipe_for(tmp_path, **{"train.max_steps": 100, **changes}) for changes in given]
    default = {"train.warmup_ratio": 0.03, "train.lr_scheduler_type": "constant"}
    recipes.append(recipe_for(tmp_path, **{"train.max_steps": 100, **default}))
    found = [make_schedule(recipe, rows=9, global_batch_size=1).warmup_steps for recipe in recipes]
    assert found == [4, 0, 4, 0]
    check_context(recipes[0], 512, 512)  # as long as the context is not too long


def test_an_epoch_cadence_is_due_after_the_step_in_which_an_epoch_ends():
    cadence = Cadence("epoch", every=0)
    due = [s for s in range(1, 7) if cadence.due(s, rows_per_epoch=21, global_batch_size=8)]
    assert due == [3, 6]  # 24 >= 21, 48 >= 42


def test_a_run_that_is_replaced_loses_its_links_and_not_what_they_point_to(tmp_path):
    kept, folder = tmp_path / "kept", tmp_path / "run"
    kept.mkdir(), folder.mkdir()
    (kept / "weights").touch()
    (folder / "model").symlink_to(kept)
    (folder / "best").symlink_to(tmp_path / "nowhere")
    (folder / "report.json").touch()
    clear_run(folder)
    assert not list(folder.iterdir()) and (kept / "weights").exists()
