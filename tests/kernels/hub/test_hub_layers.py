"""Layers and experts of the hub package against the modules and functions of transformers that they replace."""

import importlib

import pytest
import torch
from torch import Tensor, nn

pytest.importorskip("kernels.layer", reason="needs the package kernels of Hugging Face")
from kernels import LocalLayerRepository, Mode, kernelize, replace_kernel_forward_from_hub, use_kernel_mapping


def assert_same(got: tuple[Tensor, ...], expected: tuple[Tensor, ...], inputs: tuple[Tensor, ...]) -> None:
    """Compare results and their dtypes; in fp32 also gradients, which transformers' modules round midway in bf16."""
    within = {torch.float32: 1e-5, torch.bfloat16: 1e-2}[inputs[0].dtype]
    for ours, plain in zip(got, expected, strict=True):
        assert ours.dtype is plain.dtype
        torch.testing.assert_close(ours, plain, rtol=within, atol=within)
    if inputs[0].dtype is torch.float32:
        sums = (sum(y.sin().sum() for y in side) for side in (got, expected))
        for ours, plain in zip(*(torch.autograd.grad(total, inputs) for total in sums), strict=True):
            torch.testing.assert_close(ours, plain, rtol=within, atol=within)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize(
    ("layer", "family", "name"),
    [
        ("RMSNorm", "llama", "LlamaRMSNorm"),
        ("RMSNormRoundedOnce", "olmo2", "Olmo2RMSNorm"),
        ("RMSNormZeroCentered", "qwen3_5", "Qwen3_5RMSNorm"),
        ("RMSNormGated", "qwen3_5", "Qwen3_5RMSNormGated"),
    ],
)
def test_norms_equal_those_of_transformers(layer, family, name, dtype, package):
    """Also their dtype where fp32 weights meet bf16, which each rounds in its own way."""
    cls = getattr(importlib.import_module(f"transformers.models.{family}.modeling_{family}"), name)
    norm = type(name, (cls,), {})(24)  # a new class: registering a layer name changes the class
    nn.init.normal_(norm.weight)
    inputs = [torch.randn(5, 24, dtype=dtype, requires_grad=True) for _ in range(2 if layer == "RMSNormGated" else 1)]
    expected = norm(*inputs)
    replace_kernel_forward_from_hub(type(norm), layer)
    mapping = {layer: {"cpu": LocalLayerRepository(package, layer_name=layer)}}
    with use_kernel_mapping(mapping, inherit_mapping=False):  # kernelize refuses layers that break its rules
        kernelize(norm, mode=Mode.TRAINING | Mode.TORCH_COMPILE, device="cpu", use_fallback=False)
    assert norm.forward.__func__.__qualname__ == f"{layer}.forward"
    assert_same((norm(*inputs),), (expected,), (*inputs, norm.weight))


@pytest.mark.parametrize(
    ("family", "columns", "unsqueeze_dim"),
    [("llama", 16, 1), ("llama", 16, 2), ("gpt_oss", 8, 1)],
    ids=["heads first", "tokens first", "a column per pair"],
)
def test_rotary_embeddings_equal_those_of_transformers(family, columns, unsqueeze_dim, kernel):
    modelling = importlib.import_module(f"transformers.models.{family}.modeling_{family}")
    q, k = (torch.randn(2, heads, 5, 16) for heads in (4, 2))
    q, k = ((t if unsqueeze_dim == 1 else t.transpose(1, 2)).detach().requires_grad_() for t in (q, k))
    angles = torch.randn(2, 5, 8).repeat(1, 1, columns // 8)
    arguments = q, k, angles.cos(), angles.sin(), unsqueeze_dim
    layer = kernel.layers.RotaryPosEmb()
    assert_same(layer(*arguments), modelling.apply_rotary_pos_emb(*arguments), (q, k))
    with pytest.raises(ValueError, match="unsqueeze_dim is 3; expected 1 or 2"):
        layer(*arguments[:4], 3)


def test_experts_with_clamped_interleaved_transposed_weights(kernel):
    """gpt-oss has every option of the layout. Its own forward is the reference."""
    from transformers.models.gpt_oss.modeling_gpt_oss import GptOssConfig, GptOssExperts

    config = GptOssConfig(hidden_size=16, intermediate_size=24, num_local_experts=4)
    config._experts_implementation = "eager"
    experts = GptOssExperts(config)
    for parameter in experts.parameters():
        nn.init.normal_(parameter)
    hidden = torch.randn(10, 16, requires_grad=True)
    index, weights = torch.rand(10, 4).topk(2).indices, torch.rand(10, 2)
    expected = experts(hidden, index, weights)
    got = kernel.experts_forward(experts, hidden, index, weights)
    torch.testing.assert_close(got, expected, rtol=1e-4, atol=1e-4)
    inputs = (hidden, *experts.parameters())
    for ours, plain in zip(*(torch.autograd.grad(y.sin().sum(), inputs) for y in (got, expected)), strict=True):
        torch.testing.assert_close(ours, plain, rtol=1e-3, atol=1e-3)
    other = GptOssExperts(config)
    other._apply_gate = lambda both: both.chunk(2, -1)[0]
    with pytest.raises(ValueError, match="the gate of GptOssExperts is none that the op `experts` computes"):
        kernel.experts_forward(other, hidden, index, weights)
