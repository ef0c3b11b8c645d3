"""Checkpointed layers with offloaded inputs or gates: the same gradients with less device memory."""

import contextlib
import gc

import pytest
import torch
from ligertune_kernels.known_results import known_results
from support.models import tiny_models
from support.quickstart_runs import recipe_for
from support.tasks.packed_rows import packed

from ligertune.activations.checkpointing import checkpoint_layers
from ligertune.activations.gate_offload import offload_gates, require_gates
from ligertune.activations.offload import BLOCK, ActivationOffloader, OffloadPace, offloadable_share
from ligertune.activations.result_offload import keep_projections
from ligertune.activations.second_run import CheckpointedLayer
from ligertune.errors import UserError
from ligertune.models.trainable import apply_method
from ligertune.patching.lora import joint_lora
from ligertune.patching.packing_checks import install_packing_checks
from ligertune.patching.patch import patch
from ligertune.planning.options import MethodOptions
from ligertune.training.resolve import plan_for

DEVICES = ["cpu", pytest.param("cuda", marks=pytest.mark.gpu)]
KINDS = ["offload", "offload_gate", "offload_both"]
WIDE = {"num_hidden_layers": 6, "max_position_embeddings": 8192}


def gradients(model, device: str, **shape: int) -> list[torch.Tensor]:
    model(**tiny_models.batch(device=device, **shape), use_cache=False).loss.backward()
    return [p.grad for p in model.parameters() if p.requires_grad]


def checkpointed(
    kind: bool | str, *, family: str = "llama", device: str = "cpu", first: int | None = None, **changes
) -> torch.nn.Module:
    model = tiny_models.make(family, **changes).to(device).train()
    patch(model, recompute=first is not None)
    checkpoint_layers(model, kind, first=first)
    return model


def assert_same(found: list[torch.Tensor], expected: list[torch.Tensor]) -> None:
    assert all(torch.equal(a, b) for a, b in zip(found, expected, strict=True))


# each kind with each family and each method
FROZEN = {"type": "freeze", "trainable": [r"layers\.1\."]}
LORA = {"type": "lora", "lora_r": 4}
CASES = [
    ("offload", "llama", None), ("offload", "gemma2", LORA), ("offload", "qwen2", FROZEN),
    ("offload_gate", "llama", LORA), ("offload_gate", "gemma2", FROZEN), ("offload_gate", "qwen2", None),
    ("offload_both", "llama", FROZEN), ("offload_both", "gemma2", None), ("offload_both", "qwen2", LORA),
]  # fmt: skip


def adapted(model: torch.nn.Module, method: dict | None) -> torch.nn.Module:
    found = model if method is None else apply_method(model, MethodOptions(**method), fused=True)
    keep_projections(found)
    return found


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize(("kind", "family", "method"), CASES, ids=str)
def test_the_gradients_are_bit_equal_to_plain_checkpointing(kind, family, method, device):
    models = []
    for k in (True, kind):
        model = checkpointed(k, family=family, device=device)
        torch.manual_seed(0)  # of the adapters
        models.append(adapted(model, method).to(device))
    for _ in range(2):  # the second step reuses the memory of the first
        assert_same(*(gradients(model, device) for model in models))


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("kind", KINDS)
def test_batches_of_other_sizes_and_two_graphs_at_once(kind, device):
    found = []
    for k in (True, kind):
        model = checkpointed(k, device=device, **WIDE)
        losses = [
            model(**tiny_models.batch(rows=rows, length=length, device=device), use_cache=False).loss
            for rows, length in ((1, 7), (3, 20))
        ]
        del losses[0]  # its layers never run again
        losses[-1].backward()
        found.append(gradients(model, device, rows=4, length=33))
    assert_same(*found)


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("kind", KINDS)
def test_a_second_backward_of_one_graph(kind, device):
    found = []
    for k in (True, kind):
        model = tiny_models.make("llama").to(device).train()  # our kernels refuse a second one
        checkpoint_layers(model, k)
        keep_projections(model)
        loss = model(**tiny_models.batch(device=device), use_cache=False).loss
        for keeps in (True, False):
            loss.backward(retain_graph=keeps)
        found.append([p.grad for p in model.parameters()])
    assert_same(*found)


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("method", [None, LORA], ids=["full", "lora"])
@pytest.mark.parametrize("kind", KINDS)
def test_what_a_layer_writes_over_is_computed_again(kind, method, device):
    found = []
    for k in (True, kind):
        model = checkpointed(k, device=device)
        torch.manual_seed(0)  # of the adapters
        model = adapted(model, method).to(device)
        for name, module in model.named_modules():
            if name.endswith(("o_proj", "gate_proj")):
                module.register_forward_hook(lambda module, inputs, output: output.mul_(0.5))
        found.append(gradients(model, device))
    assert_same(*found)


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize(
    ("kind", "first"),
    [(True, 1), ("offload", 0), ("offload", 4), ("offload_gate", 1), ("offload_gate", 6), ("offload_both", 4)],
)
def test_without_the_last_layers_the_gradients_are_bit_equal(kind, first, device):
    usual = checkpointed(True, device=device, **WIDE)
    other = checkpointed(kind, device=device, first=first, **WIDE)
    for _ in range(2):
        assert_same(gradients(other, device), gradients(usual, device))


