"""The settings that a plan chooses, and the predicted time of a step."""

import dataclasses
import json
from pathlib import Path

import numpy as np
import pytest
from support.command_line import RECIPE
from support.quickstart_runs import EXCLUSIVE, bare_recipe, recipe_for
from transformers import AutoModelForCausalLM

from ligertune.attention.document_isolation import _logits_of
from ligertune.errors import UserError
from ligertune.files.storage import PROGRESS_FILE
from ligertune.hardware import this_machine
from ligertune.patching.packing_checks import install_packing_checks
from ligertune.planning.graph_choice import host_seconds
from ligertune.planning.memory.activation_bytes import CUDA_CONTEXT
from ligertune.planning.memory.estimate import FRAGMENTATION, uncounted
from ligertune.planning.memory.mixer_shapes import DeltaRuleShape
from ligertune.planning.parallelism import FREE_OF_SEVERAL
from ligertune.planning.time import gpu_rates, plan_time, settings_choice
from ligertune.planning.time.gpu_rates import rate_at, rates_of
from ligertune.planning.time.host_pace import host_pace, seconds_per_operation
from ligertune.planning.time.open_settings import OpenSettings, with_batch_of_tokens, with_train, with_usual_values
from ligertune.planning.time.settings_choice import Candidate, choose
from ligertune.planning.time.step_time import StepTime
from ligertune.training import resolve
from ligertune.training.checks import why_not_padding_free
from ligertune.training.resolve import plan_for

RATES = json.loads((Path(gpu_rates.__file__).parent / "rates" / "h200.json").read_text())
OPEN = {"train.per_device_train_batch_size": "auto", "train.gradient_accumulation_steps": "auto"}
PACKED = {"data.packing": True, "data.max_length": 256, "data.on_overlength": "truncate"}
ROWS = {**OPEN, **PACKED, "model.dtype": "bfloat16"}
BATCH = ("train.per_device_train_batch_size", "train.gradient_accumulation_steps")


@pytest.fixture
def h200(monkeypatch):
    """Plan for one H200 with so many bytes, or for several of one or more nodes."""

    def planned(folder, *, memory=140 << 30, gpus=1, nodes=1, **changes):
        machine = dataclasses.replace(
            this_machine(), device="cuda", vendor="nvidia", arch="sm90", name="NVIDIA H200", memory_bytes=memory,
            peak_flops=989e12, peak_bandwidth=4.8e12, has_bfloat16=True, world_size=gpus, nodes=nodes,
        )  # fmt: skip
        monkeypatch.setattr(resolve, "simulated_machine", lambda **_: machine)
        rows = {key: value for key, value in ROWS.items() if EXCLUSIVE.get(key) not in changes}
        return plan_for(recipe_for(folder, **{**rows, **changes}), for_show=True).plan

    return planned


def test_without_written_settings_a_step_has_four_rows(h200, tmp_path):
    """The quickstart's recipe names none of these keys."""
    plan = h200(tmp_path)
    assert plan.batching.global_batch_size == 4
    splits = {tuple(one.values[key] for key in BATCH) for one in plan.settings_tried}
    assert splits == {(4, 1), (2, 2), (1, 4)}
    seconds = [one.seconds for one in plan.settings_tried]
    assert seconds[1:] == sorted(seconds[1:]) and seconds[0] <= 1.01 * min(seconds)
    assert plan.time.measured and plan.time.total == pytest.approx(seconds[0])


def test_the_chosen_settings_are_those_of_the_resolved_recipe(h200, tmp_path):
    plan = h200(tmp_path, **{"train.global_batch_size": 16})
    chosen = plan.settings_tried[0]
    assert plan.batching.micro_batch_size == chosen.values[BATCH[0]]
    assert plan.batching.accumulation == chosen.values[BATCH[1]] and plan.batching.global_batch_size == 16
    again = h200(tmp_path, **{f"train.{key}": value for key, value in plan.settings["train"].items()
                              if key in ("per_device_train_batch_size", "global_batch_size", "gradient_checkpointing")},
                 **{"kernels.recompute": plan.settings["kernels"]["recompute"]})  # fmt: skip
    assert again.settings_tried == () and again.batching == plan.batching and again.peak == plan.peak


