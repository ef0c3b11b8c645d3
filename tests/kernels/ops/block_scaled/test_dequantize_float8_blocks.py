"""Block float8: transformers' values, a formula by hand at the edges, parts, strides and dtypes."""

from types import SimpleNamespace

import pytest
import torch
from ligertune_kernels.ops.block_scaled.dequantize_float8_blocks import (
    Float8Blocks,
    dequantize_float8_blocks,
    dequantize_float8_blocks_reference,
    quantize_float8_blocks,
    scales_shape,
)
from transformers.integrations.finegrained_fp8 import Fp8Dequantize

BLOCK = (16, 32)
# (shape, parts): whole blocks; edges of rows and columns; less than a block; two parts that end within a block
SHAPES = [((2, 32, 64), 1), ((1, 37, 71), 1), ((2, 5, 9), 1), ((3, 40, 33), 2), ((1, 300, 260), 1)]


def every_value(shape: tuple[int, int, int], parts: int = 1) -> Float8Blocks:
    """Return weights in which all numbers of e4m3 occur."""
    generator = torch.Generator().manual_seed(0)
    numbers = torch.tensor([b for b in range(256) if b & 127 != 127], dtype=torch.uint8)
    picked = numbers[torch.randint(0, len(numbers), shape, generator=generator)]
    scales = 0.01 + torch.rand(scales_shape(shape, BLOCK, parts), generator=generator)
    return Float8Blocks(picked.view(torch.float8_e4m3fn), scales, BLOCK, parts)


