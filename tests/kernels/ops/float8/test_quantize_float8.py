"""quantize_float8: torch's bits for every kind of value, float64's values, both copies, and the running maximum."""

import pytest
import torch
from ligertune_kernels import quantize_float8
from ligertune_kernels.ops.float8.quantize_float8 import PARTS, quantize_float8_reference
from support.covering import every_pair

E4M3, E5M2 = torch.float8_e4m3fn, torch.float8_e5m2
# one row (a generated token), ragged rows and columns, more tiles than one, a width that is no multiple of 16
SHAPES = [(1, 16), (2, 3, 40), (130, 72), (48, 130)]
RELATIVE = {E4M3: 2.0**-4, E5M2: 2.0**-3}  # half of the last mantissa bit
SMALLEST = {E4M3: 2.0**-9, E5M2: 2.0**-16}


def of(scale: float, device: torch.device) -> torch.Tensor:
    return torch.tensor(scale, device=device)


@pytest.mark.parametrize("dtype", [E4M3, E5M2])
def test_every_value_is_rounded_as_torch_rounds_it(dtype, device):
    """All bfloat16 values: zeros, ties, subnormal results, saturation, infinities and NaN."""
    x = torch.arange(2**16, dtype=torch.int32).to(torch.int16).view(torch.bfloat16).view(256, 256).to(device)
    for scale in (1.0, 2.0**-3 + 2.0**-12):
        found = quantize_float8(x, of(scale, device), dtype=dtype, columns=False).rows
        expected = quantize_float8_reference(x, of(scale, device), dtype=dtype, columns=False).rows
        is_nan = x.isnan()
        assert torch.equal(found.view(torch.uint8)[~is_nan], expected.view(torch.uint8)[~is_nan])
        assert found.float()[is_nan].isnan().all()


@pytest.mark.parametrize(
    "shape, x_dtype, dtype", every_pair(SHAPES, [torch.float32, torch.bfloat16, torch.float16], [E4M3, E5M2])
)
def test_both_copies_are_close_to_float64_and_the_maximum_is_exact(shape, x_dtype, dtype, device):
    x = torch.randn(shape, device=device).to(x_dtype)
    amax, scale = torch.zeros(PARTS, device=device), of(37.0, device)
    found = quantize_float8(x, scale, dtype=dtype, amax=amax)
    exact = x.double() * 37.0
    bound = exact.abs() * RELATIVE[dtype] + SMALLEST[dtype] / 2
    assert found.rows.shape == x.shape and found.rows.dtype is dtype
    assert ((found.rows.double() - exact).abs() <= bound).all()
    by_rows, n_rows = found.rows.flatten(0, -2).view(torch.uint8), x.shape[:-1].numel()
    assert found.columns.shape == (shape[-1], -(-n_rows // 16) * 16)
    assert torch.equal(found.columns.view(torch.uint8)[:, :n_rows], by_rows.t())
    assert not found.columns.view(torch.uint8)[:, n_rows:].any()
    assert amax.max() == x.abs().max().float()


def test_the_running_maximum_never_falls_and_copies_can_be_left_out(device):
    amax = torch.zeros(PARTS, device=device)
    first = torch.randn(200, 160, device=device)
    first[137, 91] = -9.0
    for x, largest in ((first, 9.0), (first / 2, 9.0), (first * 2, 18.0)):
        copies = quantize_float8(x, of(1.0, device), rows=False, amax=amax)
        assert copies.rows is None and amax.max() == largest
    alone = quantize_float8(first, of(1.0, device), columns=False)
    assert alone.columns is None and torch.equal(alone.rows.view(torch.uint8), _bytes(first))


def _bytes(x: torch.Tensor) -> torch.Tensor:
    return x.to(E4M3).view(torch.uint8)  # no value passes 448


def test_rows_with_a_stride_are_quantised_as_contiguous_ones(device):
    whole = torch.randn(33, 96, device=device, dtype=torch.bfloat16)
    part = whole[:, 32:64]
    found, expected = (quantize_float8(x, of(2.0, device)) for x in (part, part.contiguous()))
    for copy, other in zip(found, expected, strict=True):
        assert torch.equal(copy.view(torch.uint8), other.view(torch.uint8))


def test_empty_matrices_give_empty_copies(device):
    for shape in ((0, 16), (3, 0)):
        rows, columns = quantize_float8(torch.zeros(shape, device=device), of(1.0, device))
        assert rows.shape == shape and columns.shape == (shape[1], 16 * bool(shape[0]))


def test_copies_are_written_into_slices_of_larger_matrices(device):
    """The bytes around them stay as they were."""
    wholes = [torch.full(size, 7, dtype=torch.uint8, device=device) for size in ((48, 96), (32, 112))]
    x = torch.randn(48, 32, device=device, dtype=torch.bfloat16)
    slices = [whole[:, 16 : 16 + width].view(E5M2) for whole, width in zip(wholes, (32, 48), strict=True)]
    found = quantize_float8(x, of(2.0, device), dtype=E5M2, rows=slices[0], columns=slices[1])
    expected = quantize_float8(x, of(2.0, device), dtype=E5M2)
    for copy, written, right, whole in zip(found, slices, expected, wholes, strict=True):
        assert copy is written and torch.equal(written.view(torch.uint8), right.view(torch.uint8))
        width = written.shape[1]
        assert (whole[:, :16] == 7).all() and (whole[:, 16 + width :] == 7).all()


def test_wrong_outputs_are_refused(device):
    x, scale = torch.zeros(16, 32, device=device), of(1.0, device)
    whole = torch.zeros(16, 64, dtype=torch.uint8, device=device).view(E4M3)
    for rows in (whole, whole[:, :32].view(E5M2), whole[:, 8:40], whole.t()[:16, :16]):
        with pytest.raises(
            ValueError, match=r"quantize_float8: rows .*: expected \(16, 32\) torch.float8_e4m3fn, with"
        ):
            quantize_float8(x, scale, rows=rows)
    with pytest.raises(ValueError, match=r"quantize_float8: columns \(32, 32\) .*: expected \(32, 16\)"):
        quantize_float8(x, scale, columns=whole.view(32, 32))
