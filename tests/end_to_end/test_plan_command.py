"""`ligertune plan`: predicted memory, `--fit`, checkpointed layers, and the message for out-of-memory errors."""

import dataclasses
import json
import sys

import pytest
import torch
from support.command_line import overrides, run
from support.quickstart_runs import recipe_for, train

from ligertune.compare.trial import Failure
from ligertune.compare.trial_rank import failure_of
from ligertune.errors import UserError
from ligertune.planning.memory.fit import advice, largest_fits
from ligertune.planning.plan import Plan
from ligertune.training.checks import explain_out_of_memory
from ligertune.training.resolve import plan_for

SETTINGS = {"data.datasets.0.max_samples": 40}


def test_it_predicts_memory_and_writes_nothing(ligertune, recipe, tmp_path):
    settings = overrides({**SETTINGS, "checkpoint.output_dir": tmp_path / "run"})
    done = ligertune("plan", recipe, *settings, "--fit", "--memory", "1", "--json")
    assert done.code == 0, done.err
    plan = json.loads(done.out)
    assert sum(v for k, v in plan["peak"].items() if k not in ("total", "at")) == plan["peak"]["total"]
    without, with_checkpointing = plan["fit"]
    assert 0 < without["micro_batch_size"] < with_checkpointing["micro_batch_size"]
    assert without["row_length"] == with_checkpointing["row_length"] == 512  # the model's context
    assert "fit in 1.00 GiB without checkpointing. Write in the recipe:\ntrain:\n  per_device_train" in done.err
    assert not (tmp_path / "run").exists()


def test_a_machine_without_a_gpu_plans_for_a_named_one(ligertune, recipe, monkeypatch):
    """The architecture of the CPU, such as aarch64, is not read as a GPU's."""
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    monkeypatch.setattr("platform.machine", lambda: "aarch64")
    settings = overrides({**SETTINGS, "method.type": "lora", "method.lora_r": 1})
    done = ligertune("plan", recipe, *settings, "--gpus", "4")
    assert done.code == 0, done.err
    printed = " ".join(done.out.split())  # lines are as wide as the terminal of the tests
    assert "simulated NVIDIA H100 (sm90) x 4, ddp (the fastest that fits, by prediction)" in printed
    assert "this machine has no GPU: the plan assumes an NVIDIA H100 (sm90) with 80 GiB" in printed
    assert "(Triton)" in printed and "reference" not in printed


def test_the_lines_of_fit_are_a_recipe_that_fits(ligertune, recipe):
    usual = {**SETTINGS, "train.gradient_accumulation_steps": "null", "train.global_batch_size": 64,
             "kernels.recompute": "norms", "data.max_length": 256}  # fmt: skip
    done = ligertune("plan", recipe, *overrides(usual), "--fit", "--memory", "1", "--json")
    found = json.loads(done.out)["fit"]
    for fit in found:
        for lines in (fit["many_rows"], fit["long_row"]):
            written = {f"{section}.{key}": value for section, keys in lines.items() for key, value in keys.items()}
            again = ligertune("plan", recipe, *overrides({**usual, **written}), "--memory", "1", "--json")
            assert again.code == 0, again.err
            assert json.loads(again.out)["peak"]["total"] < 1 << 30
    assert found[1]["many_rows"]["kernels"] == {"recompute": False}
    assert found[0]["long_row"]["data"] == {"max_length": 512}


