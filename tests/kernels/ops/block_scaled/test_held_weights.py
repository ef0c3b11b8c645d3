"""QuantisedWeight in few bits: it behaves as the dequantised tensor, in linear layers and in experts."""

import copy
import io

import pytest
import torch
from ligertune_kernels.ops.block_scaled.dequantize_float8_blocks import quantize_float8_blocks
from ligertune_kernels.ops.block_scaled.dequantize_mxfp4 import quantize_mxfp4
from ligertune_kernels.ops.moe.experts import ExpertLayout, ExpertLora, ExpertProjection, experts
from ligertune_kernels.ops.moe.quantised_weight import QuantisedWeight, as_weight, to_nf4
from torch import nn
from torch.nn import functional as F

SHAPE = (3, 40, 64)


def held(name: str, shape: tuple[int, int, int] = SHAPE, *, transposed: bool = False, seed: int = 0) -> QuantisedWeight:
    """Return a random weight; transposed: shown as (X, columns, rows)."""
    weight = torch.randn(shape, generator=torch.Generator().manual_seed(seed))
    if name == "nf4":
        return to_nf4(weight)
    stored = quantize_mxfp4(weight) if name == "mxfp4" else quantize_float8_blocks(weight, block=(16, 24))
    shown = (shape[0], shape[2], shape[1]) if transposed else shape
    return QuantisedWeight(stored, shown, torch.float32, transposed=transposed)


def saved_and_loaded(weight: torch.Tensor) -> torch.Tensor:
    file = io.BytesIO()
    torch.save(weight, file)  # pickle alone has no float8
    file.seek(0)
    return torch.load(file, weights_only=False)


both = pytest.mark.parametrize("name", ["mxfp4", "fp8"])


@both
@pytest.mark.parametrize("transposed", [False, True])
def test_experts_copies_and_transposes_stay_quantised(name, transposed):
    weight = held(name, transposed=transposed)
    dense = weight.dequantize()
    for packed, expected in (
        (weight[1], dense[1]),
        (weight.transpose(-2, -1), dense.transpose(-2, -1)),
        (weight[1].T, dense[1].T),
        (weight.to(torch.bfloat16), dense.bfloat16()),
        (copy.deepcopy(weight), dense),
        (saved_and_loaded(nn.Parameter(weight, requires_grad=False)), dense),
    ):
        assert isinstance(packed, QuantisedWeight)
        assert (packed.shape, packed.dtype, packed.stride()) == (expected.shape, expected.dtype, expected.stride())
        rounding = 2**-7 if packed.dtype == torch.bfloat16 else 0
        torch.testing.assert_close(packed.dequantize(), expected, rtol=rounding, atol=0)
    assert torch.equal(weight + 1, dense + 1)
    with pytest.raises(RuntimeError, match="a QuantisedWeight is frozen"):
        weight.mul_(2)
    assert weight.stored_bytes == sum(part.nbytes for part in weight.stored.tensors) < dense.nbytes // 3
    meta = weight.to("meta")
    assert isinstance(meta, QuantisedWeight) and meta.is_meta and meta.stride() == dense.stride()


@pytest.mark.parametrize("name", ["nf4", "mxfp4", "fp8"])
def test_a_linear_layer_has_the_gradients_of_the_dequantised_weight_and_keeps_bytes(name):
    weight = held(name)
    results, kept = [], []
    for w in (weight, weight.dequantize()):
        x = torch.randn(5, SHAPE[2], generator=torch.Generator().manual_seed(1), requires_grad=True)
        saved: list[type] = []
        with torch.autograd.graph.saved_tensors_hooks(lambda t, into=saved: into.append(type(t)) or t, lambda t: t):
            y = F.linear(x, w[1])
        y.square().sum().backward()
        results.append((y.detach(), x.grad))
        kept.append(saved)
    assert all(torch.equal(a, b) for a, b in zip(*results, strict=True))
    assert kept == [[QuantisedWeight], [torch.Tensor]]


@both
@pytest.mark.parametrize("transposed", [False, True])
def test_the_op_computes_with_them_and_keeps_none_dequantised(name, transposed, device):
    """gpt-oss shows weights transposed that its files store by rows. With LoRA, forward and backward."""
    gate_up = held(name, (4, 128, 64), transposed=transposed).to(device)
    down = held(name, (4, 64, 64), transposed=transposed, seed=1).to(device)
    dense = [weight.dequantize().clone() for weight in (gate_up, down)]
    index = torch.randint(4, (6, 2), device=device)
    probabilities = torch.rand(6, 2, device=device)
    inputs = (
        torch.randn(6, 64),
        torch.randn(4, 3, 64),
        torch.randn(4, 128, 3),
        torch.randn(4, 3, 64),
        torch.randn(4, 64, 3),
    )
    gradients, kept = [], []
    for weights in ([as_weight(gate_up), as_weight(down)], dense):
        leaves = [t.clone().to(device).requires_grad_() for t in inputs]
        loras = ExpertLora(*leaves[1:3], 0.5), ExpertLora(*leaves[3:], 2.0)
        projections = [ExpertProjection(weight, lora=lora) for weight, lora in zip(weights, loras, strict=True)]
        saved: list[torch.Tensor] = []
        with torch.autograd.graph.saved_tensors_hooks(lambda t, into=saved: into.append(t) or t, lambda t: t):
            y = experts(leaves[0], index, probabilities, *projections, layout=ExpertLayout(transposed=transposed))
        y.square().sum().backward()
        gradients.append([y.detach(), *(leaf.grad for leaf in leaves)])
        kept.append(sum(t.ndim == 3 and t.numel() >= 4 * 64 * 64 for t in saved))
    for found, expected in zip(*gradients, strict=True):
        torch.testing.assert_close(found, expected, rtol=1e-5, atol=1e-4)
    assert kept == [0, 2]


@both
def test_a_compiled_function_dequantises_by_one_operator(name):
    weight = held(name)

    def function(x: torch.Tensor) -> torch.Tensor:
        return F.linear(x, weight.dequantize()[1])

    x = torch.randn(2, SHAPE[2])
    assert torch.equal(torch.compile(function, backend="aot_eager", fullgraph=True)(x), function(x))
