r"""Product of int8 activations and a weight of packed 2-bit integers: y = x wᵀ, exact in int32 (BitNet).

x (..., K) int8, w (N, K) of -2, -1, 0, 1 packed into (N, K/4) uint8. Byte j of a row holds columns j, K/4 + j,
2 K/4 + j and 3 K/4 + j, the first in the lowest bits, each as two's complement. A byte holds four quarters instead of
four neighbours, so that a tile of bytes multiplies four contiguous tiles of x:

    y = sum over quarters i of  x[:, i K/4 : (i+1) K/4] · unpack_i(w)ᵀ

A sum of K products is at most 256 K and stays under 2³¹ for K under 8 million. There is no backward.

With few rows, reading the weight takes the time: one kernel unpacks each tile of bytes in registers. With many rows,
the product takes the time, and every tile of rows would unpack the weight again: on NVIDIA the weight is then unpacked
once, and cuBLAS multiplies int8 by int8. Source: Ma et al., arXiv:2402.17764.
"""

from __future__ import annotations

import torch

from ligertune_kernels.chips import ROW_TILE_GROUP, launch_options
from ligertune_kernels.launcher import as_rows, chip_of, on_device, runs_triton, tl, triton
from ligertune_kernels.ops.extra.tiles import (
    SCALED_BLOCK,
    UNPACK_BLOCK,
    UNPACK_WARPS,
    int2_matmul_tile,
    unpacks_int2_weight,
)


def pack_int2(w: torch.Tensor) -> torch.Tensor:
    """Pack integers from -2 to 1 (..., K), K a multiple of 4, into bytes (..., K/4). Other values are not detected."""
    if w.shape[-1] % 4 or w.is_floating_point():
        raise ValueError(f"pack_int2: w is {tuple(w.shape)} of {w.dtype}: expected integers, the last size by 4")
    first, second, third, fourth = ((w & 3).to(torch.uint8)).chunk(4, dim=-1)
    return first | second << 2 | third << 4 | fourth << 6


def unpack_int2(w_packed: torch.Tensor) -> torch.Tensor:
    """Unpack w_packed (..., K/4) uint8 to int8 (..., K), the inverse of `pack_int2`."""
    quarters = torch.cat([w_packed >> shift & 3 for shift in (0, 2, 4, 6)], dim=-1)
    return (quarters ^ 2).to(torch.int8) - 2


def int2_int8_matmul_reference(
    x: torch.Tensor,
    w_packed: torch.Tensor,
    *,
    x_scale: torch.Tensor | None = None,
    weight_scale: torch.Tensor | None = None,
) -> torch.Tensor:
    """Compute `int2_int8_matmul` in plain torch, in float64, which is exact: torch has no integer product on GPUs."""
    y = (x.double() @ unpack_int2(w_packed).double().t()).to(torch.int32)
    if x_scale is None and weight_scale is None:
        return y
    y = y.float()
    if x_scale is not None:
        y = y * x_scale.float().unsqueeze(-1)
    return y if weight_scale is None else y * weight_scale.float()


@triton.jit
def _quarter_of(packed, quarter: tl.constexpr):
    """Return one quarter of the columns of packed bytes as int8: two bits, sign-extended."""
    return ((((packed >> (2 * quarter)) & 3) ^ 2).to(tl.int8) - 2).to(tl.int8)


