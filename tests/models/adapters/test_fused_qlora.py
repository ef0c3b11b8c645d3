"""Fused LoRA layers around weights in 4 bits: one dequantised weight at a time, with peft's results."""

import copy
import gc
import importlib.util
import weakref
from dataclasses import replace

import peft
import pytest
import torch
from ligertune_kernels.ops.moe import dequantize_nf4 as nf4_module
from ligertune_kernels.ops.moe.dequantize_nf4 import dequantize_nf4, quantize_nf4
from torch import nn
from torch.nn import functional

from ligertune.patching.lora.fused_lora import StoredLinear, fuse_adapters, stored_linear
from ligertune.patching.lora.joint_lora import LoraTerms, joint_update

E, F, R = 64, 40, 3
DEVICES = ["cpu", pytest.param("cuda", marks=pytest.mark.gpu)]
needs_bitsandbytes = pytest.mark.skipif(importlib.util.find_spec("bitsandbytes") is None, reason="needs bitsandbytes")


def packed_and_dense(
    seed: int, shape: tuple[int, int] = (F, E), device: str = "cpu"
) -> tuple[StoredLinear, torch.Tensor]:
    generator = torch.Generator().manual_seed(seed)
    nf4 = quantize_nf4(torch.randn(1, *shape, generator=generator).to(device))
    packed = StoredLinear(nf4.packed, nf4, shape, torch.float32)
    return packed, dequantize_nf4(nf4, (1, *shape), torch.float32)[0]


def factors(device: str = "cpu") -> tuple[torch.Tensor, torch.Tensor]:
    generator = torch.Generator().manual_seed(7)
    sizes = (R, E), (F, R)
    return tuple(torch.randn(size, generator=generator).to(device).requires_grad_() for size in sizes)


@pytest.mark.parametrize("device", DEVICES)
def test_a_weight_in_four_bits_has_the_bits_of_the_dequantised_one(device):
    """The second layer's forward releases the weight that the first layer's backward needs."""
    (packed, dense), (other, other_dense) = packed_and_dense(0, device=device), packed_and_dense(1, (E, F), device)
    found = []
    for first, second in ((packed, other), (dense, other_dense)):
        x = torch.linspace(-1, 1, 5 * E, device=device).view(5, E).requires_grad_()
        a, b = factors(device)
        y = joint_update(x, [LoraTerms(a, b, 0.5, first, None)])[0]
        z = joint_update(y, [LoraTerms(b.t(), a.t(), 0.25, second, None)])[0]
        z.square().sum().backward()
        found.append([y, z, x.grad, a.grad, b.grad])
    for mine, expected in zip(*found, strict=True):
        assert torch.equal(mine, expected)


def test_all_weights_are_dequantised_into_one_buffer_and_the_last_one_is_not_dequantised_again(monkeypatch):
    from ligertune.patching.lora import fused_lora

    calls = []
    write = nf4_module.dequantize_nf4_into
    monkeypatch.setattr(nf4_module, "dequantize_nf4_into", lambda nf4, out: calls.append(out) or write(nf4, out))
    monkeypatch.setattr(fused_lora, "_BUFFERS", {})
    (first, dense), (larger, _) = packed_and_dense(0), packed_and_dense(1, (2 * F, E))
    small = weakref.ref(first.dequantize())
    addresses = {larger.dequantize().data_ptr()}
    assert small() is None  # the smaller buffer is freed first
    for weight in (first, first, larger, first, first):
        addresses.add(weight.dequantize().data_ptr())
    assert len(addresses) == 1
    assert len(calls) == 5
    assert torch.equal(first.dequantize(), dense)


@pytest.mark.parametrize("part", ["packed", "scales"])
def test_a_weight_that_was_written_over_is_dequantised_again(part):
    (first, before), (second, _) = packed_and_dense(0), packed_and_dense(1)
    assert torch.equal(first.dequantize(), before)
    with torch.no_grad():
        getattr(first.stored, part).copy_(getattr(second.stored, part))
    assert torch.equal(first.dequantize(), dequantize_nf4(first.stored, (1, F, E), torch.float32)[0])
    assert not torch.equal(first.dequantize(), before)


