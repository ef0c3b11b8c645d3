"""The number of processes, the strategy by which they share a model, and the memory that it leaves on each device."""

from dataclasses import replace
from pathlib import Path

import pytest
import torch

from ligertune.errors import UserError
from ligertune.hardware import Machine, choose_processes
from ligertune.models.load import build_model
from ligertune.models.read_config import read_config
from ligertune.models.shape import read_shape
from ligertune.planning.memory.activation_bytes import CUBLAS_WORKSPACE
from ligertune.planning.memory.estimate import INPUT_BYTES, UNCOUNTED
from ligertune.planning.memory.states import StateBytes, states_of
from ligertune.planning.parallelism import (
    DeviceNeed,
    check_cpu_offload,
    check_replicas,
    check_strategy,
    check_tower_accumulation,
    choose_strategy,
)
from ligertune.planning.plan import Plan
from ligertune.recipe import Recipe, load_recipe
from ligertune.training.resolve import plan_for

GPU = Machine("nvidia", "cuda", "NVIDIA H100 80GB HBM3", "sm90", 1, 80 << 30, True, 989e12, 3.35e12, 1, "2.11")
FITS, TOO_LARGE = DeviceNeed(20 << 30, 80 << 30), DeviceNeed(130 << 30, 80 << 30)
WIDTH = 172  # intermediate_size of the quickstart's model


def recipe_of(quickstart: Path, *changes: str) -> Recipe:
    return load_recipe(quickstart / "stories260k.yaml", overrides=list(changes))


def plan_of(quickstart: Path, folder: Path, *changes: str, gpus: int | None = None) -> Plan:
    recipe = recipe_of(quickstart, *changes, f"checkpoint.output_dir={folder}")
    return plan_for(recipe, for_show=True, memory_gib=80, gpus=gpus).plan


@pytest.mark.parametrize(
    ("wanted", "world", "with_fsdp", "method", "need", "chosen"),
    [
        ("fsdp", 1, True, "full", TOO_LARGE, "single"),
        ("auto", 2, False, "full", FITS, "ddp"),
        ("auto", 2, False, "full", TOO_LARGE, "fsdp"),
        ("auto", 2, True, "full", FITS, "fsdp"),
        ("auto", 2, False, "qlora", TOO_LARGE, "ddp"),
        ("ddp", 2, True, "full", TOO_LARGE, "ddp"),
    ],
)
def test_auto_shards_a_model_that_does_not_fit(wanted, world, with_fsdp, method, need, chosen, quickstart):
    recipe = recipe_of(quickstart, f"parallel.strategy={wanted}")
    recipe = recipe.model_copy(update={"method": recipe.method.model_copy(update={"type": method})})
    machine = replace(GPU, world_size=world)
    found, why = choose_strategy(recipe, machine, why_fsdp="asked" if with_fsdp else "", need=lambda micro: need)
    assert found == chosen
    assert bool(why) == (wanted == "auto" and world > 1)


def test_strategy_single_is_refused_if_the_launcher_started_two(quickstart):
    recipe = recipe_of(quickstart, "parallel.strategy=single")
    with pytest.raises(UserError, match="single is one process, and the launcher started 2"):
        choose_strategy(recipe, replace(GPU, world_size=2), why_fsdp="", need=lambda micro: FITS)


@pytest.mark.parametrize(
    ("wanted", "strategy", "launched", "found"),
    [
        (3, "auto", None, 3),
        ("auto", "single", None, 1),
        ("auto", "auto", 2, 2),
        (2, "auto", 2, 2),
        (2, "auto", 4, None),
    ],
)
def test_processes_are_those_of_the_launcher_or_of_the_recipe(wanted, strategy, launched, found, monkeypatch):
    for name in ("WORLD_SIZE", "LOCAL_RANK", "ACCELERATE_MIXED_PRECISION"):
        monkeypatch.delenv(name, raising=False)
    if launched:
        monkeypatch.setenv("WORLD_SIZE", str(launched))
    elif torch.cuda.is_available() and wanted == 3 and torch.cuda.device_count() < 3:
        pytest.skip("fewer than three GPUs")
    if found is None:
        with pytest.raises(UserError, match=r"num_processes: 2, but the launcher started 4"):
            choose_processes(wanted, strategy)
    else:
        assert choose_processes(wanted, strategy) == found