@pytest.fixture
def products(monkeypatch) -> list[int]:
    """Return the addresses of the weights of all linear layers' products, in the order of their computation."""
    found, linear = [], torch.nn.functional.linear

    def counting(x, weight, bias=None):
        found.append(weight.data_ptr())
        return linear(x, weight, bias)

    monkeypatch.setattr(torch.nn.functional, "linear", counting)
    return found


@pytest.mark.parametrize("kind", ["offload_gate", "offload_both"])
def test_a_gate_is_computed_once(kind, products):
    model = checkpointed(kind)
    gradients(model, "cpu")
    mlp = model.model.layers[0].mlp
    assert products.count(mlp.gate_proj.weight.data_ptr()) == 1
    assert products.count(mlp.up_proj.weight.data_ptr()) == 2


@pytest.mark.parametrize(
    ("kind", "method", "times"),
    [("offload", None, 1), ("offload", FROZEN, 1), ("offload", {**LORA, "lora_target_modules": ["q_proj"]}, 1),
     (True, None, 2), ("offload_gate", None, 2), ("offload_both", None, 2)],
)  # fmt: skip
def test_an_output_projection_is_computed_once(kind, method, times, products):
    model = checkpointed(kind)
    torch.nn.init.normal_(model.model.layers[1].self_attn.o_proj.weight)
    whole = adapted(model, method)
    products.clear()  # patching probes the layers
    gradients(whole, "cpu")
    layer = model.model.layers[1]
    assert products.count(layer.self_attn.o_proj.weight.data_ptr()) == times
    assert products.count(layer.self_attn.v_proj.weight.data_ptr()) == 2


@pytest.mark.parametrize(("kind", "times"), [("offload", 1), (True, 2)])
def test_an_adapted_output_projection_is_computed_once(kind, times, monkeypatch):
    model = adapted(checkpointed(kind), LORA)
    projection = model.base_model.model.model.layers[1].self_attn.o_proj
    found, dense = [], joint_lora.dense
    monkeypatch.setattr(joint_lora, "dense", lambda weight: found.append(weight) or dense(weight))
    model(**tiny_models.batch(), use_cache=False).loss.backward()
    of_projection = sum(weight is projection.base_layer.weight for weight in found)
    assert of_projection == times + 1  # and once for the gradient of its input


@pytest.mark.gpu
@pytest.mark.parametrize(("kind", "times"), [("offload", 1), (True, 2)])
@pytest.mark.parametrize("method", [None, LORA])
def test_results_of_packed_rows_are_computed_once(method, kind, times, monkeypatch):
    computed, found, expected = [], [], []
    result = CheckpointedLayer.result

    def counting(self, compute):
        return result(self, lambda: (computed.append(1), compute())[1])

    monkeypatch.setattr(CheckpointedLayer, "result", counting)
    for one, gradients_of_one in ((True, expected), (kind, found)):
        model = checkpointed(one, device="cuda", attn_implementation="document_attention")
        install_packing_checks(model)
        torch.manual_seed(0)  # of the adapters
        whole = adapted(model, method).to("cuda")
        for _ in range(2):  # the second step reads from pinned memory that the first one has used
            computed.clear()
            whole(**packed(device="cuda"), num_items_in_batch=10, use_cache=False).loss.backward()
        gradients_of_one += [p.grad for p in whole.parameters() if p.grad is not None]
    assert len(computed) == 2 * times * len(model.model.layers)  # attention's and o_proj's
    assert_same(found, expected)


