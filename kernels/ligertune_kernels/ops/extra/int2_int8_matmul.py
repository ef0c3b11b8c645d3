r"""Product of int8 activations and a weight of 2-bit integers, four to a byte: y = x wᵀ, exact in int32 (BitNet).

x (..., K) int8, w (N, K) of -2, -1, 0, 1 packed into (N, K/4) uint8. Byte j of a row holds the four columns j, K/4 + j,
2 K/4 + j and 3 K/4 + j, the first in its lowest bits, each as two's complement. Four quarters and not four neighbours,
so that a tile of bytes meets four tiles of x that lie in one piece each:

    y = sum over quarters i of  x[:, i K/4 : (i+1) K/4] · unpack_i(w)ᵀ

A sum of K products is at most 256 K: it cannot pass 2³¹ for K under 8 million. Forward only.

A few rows are multiplied as the bytes come in, each tile unpacked in registers: the weight's bytes are what takes the
time, and there are a quarter as many. With many rows every row tile would unpack all of it again, and the product takes
the time: on NVIDIA the weight is then unpacked once, and cuBLAS multiplies int8 by int8.
"""

from __future__ import annotations

from typing import NamedTuple

import torch

from ligertune_kernels.chips import Chip, launch_options
from ligertune_kernels.launcher import as_rows, chip_of, on_device, runs_triton, tl, triton

GROUP = 8  # row tiles that share the columns of w while those are in the L2 cache
UNPACKED_FROM = 65  # rows; cuBLAS' product of int8 needs 17
UNPACK_BLOCK = 1024  # bytes of a packed row; on an H200 10.4 us for 4096 x 4096, where 2048 take 15.2 and 4096 24
SCALE_BLOCK = 2048  # columns of a row of the product


class Tile(NamedTuple):
    """How much of the product one program of the fused kernel makes, and how it is launched."""

    rows: int
    cols: int
    packed_bytes: int  # of a row of w at once: four times as many columns of x
    warps: int
    stages: int