def test_fit_context_finds_the_longest_row_of_each_setting(ligertune, recipe):
    usual = {**SETTINGS, "method.type": "lora", "data.packing": True, "data.max_length": 256}
    done = ligertune("plan", recipe, *overrides(usual), "--fit", "context", "--memory", "1", "--json")
    assert done.code == 0, done.err
    found = json.loads(done.out)["fit"]
    settings = [(fit["lines"]["train"]["gradient_checkpointing"], fit["lines"]["train"]["tiled_mlp"]) for fit in found]
    assert settings == [(True, False), ("offload", False), (True, True), ("offload", True)]
    checkpointing, offload, tiled, both = (fit["tokens"] for fit in found)
    assert 512 < checkpointing < offload < both and checkpointing < tiled < both and both % 256 == 0
    assert found[0]["host"] == 0 and found[3]["host"] == both * 5 * 64 * 2  # 5 layers of 64 bfloat16 values a token
    assert all(fit["peak"] < (1 << 30) - (600 << 20) for fit in found)
    assert "offload, tiled_mlp" in done.err and "The model's own context is 512 tokens" in done.err
    assert f"For {both:,} tokens, write in the recipe:\ndata:\n  max_length: {both}\n" in done.err


def test_rows_that_fit_in_tiles_only_are_tiled(tmp_path):
    """`auto` tiles where a step does not fit otherwise, and not where it does or is not checkpointed."""
    changes = {"method.type": "lora", "data.packing": True, "train.per_device_train_batch_size": 1,
               "data.max_length": 512, "train.gradient_checkpointing": "offload"}  # fmt: skip
    assert plan_for(recipe_for(tmp_path, **changes), for_show=True, memory_gib=1).plan.tile == 0
    small = plan_for(recipe_for(tmp_path, **changes), for_show=True, memory_gib=0.58).plan  # nothing fits
    assert small.tile == 4096 and small.memory.policy.tile == 4096
    assert "train.tiled_mlp: MLPs and projections run on 4,096 tokens at a time" in small.notes
    for other in ({"train.tiled_mlp": False}, {"train.gradient_checkpointing": False}):
        assert plan_for(recipe_for(tmp_path, **changes | other), for_show=True, memory_gib=0.58).plan.tile == 0


@pytest.mark.parametrize(
    ("changes", "reason"),
    [({"kernels.norm": False, "method.type": "lora"}, None), ({"parallel.strategy": "fsdp"}, "fsdp gathers"),
     ({"train.gradient_checkpointing": False}, "is for checkpointed layers"), ({"train.fp8": True}, "scales whole")],
)  # fmt: skip
def test_tiles_are_refused_where_they_cannot_be(changes, reason, tmp_path):
    wanted = {"train.gradient_checkpointing": True, "train.tiled_mlp": True, "data.packing": True, **changes}
    if reason is None:
        assert plan_for(recipe_for(tmp_path, **wanted), for_show=True, memory_gib=1).plan.tile == 4096
        return
    with pytest.raises(UserError, match=f"train.tiled_mlp.*{reason}"):
        plan_for(recipe_for(tmp_path, **wanted), for_show=True, memory_gib=1)


def test_a_plan_for_pairs_counts_both_sequences(ligertune, recipe, quickstart):
    pairs = {"task": "dpo", "data.datasets.0.path": quickstart / "preferences.jsonl", "data.max_length": 256,
             "data.val_split": 0.25, "train.per_device_train_batch_size": 2,
             "train.gradient_accumulation_steps": 2}  # fmt: skip
    for packing in (True, False):
        settings = {**pairs, "data.packing": packing}
        done = ligertune("plan", recipe, *overrides(settings), "--fit", "--memory", "1", "--json")
        assert done.code == 0, done.err
        plan = json.loads(done.out)
        assert (plan["rows"]["length"], plan["rows"]["documents"], plan["data"]["examples"]) == (512, 2, 240)
        fit = plan["fit"][0]
        assert (fit["row_length"], fit["long_row"]["data"]) == (512, {"max_length": 512})  # the model's context
    shown = ligertune("plan", recipe, *overrides(settings), "--fit", "--memory", "1").out
    assert "240 pairs, " in shown and "80 pairs" in shown and "4 pairs per step" in shown
    assert "One pair of 2 x 512 tokens (the model's context) fits" in shown


