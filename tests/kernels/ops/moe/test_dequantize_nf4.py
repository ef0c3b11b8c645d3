"""NF4: bitsandbytes' bytes, error bounds, and sizes."""

import importlib.util

import pytest
import torch
from ligertune_kernels.launcher import INTERPRETED
from ligertune_kernels.ops.moe import dequantize_nf4 as nf4_module
from ligertune_kernels.ops.moe.dequantize_nf4 import (
    BLOCK,
    TABLE,
    absmax_of,
    dequantize_nf4,
    dequantize_nf4_reference,
    nf4_bytes,
    quantize_nf4,
)

SHAPES = [
    (3, 128, 256),
    (2, 96, 160),  # 240 blocks: the last float32 scale has fewer than 256
    (2, 7, 9),  # one block that is not full
    (1, 130, 65),
]


def weights(shape: tuple[int, ...], dtype: torch.dtype = torch.float32) -> torch.Tensor:
    generator = torch.Generator().manual_seed(0)
    return (0.02 * torch.randn(shape, generator=generator)).to(dtype)


@pytest.mark.skipif(importlib.util.find_spec("bitsandbytes") is None, reason="needs bitsandbytes")
@pytest.mark.skipif(INTERPRETED, reason="test_the_kernel_gives_the_bits_of_the_reference compares the kernel")
@pytest.mark.parametrize("shape", SHAPES)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_the_bytes_of_each_expert_are_those_of_bitsandbytes(shape, dtype):
    from bitsandbytes.functional import dequantize_4bit, quantize_4bit

    weight = weights(shape, dtype)
    nf4 = quantize_nf4(weight)
    dequantised = dequantize_nf4(nf4, shape, torch.float32)
    for expert in range(shape[0]):
        flat = weight[expert].flatten()  # 0.50.2 dequantises rows that are no multiple of 64 wrongly on a CPU
        packed, state = quantize_4bit(flat, blocksize=BLOCK, quant_type="nf4", compress_statistics=True)
        assert torch.equal(nf4.packed[expert][: packed.numel()], packed.flatten())
        torch.testing.assert_close(nf4.block_scales[expert], state.state2.absmax, rtol=1e-6, atol=0)
        torch.testing.assert_close(nf4.offset[expert], state.offset, rtol=1e-6, atol=0)
        ours, theirs = nf4.scales[expert].int(), state.absmax.int()
        if nf4.block_scales[expert].all():  # the scales of a single block are multiplied by 0
            assert (ours - theirs).abs().max() <= 1 and (ours != theirs).float().mean() < 0.02  # rounding of a middle
        state.dtype = torch.float32
        expected = dequantize_4bit(packed, state).flatten()
        same = (ours == theirs).repeat_interleave(BLOCK)[: flat.numel()]
        torch.testing.assert_close(dequantised[expert].flatten()[same], expected[same], rtol=1e-6, atol=0)


@pytest.mark.parametrize("shape", SHAPES)
def test_every_weight_is_the_nearest_of_16_values(shape):
    """Compared with a search over all 16 values, with the scale that is stored."""
    weight = weights(shape)
    nf4 = quantize_nf4(weight)
    found = dequantize_nf4(nf4, shape, torch.float64)
    table = torch.tensor(TABLE, dtype=torch.float64)
    for expert in range(shape[0]):
        flat = weight[expert].double().flatten()
        blocks = list(flat.split(BLOCK))
        for block, values, stored in zip(
            blocks, found[expert].flatten().split(BLOCK), absmax_of(nf4)[expert], strict=True
        ):
            absmax = block.abs().max()
            assert abs(stored - absmax) < 0.02 * nf4.block_scales[expert].max() + 1e-7  # 8 bits of the difference
            nearest = (block.unsqueeze(1) / absmax - table).abs().min(1)
            expected = table[nearest.indices] * stored.double()
            torch.testing.assert_close(values, expected, rtol=1e-6, atol=1e-9)
            assert (values - block).abs().max() <= 0.153 * absmax + abs(stored - absmax)  # half the widest gap


def test_normal_weights_lose_nine_percent():
    weight = weights((2, 512, 256))
    error = (dequantize_nf4(quantize_nf4(weight), weight.shape, weight.dtype) - weight).norm() / weight.norm()
    assert 0.090 < error < 0.094


@pytest.mark.parametrize("shape", SHAPES)
def test_bytes_are_those_of_the_tensors(shape):
    assert sum(part.numel() * part.itemsize for part in quantize_nf4(weights(shape))) == nf4_bytes(shape)
    assert 8 * nf4_bytes((128, 1536, 2048)) / (128 * 1536 * 2048) == pytest.approx(4.127, abs=1e-3)


def test_zeros_stay_zeros_and_bad_numbers_show():
    weight = weights((2, 64, 64))
    weight[1], weight[0, :2] = 0, 0
    found = dequantize_nf4(quantize_nf4(weight), weight.shape, weight.dtype)
    assert not found[1].any() and not found[0, :2].any() and found[0, 2:].any()
    for bad in (float("nan"), float("inf")):
        weight[0, 3, 5] = bad
        assert not absmax_of(quantize_nf4(weight))[0].isfinite().all()
    with pytest.raises(ValueError, match="expected a floating-point dtype"):
        quantize_nf4(weight.int())


@pytest.mark.parametrize("shape", SHAPES)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
def test_the_kernel_gives_the_bits_of_the_reference(shape, dtype, device):
    nf4 = quantize_nf4(weights(shape).to(device))
    found, expected = dequantize_nf4(nf4, shape, dtype), dequantize_nf4_reference(nf4, shape, dtype)
    # The interpreter cuts bfloat16 off, which a GPU rounds.
    exact = dtype is not torch.bfloat16 or device.type == "cuda"
    torch.testing.assert_close(found, expected, rtol=0 if exact else 2**-7, atol=0)
    assert all(torch.equal(a, b.to(device)) for a, b in zip(nf4, quantize_nf4(weights(shape)), strict=True))


def test_a_shape_that_does_not_fit_is_refused():
    nf4 = quantize_nf4(weights((2, 128, 64)))
    with pytest.raises(ValueError, match=r"shape \(2, 64, 64\) has 64 blocks per expert: scales are \(2, 128\)"):
        dequantize_nf4(nf4, (2, 64, 64), torch.float32)


def test_chunks_give_the_same_bytes(monkeypatch):
    whole = quantize_nf4(weights((2, 96, 160)))
    monkeypatch.setattr(nf4_module, "QUANTISED_CHUNK", 2 * 100 * BLOCK)  # the third chunk is smaller
    assert all(torch.equal(a, b) for a, b in zip(whole, quantize_nf4(weights((2, 96, 160))), strict=True))