@pytest.mark.parametrize("method", [None, LORA])
def test_under_autocast_the_gradients_are_bit_equal(method):
    found = []
    for kind in (True, "offload"):
        model = checkpointed(kind)
        torch.manual_seed(0)  # of the adapters
        whole = adapted(model, method)
        with torch.autocast("cpu", torch.bfloat16):
            loss = whole(**tiny_models.batch(), use_cache=False).loss
        loss.backward()
        found.append([p.grad for p in whole.parameters() if p.requires_grad])
    assert_same(*found)


def test_layers_that_ran_without_gradients_or_stopped_early_leave_nothing():
    model = adapted(checkpointed("offload"), None)
    batch = tiny_models.batch()
    with torch.no_grad():
        expected = model(**batch, use_cache=False).logits
    loss = model(**batch, use_cache=False).loss
    del loss
    assert torch.equal(model(**batch, use_cache=False).logits, expected)
    assert_same(gradients(model, "cpu"), gradients(checkpointed(True), "cpu"))


@pytest.mark.parametrize("kind", [True, *KINDS])
def test_layers_left_out_are_computed_once(kind, products):
    model = checkpointed(kind, first=4, **WIDE)
    gradients(model, "cpu")
    computed = [products.count(layer.mlp.up_proj.weight.data_ptr()) for layer in model.model.layers]
    assert computed == [2, 2, 2, 2, 1, 1]


@pytest.mark.parametrize("kind", [True, *KINDS])
def test_frozen_layers_before_the_first_trained_one_are_computed_once(kind, products):
    model = checkpointed(kind, **WIDE)
    apply_method(model, MethodOptions(type="freeze", trainable=[r"layers\.[45]\."]))
    layers, given = model.model.layers, []
    layers[4].input_layernorm.register_forward_pre_hook(lambda _, args: given.append(args[0].requires_grad))
    products.clear()  # patching probes the layers
    gradients(model, "cpu")
    assert [products.count(layer.mlp.up_proj.weight.data_ptr()) for layer in layers] == [1, 1, 1, 1, 2, 2]
    assert given == [False, False]


def test_an_adapter_requests_no_gradient_of_the_embeddings():
    model = checkpointed(True, **WIDE)
    adapted = apply_method(model, MethodOptions(type="lora", lora_r=4))
    found = []
    model.model.embed_tokens.register_forward_hook(lambda _, args, output: found.append(output.requires_grad))
    gradients(adapted, "cpu")
    assert found == [False]


def test_a_model_whose_layers_cannot_be_chosen_is_refused():
    model = tiny_models.make("llama")
    model.model.layers = torch.nn.ModuleList([torch.nn.Linear(2, 2), torch.nn.Linear(2, 2)])
    with pytest.raises(UserError, match="LlamaForCausalLM checkpoints all its layers or none"):
        checkpoint_layers(model, True, first=1)


@pytest.mark.gpu
def test_with_layers_left_out_one_tensor_stays_on_the_device():
    """The last stored tensor stays, and the one before it, whose copy had begun, is released."""
    tokens, held = 8 * 2048, {}
    peak(True, 2)  # cuBLAS keeps its workspace
    for kind in (True, *KINDS):
        model = checkpointed(kind, device="cuda", first=14, num_hidden_layers=16, max_position_embeddings=8192)
        batch, before = long_batch()
        loss = model(**batch, use_cache=False).loss
        torch.cuda.synchronize()
        held[kind] = torch.cuda.memory_allocated() - before
        del loss
    of_input, of_gate = (tokens * 4 * size for size in (model.config.hidden_size, model.config.intermediate_size))
    assert held["offload_gate"] - held[True] == pytest.approx(of_gate, rel=0.05)
    assert held[True] - held["offload"] == pytest.approx(13 * of_input, rel=0.05)
    assert held[True] - held["offload_both"] == pytest.approx(13 * of_input - of_gate, rel=0.05)


def test_a_model_without_separate_gates_is_refused():
    model = tiny_models.make("phi3")
    assert offload_gates(model) == 0
    with pytest.raises(UserError, match="phi3 has no separate ones"):
        require_gates(0, "phi3")


