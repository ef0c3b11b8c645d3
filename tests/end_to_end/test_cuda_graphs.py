"""train.cuda_graphs: on a GPU the bits of a run without, on a CPU a note, and where it cannot be one sentence."""

from __future__ import annotations

import dataclasses

import pytest
import torch
from command_line import losses
from test_keys import read

from ligertune.errors import UserError
from ligertune.planning.cuda_graph_checks import check_cuda_graphs, suggest_cuda_graphs
from ligertune.run import plan_for, run
from ligertune.train import cuda_graphs

GRAPHS = {"train.cuda_graphs": True}
SETTINGS = {
    "data.datasets.0.max_samples": 64,
    "data.val_split": 0,
    "data.max_length": 256,
    "data.on_overlength": "truncate",
    "train.max_steps": 12,
    "train.learning_rate": 1e-3,
    "logging.logging_steps": 1,
    "checkpoint.save_strategy": "no",
}
PADDED = {"data.packing": False, "train.per_device_train_batch_size": 4, "train.gradient_accumulation_steps": 2}
PACKED = {"data.packing": True, "train.per_device_train_batch_size": 2, "train.gradient_accumulation_steps": 3}
LORA = {"method.type": "lora", "method.lora_dropout": 0.1, "train.learning_rate": 1e-2}


@pytest.fixture(scope="module")
def packed(quickstart, tmp_path_factory):
    recipe = read(quickstart, tmp_path_factory.mktemp("plan"), **{**SETTINGS, **PACKED, **GRAPHS})
    return plan_for(recipe, for_show=True).plan


def test_on_a_cpu_a_note_says_that_nothing_is_recorded(packed):
    if packed.machine.device == "cpu":
        assert "train.cuda_graphs has no effect on a CPU" in packed.notes
    assert packed.rows.multiple_of == 256  # one length for all rows


def on(plan, *, peak_flops=None, **changes):
    gpu = dataclasses.replace(plan.machine, device="cuda", vendor="nvidia", peak_flops=peak_flops)
    return dataclasses.replace(plan, machine=gpu, attn_implementation="varlen", **changes)


def test_the_plan_names_it_where_launching_is_what_takes_the_time(quickstart, tmp_path):
    """One row of 128 tokens of Llama-3.2-1B's size; not where it would be refused, nor where there is enough to do."""
    recipe = read(quickstart, tmp_path, **{**SETTINGS, **PACKED, "data.max_length": 128})
    plan = plan_for(recipe, for_show=True).plan
    one_row = dataclasses.replace(plan.batching, micro_batch_size=1)
    one_b = {"n_parameters": 1_240_000_000, "memory": dataclasses.replace(plan.memory, layers=16)}
    plan = on(dataclasses.replace(plan, batching=one_row, **one_b), peak_flops=989e12)

    def says(changed, has_images=False, **train):
        asked = recipe.model_copy(update={"train": recipe.train.model_copy(update=train)})
        return [
            note
            for note in suggest_cuda_graphs(changed, asked, has_images=has_images).notes
            if "train.cuda_graphs: true" in note
        ]

    assert len(says(plan)) == 1 and "128 tokens" in says(plan)[0]
    many_rows = dataclasses.replace(one_row, micro_batch_size=256)
    for quiet in (
        dataclasses.replace(plan, batching=many_rows),
        dataclasses.replace(plan, strategy="ddp"),
        dataclasses.replace(plan, machine=dataclasses.replace(plan.machine, device="cpu")),
    ):
        assert not says(quiet)
    assert not says(plan, has_images=True)
    assert not says(plan, gradient_checkpointing=True)
    assert not says(plan, cuda_graphs=True)


def test_it_is_refused_where_each_batch_would_be_another(packed):
    check_cuda_graphs(on(packed), has_images=False)
    for plan, sees, words in (
        (on(packed, strategy="ddp"), False, "parallel.strategy is ddp here. Write parallel.num_processes: 1"),
        (on(packed), True, "reads images, which give each batch another shape"),
        (on(packed, precision=dataclasses.replace(packed.precision, autocast="fp16")), False, "trains in float16"),
        (
            dataclasses.replace(on(packed), attn_implementation="per_document"),
            False,
            "per_document attention depend",
        ),
    ):
        with pytest.raises(UserError, match=words):
            check_cuda_graphs(plan, has_images=sees)


def trained(quickstart, folder, **changes):
    """(losses, notes, peak memory) of a run."""
    recipe = read(quickstart, folder, **{**SETTINGS, **GRAPHS, "model.dtype": "bfloat16", **changes})
    report = run(plan_for(recipe), lambda line: None)
    return losses(folder / "run"), " ".join(report.notes), report.peak_memory


@pytest.mark.gpu
@pytest.mark.parametrize(
    "changes",
    [
        pytest.param(PADDED, id="padded, eight lengths"),
        pytest.param(PACKED, id="packed"),
        pytest.param({**PACKED, "train.gradient_accumulation_steps": 1}, id="packed, one micro batch"),
        pytest.param({**PADDED, "model.dtype": "float32"}, id="float32"),
        pytest.param({**PACKED, "kernels.optimizer": True}, id="our optimizer"),
        pytest.param({**PACKED, "kernels.recompute": True}, id="activations made again"),
        pytest.param({**PACKED, "kernels.attention": True}, id="our attention"),
        pytest.param({**PACKED, **LORA}, id="lora with dropout"),
        pytest.param({**PACKED, "kernels.enabled": False}, id="without our kernels"),
    ],
)
def test_it_gives_the_bits_of_a_run_without(changes, quickstart, tmp_path, monkeypatch):
    graphed, notes, peak = trained(quickstart, tmp_path / "graphed", **changes)
    monkeypatch.setattr(cuda_graphs, "MAX_GRAPHS", 0)  # the same batches, launched
    launched, without, peak_without = trained(quickstart, tmp_path / "launched", **changes)
    assert graphed == launched and graphed[-1] < graphed[0]
    assert " 0 recorded, 0 micro batches by them" in without
    recorded, replayed = (int(notes.split(words)[0].split()[-1]) for words in (" recorded", " micro batches by them"))
    assert 0 < recorded <= 16 and replayed >= 6, notes
    assert peak["allocated_steady"] > 0.9 * peak_without["allocated_steady"]  # what they use is counted


def record_nothing() -> None:
    """torch's random numbers still wait for the end of a recording that failed, and the next test would be refused."""
    with torch.cuda.graph(torch.cuda.CUDAGraph()):
        torch.zeros((), device="cuda")


@pytest.mark.gpu
def test_what_waits_for_the_device_is_named(quickstart, tmp_path, monkeypatch, request):
    from transformers import LlamaForCausalLM

    forward = LlamaForCausalLM.forward

    def waits(self, *args, **kwargs):
        bool(torch.zeros((), device="cuda") > 1)
        return forward(self, *args, **kwargs)

    monkeypatch.setattr(LlamaForCausalLM, "forward", waits)
    request.addfinalizer(record_nothing)
    with pytest.raises(UserError, match=r"train.cuda_graphs: forward and backward cannot be recorded: .*") as caught:
        trained(quickstart, tmp_path, **PACKED, **{"kernels.enabled": False})
    assert caught.value.hint == "Write train.cuda_graphs: false."