def test_written_settings_stay(h200, tmp_path):
    written = {BATCH[0]: 2, BATCH[1]: 3, "train.gradient_checkpointing": "offload"}
    plan = h200(tmp_path, **written)
    assert (plan.batching.micro_batch_size, plan.batching.accumulation) == (2, 3)
    assert plan.settings["train"]["gradient_checkpointing"] == "offload"
    whole = h200(tmp_path, **{"train.gradient_checkpointing": True})
    assert whole.settings["train"]["gradient_checkpointing"] is True and whole.checkpointed_layers is None
    assert h200(tmp_path, **{BATCH[1]: 3}).batching.global_batch_size == 12  # four rows, as ever


def test_the_simplest_of_the_fastest_is_chosen(h200, tmp_path):
    plan = h200(tmp_path)
    recipe = with_usual_values(recipe_for(tmp_path, **{**ROWS, "kernels.recompute": False}), 1)
    tight = dataclasses.replace(plan, machine=dataclasses.replace(plan.machine, memory_bytes=plan.peak.total))

    def candidate(seconds, *, plan=plan, **train):
        return Candidate(with_train(recipe, **train), plan, StepTime(products=seconds))

    fast = candidate(1.0, gradient_checkpointing=True)
    simple = candidate(1.005)
    slow = candidate(1.02)
    full = candidate(1.0, plan=tight)
    assert choose([slow, fast]) is fast  # 2 % are worth a checkpointed layer
    assert choose([fast, slow, simple]) is simple
    assert choose([candidate(1.0, gradient_checkpointing="offload"), fast]) is fast
    assert choose([full, simple]) is simple and choose([full, slow]) is full


def test_a_run_that_is_continued_keeps_its_settings_where_they_fit(h200, tmp_path):
    """Another choice would compute the same batch in another order. The first may be what ran out of memory."""
    chosen, kept, *_ = h200(tmp_path).settings_tried
    written = {key: value for key, value in kept.values.items() if key != BATCH[1]}
    run = tmp_path / "run"
    (run / "checkpoints" / "step-2").mkdir(parents=True)
    (run / "resolved_recipe.yaml").write_text(h200(tmp_path, **written).recipe_text)

    def values(**changes):
        return h200(tmp_path, **changes).settings_tried[0].values

    resumed = {"checkpoint.resume_from_checkpoint": "newest"}
    assert values(**resumed) == chosen.values  # the checkpoint is not complete
    (run / "checkpoints" / "step-2" / PROGRESS_FILE).write_text('{"step": 2}')
    assert values(**resumed) == kept.values
    assert values(**{"checkpoint.resume_from_checkpoint": run / "checkpoints" / "step-2"}) == kept.values
    assert values() == chosen.values
    memory = round((1 + FRAGMENTATION) * (kept.peak - 1)) + CUDA_CONTEXT
    assert values(memory=memory, **resumed) != kept.values
    (run / "resolved_recipe.yaml").write_text("train: {of_an_earlier_version: 1}")
    assert values(**resumed) == chosen.values


