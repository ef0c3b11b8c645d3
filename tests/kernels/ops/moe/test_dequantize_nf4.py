"""NF4 and FP4: bitsandbytes' bytes, error bounds, and sizes."""

import importlib.util

import pytest
import torch
from ligertune_kernels.launcher import INTERPRETED
from ligertune_kernels.ops.moe import dequantize_nf4 as nf4_module
from ligertune_kernels.ops.moe.dequantize_nf4 import (
    BLOCK,
    TABLE,
    TABLES,
    Nf4,
    absmax_of,
    dequantize_nf4,
    dequantize_nf4_into,
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


needs_bitsandbytes = pytest.mark.skipif(importlib.util.find_spec("bitsandbytes") is None, reason="needs bitsandbytes")
FORMATS = [("nf4", False), ("fp4", True), ("fp4", False)]  # but NF4 with double quantisation
formats = pytest.mark.parametrize(("quant_type", "double_quant"), FORMATS, ids=str)


@needs_bitsandbytes
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
    for double_quant in (True, False):
        nf4 = quantize_nf4(weights(shape), double_quant=double_quant)
        assert sum(part.numel() * part.itemsize for part in nf4.tensors) == nf4_bytes(shape, double_quant=double_quant)
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
    on_cpu = quantize_nf4(weights(shape)).tensors
    assert all(torch.equal(a, b.to(device)) for a, b in zip(nf4.tensors, on_cpu, strict=True))


def test_a_shape_that_does_not_fit_is_refused():
    nf4 = quantize_nf4(weights((2, 128, 64)))
    with pytest.raises(ValueError, match=r"shape \(2, 64, 64\) has 64 blocks per expert: scales are \(2, 128\)"):
        dequantize_nf4(nf4, (2, 64, 64), torch.float32)


def test_chunks_give_the_same_bytes(monkeypatch):
    whole = quantize_nf4(weights((2, 96, 160)))
    monkeypatch.setattr(nf4_module, "QUANTISED_CHUNK", 2 * 100 * BLOCK)  # the third chunk is smaller
    chunks = quantize_nf4(weights((2, 96, 160)))
    assert all(torch.equal(a, b) for a, b in zip(whole.tensors, chunks.tensors, strict=True))


def stored_by_bitsandbytes(shape: tuple[int, ...], block: int, quant_type: str, double_quant: bool, dtype: torch.dtype):
    """Return (its bytes and state, the same weight as ours takes it)."""
    from bitsandbytes.functional import quantize_4bit

    flat = weights((1, *shape), dtype).flatten()
    packed, state = quantize_4bit(flat, blocksize=block, quant_type=quant_type, compress_statistics=double_quant)
    empty = torch.empty(1, 0)
    nested = (state.state2.absmax.view(1, -1), state.offset.view(1)) if double_quant else (empty, empty)
    return packed, state, Nf4(packed.view(1, -1), state.absmax.view(1, -1), *nested, quant_type, block)


@needs_bitsandbytes
@formats
@pytest.mark.parametrize("shape", SHAPES)
def test_other_formats_have_the_bytes_of_bitsandbytes(shape, quant_type, double_quant):
    ours = quantize_nf4(weights((1, *shape[1:])), quant_type=quant_type, double_quant=double_quant)
    packed, state, theirs = stored_by_bitsandbytes(shape[1:], BLOCK, quant_type, double_quant, torch.float32)
    table = torch.tensor(TABLES[quant_type])
    mine, found = (table[part[:, : packed.numel()].int().flatten() >> 4] for part in (ours.packed, theirs.packed))
    assert torch.equal(mine, found)  # FP4 has two zeros
    assert ours.is_nested == state.nested == double_quant
    torch.testing.assert_close(absmax_of(ours), absmax_of(theirs), rtol=0 if not double_quant else 0.02, atol=0)


@needs_bitsandbytes
@pytest.mark.parametrize(("quant_type", "double_quant"), [("nf4", True), *FORMATS], ids=str)
@pytest.mark.parametrize(
    ("shape", "dtype", "block"),
    [
        ((96, 160), torch.float32, 64),
        ((64, 128), torch.float16, 128),
        ((7, 9), torch.float32, 4096),  # more than the weights
        ((130, 65), torch.bfloat16, 64),
    ],
    ids=str,
)
def test_weights_that_bitsandbytes_has_stored_are_dequantised(shape, dtype, block, quant_type, double_quant, device):
    """Odd shapes end within a block, and their bytes with the last weight."""
    from bitsandbytes.functional import dequantize_4bit

    packed, state, nf4 = stored_by_bitsandbytes(shape, block, quant_type, double_quant, dtype)
    found = torch.full((1, *shape), 7.0, dtype=dtype, device=device)
    dequantize_nf4_into(nf4.apply(lambda part: part.to(device)), found)
    table = torch.tensor(TABLES[quant_type], dtype=torch.float64)
    nibbles = torch.stack((packed.flatten() >> 4, packed.flatten() & 15), 1).flatten()[: found.numel()].int()
    absmax = absmax_of(nf4)[0].double().repeat_interleave(block)[: found.numel()]
    exact = (table[nibbles] * absmax).view(shape)
    # Triton's interpreter cuts bfloat16 off. atol: half of the smallest float16.
    rounding = {torch.float32: 2e-7, torch.bfloat16: 2**-7, torch.float16: 2**-11}[dtype]
    torch.testing.assert_close(found[0].double().cpu(), exact, rtol=rounding, atol=3e-8)
    theirs = dequantize_4bit(packed, state).view(shape)
    torch.testing.assert_close(found[0].cpu(), theirs, rtol=2 * rounding, atol=6e-8)
    assert torch.equal(dequantize_nf4(nf4.apply(lambda part: part.to(device)), (1, *shape), dtype), found)


def test_an_unknown_format_is_refused():
    with pytest.raises(ValueError, match="quant_type is 'int4': expected nf4 or fp4"):
        quantize_nf4(weights((1, 8, 8)), quant_type="int4")