def test_weights_of_two_dtypes_share_the_buffer():
    (first, dense), (second, other) = packed_and_dense(0), packed_and_dense(1)
    narrow = replace(first, dtype=torch.bfloat16)
    for weight, expected in ((narrow, dense.bfloat16()), (first, dense), (second, other), (narrow, dense.bfloat16())):
        assert torch.equal(weight.dequantize(), expected)


def test_a_released_weight_is_never_mistaken_for_the_next():
    """The next weight has the memory of the released one."""
    (first, _), (second, expected) = packed_and_dense(0), packed_and_dense(1)
    first.dequantize()
    for old, new in zip(first.stored.tensors, second.stored.tensors, strict=True):
        old.copy_(new)
    reused = StoredLinear(first.stored.packed.detach(), first.stored, (F, E), torch.float32)
    assert reused.parameter.data_ptr() == first.parameter.data_ptr()
    assert torch.equal(reused.dequantize(), expected)


def quantised(
    device: str, dtype: torch.dtype, *, bias: bool = False, features: int = F, **format_of: object
) -> nn.Module:
    """Return peft's LoRA layer around bitsandbytes' Linear4bit, as QLoRA loads it."""
    import bitsandbytes
    from peft.tuners.lora.bnb import Linear4bit

    torch.manual_seed(0)
    base = bitsandbytes.nn.Linear4bit(E, features, bias=bias, compute_dtype=dtype, **{"quant_type": "nf4", **format_of})
    base = base.to(dtype).to(device)
    made = Linear4bit(base, "default", peft.LoraConfig(r=R), r=R, lora_alpha=7).to(device)
    nn.init.normal_(made.lora_B["default"].weight, std=0.3)
    return made


def outcome(module: nn.Module, x: torch.Tensor, *, autocast: bool) -> list[torch.Tensor]:
    x = x.clone().requires_grad_()
    with torch.autocast(x.device.type, torch.bfloat16, enabled=autocast):
        y = module(x)
    (y.float() * torch.linspace(-1, 1, y.numel(), device=y.device).view(y.shape)).sum().backward()
    return [y, x.grad, *(module.get_parameter(f"lora_{name}.default.weight").grad for name in "AB")]


@needs_bitsandbytes
@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize(
    ("dtype", "tolerance", "bias", "quant_type", "compress_statistics"),
    [
        (torch.float32, 2e-6, False, "nf4", True),
        (torch.float32, 2e-6, True, "fp4", False),
        (torch.bfloat16, 1e-2, True, "nf4", False),
        (torch.bfloat16, 1e-2, False, "fp4", True),
    ],
    ids=str,
)
def test_a_quantised_layer_has_pefts_output_and_gradients(
    dtype, tolerance, bias, quant_type, compress_statistics, device, monkeypatch
):
    from peft.tuners.lora.bnb import Linear4bit

    calls, forward = [], Linear4bit.forward
    monkeypatch.setattr(Linear4bit, "forward", lambda self, *a, **k: calls.append(self) or forward(self, *a, **k))
    four_bits = {"quant_type": quant_type, "compress_statistics": compress_statistics}
    usual = quantised(device, dtype, bias=bias, **four_bits)
    fused = copy.deepcopy(usual)
    assert fuse_adapters(fused) == 1 and stored_linear(fused.base_layer) is not None
    x = torch.randn(2, 6, E, device=device, dtype=dtype)
    pairs = zip(*(outcome(module, x, autocast=dtype is torch.bfloat16) for module in (fused, usual)), strict=True)
    for mine, expected in pairs:
        assert mine.dtype == expected.dtype
        assert (mine - expected).norm() <= tolerance * expected.norm()
    assert len(calls) == 1