def tile_for(n_rows: int, n_cols: int, n_bytes: int, chip: Chip) -> Tile:
    """The fused kernel's tile for x (n_rows, 4 n_bytes): the largest of these that do not spill anywhere."""
    if n_rows <= 16:
        # Rows that do not start at multiples of 16 bytes are loaded byte by byte, each with a pointer in registers.
        return Tile(16, 64, 64 if n_bytes % 16 == 0 else 32, warps=4, stages=2)
    large = -(-n_rows // 128) * -(-n_cols // 128)
    if n_bytes % 16 == 0 and large >= chip.processors:
        return Tile(128, 128, 32, warps=8, stages=2)
    return Tile(64, 64, 64 if n_bytes % 16 == 0 else 32, warps=8 if chip.warp_size == 32 else 4, stages=2)


def unpacks_first(n_rows: int, n_cols: int, n_bytes: int, chip: Chip) -> bool:
    """Whether w is unpacked as a whole, for torch's product of int8.

    That wants sizes in eights on NVIDIA; rows of unpacked w are stored in vectors where a quarter of one is 16 bytes.
    """
    return chip.vendor != "amd" and n_rows >= UNPACKED_FROM and n_cols % 8 == 0 and n_bytes % 16 == 0


def pack_int2(w: torch.Tensor) -> torch.Tensor:
    """Integers of -2 to 1 (..., K), K a multiple of 4, as bytes (..., K/4). Other values are not noticed."""
    if w.shape[-1] % 4 or w.is_floating_point():
        raise ValueError(f"pack_int2: w is {tuple(w.shape)} of {w.dtype}: expected integers, the last size by 4")
    first, second, third, fourth = ((w & 3).to(torch.uint8)).chunk(4, dim=-1)
    return first | second << 2 | third << 4 | fourth << 6


def unpack_int2(w_packed: torch.Tensor) -> torch.Tensor:
    """The int8 (..., K) whose `pack_int2` is w_packed (..., K/4)."""
    quarters = torch.cat([w_packed >> shift & 3 for shift in (0, 2, 4, 6)], dim=-1)
    return (quarters ^ 2).to(torch.int8) - 2


def int2_int8_matmul_reference(
    x: torch.Tensor,
    w_packed: torch.Tensor,
    *,
    x_scale: torch.Tensor | None = None,
    weight_scale: torch.Tensor | None = None,
) -> torch.Tensor:
    """The same in plain torch. The product is in float64, which is exact: torch has none of integers on GPUs."""
    y = (x.double() @ unpack_int2(w_packed).double().t()).to(torch.int32)
    if x_scale is None and weight_scale is None:
        return y
    y = y.float()
    if x_scale is not None:
        y = y * x_scale.float().unsqueeze(-1)
    return y if weight_scale is None else y * weight_scale.float()


@triton.jit
def _quarter_of(packed, quarter: tl.constexpr):
    """The int8 that bytes hold of one quarter of the columns: two bits, and their sign."""
    return ((((packed >> (2 * quarter)) & 3) ^ 2).to(tl.int8) - 2).to(tl.int8)


@triton.jit(do_not_specialize=["n_rows"])
def _int2_int8_kernel(
    x_ptr,
    w_ptr,
    y_ptr,
    x_scale_ptr,
    weight_scale_ptr,
    x_row_stride,
    w_row_stride,
    weight_scale_stride,
    n_rows,
    n_cols,
    n_bytes,
    HAS_X_SCALE: tl.constexpr,
    HAS_WEIGHT_SCALE: tl.constexpr,
    GROUP: tl.constexpr,
    BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr,
    BLOCK_BYTES: tl.constexpr,
):
    # A group of row tiles goes through all column tiles before the next group does.
    col_tiles = tl.cdiv(n_cols, BLOCK_N)
    group = tl.program_id(0) // (GROUP * col_tiles)
    height = tl.minimum(tl.cdiv(n_rows, BLOCK_M) - group * GROUP, GROUP)
    within = tl.program_id(0) % (GROUP * col_tiles)
    rows = (group * GROUP + within % height) * BLOCK_M + tl.arange(0, BLOCK_M)
    cols = (within // height) * BLOCK_N + tl.arange(0, BLOCK_N)
    # Rows and columns past the end read the last ones; they are not stored.
    x_rows = x_ptr + tl.minimum(rows, n_rows - 1).to(tl.int64)[:, None] * x_row_stride
    w_rows = w_ptr + tl.minimum(cols, n_cols - 1).to(tl.int64)[None, :] * w_row_stride
    total = tl.zeros([BLOCK_M, BLOCK_N], dtype=tl.int32)
    for start in range(0, n_bytes, BLOCK_BYTES):
        offs = start + tl.arange(0, BLOCK_BYTES)
        packed = tl.load(w_rows + offs[:, None], mask=offs[:, None] < n_bytes, other=0)
        for quarter in tl.static_range(4):
            x = tl.load(x_rows + quarter * n_bytes + offs[None, :], mask=offs[None, :] < n_bytes, other=0)
            total = tl.dot(x, _quarter_of(packed, quarter), total, out_dtype=tl.int32)
    y_ptrs = y_ptr + rows.to(tl.int64)[:, None] * n_cols + cols[None, :]
    mask = (rows < n_rows)[:, None] & (cols < n_cols)[None, :]
    if HAS_X_SCALE or HAS_WEIGHT_SCALE:
        y = total.to(tl.float32)
        if HAS_X_SCALE:
            y *= tl.load(x_scale_ptr + rows, mask=rows < n_rows, other=0.0).to(tl.float32)[:, None]
        if HAS_WEIGHT_SCALE:
            weight_scale = tl.load(weight_scale_ptr + cols * weight_scale_stride, mask=cols < n_cols, other=0.0)
            y *= weight_scale.to(tl.float32)[None, :]
        tl.store(y_ptrs, y, mask=mask)
    else:
        tl.store(y_ptrs, total, mask=mask)


@triton.jit
def _unpack_kernel(w_ptr, out_ptr, w_row_stride, n_bytes, BLOCK: tl.constexpr):
    row = tl.program_id(0).to(tl.int64)
    offs = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    mask = offs < n_bytes
    packed = tl.load(w_ptr + row * w_row_stride + offs, mask=mask, other=0)
    for quarter in tl.static_range(4):
        tl.store(out_ptr + (row * 4 + quarter) * n_bytes + offs, _quarter_of(packed, quarter), mask=mask)


@triton.jit
def _scale_kernel(
    y_ptr,
    x_scale_ptr,
    weight_scale_ptr,
    weight_scale_stride,
    n_cols,
    HAS_X_SCALE: tl.constexpr,
    HAS_WEIGHT_SCALE: tl.constexpr,
    BLOCK: tl.constexpr,
):
    # y holds int32 under the name of float32, and float32 after: it is one size.
    row = tl.program_id(0).to(tl.int64)
    cols = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    mask = cols < n_cols
    y = tl.load(y_ptr + row * n_cols + cols, mask=mask).to(tl.int32, bitcast=True).to(tl.float32)
    if HAS_X_SCALE:
        y *= tl.load(x_scale_ptr + row).to(tl.float32)
    if HAS_WEIGHT_SCALE:
        y *= tl.load(weight_scale_ptr + cols * weight_scale_stride, mask=mask, other=0.0).to(tl.float32)
    tl.store(y_ptr + row * n_cols + cols, y, mask=mask)


def int2_int8_matmul(
    x: torch.Tensor,
    w_packed: torch.Tensor,
    *,
    x_scale: torch.Tensor | None = None,
    weight_scale: torch.Tensor | None = None,
) -> torch.Tensor:
    """x (..., K) int8 times the weight (N, K) that `pack_int2` made w_packed (N, K/4) uint8 of: (..., N) int32, exact.

    With x_scale (...) or weight_scale, (N,) or a scalar, the product is multiplied by them and float32. Forward only.
    For many rows (`unpacks_first`) N K bytes hold the unpacked weight meanwhile: half of what it takes in bf16. In a
    graph that torch compiles, the fused kernel takes them, too.
    """
    _check(x, w_packed, x_scale, weight_scale)
    if x.numel() == 0 or w_packed.numel() == 0 or not runs_triton(x):
        return int2_int8_matmul_reference(x, w_packed, x_scale=x_scale, weight_scale=weight_scale)
    rows, w_packed = as_rows(x), as_rows(w_packed)
    scales = (
        None if x_scale is None else x_scale.reshape(-1).contiguous(),
        None if weight_scale is None else weight_scale.contiguous(),
    )
    # Not in a graph: torch 2.11 cannot trace where x begins in its storage, on which cuBLAS depends.
    unpacked = not torch.compiler.is_compiling() and unpacks_first(rows.shape[0], *w_packed.shape, chip_of(x.device))
    with on_device(x):
        y = (_unpacked if unpacked else _fused)(rows, w_packed, *scales)
    return y.view(*x.shape[:-1], w_packed.shape[0])


def _fused(
    x: torch.Tensor, w_packed: torch.Tensor, x_scale: torch.Tensor | None, weight_scale: torch.Tensor | None
) -> torch.Tensor:
    """The product of x (M, K) and the scales in one kernel: (M, N)."""
    (n_rows, _), (n_cols, n_bytes) = x.shape, w_packed.shape
    scaled = x_scale is not None or weight_scale is not None
    y = torch.empty((n_rows, n_cols), dtype=torch.float32 if scaled else torch.int32, device=x.device)
    chip = chip_of(x.device)
    tile = tile_for(n_rows, n_cols, n_bytes, chip)
    launch = {**launch_options(tile.rows * tile.cols, chip), "num_warps": tile.warps, "num_stages": tile.stages}
    _int2_int8_kernel[(triton.cdiv(n_rows, tile.rows) * triton.cdiv(n_cols, tile.cols),)](
        x, w_packed, y, y if x_scale is None else x_scale, y if weight_scale is None else weight_scale,
        x.stride(0), w_packed.stride(0), 0 if weight_scale is None else weight_scale.dim(), n_rows, n_cols, n_bytes,
        HAS_X_SCALE=x_scale is not None, HAS_WEIGHT_SCALE=weight_scale is not None,
        GROUP=GROUP, BLOCK_M=tile.rows, BLOCK_N=tile.cols, BLOCK_BYTES=tile.packed_bytes, **launch,
    )  # fmt: skip
    return y


def _unpacked(
    x: torch.Tensor, w_packed: torch.Tensor, x_scale: torch.Tensor | None, weight_scale: torch.Tensor | None
) -> torch.Tensor:
    """The same by way of the whole weight in int8; the scales over the product, in its own memory."""
    if x.stride(0) % 16 or x.storage_offset() % 16:  # cuBLAS loads vectors
        x = x.clone(memory_format=torch.contiguous_format)
    y = torch._int_mm(x, _unpack(w_packed).t())
    if x_scale is None and weight_scale is None:
        return y
    y = y.view(torch.float32)
    (n_rows, n_cols), block = y.shape, SCALE_BLOCK
    _scale_kernel[(n_rows, triton.cdiv(n_cols, block))](
        y, weight_scale if x_scale is None else x_scale, x_scale if weight_scale is None else weight_scale,
        0 if weight_scale is None else weight_scale.dim(), n_cols,
        HAS_X_SCALE=x_scale is not None, HAS_WEIGHT_SCALE=weight_scale is not None,
        BLOCK=block, **launch_options(block, chip_of(y.device)),
    )  # fmt: skip
    return y


def _unpack(w_packed: torch.Tensor) -> torch.Tensor:
    """`unpack_int2` of rows (N, K/4) in one kernel, which writes each byte of (N, K) once."""
    n_cols, n_bytes = w_packed.shape
    out = torch.empty((n_cols, 4 * n_bytes), dtype=torch.int8, device=w_packed.device)
    grid = (n_cols, triton.cdiv(n_bytes, UNPACK_BLOCK))
    launch = {**launch_options(UNPACK_BLOCK, chip_of(out.device)), "num_warps": 4}
    _unpack_kernel[grid](w_packed, out, w_packed.stride(0), n_bytes, BLOCK=UNPACK_BLOCK, **launch)
    return out


def _check(
    x: torch.Tensor, w_packed: torch.Tensor, x_scale: torch.Tensor | None, weight_scale: torch.Tensor | None
) -> None:
    if x.dtype is not torch.int8 or w_packed.dtype is not torch.uint8:
        raise ValueError(f"int2_int8_matmul: x is {x.dtype} and w_packed {w_packed.dtype}: expected int8 and uint8")
    if w_packed.dim() != 2 or x.dim() == 0 or x.shape[-1] != 4 * w_packed.shape[1]:
        raise ValueError(
            f"int2_int8_matmul: x is {tuple(x.shape)} and w_packed {tuple(w_packed.shape)}: "
            "expected (..., K) and (N, K/4)"
        )
    if x_scale is not None and x_scale.shape != x.shape[:-1]:
        raise ValueError(f"int2_int8_matmul: x_scale is {tuple(x_scale.shape)}; expected {tuple(x.shape[:-1])}")
    if weight_scale is not None and weight_scale.shape not in ((), w_packed.shape[:1]):
        raise ValueError(
            f"int2_int8_matmul: weight_scale is {tuple(weight_scale.shape)}; expected () or {tuple(w_packed.shape[:1])}"
        )
    if torch.is_grad_enabled() and any(scale is not None and scale.requires_grad for scale in (x_scale, weight_scale)):
        raise ValueError(
            "int2_int8_matmul has no backward; pass detached scales, and multiply by a trainable one after"
        )
