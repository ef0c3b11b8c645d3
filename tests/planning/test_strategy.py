"""How many processes train, and how they share the model."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch

from ligertune.errors import UserError
from ligertune.hardware import Machine, choose_processes
from ligertune.planning.memory.states import states_of
from ligertune.planning.parallelism import (
    DeviceNeed,
    check_cpu_offload,
    check_image_accumulation,
    check_replicas,
    check_strategy,
    choose_strategy,
)
from ligertune.recipe import load_recipe
from ligertune.run import plan_for

GPU = Machine("nvidia", "cuda", "NVIDIA H100 80GB HBM3", "sm90", 1, 80 << 30, True, 989e12, 3.35e12, 1, "2.11")

FITS, TOO_LARGE = DeviceNeed(20 << 30, 80 << 30), DeviceNeed(130 << 30, 80 << 30)


@pytest.mark.parametrize(
    ("asked", "world", "with_fsdp", "method", "alone", "chosen"),
    [
        ("fsdp", 1, True, "full", TOO_LARGE, "single"),
        ("auto", 2, False, "full", FITS, "ddp"),
        ("auto", 2, False, "full", TOO_LARGE, "fsdp"),
        ("auto", 2, True, "full", FITS, "fsdp"),
        ("auto", 2, False, "qlora", TOO_LARGE, "ddp"),
        ("ddp", 2, True, "full", TOO_LARGE, "ddp"),
    ],
)
def test_auto_shards_what_does_not_fit(asked, world, with_fsdp, method, alone, chosen, quickstart):
    recipe = load_recipe(quickstart / "stories260k.yaml", overrides=[f"parallel.strategy={asked}"])
    recipe = recipe.model_copy(update={"method": recipe.method.model_copy(update={"type": method})})
    found, why = choose_strategy(
        recipe, replace(GPU, world_size=world), launched_with_fsdp=with_fsdp, need=lambda micro: alone
    )
    assert found == chosen
    assert bool(why) == (asked == "auto" and world > 1)


def test_strategy_single_is_refused_if_the_launcher_started_two(quickstart):
    recipe = load_recipe(quickstart / "stories260k.yaml", overrides=["parallel.strategy=single"])
    with pytest.raises(UserError, match="single is one process, and the launcher started 2"):
        choose_strategy(recipe, replace(GPU, world_size=2), launched_with_fsdp=False, need=lambda micro: FITS)


@pytest.fixture
def launched(monkeypatch):
    """launched(2): as a launcher of two processes would have set the environment."""
    for name in ("WORLD_SIZE", "LOCAL_RANK", "ACCELERATE_MIXED_PRECISION"):
        monkeypatch.delenv(name, raising=False)
    return lambda count: monkeypatch.setenv("WORLD_SIZE", str(count))


@pytest.mark.parametrize(
    ("wanted", "strategy", "by_launcher", "found"),
    [(3, "auto", None, 3), ("auto", "single", None, 1), ("auto", "auto", 2, 2), (2, "auto", 2, 2)],
)
def test_processes_are_the_launchers_or_the_recipes(wanted, strategy, by_launcher, found, launched):
    if by_launcher:
        launched(by_launcher)
    import torch

    if torch.cuda.is_available() and wanted == 3 and torch.cuda.device_count() < 3:
        pytest.skip("fewer than three GPUs")
    assert choose_processes(wanted, strategy) == found


def test_a_launcher_that_started_another_number_is_refused(launched):
    launched(4)
    with pytest.raises(UserError, match=r"num_processes: 2, but the launcher started 4"):
        choose_processes(2, "auto")


@pytest.mark.parametrize(
    ("machine", "said"),
    [(replace(GPU, device="cpu"), "this machine has no GPU"), (GPU, "fsdp needs more than one process")],
)
def test_offload_is_refused_where_it_changes_nothing(machine, said):
    with pytest.raises(UserError, match=said):
        check_cpu_offload(machine)


@pytest.mark.parametrize(
    ("key", "strategy", "autocast", "says"),
    [
        ("train.optim_in_backward=true", "ddp", "no", "before they are averaged"),
        ("train.optim_in_backward=true", "fsdp", "fp16", "scaled until the step"),
        ("train.optim_offload=true", "fsdp", "no", "small already"),
        ("checkpoint.async_save=true", "fsdp", "no", "write their shards"),
        ("train.optim=galore_adamw", "fsdp", "no", "galore_adamw needs whole weights"),
        ("train.optim=adafactor", "fsdp", "no", "adafactor needs whole weights"),
        ("train.optim=adamw_8bit", "fsdp", "no", "adamw_8bit needs whole weights"),
        ("parallel.dp_replicate_size=2", "fsdp", "fp16", "replicas train in bfloat16 or float32"),
        ("parallel.strategy=deepspeed_zero2", "deepspeed_zero2", "fp16", "deepspeed_zero2 trains in bfloat16"),
    ],
)
def test_what_a_strategy_or_a_precision_would_get_wrong_is_refused(key, strategy, autocast, says, quickstart):
    """Each is accepted where it is right: in one process, with gradients that are not scaled."""
    overrides = [key, "train.max_grad_norm=0", "train.gradient_accumulation_steps=1"]
    overrides += ["parallel.strategy=fsdp"] if "dp_replicate_size" in key else []
    recipe = load_recipe(quickstart / "stories260k.yaml", overrides=overrides)
    check_strategy(recipe, "single", autocast="no")
    with pytest.raises(UserError, match=says) as caught:
        check_strategy(recipe, strategy, autocast=autocast)
    assert caught.value.hint.endswith(".")


@pytest.mark.parametrize("strategy", ["fsdp", "ddp"])
def test_a_plan_for_two_processes_asks_whether_their_strategy_can(strategy, quickstart, tmp_path):
    changes = ["train.optim_in_backward=true", "train.max_grad_norm=0", "train.gradient_accumulation_steps=1"]
    changes += [f"parallel.strategy={strategy}", f"checkpoint.output_dir={tmp_path}"]
    recipe = load_recipe(quickstart / "stories260k.yaml", overrides=changes)
    if strategy == "fsdp":
        assert plan_for(recipe, processes=2).plan.optimizer.in_backward
        return
    with pytest.raises(UserError, match="optim_in_backward: under ddp"):
        plan_for(recipe, processes=2)


def test_offload_takes_the_states_off_the_device(quickstart, tmp_path):
    plans = []
    for value in ("false", "true"):
        changes = [f"parallel.cpu_offload={value}", "parallel.strategy=fsdp", f"checkpoint.output_dir={tmp_path}"]
        recipe = load_recipe(quickstart / "stories260k.yaml", overrides=changes)
        plans.append(plan_for(recipe, for_show=True, memory_gib=80, gpus=2).plan)
    held, offloaded = plans
    assert offloaded.strategy == "fsdp" and offloaded.bytes == held.bytes  # of the run, wherever they are
    assert offloaded.peak.optimizer == offloaded.peak.phase.gradients == 0 < held.peak.optimizer
    assert 0 < offloaded.peak.total < held.peak.total


@pytest.mark.parametrize(
    ("kind", "width"), [("true", 0), ("offload", 64), ("offload_gate", 172)]
)  # hidden and intermediate sizes of the quickstart's model
def test_what_waits_on_the_host_is_planned(kind, width, quickstart, tmp_path):
    changes = [f"train.gradient_checkpointing={kind}", f"checkpoint.output_dir={tmp_path}", "model.dtype=bfloat16"]
    plan = plan_for(load_recipe(quickstart / "stories260k.yaml", overrides=changes), for_show=True, memory_gib=80).plan
    tokens = plan.batching.micro_batch_size * plan.row_length
    assert plan.memory.host_bytes(plan.batching.micro_batch_size, plan.row_length) == (
        plan.memory.layers * tokens * width * 2
    )
    assert any("pinned host memory" in note for note in plan.notes) == bool(width)


def test_two_gates_are_planned_beside_what_checkpointing_holds(quickstart, tmp_path):
    found = {}
    for kind in ("true", "offload_gate"):
        changes = [f"train.gradient_checkpointing={kind}", f"checkpoint.output_dir={tmp_path}"]
        recipe = load_recipe(quickstart / "stories260k.yaml", overrides=changes)
        found[kind] = plan_for(recipe, for_show=True, memory_gib=80).plan
    plan = found["true"]
    gate = plan.batching.micro_batch_size * plan.row_length * 172 * plan.memory.itemsize
    assert gate <= found["offload_gate"].peak.total - plan.peak.total <= 2 * gate


@pytest.mark.parametrize("change", ["method.type=qlora", "model.dtype=float16", "parallel.strategy=deepspeed_zero3"])
def test_gates_that_cannot_be_kept_are_refused(change, quickstart):
    changes = ["train.gradient_checkpointing=offload_gate", change]
    with pytest.raises(UserError, match=r"offload_gate saves the outputs of plain linear layers"):
        load_recipe(quickstart / "stories260k.yaml", overrides=changes)


@pytest.mark.parametrize(("copies", "world"), [(2, 2), (2, 3), (2, 1), (4, 6), (8, 8)])
def test_copies_that_no_two_processes_would_share_are_refused(copies, world):
    with pytest.raises(UserError, match=f"{copies} copies need a multiple of .* this run has {world}"):
        check_replicas(copies, world)


@pytest.mark.parametrize(("copies", "world"), [(2, 4), (2, 6), (3, 6), (4, 8)])
def test_copies_that_some_processes_share_are_not_refused(copies, world):
    check_replicas(copies, world)


def test_copies_of_a_model_that_sees_do_not_accumulate(quickstart):
    copies = ["parallel.strategy=fsdp", "parallel.dp_replicate_size=2"]
    recipe = load_recipe(quickstart / "stories260k.yaml", overrides=copies)
    check_image_accumulation(recipe, 1)
    check_image_accumulation(load_recipe(quickstart / "stories260k.yaml"), 4)
    with pytest.raises(UserError, match="accumulates 4 micro-batches"):
        check_image_accumulation(recipe, 4)


def test_a_device_holds_its_part_of_one_copy(quickstart, tmp_path):
    plans = {}
    for gpus, copies in ((8, 1), (8, 2), (4, 1)):
        changes = [f"parallel.dp_replicate_size={copies}", "parallel.strategy=fsdp", "train.optim=adamw_bf16"]
        changes += [f"checkpoint.output_dir={tmp_path}"]
        recipe = load_recipe(quickstart / "stories260k.yaml", overrides=changes)
        plans[gpus, copies] = plan_for(recipe, for_show=True, memory_gib=80, gpus=gpus).plan
    shared, copied, fewer = plans.values()
    assert copied.batching == shared.batching and copied.shards == fewer.shards == 4
    assert copied.bytes == fewer.bytes and copied.peak == fewer.peak
    assert copied.bytes.total > shared.bytes.total and copied.peak.total > shared.peak.total


def test_zero_shares_what_its_stage_says(quickstart, tmp_path):
    plans = {}
    for strategy in ("ddp", "deepspeed_zero2", "deepspeed_zero3"):
        changes = [f"parallel.strategy={strategy}", "model.dtype=bfloat16", f"checkpoint.output_dir={tmp_path}"]
        recipe = load_recipe(quickstart / "stories260k.yaml", overrides=changes)
        plans[strategy] = shared_states(recipe)
    ddp, two, three = plans.values()
    assert two.weights == ddp.weights and three.weights == ddp.weights // 2
    assert two.gradients == three.gradients == ddp.gradients // 2
    # two states in bfloat16; there, half of two in float32 and of the weights once more
    assert two.optimizer == three.optimizer == pytest.approx(ddp.optimizer / 4 * 12 / 2, rel=1e-6)


def shared_states(recipe):
    """The states of a plan for two devices."""
    from ligertune.models import load
    from ligertune.models.shape import read_shape

    config = load.read_config(recipe.model)
    spec = recipe.model.model_copy(update={"init": "random"})
    model = load.build_model(spec, config, dtype=torch.bfloat16, device="meta", seed=0)
    return states_of(recipe, read_shape(model), "bfloat16", strategy=recipe.parallel.strategy, world_size=2)
