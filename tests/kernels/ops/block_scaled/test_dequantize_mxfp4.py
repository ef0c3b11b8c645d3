"""MXFP4: transformers' values, rounding as the MX specification says, odd shapes, strides and dtypes."""

import pytest
import torch
from ligertune_kernels.ops.block_scaled import dequantize_mxfp4 as mx_module
from ligertune_kernels.ops.block_scaled.dequantize_mxfp4 import (
    E2M1,
    Mxfp4,
    dequantize_mxfp4,
    dequantize_mxfp4_reference,
    quantize_mxfp4,
)
from transformers.integrations.mxfp4 import convert_moe_packed_tensors

# one block; more blocks than a program has; a last program that is not full
SHAPES = [(1, 1, 32), (3, 7, 96), (2, 130, 64), (2, 33, 160)]


def random_bytes(shape: tuple[int, int, int], *, lowest: int = 90, highest: int = 150) -> Mxfp4:
    """Return weights with all 16 codes of an element, and scales from `lowest` to `highest`."""
    generator = torch.Generator().manual_seed(0)
    n_experts, n_rows, n_columns = shape
    groups = (n_experts, n_rows, n_columns // 32)
    blocks = torch.randint(0, 256, (*groups, 16), generator=generator, dtype=torch.uint8)
    return Mxfp4(blocks, torch.randint(lowest, highest, groups, generator=generator, dtype=torch.uint8))


def weights(shape: tuple[int, ...], seed: int = 0) -> torch.Tensor:
    return 0.02 * torch.randn(shape, generator=torch.Generator().manual_seed(seed))


@pytest.mark.parametrize("shape", SHAPES)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_the_weights_are_those_of_transformers(shape, dtype):
    stored = random_bytes(shape)
    expected = convert_moe_packed_tensors(*stored.tensors, dtype=dtype).transpose(1, 2)  # it returns (X, columns, rows)
    assert torch.equal(dequantize_mxfp4_reference(stored, shape, dtype), expected)


@pytest.mark.parametrize("shape", SHAPES)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
def test_the_kernel_gives_the_bits_of_the_reference(shape, dtype, device):
    # within the normal numbers of the dtype: Triton's interpreter stores subnormal ones of bfloat16 wrongly
    lowest = {torch.float32: 0, torch.bfloat16: 3, torch.float16: 115}[dtype]
    stored = random_bytes(shape, lowest=lowest, highest=135)
    expected = dequantize_mxfp4_reference(stored, shape, dtype)
    moved = stored.apply(lambda part: part.to(device))
    assert torch.equal(dequantize_mxfp4(moved, shape, dtype).cpu(), expected)
    out = torch.full(shape, 7.0, dtype=dtype, device=device)
    moved.write(out)
    assert torch.equal(out.cpu(), expected)


def test_every_scale_is_read(device):
    scales = torch.arange(256, dtype=torch.uint8).view(1, 256, 1)
    stored = Mxfp4(torch.full((1, 256, 1, 16), 0x62, dtype=torch.uint8), scales)  # 1 and 4
    found = dequantize_mxfp4(stored.apply(lambda part: part.to(device)), (1, 256, 32), torch.float64).cpu()
    found32 = dequantize_mxfp4(stored.apply(lambda part: part.to(device)), (1, 256, 32), torch.float32).cpu()
    expected = torch.tensor([1.0, 4.0], dtype=torch.float64) * 2.0 ** (torch.arange(255).double() - 127)[:, None]
    assert torch.equal(found[0, :255, :2].float(), expected.float())
    assert torch.equal(found32[0, :255, :2], expected.float())
    assert found[0, 255].isnan().all() and found32[0, 255].isnan().all()
    assert stored.magnitudes().isnan().all() and not random_bytes((1, 4, 32)).magnitudes().any()


def test_views_of_other_strides_and_no_experts(device):
    stored = random_bytes((3, 40, 64)).apply(lambda part: part.to(device))
    expected = dequantize_mxfp4(stored, (3, 40, 64), torch.float32)
    rows = stored.apply(lambda part: part[:, ::2])  # not contiguous
    assert torch.equal(dequantize_mxfp4(rows, (3, 20, 64), torch.float32), expected[:, ::2])
    one = stored.apply(lambda part: part.narrow(0, 1, 1))
    assert torch.equal(dequantize_mxfp4(one, (1, 40, 64), torch.float32), expected[1:2])
    none = stored.apply(lambda part: part[:0])
    assert dequantize_mxfp4(none, (0, 40, 64), torch.bfloat16).shape == (0, 40, 64)
    with pytest.raises(ValueError, match="out is not contiguous"):
        stored.write(expected.new_empty(3, 64, 40).transpose(1, 2))


@pytest.mark.parametrize("shape", SHAPES)
def test_quantised_values_are_the_nearest_under_the_specifications_scale(shape):
    """Compared with a search over all codes in float64; in the middle of two, the even code is chosen."""
    weight = weights(shape)
    stored = quantize_mxfp4(weight)
    table = torch.tensor(E2M1, dtype=torch.float64)
    blocks = weight.double().view(*stored.scales.shape, 32)
    scale = 2.0 ** (torch.floor(torch.log2(blocks.abs().amax(-1))) - 2)
    assert torch.equal(stored.scales.double(), torch.log2(scale) + 127)
    distance = (blocks.abs().unsqueeze(-1) / scale[..., None, None] - table).abs()
    expected = table[distance.argmin(-1)] * scale.unsqueeze(-1) * blocks.sign()
    assert torch.equal(dequantize_mxfp4(stored, shape, torch.float64), expected.view(shape))


def test_the_better_of_two_scales_is_taken_where_asked():
    """Compared with both scales in float64; no block loses more than under the specification's scale."""
    weight = weights((2, 64, 96))
    plain, best = quantize_mxfp4(weight), quantize_mxfp4(weight, best_scale=True)
    wide = best.scales.int() - plain.scales.int()
    assert set(wide.unique().tolist()) == {0, 1}
    blocks = weight.double().view(*plain.scales.shape, 32)
    errors = [
        (dequantize_mxfp4(one, weight.shape, torch.float64).view_as(blocks) - blocks).square().sum(-1)
        for one in (plain, best)
    ]
    assert (errors[1] <= errors[0]).all() and (errors[1] < errors[0])[wide == 1].all()
    block = torch.zeros(1, 1, 32)
    block[0, 0, :3] = torch.tensor([3.999, 0.5, -1.5])
    found = dequantize_mxfp4(quantize_mxfp4(block, best_scale=True), (1, 1, 32), torch.float32)[0, 0, :3]
    assert found.tolist() == [4.0, 0.5, -1.5]
    stored = random_bytes((2, 33, 160), lowest=4)
    dense = dequantize_mxfp4(stored, (2, 33, 160), torch.float32)
    again = quantize_mxfp4(dense, best_scale=True)
    assert torch.equal(dequantize_mxfp4(again, (2, 33, 160), torch.float32), dense)


def test_ties_go_to_the_even_code_and_large_values_saturate():
    middles = torch.tensor([0.25, 0.75, 1.25, 1.75, 2.5, 3.5, 5.0, 7.9])
    row = torch.cat((middles, -middles, torch.zeros(15), torch.tensor([4.0])))
    found = dequantize_mxfp4(quantize_mxfp4(row.view(1, 1, 32)), (1, 1, 32), torch.float32).flatten()
    expected = torch.tensor([0.0, 1.0, 1.0, 2.0, 2.0, 4.0, 4.0, 6.0])
    assert torch.equal(found[:8], expected) and torch.equal(found[8:16], -expected)
    assert not found[16:31].any()


@pytest.mark.parametrize("shape", SHAPES)
def test_a_dequantised_weight_keeps_its_values(shape):
    """Of every base: also of one whose blocks have a larger scale than the specification's."""
    for stored in (random_bytes(shape, lowest=4), quantize_mxfp4(weights(shape))):
        dense = dequantize_mxfp4(stored, shape, torch.float32)
        again = quantize_mxfp4(dense)
        assert torch.equal(dequantize_mxfp4(again, shape, torch.float32), dense)
    assert torch.equal(again.blocks, stored.blocks) and torch.equal(again.scales, stored.scales)


def test_extremes_zeros_and_bad_numbers():
    weight = torch.zeros(1, 4, 32)
    weight[0, 1, 3] = 3e38
    weight[0, 2, 3] = 1e-40  # below the smallest scale times 6
    weight[0, 3, 3] = float("nan")
    stored = quantize_mxfp4(weight)
    found = dequantize_mxfp4(stored, (1, 4, 32), torch.float32)
    assert not found[0, 0].any()
    assert found[0, 1, 3] == 6 * 2.0**125
    assert 0 <= found[0, 2, 3] < 1e-38
    assert found[0, 3].isnan().all()


def test_chunks_give_the_same_bytes(monkeypatch):
    whole = quantize_mxfp4(weights((2, 40, 64)))
    monkeypatch.setattr(mx_module, "QUANTISED_ROWS", 7 * 64)
    chunks = quantize_mxfp4(weights((2, 40, 64)))
    assert all(torch.equal(a, b) for a, b in zip(whole.tensors, chunks.tensors, strict=True))


def test_bad_input_is_refused():
    with pytest.raises(ValueError, match=r"expected \(X, rows, a multiple of 32\)"):
        quantize_mxfp4(torch.randn(2, 3, 40))
    with pytest.raises(ValueError, match="expected a floating-point dtype"):
        quantize_mxfp4(torch.ones(1, 1, 32, dtype=torch.int32))
    with pytest.raises(ValueError, match=r"shape is \(1, 2, 64\): the bytes hold \(1, 4, 32\)"):
        dequantize_mxfp4(random_bytes((1, 4, 32)), (1, 2, 64), torch.float32)