@triton.jit(do_not_specialize=["n_rows"])
def _int2_int8_kernel(
    x_ptr,  # (M, K)
    w_ptr,  # (N, K/4)
    y_ptr,  # (M, N)
    x_scale_ptr, weight_scale_ptr,  # (M,), (N,) or ()
    x_row_stride, w_row_stride, weight_scale_stride, n_rows, n_cols, n_bytes,
    HAS_X_SCALE: tl.constexpr, HAS_WEIGHT_SCALE: tl.constexpr, GROUP: tl.constexpr,
    BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_BYTES: tl.constexpr,
):  # fmt: skip
    # A group of row tiles computes all column tiles before the next group starts.
    col_tiles = tl.cdiv(n_cols, BLOCK_N)
    group = tl.program_id(0) // (GROUP * col_tiles)
    height = tl.minimum(tl.cdiv(n_rows, BLOCK_M) - group * GROUP, GROUP)
    within = tl.program_id(0) % (GROUP * col_tiles)
    rows = (group * GROUP + within % height) * BLOCK_M + tl.arange(0, BLOCK_M)
    cols = (within // height) * BLOCK_N + tl.arange(0, BLOCK_N)
    # Rows and columns past the end load the last ones and are not stored, so that loads need no mask.
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
    y_ptr,  # (M, N)
    x_scale_ptr, weight_scale_ptr,  # (M,), (N,) or ()
    weight_scale_stride, n_cols,
    HAS_X_SCALE: tl.constexpr, HAS_WEIGHT_SCALE: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    # y holds the bits of int32 before and float32 after: both have four bytes.
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
    x: torch.Tensor,  # (..., K) int8
    w_packed: torch.Tensor,  # (N, K/4) uint8, from `pack_int2`
    *,
    x_scale: torch.Tensor | None = None,  # (...)
    weight_scale: torch.Tensor | None = None,  # (N,) or ()
) -> torch.Tensor:  # (..., N)
    """Multiply x by the packed weight: int32 and exact, or float32 multiplied by the given scales. Forward only.

    For many rows (`unpacks_int2_weight`) the unpacked weight takes N K bytes meanwhile, half of its size in bf16. Under
    torch.compile the fused kernel always runs.

    Raises ValueError on mismatched shapes or dtypes, and for scales that require a gradient.
    """
    _check(x, w_packed, x_scale, weight_scale)
    if x.numel() == 0 or w_packed.numel() == 0 or not runs_triton(x):
        return int2_int8_matmul_reference(x, w_packed, x_scale=x_scale, weight_scale=weight_scale)
    rows = as_rows(x)
    w_packed = as_rows(w_packed)
    scales = (
        None if x_scale is None else x_scale.reshape(-1).contiguous(),
        None if weight_scale is None else weight_scale.contiguous(),
    )
    # Not while compiling: cuBLAS needs an aligned x, and torch 2.11 cannot trace its storage offset.
    chip = chip_of(x.device)
    unpacked = not torch.compiler.is_compiling() and unpacks_int2_weight(rows.shape[0], *w_packed.shape, chip)
    with on_device(x):
        y = (_unpacked if unpacked else _fused)(rows, w_packed, *scales)
    return y.view(*x.shape[:-1], w_packed.shape[0])


def _fused(
    x: torch.Tensor, w_packed: torch.Tensor, x_scale: torch.Tensor | None, weight_scale: torch.Tensor | None
) -> torch.Tensor:
    """Return the scaled product (M, N) of x (M, K), computed by one kernel that unpacks tiles of the weight."""
    n_rows = x.shape[0]
    n_cols, n_bytes = w_packed.shape
    scaled = x_scale is not None or weight_scale is not None
    y = torch.empty((n_rows, n_cols), dtype=torch.float32 if scaled else torch.int32, device=x.device)
    chip = chip_of(x.device)
    tile = int2_matmul_tile(n_rows, n_cols, n_bytes, chip)
    launch = {**launch_options(tile.rows * tile.cols, chip), "num_warps": tile.warps, "num_stages": tile.stages}
    _int2_int8_kernel[(triton.cdiv(n_rows, tile.rows) * triton.cdiv(n_cols, tile.cols),)](
        x, w_packed, y, y if x_scale is None else x_scale, y if weight_scale is None else weight_scale,
        x.stride(0), w_packed.stride(0), 0 if weight_scale is None else weight_scale.dim(), n_rows, n_cols, n_bytes,
        HAS_X_SCALE=x_scale is not None, HAS_WEIGHT_SCALE=weight_scale is not None,
        GROUP=ROW_TILE_GROUP, BLOCK_M=tile.rows, BLOCK_N=tile.cols, BLOCK_BYTES=tile.packed_bytes, **launch,
    )  # fmt: skip
    return y


def _unpacked(
    x: torch.Tensor, w_packed: torch.Tensor, x_scale: torch.Tensor | None, weight_scale: torch.Tensor | None
) -> torch.Tensor:
    """Return the scaled product (M, N) through the whole weight in int8; scales are applied in the product's memory."""
    if x.stride(0) % 16 or x.storage_offset() % 16:  # cuBLAS loads vectors of 16 bytes
        x = x.clone(memory_format=torch.contiguous_format)
    y = torch._int_mm(x, _unpack(w_packed).t())
    if x_scale is None and weight_scale is None:
        return y
    y = y.view(torch.float32)
    n_rows, n_cols = y.shape
    block = SCALED_BLOCK
    _scale_kernel[(n_rows, triton.cdiv(n_cols, block))](
        y, weight_scale if x_scale is None else x_scale, x_scale if weight_scale is None else weight_scale,
        0 if weight_scale is None else weight_scale.dim(), n_cols,
        HAS_X_SCALE=x_scale is not None, HAS_WEIGHT_SCALE=weight_scale is not None,
        BLOCK=block, **launch_options(block, chip_of(y.device)),
    )  # fmt: skip
    return y


def _unpack(w_packed: torch.Tensor) -> torch.Tensor:
    """Compute `unpack_int2` of (N, K/4) in one kernel, which writes each byte of (N, K) once."""
    n_cols, n_bytes = w_packed.shape
    out = torch.empty((n_cols, 4 * n_bytes), dtype=torch.int8, device=w_packed.device)
    grid = (n_cols, triton.cdiv(n_bytes, UNPACK_BLOCK))
    launch = {**launch_options(UNPACK_BLOCK, chip_of(out.device)), "num_warps": UNPACK_WARPS}
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