@pytest.mark.parametrize(
    ("targets", "fused", "refused"),
    [("all-linear", True, True), ("all-linear", False, False), (["q_proj"], True, False)],
)
def test_gates_that_fused_adapters_compute_are_refused(targets, fused, refused, tmp_path):
    """They would be recomputed, as without offloading."""
    settings = {"method.type": "lora", "method.lora_target_modules": targets, "kernels.lora": fused}
    recipe = recipe_for(tmp_path, **settings, **{"train.gradient_checkpointing": "offload_gate"})
    message = "offload_gate needs gate projections that run by themselves"
    with pytest.raises(UserError, match=message) if refused else contextlib.nullcontext():
        plan_for(recipe, for_show=True)


def test_a_layer_with_two_gates_takes_back_each():
    layer, products = CheckpointedLayer(ActivationOffloader()), (torch.ones(1, 2), 2 * torch.ones(1, 2))
    with layer.running(again=False):
        first = [layer.gate(lambda product=product: product) for product in products]
    with layer.running(again=True):
        again = [layer.gate(lambda: torch.zeros(1, 2)) for _ in products]
    assert [t.tolist() for t in again] == [t.tolist() for t in first] == [[[1, 1]], [[2, 2]]]


def test_a_layer_takes_back_its_results_once_and_then_computes_them():
    layer = CheckpointedLayer(ActivationOffloader(), ActivationOffloader())
    results = (torch.ones(2), torch.zeros(1)), (3 * torch.ones(2),)
    with layer.running(again=False):
        first = [layer.result(lambda result=result: result) for result in results]
        with torch.no_grad():
            assert known_results() is None
        assert known_results() is layer
    assert known_results() is None
    found = []
    for _ in range(2):  # two backwards of one graph
        with layer.running(again=True):
            found.append([layer.result(lambda: (torch.full((2,), 9.0),)) for _ in results])
    as_lists = [[[t.tolist() for t in result] for result in run] for run in (first, *found)]
    assert as_lists[0] == as_lists[1] == [[[1, 1], [0]], [[3, 3]]]
    assert as_lists[2] == [[[9, 9]], [[9, 9]]]


def test_the_gradient_of_attention_brings_back_the_results_of_the_layer_before(monkeypatch):
    called = []
    monkeypatch.setattr(ActivationOffloader, "prefetch_last", lambda self: called.append(self))
    layer = CheckpointedLayer(ActivationOffloader(), results := ActivationOffloader())
    x = torch.ones(2, requires_grad=True)
    for again in (False, True):
        with layer.running(again=again):
            layer.attended(out := 2 * x)
        called.append(again)
        out.sum().backward()
    assert called == [False, results, True]  # no gradient passes through a second run


def test_a_link_that_was_busy_once_is_measured_again():
    pace = OffloadPace()
    pace._layers, pace._copies = 8, [(FakeEvent(0.0), FakeEvent(50.0))]
    pace._ends = [FakeEvent(0.0), FakeEvent(7.0)]
    pace.begin()
    assert pace.share == 0.25
    assert sum(pace.is_due() for _ in range(8)) == 2  # the second one starts the copy of the first


class FakeEvent:
    """A CUDA event that has happened at a time, in ms."""

    def __init__(self, time: float) -> None:
        self.time = time

    def query(self) -> bool:
        return True

    def elapsed_time(self, later: "FakeEvent") -> float:
        return later.time - self.time


def test_without_an_offloader_of_results_they_are_computed_twice():
    layer, found = CheckpointedLayer(ActivationOffloader()), iter((torch.zeros(1), torch.ones(1)))
    for again in (False, True):
        with layer.running(again=again):
            assert float(layer.result(lambda: (next(found),))[0]) == again


@pytest.mark.parametrize(
    ("layer", "copy", "taken", "share"),
    [(25, 14, 0, 1), (25, 40, 0, 0.60625), (25, 0, 0, 1), (0, 9, 0, 0), (25, 40, 4.25, 0.5), (25, 9, 30, 0)],
)
def test_share_of_layers_that_the_link_has_time_for(layer, copy, taken, share):
    assert offloadable_share(layer, copy, taken) == pytest.approx(share)


def test_offloading_layers_are_spread_evenly():
    pace = OffloadPace()
    pace.share = 0.75
    assert [pace.is_due() for _ in range(8)] == [False, True, True, True] * 2
    pace.share = 0.0
    assert not any(pace.is_due() for _ in range(8))


