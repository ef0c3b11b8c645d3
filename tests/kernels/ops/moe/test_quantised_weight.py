"""QuantisedWeight: it behaves as the dequantised tensor, and no dequantised weight is kept for the backward."""

import copy
import gc
import pickle
import weakref

import pytest
import torch
from ligertune_kernels.ops.moe import dequantize_nf4, quantised_weight
from ligertune_kernels.ops.moe.experts import ExpertLora, ExpertProjection, experts
from ligertune_kernels.ops.moe.quantised_weight import QuantisedWeight, as_weight, to_nf4
from torch import nn
from torch.nn import functional as F

SHAPE = (3, 20, 48)


@pytest.fixture
def weight() -> QuantisedWeight:
    return to_nf4(torch.randn(SHAPE, generator=torch.Generator().manual_seed(0)))


@pytest.fixture
def computed(monkeypatch) -> list[tuple[int, ...]]:
    """The shapes of all weights that are dequantised."""
    shapes, real = [], dequantize_nf4.dequantize_nf4
    monkeypatch.setattr(
        dequantize_nf4, "dequantize_nf4", lambda nf4, shape, dtype: shapes.append(shape) or real(nf4, shape, dtype)
    )
    return shapes


def test_experts_and_transposes_stay_in_4_bits(weight):
    dense = weight.dequantize()
    assert (weight.shape, weight.dtype, weight.stride()) == (SHAPE, torch.float32, dense.stride())
    for packed, expected in (
        (weight[1], dense[1]),
        (weight[-1], dense[-1]),
        (weight[torch.tensor(2)], dense[2]),  # as transformers' loop over experts does
        (weight.transpose(-2, -1), dense.transpose(-2, -1)),
        (weight[1].T, dense[1].T),
        (weight.mT[2], dense.mT[2]),
        (weight.to(torch.bfloat16), dense.bfloat16()),
        (weight.clone(), dense),
        (copy.deepcopy(weight), dense),
        (pickle.loads(pickle.dumps(weight)), dense),
        (nn.Parameter(weight, requires_grad=False), dense),
    ):
        assert isinstance(packed, QuantisedWeight)
        assert (packed.shape, packed.dtype, packed.stride()) == (expected.shape, expected.dtype, expected.stride())
        torch.testing.assert_close(
            packed.dequantize(), expected, rtol=2**-7 if packed.dtype == torch.bfloat16 else 0, atol=0
        )
    assert isinstance(pickle.loads(pickle.dumps(nn.Parameter(weight, requires_grad=False))), nn.Parameter)


def test_other_ops_read_the_dequantised_weight_and_none_writes(weight):
    dense = weight.dequantize()
    for op in (
        torch.sum,
        lambda w: w[:, 1:3],
        lambda w: w[torch.tensor([0, 2])],
        lambda w: w + 1,
        lambda w: w.view(-1),
    ):
        found = op(weight)
        assert not isinstance(found, QuantisedWeight) and torch.equal(found, op(dense))
    with pytest.raises(RuntimeError, match="a QuantisedWeight is frozen"):
        weight.mul_(2)
    with pytest.raises(ValueError, match=r"expected \(experts, rows, columns\)"):
        to_nf4(torch.randn(4, 4))


def test_the_weights_of_one_layer_are_kept_and_no_more(weight, computed):
    layers = [(to_nf4(torch.randn(SHAPE)), to_nf4(torch.randn(SHAPE))) for _ in range(3)]
    for gate_up, down in layers:  # forward
        gate_up.dequantize(), down.dequantize()
    assert len(computed) == 6
    for gate_up, down in reversed(layers):  # a second forward, and the backward
        gate_up.dequantize(), down.dequantize(), down.dequantize(), gate_up.dequantize()
    assert len(computed) == 6 + 4  # the last layer's are those of the forward
    assert len(quantised_weight._RECENT) == quantised_weight.KEPT_WEIGHTS
    layers[0][0].to(torch.bfloat16).dequantize()
    assert len(computed) == 11  # another dtype
    kept = weakref.ref(layers[0][1].dequantize())
    assert kept() is not None
    del layers, gate_up, down
    gc.collect()
    assert kept() is None  # freed with the model


def test_a_weight_that_was_loaded_over_is_dequantised_again():
    weight, other = to_nf4(torch.randn(SHAPE)), to_nf4(torch.randn(SHAPE))
    weight.dequantize()
    for mine, its in zip(weight.stored.tensors, other.stored.tensors, strict=True):
        mine.copy_(its)
    assert torch.equal(weight.dequantize(), other.dequantize())


def test_a_weight_that_inference_dequantised_serves_training(weight):
    with torch.inference_mode():
        weight.dequantize()
    x = torch.randn(2, SHAPE[2], requires_grad=True)
    F.linear(x, weight.dequantize()[0]).sum().backward()
    assert x.grad is not None


def test_experts_take_it_as_a_function():
    gate_up, down = to_nf4(torch.randn(4, 24, 16)), to_nf4(torch.randn(4, 16, 12))
    hidden, index = torch.randn(6, 16), torch.randint(4, (6, 2))
    probabilities = torch.rand(6, 2)
    found = experts(hidden, index, probabilities, as_weight(gate_up), as_weight(down))
    expected = experts(hidden, index, probabilities, gate_up.dequantize(), down.dequantize())
    assert torch.equal(found, expected)
    dense = torch.ones(2)
    assert as_weight(dense) is dense


def test_the_op_keeps_no_dequantised_weight_and_has_the_gradients_of_one_that_is_kept(computed, device):
    """Of two layers with LoRA. Each forward computes gate_up and down, and so does the first layer's backward."""
    layers = [(to_nf4(torch.randn(4, 24, 16)).to(device), to_nf4(torch.randn(4, 16, 12)).to(device)) for _ in range(2)]
    dense = [[weight.dequantize().clone() for weight in layer] for layer in layers]
    hidden, index = torch.randn(6, 16), torch.randint(4, (6, 2), device=device)
    adapters = torch.randn(4, 3, 16), torch.randn(4, 24, 3), torch.randn(4, 3, 12), torch.randn(4, 16, 3)
    probabilities = torch.rand(6, 2, device=device)
    computed.clear()
    gradients, kept = [], []
    for weights in ([[as_weight(weight) for weight in layer] for layer in layers], dense):
        leaves = [t.clone().to(device).requires_grad_() for t in (hidden, *adapters)]
        loras = ExpertLora(*leaves[1:3], 0.5), ExpertLora(*leaves[3:], 2.0)
        saved: list[torch.Tensor] = []
        with torch.autograd.graph.saved_tensors_hooks(lambda t, into=saved: into.append(t) or t, lambda t: t):
            y = leaves[0]
            for layer in weights:
                projections = (ExpertProjection(weight, lora=lora) for weight, lora in zip(layer, loras, strict=True))
                y = experts(y, index, probabilities, *projections)
        y.square().sum().backward()
        gradients.append([leaf.grad for leaf in leaves])
        kept.append(sum(t.shape in ((4, 24, 16), (4, 16, 12)) for t in saved))
    assert all(torch.equal(a, b) for a, b in zip(*gradients, strict=True))
    assert kept == [0, 4] and len(computed) == 2 * 2 + 2


def test_a_compiled_function_dequantises_by_one_operator(weight):
    def function(x: torch.Tensor) -> torch.Tensor:
        return F.linear(x, weight.dequantize()[1])

    x = torch.randn(2, SHAPE[2])
    assert torch.equal(torch.compile(function, backend="aot_eager", fullgraph=True)(x), function(x))
