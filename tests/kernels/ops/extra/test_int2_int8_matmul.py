"""int2_int8_matmul against integer arithmetic, bit for bit; packing and unpacking."""

import pytest
import torch
from ligertune_kernels import int2_int8_matmul, int2_int8_matmul_reference, pack_int2, unpack_int2
from ligertune_kernels.chips import INTERPRETER, Chip
from ligertune_kernels.ops.extra.int2_int8_matmul import _unpack
from ligertune_kernels.ops.extra.tiles import unpacks_int2_weight
from support.covering import every_pair

SIZES = (
    pytest.param((1,), 1, 4, id="one row, one column, one byte"),
    pytest.param((3, 7), 67, 260, id="rows in two dimensions, nothing a multiple of a tile"),
    pytest.param((600,), 20, 64, id="more row tiles than a group, the last one short"),
    pytest.param((70,), 130, 1024, id="several tiles each way, aligned"),
    pytest.param((13, 5), 72, 320, id="first number of rows with an unpacked weight"),
)
FORMS = pytest.param(10, 67, id="fused"), pytest.param(66, 72, id="unpacked")
SCALES = [pytest.param(by_row, weight) for by_row in (True, False) for weight in ("by column", "one", "none")][:5]
DTYPES = torch.float32, torch.bfloat16
H100 = Chip("nvidia", "sm90", 32, 132, 50 << 20)
MI300X = Chip("amd", "gfx942", 64, 304, 4 << 20)


def example(leading: tuple[int, ...], n_cols: int, n_inner: int, device: torch.device):
    """Return x with -128 and 127, and w of -2 to 1 before packing."""
    x = torch.randint(-128, 128, (*leading, n_inner), device=device, dtype=torch.int8)
    x.view(-1)[:2] = torch.tensor([-128, 127])
    return x, torch.randint(-2, 2, (n_cols, n_inner), device=device)


@pytest.mark.parametrize("leading, n_cols, n_inner", SIZES)
def test_is_the_integer_product(leading, n_cols, n_inner, device) -> None:
    x, w = example(leading, n_cols, n_inner, device)
    expected = (x.cpu().long() @ w.cpu().T).to(device, torch.int32)
    for op in (int2_int8_matmul, int2_int8_matmul_reference):
        y = op(x, pack_int2(w))
        assert y.dtype == torch.int32 and torch.equal(y, expected)


def test_the_largest_sums_are_exact(device) -> None:
    """-128 · -2 · 70,000 is 1.8e7: more than 2²⁴, where float32 is no longer exact."""
    x = torch.full((1, 70_000), -128, device=device, dtype=torch.int8)
    x[0, 0] = -127
    w = pack_int2(torch.full((1, 70_000), -2, device=device))
    assert int2_int8_matmul(x, w).item() == 256 * 70_000 - 2


@pytest.mark.parametrize("n_rows, n_cols, by_row, weight, dtype", every_pair(FORMS, SCALES, DTYPES))
def test_scales_multiply_the_product(n_rows, n_cols, by_row, weight, dtype, device) -> None:
    x, w = example((2, n_rows // 2), n_cols, 64, device)
    x_scale = torch.rand(x.shape[:-1], device=device, dtype=dtype) if by_row else None
    sizes = {"by column": (n_cols,), "one": ()}
    weight_scale = None if weight == "none" else torch.rand(sizes[weight], device=device, dtype=dtype)
    y = int2_int8_matmul(x, pack_int2(w), x_scale=x_scale, weight_scale=weight_scale)
    expected = int2_int8_matmul_reference(x, pack_int2(w), x_scale=x_scale, weight_scale=weight_scale)
    assert y.dtype == torch.float32
    torch.testing.assert_close(y, expected, rtol=2.0**-22, atol=0.0)  # two roundings


@pytest.mark.parametrize("dtype", [torch.int8, torch.int64])
@pytest.mark.parametrize("shape", [(4,), (3, 8), (2, 3, 12), (0, 4)])
def test_unpacking_inverts_packing(shape, dtype, device) -> None:
    w = torch.randint(-2, 2, shape, device=device).to(dtype)
    packed = pack_int2(w)
    assert packed.dtype == torch.uint8 and packed.shape == (*shape[:-1], shape[-1] // 4)
    assert torch.equal(unpack_int2(packed), w.to(torch.int8))


def test_a_byte_holds_one_column_of_each_quarter(device) -> None:
    w = torch.tensor([[0, 1, -2, -1, 1, 1, 0, 0]], device=device)  # quarters (0 1) (-2 -1) (1 1) (0 0)
    assert pack_int2(w).tolist() == [[0b00_01_10_00, 0b00_01_11_01]]


@pytest.mark.parametrize("n_rows, n_bytes", [(1, 1), (7, 65), (3, 2049), (5, 4096)], ids=str)
def test_the_unpack_kernel_agrees_with_torch(n_rows, n_bytes, device) -> None:
    """One byte, an odd number, one byte past a block, whole blocks; every value of a byte; every second row."""
    wide = torch.randint(256, (2 * n_rows, n_bytes + 3), device=device, dtype=torch.uint8)
    for w in (wide[:n_rows, :n_bytes].contiguous(), wide[::2, 1 : n_bytes + 1]):
        assert torch.equal(_unpack(w), unpack_int2(w))


@pytest.mark.parametrize("chip", [H100, INTERPRETER], ids=["H100", "interpreter"])
def test_many_rows_on_nvidia_unpack_the_weight_first(chip) -> None:
    assert unpacks_int2_weight(65, 4096, 1024, chip)
    assert unpacks_int2_weight(4096, 8, 16, chip)
    assert not unpacks_int2_weight(64, 4096, 1024, chip)  # reading the weight takes the time
    assert not unpacks_int2_weight(65, 4097, 1024, chip)  # cuBLAS needs N in eights
    assert not unpacks_int2_weight(65, 4096, 1026, chip)  # quarters are unaligned
    assert not unpacks_int2_weight(4096, 4096, 1024, MI300X)


@pytest.mark.parametrize("leading, n_cols", [((6, 4), 9), ((6, 16), 16)], ids=["fused", "unpacked"])
def test_takes_rows_of_any_stride(leading, n_cols, device) -> None:
    x, w = example(leading, n_cols, 128, device)
    packed = pack_int2(w)
    for view in (x[::2], x.transpose(0, 1), x[:, :, ::2].contiguous().repeat_interleave(2, dim=-1)[..., :128]):
        assert torch.equal(int2_int8_matmul(view, packed), int2_int8_matmul(view.contiguous(), packed))
    late = torch.cat([x.view(-1)[:3], x.view(-1)])[3:].view(x.shape)  # starts unaligned
    assert torch.equal(int2_int8_matmul(late, packed), int2_int8_matmul(x, packed))
    wide = pack_int2(torch.cat([w, w], dim=1))
    assert torch.equal(int2_int8_matmul(x, wide[:, ::2]), int2_int8_matmul(x, wide[:, ::2].contiguous()))


@pytest.mark.parametrize("leading, n_cols", [((0,), 5), ((2, 0), 5), ((3,), 0)])
def test_takes_empty_tensors(leading, n_cols, device) -> None:
    x = torch.zeros(*leading, 8, device=device, dtype=torch.int8)
    y = int2_int8_matmul(x, torch.zeros(n_cols, 2, device=device, dtype=torch.uint8))
    assert y.shape == (*leading, n_cols) and y.dtype == torch.int32