@pytest.mark.parametrize(
    "settings, when",
    [({}, "in the loss"), ({"train.gradient_checkpointing": True}, "at the beginning of the backward"),
     ({"train.per_device_train_batch_size": 1, "train.gradient_accumulation_steps": 1, "data.max_length": 256,
       "train.gradient_checkpointing": True}, "in the backward of the first layer")],
)  # fmt: skip
def test_it_names_the_moment_of_peak_memory(settings, when, ligertune, recipe):
    done = ligertune("plan", recipe, *overrides({**SETTINGS, **settings}))
    assert done.code == 0 and f"reached {when}" in " ".join(done.out.split()), done.err


@pytest.mark.slow
def test_peft_is_imported_for_adapters_only(recipe, tmp_path):
    """Importing it takes seconds, in each process of a run."""
    changes = [f"checkpoint.output_dir={tmp_path / 'run'}", "train.max_steps=1", "data.datasets.0.max_samples=40"]
    code = (
        "import sys; from pathlib import Path\n"
        "from ligertune.recipe import load_recipe; from ligertune.run import run\n"
        "from ligertune.training.resolve import plan_for\n"
        f"job = plan_for(load_recipe(Path({str(recipe)!r}), {changes!r}))\n"
        "run(job, lambda line: None)\n"
        "assert 'accelerate' in sys.modules and 'peft' not in sys.modules"
    )
    done = run([sys.executable, "-c", code], cwd=tmp_path)
    assert done.code == 0, done.err


@pytest.fixture(scope="module")
def plan(tmp_path_factory):
    folder = tmp_path_factory.mktemp("plan")
    return plan_for(recipe_for(folder, **{"data.packing": True, "data.max_length": 512}), for_show=True).plan


