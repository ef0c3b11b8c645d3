"""train.cuda_graphs: bit-equal to a run without it on a GPU, a note on a CPU, and what refuses it."""

import dataclasses

import pytest
import torch
from support.command_line import losses
from support.quickstart_runs import recipe_for, train

from ligertune.errors import UserError
from ligertune.planning.make_plan import check_cuda_graphs, suggest_cuda_graphs
from ligertune.planning.memory.model_shape import ModalityFacts
from ligertune.training import cuda_graphs
from ligertune.training.resolve import plan_for

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
TEXT = ModalityFacts()
IMAGES = ModalityFacts(inputs="images", family="Qwen2-VL")
LORA = {"method.type": "lora", "method.lora_dropout": 0.1, "train.learning_rate": 1e-2}


@pytest.fixture(scope="module")
def packed(tmp_path_factory):
    recipe = recipe_for(tmp_path_factory.mktemp("plan"), **{**SETTINGS, **PACKED, **GRAPHS})
    return plan_for(recipe, for_show=True).plan


def test_a_note_says_that_a_cpu_has_no_cuda_graphs(packed):
    if packed.machine.device == "cpu":
        assert "train.cuda_graphs has no effect on a CPU" in packed.notes
    assert packed.rows.multiple_of == 256  # one length for all rows


def on_a_gpu(plan, *, peak_flops=None, **changes):
    gpu = dataclasses.replace(plan.machine, device="cuda", vendor="nvidia", peak_flops=peak_flops)
    return dataclasses.replace(plan, machine=gpu, attn_implementation="varlen", **changes)


def test_the_plan_suggests_it_where_kernel_launches_take_the_time(tmp_path):
    """One row of 128 tokens at the size of Llama-3.2-1B. Not for larger batches, nor where it would be refused."""
    recipe = recipe_for(tmp_path, **{**SETTINGS, **PACKED, "data.max_length": 128, "data.max_dropped": 1})
    plan = plan_for(recipe, for_show=True).plan
    one_row = dataclasses.replace(plan.batching, micro_batch_size=1)
    one_b = {"n_parameters": 1_240_000_000, "memory": dataclasses.replace(plan.memory, layers=16)}
    plan = on_a_gpu(dataclasses.replace(plan, batching=one_row, notes=(), **one_b), peak_flops=989e12)

    def suggestions(changed, modality=TEXT, **train):
        changed_recipe = recipe.model_copy(update={"train": recipe.train.model_copy(update=train)})
        notes = suggest_cuda_graphs(changed, changed_recipe, modality).notes
        return [note for note in notes if "train.cuda_graphs: true" in note]

    assert len(suggestions(plan)) == 1 and "128 tokens" in suggestions(plan)[0]
    many_rows = dataclasses.replace(one_row, micro_batch_size=256)
    for other in (
        dataclasses.replace(plan, batching=many_rows),
        dataclasses.replace(plan, strategy="ddp"),
        dataclasses.replace(plan, machine=dataclasses.replace(plan.machine, device="cpu")),
    ):
        assert not suggestions(other)
    assert not suggestions(plan, IMAGES)
    assert not suggestions(plan, gradient_checkpointing=True)
    assert not suggestions(plan, cuda_graphs=True)


def test_it_is_refused_where_batches_differ_in_shape(packed):
    check_cuda_graphs(on_a_gpu(packed), TEXT)
    fp16 = dataclasses.replace(packed.precision, autocast="fp16")
    per_document = dataclasses.replace(on_a_gpu(packed), attn_implementation="per_document")
    for plan, modality, words in (
        (on_a_gpu(packed, strategy="ddp"), TEXT, "parallel.strategy is ddp here. Write parallel.num_processes: 1"),
        (on_a_gpu(packed), IMAGES, "reads images, which give each batch another shape"),
        (on_a_gpu(packed, precision=fp16), TEXT, "trains in float16"),
        (per_document, TEXT, "per_document attention depend"),
    ):
        with pytest.raises(UserError, match=words):
            check_cuda_graphs(plan, modality)


def trained(folder, **changes):
    """(losses, notes, peak memory) of a run."""
    report = train(folder, **{**SETTINGS, **GRAPHS, "model.dtype": "bfloat16", **changes})
    return losses(folder / "run"), " ".join(report.notes), report.peak_memory


@pytest.mark.gpu
@pytest.mark.parametrize(
    "changes",
    [
        pytest.param(PADDED, id="padded, eight lengths"),
        pytest.param(PACKED, id="packed"),
        pytest.param({**PACKED, "train.gradient_accumulation_steps": 1}, id="packed, one micro batch"),
        pytest.param({**PADDED, "model.dtype": "float32"}, id="float32"),
        pytest.param({**PACKED, "kernels.optimizer": True}, id="fused optimizer"),
        pytest.param({**PACKED, "kernels.recompute": True}, id="recompute"),
        pytest.param({**PACKED, "kernels.attention": True}, id="document attention"),
        pytest.param({**PACKED, **LORA}, id="lora with dropout"),
        pytest.param({**PACKED, "kernels.enabled": False}, id="no kernels"),
    ],
)
def test_it_is_bit_equal_to_a_run_without_graphs(changes, tmp_path, monkeypatch):
    graphed, notes, peak = trained(tmp_path / "graphed", **changes)
    monkeypatch.setattr(cuda_graphs, "MAX_GRAPHS", 0)  # the same batches without graphs
    launched, without, peak_without = trained(tmp_path / "launched", **changes)
    assert graphed == launched and graphed[-1] < graphed[0]
    assert " 0 recorded, 0 micro batches by them" in without
    recorded, replayed = (int(notes.split(words)[0].split()[-1]) for words in (" recorded", " micro batches by them"))
    assert 0 < recorded <= 16 and replayed >= 6, notes
    assert peak["allocated_steady"] > 0.9 * peak_without["allocated_steady"]  # the memory of graphs is counted


def record_nothing() -> None:
    """Record an empty graph, because after a failed recording torch's generator still expects its end."""
    with torch.cuda.graph(torch.cuda.CUDAGraph()):
        torch.zeros((), device="cuda")


@pytest.mark.gpu
def test_a_synchronising_operation_is_named(tmp_path, monkeypatch, request):
    from transformers import LlamaForCausalLM

    forward = LlamaForCausalLM.forward

    def synchronises(self, *args, **kwargs):
        bool(torch.zeros((), device="cuda") > 1)
        return forward(self, *args, **kwargs)

    monkeypatch.setattr(LlamaForCausalLM, "forward", synchronises)
    request.addfinalizer(record_nothing)
    with pytest.raises(UserError, match=r"train.cuda_graphs: forward and backward cannot be recorded: .*") as caught:
        trained(tmp_path, **PACKED, **{"kernels.enabled": False})
    assert caught.value.hint == "Write train.cuda_graphs: false."