def by_hand(stored: Float8Blocks) -> torch.Tensor:
    """Return the weights in float32, element by element."""
    _, n_rows, n_columns = stored.shape
    part_rows = n_rows // stored.parts
    blocks = -(-part_rows // BLOCK[0])
    rows = torch.arange(n_rows)
    block_row = rows // part_rows * blocks + rows % part_rows // BLOCK[0]
    block_column = torch.arange(n_columns) // BLOCK[1]
    return stored.values.float() * stored.scales[:, block_row][:, :, block_column]


@pytest.mark.parametrize(("shape", "parts"), SHAPES)
def test_the_weights_are_the_formulas(shape, parts):
    stored = every_value(shape, parts)
    assert torch.equal(dequantize_float8_blocks_reference(stored, shape, torch.float32), by_hand(stored))


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_the_weights_are_those_of_transformers(dtype):
    stored = every_value((1, 64, 96))
    one = Fp8Dequantize(SimpleNamespace(quantization_config=SimpleNamespace(weight_block_size=BLOCK)))
    try:
        expected = one._dequantize_one(stored.values[0], stored.scales[0], output_dtype=dtype)
    except TypeError:  # transformers 5.17 returns the dtype of the scales
        expected = one._dequantize_one(stored.values[0], stored.scales[0]).to(dtype)
    assert torch.equal(dequantize_float8_blocks_reference(stored, (1, 64, 96), dtype)[0], expected)


@pytest.mark.parametrize(("shape", "parts"), SHAPES)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
def test_the_kernel_gives_the_bits_of_the_reference(shape, parts, dtype, device):
    stored = every_value(shape, parts)
    expected = dequantize_float8_blocks_reference(stored, shape, dtype)
    moved = stored.apply(lambda part: part.to(device))
    out = torch.full(shape, 7.0, dtype=dtype, device=device)
    moved.write(out)
    # The interpreter cuts bfloat16 off, which a GPU rounds.
    exact = dtype is not torch.bfloat16 or device.type == "cuda"
    for found in (dequantize_float8_blocks(moved, shape, dtype), out):
        torch.testing.assert_close(found.cpu(), expected, rtol=0 if exact else 2**-7, atol=0)


def test_bad_numbers_views_and_no_experts(device):
    stored = every_value((3, 40, 64))
    stored.values.view(torch.uint8)[2, 1, 3] = 255
    moved = stored.apply(lambda part: part.to(device))
    found = dequantize_float8_blocks(moved, (3, 40, 64), torch.float32)
    assert found[2, 1, 3].isnan() and found.isnan().sum() == 1 and moved.magnitudes().isnan().any()
    one = moved.apply(lambda part: part.narrow(0, 1, 1))
    assert torch.equal(dequantize_float8_blocks(one, (1, 40, 64), torch.float32), found[1:2])
    assert not one.magnitudes().isnan().any()
    twice = torch.stack((moved.values.view(torch.uint8),) * 2, 1)[:, 0]  # experts far from each other
    strided = moved._replace(values=twice.view(torch.float8_e4m3fn))
    assert not strided.values.is_contiguous()
    torch.testing.assert_close(
        dequantize_float8_blocks(strided, (3, 40, 64), torch.float32), found, rtol=0, atol=0, equal_nan=True
    )
    none = moved.apply(lambda part: part[:0])
    assert dequantize_float8_blocks(none, (0, 40, 64), torch.bfloat16).shape == (0, 40, 64)


@pytest.mark.parametrize("shape", [(2, 32, 64), (1, 37, 71), (2, 5, 9)])
@pytest.mark.parametrize("scale_dtype", [torch.float32, torch.bfloat16])
def test_quantised_values_are_the_nearest_under_the_largest_value_of_the_block(shape, scale_dtype):
    weight = 0.02 * torch.randn(shape, generator=torch.Generator().manual_seed(0))
    stored = quantize_float8_blocks(weight, block=BLOCK, scale_dtype=scale_dtype)
    numbers = torch.arange(127, dtype=torch.uint8).view(torch.float8_e4m3fn).double()
    for expert, scales in zip(weight, stored.scales, strict=True):
        for i, part in enumerate(expert.split(BLOCK[0])):
            for j, block in enumerate(part.split(BLOCK[1], 1)):
                assert scales[i, j] == (block.abs().max() / 448).to(scale_dtype).float()
    dense = dequantize_float8_blocks(stored, shape, torch.float32)
    wide = by_hand(Float8Blocks(torch.ones(shape).to(torch.float8_e4m3fn), stored.scales, BLOCK))
    scaled = (weight / wide).clamp(-448, 448).double()
    nearest = (scaled.abs().unsqueeze(-1) - numbers).abs().amin(-1)
    assert ((dense / wide).double() - scaled).abs().sub(nearest).abs().max() < 1e-4


def test_requantised_weights_keep_their_values():
    shape = (2, 37, 71)
    stored = quantize_float8_blocks(torch.randn(shape, generator=torch.Generator().manual_seed(0)), block=BLOCK)
    dense = dequantize_float8_blocks(stored, shape, torch.float32)
    again = quantize_float8_blocks(dense, block=BLOCK)
    assert torch.equal(again.values.view(torch.uint8), stored.values.view(torch.uint8))
    torch.testing.assert_close(again.scales, stored.scales, rtol=1e-6, atol=0)


def test_zeros_and_powers_of_two():
    weight = torch.zeros(1, 16, 64)
    weight[0, 3, 40] = 100.0
    stored = quantize_float8_blocks(weight, block=BLOCK, scale_dtype=torch.float8_e8m0fnu)
    assert torch.equal(stored.scales, torch.tensor([[[1.0, 0.25]]]))  # 100/448 rounded up to a power of two
    found = dequantize_float8_blocks(stored, (1, 16, 64), torch.float32)
    assert found[0, 3, 40] == 104.0 or found[0, 3, 40] == 96.0  # 400 lies between 384 and 416 of e4m3
    assert found.count_nonzero() == 1


def test_bad_input_is_refused():
    with pytest.raises(ValueError, match=r"expected \(X, rows, columns\) in floating point"):
        quantize_float8_blocks(torch.randn(3, 40))
    stored = every_value((1, 40, 64))
    with pytest.raises(ValueError, match=r"shape is \(1, 64, 40\): the values have \(1, 40, 64\)"):
        dequantize_float8_blocks(stored, (1, 64, 40), torch.float32)
    with pytest.raises(ValueError, match=r"scales are \(1, 3, 1\): expected \(1, 3, 2\)"):
        dequantize_float8_blocks(stored._replace(scales=stored.scales[:, :, :1]), (1, 40, 64), torch.float32)