@pytest.mark.gpu
@pytest.mark.parametrize("share", [0.0, 0.5, 1.0])
@pytest.mark.parametrize("kind", ["offload", "offload_gate"])
def test_layers_that_do_not_offload_recompute_their_gate_or_results(kind, share, monkeypatch):
    monkeypatch.setattr(OffloadPace, "begin", lambda self, other=None: setattr(self, "share", share))
    usual, other = (adapted(checkpointed(kind, device="cuda", **WIDE), None) for kind in (True, kind))
    for _ in range(2):
        assert_same(gradients(other, "cuda"), gradients(usual, "cuda"))


@pytest.mark.gpu
def test_offloading_inputs_holds_less_on_the_device():
    inputs = 16 * 8 * 2048 * 64 * 4
    peak(True, 2)
    assert peak(True, 16) - peak("offload", 16) > 0.8 * inputs


@pytest.mark.gpu
def test_two_gates_at_most_are_held_on_the_device():
    gate = 8 * 2048 * tiny_models.make("llama").config.intermediate_size * 4
    peak(True, 2)
    assert peak("offload_gate", 16) - peak(True, 16) < 2.1 * gate


def peak(kind: bool | str, layers: int) -> int:
    """Return the bytes that a forward and a backward need on top of the model."""
    model = checkpointed(kind, device="cuda", num_hidden_layers=layers, max_position_embeddings=8192)
    batch, before = long_batch()
    model(**batch, use_cache=False).loss.backward()
    return torch.cuda.max_memory_allocated() - before


def long_batch() -> tuple[dict, int]:
    """Return 8 full rows of 2,048 tokens and the bytes in use, without the garbage of earlier models."""
    batch = tiny_models.batch(rows=8, length=2048, device="cuda")
    batch.pop("attention_mask")
    gc.collect()
    torch.cuda.reset_peak_memory_stats()
    return batch, torch.cuda.memory_allocated()


@pytest.mark.gpu
def test_stored_tensors_come_back_unchanged_while_the_device_is_busy():
    offloader, size = ActivationOffloader(), BLOCK // 4 + 1000
    for _ in range(3):
        expected, stored = [], []
        for _ in range(6):
            tensor = torch.randn(size, device="cuda")
            expected.append(tensor.double().sum())
            stored.append(offloader.store(tensor))
            del tensor
            torch.randn(4096, 4096, device="cuda") @ torch.randn(4096, 4096, device="cuda")
        for i in reversed(range(6)):
            back = stored[i].take()[0]
            assert torch.equal(back.double().sum(), expected[i])
            back.fill_(float("nan"))  # its reader may write over it
            stored[i] = None
    assert len(offloader._free) == 5 * 2


@pytest.mark.gpu
def test_tensors_that_came_back_leave_again_when_others_are_stored():
    offloader = ActivationOffloader()
    tensors = [torch.randn(100, device="cuda") for _ in range(4)]
    stored = [offloader.store(tensor) for tensor in tensors[:3]]
    stored.pop().take()  # and prefetches the one before it
    stored.append(offloader.store(tensors[3]))
    found = [one.take()[0] for one in reversed(stored)]
    assert_same(found, [tensors[3], tensors[1], tensors[0]])


@pytest.mark.gpu
def test_no_more_pinned_memory_is_taken_than_allowed():
    offloader = ActivationOffloader(max_pinned=2 * BLOCK)
    tensors = [torch.zeros(BLOCK // 4, device="cuda") for _ in range(7)]
    stored = [offloader.store_if_fast(tensor) for tensor in tensors[:6]]
    assert [one is not None for one in stored] == [True, True, True, False, False, False]  # the last one is not copied
    for i in (2, 1):
        stored[i].take()
        stored[i] = None  # the memory of the second one is free again
    assert offloader.store_if_fast(tensors[6]) is not None


@pytest.mark.gpu
def test_a_tensor_written_over_before_its_copy_is_refused():
    offloader = ActivationOffloader()
    tensor = torch.randn(10, device="cuda")
    stored = offloader.store(tensor)
    tensor.add_(1)
    with pytest.raises(RuntimeError, match="written over"):
        offloader.store(torch.randn(10, device="cuda"))
    assert stored.on_device