@needs_bitsandbytes
def test_another_format_of_four_bits_runs_pefts_own_code():
    """bitsandbytes' order of the bytes for CPUs with AVX-512."""
    from bitsandbytes.functional import _convert_weight_packed_for_cpu

    base = quantised("cpu", torch.float32, features=32).base_layer
    assert stored_linear(base) is not None
    weight = base.weight
    weight.data, weight.quant_state = _convert_weight_packed_for_cpu(weight.data, weight.quant_state)
    assert stored_linear(base) is None


@needs_bitsandbytes
@pytest.mark.parametrize("storage", [torch.bfloat16, torch.float16, torch.float32])
def test_the_bytes_are_read_from_any_dtype_and_the_scales_from_the_layer(storage):
    """FSDP2 shards the first and drops the second from the weight."""
    expected = stored_linear(quantised("cpu", torch.float32).base_layer).dequantize().clone()
    base = quantised("cpu", torch.float32, quant_storage=storage).base_layer
    assert torch.equal(stored_linear(base).dequantize(), expected)
    gathered = base.weight.data.clone()
    assert gathered.dtype == storage
    base.weight = nn.Parameter(gathered, requires_grad=False)
    assert not hasattr(base.weight, "quant_state")
    assert torch.equal(stored_linear(base).dequantize(), expected)


@needs_bitsandbytes
def test_the_state_of_a_layer_is_read_once_and_again_when_its_weight_moves():
    base = quantised("cpu", torch.float32).base_layer
    found = stored_linear(base)
    assert stored_linear(base) is found
    base.weight.data = base.weight.data.clone()
    moved = stored_linear(base)
    assert moved is not found and torch.equal(moved.dequantize(), found.dequantize())
    assert stored_linear(copy.deepcopy(base)) is not moved


@needs_bitsandbytes
def test_a_layer_whose_weight_was_read_is_freed():
    """bitsandbytes' parameters refer to their layer."""
    base = quantised("cpu", torch.float32).base_layer
    stored_linear(base).dequantize()
    freed = weakref.ref(base)
    del base
    gc.collect()
    assert freed() is None


@needs_bitsandbytes
@pytest.mark.parametrize(
    ("quant_type", "compress_statistics"), [("nf4", True), ("nf4", False), ("fp4", True), ("fp4", False)]
)
def test_gradients_of_adapters_are_those_of_float64_on_dequantised_weights(quant_type, compress_statistics):
    """Two layers one behind the other, so that each backward needs a weight that the buffer no longer holds."""
    four_bits = {"quant_type": quant_type, "compress_statistics": compress_statistics}
    layers = nn.ModuleList(quantised("cpu", torch.float32, bias=True, **four_bits) for _ in range(2))
    with torch.no_grad():
        layers[1].lora_A["default"].weight.mul_(-0.5)
    assert fuse_adapters(layers) == 2
    x = torch.randn(3, 5, E, generator=torch.Generator().manual_seed(3))
    target = torch.linspace(-1, 1, 3 * 5 * F).view(3, 5, F)
    (layers[1](functional.pad(layers[0](x), (0, E - F))) * target).sum().backward()

    hidden = x.double()
    exact = []
    for layer in layers:
        weight = stored_linear(layer.base_layer).dequantize().double()
        a, b = (part["default"].weight.detach().double().requires_grad_() for part in (layer.lora_A, layer.lora_B))
        exact += [a, b]
        y = hidden @ weight.t() + layer.base_layer.bias.double() + layer.scaling["default"] * hidden @ a.t() @ b.t()
        hidden = functional.pad(y, (0, E - F))
    (y * target.double()).sum().backward()
    found = [part["default"].weight.grad for layer in layers for part in (layer.lora_A, layer.lora_B)]
    for mine, expected in zip(found, exact, strict=True):
        assert (mine - expected.grad).norm() <= 1e-6 * expected.grad.norm()