def test_four_gpus_shard_the_states(tmp_path, plan):
    # as `plan`, on a CPU
    float32 = {"data.packing": True, "model.dtype": "float32", "parallel.strategy": "fsdp"}
    four = plan_for(recipe_for(tmp_path, **float32), for_show=True, gpus=4).plan
    assert (four.strategy, four.bytes.optimizer) == ("fsdp", plan.bytes.optimizer // 4)


def test_fit_finds_the_largest_micro_batch(plan):
    small = dataclasses.replace(plan, machine=dataclasses.replace(plan.machine, memory_bytes=3 << 30))
    memory = small.machine.memory_bytes
    for fit, estimate in zip(
        largest_fits(small), (small.memory.without_checkpointing(), small.memory.with_checkpointing()), strict=True
    ):
        accumulates = small.batching.accumulation > 1
        rows = fit.micro_batch_size
        # every token may have a label: which examples share a row changes in each epoch
        assert estimate.fits(rows, 512, accumulates=accumulates, memory=memory, labels=rows * 512)
        assert not estimate.fits(rows + 1, 512, accumulates=accumulates, memory=memory, labels=(rows + 1) * 512)


def checkpointed(folder, layers: int | str, gib: float) -> Plan:
    changes = {"data.packing": True, "data.max_length": 512, "train.per_device_train_batch_size": 64,
               "train.gradient_checkpointing": True, "train.gradient_checkpointing_layers": layers}  # fmt: skip
    return plan_for(recipe_for(folder, **changes), for_show=True, memory_gib=gib).plan


def test_auto_checkpoints_as_few_layers_as_memory_allows(tmp_path):
    found = []
    for mib in range(768, 1792, 64):
        made = checkpointed(tmp_path, "auto", mib / 1024)
        left = made.memory.policy.not_checkpointed
        fits = [
            dataclasses.replace(made.memory, policy=dataclasses.replace(made.memory.policy, not_checkpointed=n)).fits(
                64, 512, accumulates=True, memory=mib << 20, labels=made.largest_batch.labels
            )
            for n in range(7)
        ]
        assert left == 0 or fits[left]
        assert left == 5 or not fits[left + 1]
        assert f"{5 - left} of 5 layers are checkpointed" in " ".join(made.notes)
        found.append(left)
    assert found == sorted(found) and found[0] == 0 and found[-1] == 5 and len(set(found)) > 3, found


def test_a_note_says_when_fewer_checkpointed_layers_suffice(tmp_path):
    for mib in (768, 1024, 1216, 1408, 1792):
        auto, every = (checkpointed(tmp_path, layers, mib / 1024) for layers in ("auto", "all"))
        needed = 5 - auto.memory.policy.not_checkpointed
        said = " ".join(note for note in every.notes if note.startswith("train.gradient_checkpointing"))
        words = {0: "room for all activations", 5: ""}.get(needed, f"checkpoint {needed} of 5 layers instead")
        assert words in said and bool(words) == bool(said)
        assert every.checkpointed_layers is None


def test_gradient_checkpointing_layers(tmp_path, ligertune, recipe):
    assert checkpointed(tmp_path, 2, 8).checkpointed_layers == 2
    assert checkpointed(tmp_path, "all", 8).checkpointed_layers is None
    changes = {**SETTINGS, "train.gradient_checkpointing": True, "train.gradient_checkpointing_layers": 6}
    done = ligertune("plan", recipe, *overrides(changes))
    assert done.code == 2 and "gradient_checkpointing_layers: 6, but the model has 5 layers" in done.err


def test_an_out_of_memory_error_names_the_keys_to_change(plan):
    with pytest.raises(UserError) as caught, explain_out_of_memory(plan):
        raise torch.OutOfMemoryError(
            "CUDA out of memory. Tried to allocate 2.00 GiB. GPU 0 has a total capacity of 8 GiB"
        )
    said = str(caught.value)
    assert caught.value.exit_code == 1
    assert "ran out of memory: tried to allocate 2.00 GiB. The plan expects" in said and "activations" in said
    ways = "train.per_device_train_batch_size: 1 (with train.global_batch_size: 4", "train.optim: adamw_8bit", "lora"
    assert all(way in said for way in ways), said
    assert "train.per_device_train_batch_size: 1" in advice(plan)
    assert failure_of(caught.value) == Failure("out of memory", said)  # a sweep of `compare` goes on


def test_a_comparison_distinguishes_out_of_memory_from_other_errors():
    assert failure_of(UserError("data.max_length is wrong.")) == Failure("error", "data.max_length is wrong.")
    assert failure_of(MemoryError("8 GiB")).kind == "out of memory"
    assert failure_of(RuntimeError("[enforce fail at alloc_cpu.cpp] DefaultCPUAllocator: can't allocate memory"))
    assert failure_of(RuntimeError("mat1 and mat2 shapes cannot be multiplied")) is None


def test_advice_does_not_combine_exclusive_keys(tmp_path):
    made = plan_for(recipe_for(tmp_path, **{"data.packing": True, "kernels.recompute": True}), for_show=True).plan
    found = advice(dataclasses.replace(made, machine=dataclasses.replace(made.machine, memory_bytes=3 << 30)))
    assert "train.gradient_checkpointing: true instead of kernels.recompute (fits" in found


@pytest.mark.gpu
def test_the_predicted_peak_is_within_15_percent_on_a_gpu(tmp_path):
    changes = {"model.init": "random", "train.per_device_train_batch_size": 64, "data.packing": True,
               "data.datasets.0.max_samples": "null", "train.num_train_epochs": 1}  # fmt: skip
    report = train(tmp_path, **changes)
    predicted = json.loads((tmp_path / "run" / "plan.json").read_text())["peak"]["total"]
    assert predicted == pytest.approx(report.peak_memory["allocated_run"], rel=0.15)


@pytest.mark.gpu
def test_an_out_of_memory_error_on_a_gpu_is_explained(tmp_path):
    torch.cuda.set_per_process_memory_fraction(0.005)
    try:
        with pytest.raises(UserError, match="ran out of memory"):
            changes = {"train.per_device_train_batch_size": 64, "data.packing": True, "data.max_length": 4096}
            train(tmp_path, **changes)
    finally:
        torch.cuda.set_per_process_memory_fraction(1.0)