@pytest.mark.parametrize(
    ("machine", "message"),
    [(replace(GPU, device="cpu"), "this machine has no GPU"), (GPU, "fsdp needs more than one process")],
)
def test_cpu_offload_is_refused_if_it_changes_nothing(machine, message):
    with pytest.raises(UserError, match=message):
        check_cpu_offload(machine)


@pytest.mark.parametrize(
    ("key", "strategy", "autocast", "message"),
    [
        ("train.optim_in_backward=true", "ddp", "no", "before they are averaged"),
        ("train.optim_in_backward=true", "fsdp", "fp16", "scaled until the step"),
        ("train.optim_offload=true", "fsdp", "no", "small already"),
        ("train.optim=galore_adamw", "fsdp", "no", "galore_adamw needs whole weights"),
        ("train.optim=adafactor", "fsdp", "no", "adafactor needs whole weights"),
        ("train.optim=adamw_8bit", "fsdp", "no", "adamw_8bit needs whole weights"),
        ("parallel.dp_replicate_size=2", "fsdp", "fp16", "replicas train in bfloat16 or float32"),
        ("parallel.strategy=deepspeed_zero2", "deepspeed_zero2", "fp16", "deepspeed_zero2 trains in bfloat16"),
    ],
)
def test_settings_that_a_strategy_does_not_support_are_refused(key, strategy, autocast, message, quickstart):
    """Each is accepted in one process without a loss scale."""
    changes = [key, "train.max_grad_norm=0", "train.gradient_accumulation_steps=1"]
    changes += ["parallel.strategy=fsdp"] if "dp_replicate_size" in key else []
    recipe = recipe_of(quickstart, *changes)
    check_strategy(recipe, "single", autocast="no")
    with pytest.raises(UserError, match=message) as caught:
        check_strategy(recipe, strategy, autocast=autocast)
    assert caught.value.hint.endswith(".")


def test_a_plan_checks_its_strategy(quickstart, tmp_path):
    changes = ["train.optim_in_backward=true", "train.max_grad_norm=0", "train.gradient_accumulation_steps=1"]
    fsdp, ddp = (recipe_of(quickstart, *changes, f"parallel.strategy={strategy}", f"checkpoint.output_dir={tmp_path}")
                 for strategy in ("fsdp", "ddp"))  # fmt: skip
    assert plan_for(fsdp, processes=2).plan.optimizer.in_backward
    with pytest.raises(UserError, match="optim_in_backward: under ddp"):
        plan_for(ddp, processes=2)


def test_cpu_offload_removes_the_states_from_the_device(quickstart, tmp_path):
    on_device, offloaded = (
        plan_of(quickstart, tmp_path, f"parallel.cpu_offload={value}", "parallel.strategy=fsdp", gpus=2)
        for value in ("false", "true")
    )
    assert offloaded.strategy == "fsdp" and offloaded.bytes == on_device.bytes
    assert offloaded.peak.optimizer == offloaded.peak.phase.gradients == 0 < on_device.peak.optimizer
    assert 0 < offloaded.peak.total < on_device.peak.total


def test_offloaded_gates_are_in_the_plan(quickstart, tmp_path):
    shared = ("model.dtype=bfloat16", "train.cuda_graphs=false")
    usual, offloads = (
        plan_of(quickstart, tmp_path, f"train.gradient_checkpointing={kind}", *shared)
        for kind in ("true", "offload_gate")
    )
    assert [any("pinned host memory" in note for note in plan.notes) for plan in (usual, offloads)] == [False, True]
    # One gate is on the device while it is used, and a second one while it is prefetched.
    gate = usual.batching.micro_batch_size * usual.row_length * WIDTH * 2
    assert gate <= offloads.peak.total - usual.peak.total <= 2 * gate