def test_less_memory_gives_a_plan_that_fits(h200, tmp_path):
    """Each plan of the list fits; with too little memory the usual one is left, and training says what to change."""
    large = h200(tmp_path, **{"train.global_batch_size": 64})
    peaks = sorted(one.peak for one in large.settings_tried)
    room = peaks[len(peaks) // 4]
    memory = round((1 + FRAGMENTATION) * room) + CUDA_CONTEXT
    small = h200(tmp_path, memory=memory, **{"train.global_batch_size": 64})
    assert 0 < len(small.settings_tried) < len(large.settings_tried)
    assert max(one.peak for one in small.settings_tried) <= room
    assert small.peak.total == small.settings_tried[0].peak
    assert h200(tmp_path, memory=600 << 20).settings_tried == ()


@pytest.mark.parametrize(("not_checkpointed", "fits"), [(0, True), (2, False), (5, True)])
def test_steps_with_some_layers_checkpointed_need_more_room(h200, tmp_path, not_checkpointed, fits):
    """5 % more than the peak is room enough for steps of one kind of layers. The model has five."""
    estimate = h200(tmp_path).memory.with_checkpointing(not_checkpointed=not_checkpointed)
    rows = {"rows": 4, "row_length": 256}
    peak = estimate.peak(**rows, accumulates=False, memory=1 << 37).total
    assert estimate.fits(**rows, accumulates=False, memory=round(1.05 * peak) + CUDA_CONTEXT) is fits


def test_checkpointing_is_chosen_where_nothing_else_fits(h200, tmp_path):
    one_row = {BATCH[0]: 64, "kernels.recompute": False}
    whole = h200(tmp_path, **one_row, **{"train.gradient_checkpointing": False}).peak.total
    plan = h200(tmp_path, memory=whole + CUDA_CONTEXT, **one_row)
    assert plan.settings["train"]["gradient_checkpointing"] is not False
    layers = plan.settings["train"]["gradient_checkpointing_layers"]
    assert layers == "all" or 0 < layers < 5  # the model has five
    tried = [{"train.gradient_checkpointing_layers": "all", **one.values} for one in plan.settings_tried]
    offloaded = {one["train.gradient_checkpointing_layers"] for one in tried if "offload" in one.values()}
    assert "all" in offloaded and any(0 < number < 5 for number in offloaded - {"all"})


def test_layers_with_a_recurrence_keep_the_host_longer_and_have_more_uncounted(h200, tmp_path):
    plan = h200(tmp_path)
    mixer = DeltaRuleShape(key_heads=1, value_heads=2, key_dim=16, value_dim=16, repeats=False)
    layer = dataclasses.replace(plan.memory.layer, mixer=mixer)
    for memory in (
        dataclasses.replace(plan.memory, layer=layer),
        dataclasses.replace(plan.memory, other_layers=((layer, 2),)),
    ):
        hybrid = dataclasses.replace(plan, memory=memory)
        assert host_seconds(hybrid) == pytest.approx(1.25 * host_seconds(plan))
    assert uncounted(1, mixers=2) > uncounted(2, mixers=0) > uncounted(1, mixers=0)


STRATEGY = ("parallel.strategy", "parallel.reshard_after_forward", "parallel.dp_replicate_size")


@pytest.fixture
def larger(tmp_path):
    """Recipe keys of a model whose weights need more memory than the activations of a row."""
    model = tmp_path / "larger"
    model.mkdir()
    sizes = {"hidden_size": 4096, "intermediate_size": 14336, "num_attention_heads": 32, "head_dim": 128}
    config = json.loads((RECIPE.parent / "stories260K" / "config.json").read_text())
    (model / "config.json").write_text(json.dumps({**config, **sizes}))
    tokenizer = RECIPE.parent / "stories260K"
    return {"model.model_name_or_path": model, "model.init": "random", "model.tokenizer.path": tokenizer}


def strategies(plan) -> set[tuple[object, ...]]:
    """Return (strategy, resharding, copies) of each setting that fits; None: the setting does not have it."""
    return {tuple(one.values.get(key) for key in STRATEGY) for one in plan.settings_tried}


def test_several_gpus_try_each_strategy(h200, tmp_path):
    plan = h200(tmp_path, gpus=4, **{"train.global_batch_size": 16})
    assert strategies(plan) == {("ddp", None, None), ("fsdp", True, None), ("fsdp", False, None)}
    chosen = plan.settings_tried[0]
    written = plan.settings["parallel"]
    assert (plan.strategy, plan.strategy_why) == (chosen.values[STRATEGY[0]], "the fastest that fits, by prediction")
    assert written["strategy"] == plan.strategy and not plan.time.measured
    assert chosen.seconds <= 1.01 * min(one.seconds for one in plan.settings_tried)
    again = h200(tmp_path, gpus=4, **{
        **{f"parallel.{key}": written[key] for key in ("strategy", "reshard_after_forward")},
        "train.global_batch_size": 16, BATCH[0]: plan.batching.micro_batch_size,
        "train.gradient_checkpointing": plan.settings["train"]["gradient_checkpointing"],
        "kernels.recompute": plan.settings["kernels"]["recompute"],
    })  # fmt: skip
    assert again.strategy == plan.strategy and again.peak == plan.peak


def test_weights_that_stay_gathered_need_memory(h200, larger, tmp_path):
    """Replicas need the most. With less memory than they need the model is sharded, then resharded."""
    settings = {BATCH[0]: 1, "train.gradient_checkpointing": False, **larger}
    fitting = h200(tmp_path, gpus=4, **settings).settings_tried
    peaks = {tuple(one.values.get(key) for key in STRATEGY[:2]): one.peak for one in fitting}
    replicas, gathered, resharded = (peaks[key] for key in (("ddp", None), ("fsdp", False), ("fsdp", True)))
    assert resharded < gathered < replicas

    def left(peak: int) -> set[tuple[object, ...]]:
        """Return the strategies that fit if memory is less than this peak needs."""
        memory = round(((1 + FRAGMENTATION) * peak + CUDA_CONTEXT) / (1 - FREE_OF_SEVERAL)) - (1 << 20)
        return strategies(h200(tmp_path, gpus=4, memory=memory, **settings))

    assert left(replicas) == {("fsdp", True, None), ("fsdp", False, None)}
    assert left(gathered) == {("fsdp", True, None)}


def test_written_strategies_stay(h200, tmp_path):
    def found(**parallel) -> set[tuple[object, ...]]:
        written = {f"parallel.{key}": value for key, value in parallel.items()}
        return strategies(h200(tmp_path, gpus=4, **{BATCH[0]: 4, **written}))

    assert found(strategy="ddp") == {("ddp", None, None)}
    assert found(strategy="fsdp") == {("fsdp", True, None), ("fsdp", False, None)}
    assert found(strategy="fsdp", reshard_after_forward=False) == {("fsdp", False, None)}
    assert found(strategy="fsdp", dp_replicate_size=2) == {("fsdp", True, 2), ("fsdp", False, 2)}
    assert strategies(h200(tmp_path)) == {(None, None, None)}  # one process has none


def test_a_copy_of_the_model_in_each_node_is_tried_on_several_nodes(h200, larger, tmp_path):
    """Where the network is slow next to the computation, one copy per node is faster than one copy over all."""
    settings = {"train.global_batch_size": 16, "train.gradient_checkpointing": False, **larger}
    plan = h200(tmp_path, gpus=16, nodes=2, **settings)
    assert {copies for _, _, copies in strategies(plan)} == {None, 2}
    fastest = {copies: min(one.seconds for one in plan.settings_tried
                           if one.values["parallel.strategy"] == "fsdp" and one.values.get(STRATEGY[2]) == copies)
               for copies in (None, 2)}  # fmt: skip
    assert fastest[2] < fastest[None]
    written = h200(tmp_path, gpus=16, nodes=2, **settings, **{"parallel.dp_replicate_size": 1})
    assert {copies for _, _, copies in strategies(written)} == {None}
    assert {copies for _, _, copies in strategies(h200(tmp_path, gpus=16, nodes=16, **settings))} == {None}


def test_offloading_is_not_chosen_where_the_host_has_too_little_memory(h200, tmp_path, monkeypatch):
    def offloads() -> bool:
        tried = h200(tmp_path, **{"train.global_batch_size": 8}).settings_tried
        return any(one.values["train.gradient_checkpointing"] == "offload" for one in tried)

    assert offloads()
    monkeypatch.setattr(settings_choice, "total_memory", lambda: 1)
    assert not offloads()


def test_a_batch_in_tokens_is_whole_rows(h200, tmp_path):
    plan = h200(tmp_path, **{"train.global_batch_tokens": 2000})
    mean = plan.data.tokens / plan.rows.count
    assert abs(plan.batching.global_batch_size * mean - 2000) <= mean / 2
    recipe = bare_recipe(global_batch_tokens=10_000)
    assert with_batch_of_tokens(recipe, 1000.0, row_ranks=4).train.global_batch_size == 8
    assert with_batch_of_tokens(recipe, 1400.0, row_ranks=4).train.global_batch_size == 8  # 7.1 rows
    assert with_batch_of_tokens(recipe, 90_000.0, row_ranks=4).train.global_batch_size == 4


@pytest.mark.parametrize(("wanted", "ranks", "micro"), [(64, 1, 4), (6, 1, 3), (6, 2, 3), (7, 1, 1), (2, 2, 1)])
def test_usual_values_divide_the_global_batch(wanted, ranks, micro):
    train = with_usual_values(bare_recipe(global_batch_size=wanted), ranks).train
    assert (train.per_device_train_batch_size, train.gradient_checkpointing) == (micro, False)


def test_a_global_batch_that_processes_cannot_share_is_refused():
    with pytest.raises(UserError, match="global_batch_size: 6 is not a multiple of 4 processes") as caught:
        with_usual_values(bare_recipe(global_batch_size=6), 4)
    assert caught.value.hint == "Write 4."


def test_which_settings_are_open():
    assert OpenSettings.of(bare_recipe()) == OpenSettings(split=True, checkpointing=True, recompute=True)
    written = bare_recipe(per_device_train_batch_size=2, gradient_checkpointing=False)
    assert OpenSettings.of(written) == OpenSettings(split=False, checkpointing=False, recompute=False)
    assert not OpenSettings.of(bare_recipe(gradient_accumulation_steps=2)).split


def test_a_cpu_has_no_predicted_time(tmp_path):
    plan = plan_for(recipe_for(tmp_path, **ROWS)).plan
    assert plan.time is None and plan.settings_tried == ()
    assert plan.batching.micro_batch_size == 4 and plan.settings["train"]["gradient_checkpointing"] is False


def test_rates_between_measured_sizes_lie_between_their_rates():
    rates = gpu_rates.rates_in(RATES)
    (width, tokens, rate), *_ = rates.linear
    assert rate_at(rates.linear, width, tokens) == rate == rate_at(rates.linear, width, 1)
    at = {count: value for size, count, value in rates.linear if size == width}
    low, high, *_ = sorted(at)
    between = rate_at(rates.linear, width, (low * high) ** 0.5)
    assert between == pytest.approx((at[low] + at[high]) / 2)


def test_a_gpu_without_rates_has_those_of_the_reference_at_its_own_peaks():
    """An MI300X has 1.32 times the FLOP/s of an H200; a GPU of unknown peaks has no prediction."""
    machine = dataclasses.replace(
        this_machine(), device="cuda", vendor="amd", name="AMD Instinct MI300X", peak_flops=1307.4e12,
        peak_bandwidth=5.3e12,
    )  # fmt: skip
    rates = rates_of(machine)
    assert not rates.measured and rates.device == RATES["device"]
    assert rates.matmul == pytest.approx(RATES["matmul"] * 1307.4 / 989)
    assert rates_of(dataclasses.replace(machine, peak_flops=None)) is None


def test_steps_that_were_measured_are_predicted(h200, tmp_path):
    """More rows take longer, recomputation costs time and saves memory, offloading saves the most."""
    tried = {tuple(one.values.values()): one for one in h200(tmp_path, **{"train.global_batch_size": 8}).settings_tried}
    plain, recomputed, offloaded = (
        tried[key] for key in ((8, 1, False, False), (8, 1, False, True), (8, 1, "offload", False))
    )
    assert plain.seconds < recomputed.seconds < offloaded.seconds
    assert plain.peak > recomputed.peak > offloaded.peak


def test_a_slow_host_makes_steps_longer(h200, tmp_path, monkeypatch):
    """Several processes, which must plan alike, and a run on a CPU have the pace of the reference."""
    machine = h200(tmp_path).machine
    assert host_pace(dataclasses.replace(machine, world_size=2)) == 1.0
    assert host_pace(dataclasses.replace(machine, device="cpu")) == 1.0
    assert 1e-6 < seconds_per_operation() < 1e-2
    monkeypatch.setattr(plan_time, "host_pace", lambda machine: 100.0)
    slow = h200(tmp_path, **{"train.cuda_graphs": False})
    assert slow.time.parts.host == pytest.approx(100 * host_seconds(slow) * slow.batching.accumulation, rel=0.1)
    assert slow.batching.accumulation == 1  # few launches


def test_the_check_of_documents_reads_short_rows_where_graphs_need_long_ones(tmp_path):
    """The logits of a whole row would take more memory than the step; a row's padding is left out of what is kept."""
    job = plan_for(recipe_for(tmp_path, **PACKED, **{"train.cuda_graphs": True}))
    assert job.plan.rows.multiple_of == 256
    model = AutoModelForCausalLM.from_config(job.config, attn_implementation=job.plan.attn_implementation)
    install_packing_checks(model)
    lengths = []
    model.register_forward_pre_hook(
        lambda _, __, inputs: lengths.append(inputs["input_ids"].shape[1]), with_kwargs=True
    )
    assert why_not_padding_free(job.plan, model) is None
    assert lengths and max(lengths) <= 128
    assert _logits_of(model, [np.arange(3), np.arange(4)], multiple_of=64).shape[0] == 7
