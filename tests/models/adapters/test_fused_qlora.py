"""Fused LoRA layers around weights in 4 bits: one dequantised weight at a time, with peft's results."""

import copy
import importlib.util
import weakref

import peft
import pytest
import torch
from ligertune_kernels.ops.moe.dequantize_nf4 import dequantize_nf4, quantize_nf4
from torch import nn

from ligertune.patching.lora.fused_lora import FourBitWeight, four_bit_weight, fuse_adapters
from ligertune.patching.lora.joint_lora import LoraTerms, joint_update

E, F, R = 64, 40, 3
DEVICES = ["cpu", pytest.param("cuda", marks=pytest.mark.gpu)]
needs_bitsandbytes = pytest.mark.skipif(importlib.util.find_spec("bitsandbytes") is None, reason="needs bitsandbytes")


def packed_and_dense(
    seed: int, shape: tuple[int, int] = (F, E), device: str = "cpu"
) -> tuple[FourBitWeight, torch.Tensor]:
    generator = torch.Generator().manual_seed(seed)
    nf4 = quantize_nf4(torch.randn(1, *shape, generator=generator).to(device))
    packed = FourBitWeight(nf4.packed, nf4, shape, torch.float32)
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


def test_a_dequantised_weight_is_kept_until_the_next_one(monkeypatch):
    from ligertune.patching.lora import fused_lora

    calls = []
    monkeypatch.setattr(fused_lora, "dequantize_nf4", lambda *a, **k: calls.append(a) or dequantize_nf4(*a, **k))
    (first, dense), (larger, _) = packed_and_dense(0), packed_and_dense(1, (2 * F, E))
    for weight in (first, first, larger, first, first):
        weight.dequantize()
    assert len(calls) == 3
    assert torch.equal(first.dequantize(), dense)
    released = weakref.ref(first.dequantize())
    larger.dequantize()
    assert released() is None


def test_a_released_weight_is_never_mistaken_for_the_next():
    """The next weight has the memory of the released one."""
    (first, _), (second, expected) = packed_and_dense(0), packed_and_dense(1)
    first.dequantize()
    for old, new in zip(first.nf4, second.nf4, strict=True):
        old.copy_(new)
    reused = FourBitWeight(first.nf4.packed.detach(), first.nf4, (F, E), torch.float32)
    assert reused.parameter.data_ptr() == first.parameter.data_ptr()
    assert torch.equal(reused.dequantize(), expected)


def quantised(device: str, dtype: torch.dtype, *, bias: bool = False, quant_type: str = "nf4") -> nn.Module:
    """Return peft's LoRA layer around bitsandbytes' Linear4bit, as QLoRA loads it."""
    import bitsandbytes
    from peft.tuners.lora.bnb import Linear4bit

    torch.manual_seed(0)
    base = bitsandbytes.nn.Linear4bit(E, F, bias=bias, compute_dtype=dtype, quant_type=quant_type)
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
@pytest.mark.parametrize("bias", [False, True])
@pytest.mark.parametrize(("dtype", "tolerance"), [(torch.float32, 2e-6), (torch.bfloat16, 1e-2)], ids=str)
def test_a_quantised_layer_has_pefts_output_and_gradients(dtype, tolerance, bias, device, monkeypatch):
    from peft.tuners.lora.bnb import Linear4bit

    calls, forward = [], Linear4bit.forward
    monkeypatch.setattr(Linear4bit, "forward", lambda self, *a, **k: calls.append(self) or forward(self, *a, **k))
    usual = quantised(device, dtype, bias=bias)
    fused = copy.deepcopy(usual)
    assert fuse_adapters(fused) == 1 and four_bit_weight(fused.base_layer) is not None
    x = torch.randn(2, 6, E, device=device, dtype=dtype)
    pairs = zip(*(outcome(module, x, autocast=dtype is torch.bfloat16) for module in (fused, usual)), strict=True)
    for mine, expected in pairs:
        assert mine.dtype == expected.dtype
        assert (mine - expected).norm() <= tolerance * expected.norm()
    assert len(calls) == 1


@needs_bitsandbytes
def test_another_format_of_four_bits_runs_pefts_own_code():
    fused = quantised("cpu", torch.float32, quant_type="fp4")
    x = torch.randn(6, E)
    with torch.no_grad():
        expected = fused(x)
        assert fuse_adapters(fused) == 1 and four_bit_weight(fused.base_layer) is None
        assert torch.equal(fused(x), expected)