def test_the_workspaces_of_recorded_steps_are_in_the_plan(quickstart, tmp_path):
    """CUDA graphs are recorded on a second stream, and cuBLAS allocates workspaces for each; two graphs read copies."""
    plans = [plan_of(quickstart, tmp_path, f"train.cuda_graphs={on}") for on in ("false", "true")]
    usual, recorded = (plan.peak.phase.working for plan in plans)
    counted = CUBLAS_WORKSPACE + 2 * INPUT_BYTES * plans[0].largest_batch.tokens
    assert recorded - usual == pytest.approx((1 + UNCOUNTED) * counted, abs=1)


def test_a_layers_adapters_and_their_new_gradients_are_in_the_plan(quickstart, tmp_path):
    small, large = (
        plan_of(quickstart, tmp_path, "method.type=lora", "model.dtype=bfloat16", f"method.lora_r={rank}")
        for rank in (8, 16)
    )
    of_layer = (large.n_trainable - small.n_trainable) // small.memory.layers
    assert large.memory.workspace - small.memory.workspace == of_layer * (2 + 4)


@pytest.mark.parametrize("change", ["method.type=qlora", "model.dtype=float16", "parallel.strategy=deepspeed_zero3"])
def test_gates_that_cannot_be_offloaded_are_refused(change, quickstart):
    with pytest.raises(UserError, match=r"offload_gate saves the outputs of plain linear layers"):
        recipe_of(quickstart, "train.gradient_checkpointing=offload_gate", change)


def test_each_copy_of_a_model_needs_two_processes():
    for copies, world in ((2, 4), (2, 6), (3, 6), (4, 8)):
        check_replicas(copies, world)
    for copies, world in ((2, 2), (2, 3), (2, 1), (4, 6), (8, 8)):
        with pytest.raises(UserError, match=f"{copies} copies need a multiple of .* this run has {world}"):
            check_replicas(copies, world)


def test_replicas_of_a_vision_language_model_do_not_accumulate(quickstart):
    recipe = recipe_of(quickstart, "parallel.strategy=fsdp", "parallel.dp_replicate_size=2")
    check_tower_accumulation(recipe, 1, model_kind="model")
    check_tower_accumulation(recipe_of(quickstart), 4, model_kind="model")
    with pytest.raises(UserError, match="accumulates 4 micro-batches"):
        check_tower_accumulation(recipe, 4, model_kind="vision-language model")


def test_a_device_holds_its_shard_of_one_copy(quickstart, tmp_path):
    # else each plan chooses
    written = ("train.per_device_train_batch_size=4", "train.gradient_accumulation_steps=2",
               "train.gradient_checkpointing=false")  # fmt: skip
    changes = ("parallel.strategy=fsdp", "train.optim=adamw_bf16", *written)
    shared, copied, fewer = (
        plan_of(quickstart, tmp_path, *changes, f"parallel.dp_replicate_size={copies}", gpus=gpus)
        for gpus, copies in ((8, 1), (8, 2), (4, 1))
    )
    assert copied.batching == shared.batching and copied.shards == fewer.shards == 4
    assert copied.bytes == fewer.bytes and copied.peak == fewer.peak
    assert copied.bytes.total > shared.bytes.total and copied.peak.total > shared.peak.total


def test_zero_stage_2_shards_gradients_and_states_and_stage_3_also_weights(quickstart):
    ddp, two, three = (states_on_two_devices(quickstart, s) for s in ("ddp", "deepspeed_zero2", "deepspeed_zero3"))
    assert two.weights == ddp.weights and three.weights == ddp.weights // 2
    assert two.gradients == three.gradients == ddp.gradients // 2
    # ddp: two bfloat16 states. ZeRO: half of two float32 states and of float32 weights.
    assert two.optimizer == three.optimizer == pytest.approx(ddp.optimizer / 4 * 12 / 2, rel=1e-6)


def states_on_two_devices(quickstart: Path, strategy: str) -> StateBytes:
    recipe = recipe_of(quickstart, f"parallel.strategy={strategy}", "model.dtype=bfloat16")
    config, spec = read_config(recipe.model), recipe.model.model_copy(update={"init": "random"})
    model = build_model(spec, config, dtype=torch.bfloat16, device="meta", seed=0)
    return states_of(recipe, read_shape(model).parameters, "bfloat16", strategy=strategy, world_size=2)
