"""train.cuda_graphs: bit-equal to a run without it on a GPU, a note on a CPU, and what refuses it."""

import dataclasses
import functools

import pytest
import torch
from support.command_line import losses
from support.quickstart_runs import recipe_for, train

from ligertune.errors import UserError
from ligertune.hardware import this_machine
from ligertune.planning.graph_choice import check_cuda_graphs, chooses_cuda_graphs
from ligertune.planning.memory.model_shape import ModalityFacts
from ligertune.planning.options import RunOptions
from ligertune.training import cuda_graphs, resolve
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
FUSED_LORA = {"method.type": "lora", "kernels.lora": True, "train.learning_rate": 1e-2}
LORA_DROPOUT = {"method.type": "lora", "method.lora_dropout": 0.1}
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
    gpu = dataclasses.replace(plan.machine, device="cuda", vendor="nvidia", arch="sm90", peak_flops=peak_flops)
    return dataclasses.replace(plan, machine=gpu, attn_implementation="varlen", **changes)


@pytest.mark.parametrize(
    "method, checkpointing, limit", [("full", False, 4096), ("lora", False, 8192), ("lora", True, 16384)]
)
def test_auto_records_where_kernel_launches_take_the_time(method, checkpointing, limit, tmp_path):
    """Rows at the size of Llama-3.2-1B on an H100, up to about `limit` tokens in a micro-batch."""
    recipe = recipe_for(tmp_path, **{**SETTINGS, **PACKED, "data.max_length": 128, "data.max_dropped": 1})
    found = plan_for(recipe, for_show=True).plan
    one_b = {"n_parameters": 1_240_000_000, "memory": dataclasses.replace(found.memory, layers=16)}
    one_b["n_trainable"] = 1_240_000_000 if method == "full" else 11_000_000
    plan = on_a_gpu(dataclasses.replace(found, **one_b), peak_flops=989e12)
    method = recipe.method.model_copy(update={"type": method})

    def chosen(tokens, *, modality=TEXT, memory=80 << 30, **changes):
        rows = dataclasses.replace(plan.batching, micro_batch_size=tokens // 128)
        machine = dataclasses.replace(plan.machine, memory_bytes=memory)
        train = recipe.train.model_copy(update={"gradient_checkpointing": checkpointing, **changes})
        given = recipe.model_copy(update={"train": train, "method": method})
        build = RunOptions.of(given).build
        changed = dataclasses.replace(plan, build=build, batching=rows, machine=machine)
        return chooses_cuda_graphs(changed, given, modality)

    assert chosen(limit) and not chosen(2 * limit)
    if method == "full":  # float8 takes the host longer, and the GPU less time
        assert chosen(2 * limit, fp8=True) and not chosen(4 * limit, fp8=True)
    peak = dataclasses.replace(plan, batching=dataclasses.replace(plan.batching, micro_batch_size=limit // 128)).peak
    assert not chosen(limit, memory=peak.total + 1)  # no room for the memory of the graph
    assert not chosen(limit, modality=IMAGES)
    assert not chosen(limit, torch_compile=True)
    assert not chooses_cuda_graphs(dataclasses.replace(plan, strategy="ddp"), recipe, TEXT)
    for machine in ({"device": "cpu", "vendor": "cpu", "arch": "x86_64", "peak_flops": None}, {"arch": "sm100"}):
        other = dataclasses.replace(plan.machine, **machine)
        assert not chooses_cuda_graphs(dataclasses.replace(plan, machine=other), recipe, TEXT)
    assert not chooses_cuda_graphs(dataclasses.replace(plan, n_active=1000), recipe, TEXT)  # a mixture


@pytest.mark.parametrize("changes, recorded", [(PACKED, "auto"), (PADDED, False), ({**PACKED, **LORA_DROPOUT}, False)])
def test_auto_needs_shapes_that_repeat(changes, recorded, tmp_path, monkeypatch):
    """Packed rows have one length, other rows here do not; checkpointed layers with dropout cannot be recorded."""
    machine = dataclasses.replace(this_machine(), device="cuda", vendor="nvidia", arch="sm90", peak_flops=989e12)
    monkeypatch.setattr(resolve, "simulated_machine", lambda **_: machine)
    given = {**SETTINGS, **changes, "model.dtype": "bfloat16", "train.gradient_checkpointing": True}
    plan = plan_for(recipe_for(tmp_path, **given), for_show=True).plan
    assert plan.build.execution.cuda_graphs == recorded
    assert plan.settings["train"]["cuda_graphs"] is bool(recorded)
    assert (plan.rows.multiple_of == 256) is (recorded == "auto")


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
        pytest.param({**PACKED, **FUSED_LORA}, id="fused lora"),
        pytest.param({**PACKED, "train.gradient_checkpointing": True}, id="checkpointing"),
        pytest.param({**PACKED, **FUSED_LORA, "train.gradient_checkpointing": "offload"}, id="offloaded layer inputs"),
        pytest.param({**PACKED, "kernels.enabled": False}, id="no kernels"),
        pytest.param({**PACKED, "train.fp8": True}, id="float8"),
        pytest.param({**PADDED, "train.fp8": True}, id="float8, eight lengths"),
        pytest.param({**PACKED, "train.fp8": True, "train.gradient_checkpointing": True}, id="float8, checkpointing"),
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

    @functools.wraps(forward)  # the fused loss reads the signature
    def synchronises(self, *args, **kwargs):
        bool(torch.zeros((), device="cuda") > 1)
        return forward(self, *args, **kwargs)

    monkeypatch.setattr(LlamaForCausalLM, "forward", synchronises)
    request.addfinalizer(record_nothing)
    with pytest.raises(UserError, match=r"train.cuda_graphs: forward and backward cannot be recorded: .*") as caught:
        trained(tmp_path, **PACKED, **{"kernels.enabled": False})
    assert caught.value.hint == "Write train.cuda_graphs: false."


@pytest.mark.gpu
def test_auto_goes_on_without_graphs_where_a_step_cannot_be_recorded(tmp_path, monkeypatch):
    from transformers import LlamaForCausalLM

    forward = LlamaForCausalLM.forward
    auto = {**PACKED, "train.cuda_graphs": "auto"}
    with monkeypatch.context() as patch:
        patch.setattr(cuda_graphs, "MAX_GRAPHS", 0)
        expected, *_ = trained(tmp_path / "launched", **auto)

    @functools.wraps(forward)  # the fused loss reads the signature
    def synchronises(self, *args, **kwargs):
        bool(torch.zeros((), device="cuda") > 1)
        return forward(self, *args, **kwargs)

    monkeypatch.setattr(LlamaForCausalLM, "forward", synchronises)
    found, notes, _ = trained(tmp_path / "auto", **auto)
    assert "CUDA graphs: 0 recorded" in notes and "cannot be recorded" in notes
    assert found == expected
