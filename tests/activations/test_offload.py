"""Checkpointed layers with offloaded inputs or gates: the same gradients with less device memory."""

import gc

import pytest
import torch
from support.models import tiny_models

from ligertune.activations.checkpointing import checkpoint_layers
from ligertune.activations.gate_offload import CheckpointedLayer, offload_gates, require_gates
from ligertune.activations.offload import BLOCK, ActivationOffloader, OffloadPace, offloadable_share
from ligertune.errors import UserError
from ligertune.models.trainable import apply_method
from ligertune.patching.patch import patch
from ligertune.planning.options import MethodOptions

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


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize(("kind", "family", "method"), CASES, ids=str)
def test_the_gradients_are_bit_equal_to_plain_checkpointing(kind, family, method, device):
    models = []
    for k in (True, kind):
        model = checkpointed(k, family=family, device=device)
        torch.manual_seed(0)  # of the adapters
        models.append(model if method is None else apply_method(model, MethodOptions(**method)).to(device))
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
        loss = model(**tiny_models.batch(device=device), use_cache=False).loss
        for keeps in (True, False):
            loss.backward(retain_graph=keeps)
        found.append([p.grad for p in model.parameters()])
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


def test_a_layer_with_two_gates_takes_back_each():
    layer, x, weights = CheckpointedLayer(ActivationOffloader()), torch.ones(1, 2), (torch.eye(2), 2 * torch.eye(2))
    with layer.running(again=False):
        first = [layer.gate(x, weight, None) for weight in weights]
    with layer.running(again=True):
        again = [layer.gate(x, torch.zeros(2, 2), None) for _ in weights]
    assert [t.tolist() for t in again] == [t.tolist() for t in first] == [[[1, 1]], [[2, 2]]]


@pytest.mark.parametrize(("layer", "copy", "share"), [(25, 14, 1), (25, 40, 0.60625), (25, 0, 1), (0, 9, 0)])
def test_share_of_layers_that_the_link_has_time_for(layer, copy, share):
    assert offloadable_share(layer, copy) == pytest.approx(share)


def test_offloading_layers_are_spread_evenly():
    pace = OffloadPace()
    pace.share = 0.75
    assert [pace.is_due() for _ in range(8)] == [False, True, True, True] * 2
    pace.share = 0.0
    assert not any(pace.is_due() for _ in range(8))


@pytest.mark.gpu
@pytest.mark.parametrize("share", [0.0, 0.5, 1.0])
def test_layers_that_do_not_offload_recompute_their_gate(share, monkeypatch):
    monkeypatch.setattr(OffloadPace, "begin", lambda self: setattr(self, "share", share))
    usual, other = (checkpointed(kind, device="cuda", **WIDE) for kind in (True, "offload_gate"))
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
            back = stored[i].take()
            assert torch.equal(back.double().sum(), expected[i])
            back.fill_(float("nan"))  # its reader may write over it
            stored[i] = None
    assert len(offloader._free) == 5 * 2


@pytest.mark.gpu
def test_a_tensor_written_over_before_its_copy_is_refused():
    offloader = ActivationOffloader()
    tensor = torch.randn(10, device="cuda")
    stored = offloader.store(tensor)
    tensor.add_(1)
    with pytest.raises(RuntimeError, match="written over"):
        offloader.store(torch.randn(10, device="cuda"))
    assert stored.on_device
