r"""Quantise a matrix to float8 for products: row-major and transposed copies, and its largest value, in one pass.

    q = round(clamp(x · scale, ±largest))       amax = max(amax, |x|)

A float8 product on NVIDIA's tensor cores reads both operands along the inner dimension. In y = x W^T, dx = dy W and
dW = dy^T x each matrix is such an operand once by rows and once by columns, so both copies are written while a tile is
in registers. With `delayed scaling` (Micikevicius et al. 2022, arXiv:2209.05433) the scale comes from the amax of
earlier steps: no pass over x only looks for it.

e4m3 holds up to 448 and e5m2 up to 57344; larger values become the largest one, and NaN stays NaN. x · scale is
computed in float32 and rounded once, to nearest, ties to even. There is no backward: `models.float8_linear` has it.
"""

from __future__ import annotations

from typing import NamedTuple

import torch

from ligertune_kernels.chips import Chip, applies
from ligertune_kernels.launcher import Launcher, as_rows, cached, chip_of, runs_triton, tl, triton

ALIGNMENT = 16  # torch._scaled_mm: bytes of a row of an operand
PARTS = 1024  # running maxima, one per program: 8 programs for each of an H100's 132 processors
BLOCK_ROWS, BLOCK_COLS, NUM_WARPS = 128, 64, 8  # 128 bytes per row in memory, of x and of both copies but one
MANTISSA_BITS = {torch.float8_e4m3fn: 3, torch.float8_e5m2: 2}


class Float8Copies(NamedTuple):
    """A matrix x (N, C) in float8. Either copy may be left out."""

    rows: torch.Tensor | None  # (N, C)
    columns: torch.Tensor | None  # (C, N rounded up to a multiple of 16), zeros at the end


def quantize_float8_reference(
    x: torch.Tensor,
    scale: torch.Tensor,
    *,
    dtype: torch.dtype = torch.float8_e4m3fn,
    rows: bool = True,
    columns: bool = True,
    amax: torch.Tensor | None = None,
) -> Float8Copies:
    """Compute `quantize_float8` in plain torch."""
    matrix, largest = as_rows(x), torch.finfo(dtype).max
    q = (matrix.to(torch.promote_types(x.dtype, torch.float32)) * scale).clamp(-largest, largest).to(dtype)
    if amax is not None and x.numel():
        amax[0] = torch.maximum(amax[0], torch.linalg.vector_norm(matrix, float("inf")))
    transposed = None
    if columns:
        n_rows, n_cols = q.shape
        transposed = torch.zeros(n_cols, padded_rows(n_rows), dtype=torch.uint8, device=x.device)
        transposed[:, :n_rows] = q.view(torch.uint8).t()
        transposed = transposed.view(dtype)
    return Float8Copies(q.view(x.shape) if rows else None, transposed)


def padded_rows(n: int) -> int:
    """Return the length of a column of the transposed copy."""
    return -(-n // ALIGNMENT) * ALIGNMENT


@triton.jit
def float8_bits(y, MANTISSA_BITS: tl.constexpr, LARGEST: tl.constexpr, HARDWARE: tl.constexpr):
    """Return float32 values rounded to float8, as uint8. MANTISSA_BITS: 3 is e4m3, 2 is e5m2."""
    y = tl.where(y == y, tl.minimum(tl.maximum(y, -LARGEST), LARGEST), y)
    if HARDWARE:
        if MANTISSA_BITS == 3:
            return y.to(tl.float8e4nv).to(tl.uint8, bitcast=True)
        else:
            return y.to(tl.float8e5).to(tl.uint8, bitcast=True)
    bits = y.to(tl.uint32, bitcast=True)
    magnitude = bits & 0x7FFFFFFF
    # Normal numbers: round the mantissa of float32 and subtract the difference of the exponents' biases.
    DROPPED: tl.constexpr = 23 - MANTISSA_BITS
    BIAS: tl.constexpr = (1 << (6 - MANTISSA_BITS)) - 1  # 7, 15
    odd = (magnitude >> DROPPED) & 1
    normal = ((magnitude + ((1 << (DROPPED - 1)) - 1) + odd) >> DROPPED) - ((127 - BIAS) << MANTISSA_BITS)
    # Subnormal ones: adding a number whose last bit is float8's smallest value rounds to a multiple of it.
    ANCHOR: tl.constexpr = (127 + 24 - BIAS - MANTISSA_BITS) << 23
    anchor = tl.full(y.shape, ANCHOR, tl.uint32).to(tl.float32, bitcast=True)
    subnormal = (magnitude.to(tl.float32, bitcast=True) + anchor).to(tl.uint32, bitcast=True) - ANCHOR
    code = tl.where(magnitude < ((128 - BIAS) << 23), subnormal, normal)
    code = tl.where(magnitude > 0x7F800000, 0x7F, code)
    return (code | ((bits >> 24) & 0x80)).to(tl.uint8)


@triton.jit(do_not_specialize=["n_rows"])
def _quantize_float8_kernel(
    x_ptr,  # (N, C)
    scale_ptr,  # () float32
    rows_ptr,  # (N, C) uint8
    columns_ptr,  # (C, N rounded up) uint8
    amax_ptr,  # (programs,) float32
    n_cols, x_row_stride, n_rows,
    MANTISSA_BITS: tl.constexpr, LARGEST: tl.constexpr, HARDWARE: tl.constexpr,
    HAS_ROWS: tl.constexpr, HAS_COLUMNS: tl.constexpr, HAS_AMAX: tl.constexpr,
    ALIGNMENT: tl.constexpr, BLOCK_ROWS: tl.constexpr, BLOCK_COLS: tl.constexpr,
):  # fmt: skip
    """Each program quantises every n-th tile, and adds their largest value to its running maximum."""
    program = tl.program_id(0)
    scale = tl.load(scale_ptr)
    n_padded = (n_rows + ALIGNMENT - 1) // ALIGNMENT * ALIGNMENT
    col_blocks = tl.cdiv(n_cols, BLOCK_COLS)
    largest = 0.0
    for tile in range(program, tl.cdiv(n_padded, BLOCK_ROWS) * col_blocks, tl.num_programs(0)):
        rows = (tile // col_blocks) * BLOCK_ROWS + tl.arange(0, BLOCK_ROWS)
        cols = (tile % col_blocks) * BLOCK_COLS + tl.arange(0, BLOCK_COLS)
        inside = (rows < n_rows)[:, None] & (cols < n_cols)[None, :]
        at = rows.to(tl.int64)[:, None] * x_row_stride + cols[None, :]
        x = tl.load(x_ptr + at, mask=inside, other=0.0).to(tl.float32)
        if HAS_AMAX:
            largest = tl.maximum(largest, tl.max(tl.max(tl.abs(x), axis=1), axis=0))
        q = float8_bits(x * scale, MANTISSA_BITS, LARGEST, HARDWARE)
        if HAS_ROWS:
            tl.store(rows_ptr + rows.to(tl.int64)[:, None] * n_cols + cols[None, :], q, mask=inside)
        if HAS_COLUMNS:
            at = cols.to(tl.int64)[:, None] * n_padded + rows[None, :]
            tl.store(columns_ptr + at, tl.trans(q), mask=(cols < n_cols)[:, None] & (rows < n_padded)[None, :])
    if HAS_AMAX:
        tl.store(amax_ptr + program, tl.maximum(tl.load(amax_ptr + program), largest))


def check_scale(op: str, scale: torch.Tensor, amax: torch.Tensor | None) -> None:
    """Raise ValueError for a scale or running maxima of another shape or dtype."""
    if scale.numel() != 1 or scale.dtype != torch.float32:
        raise ValueError(f"{op}: scale {tuple(scale.shape)} {scale.dtype}: expected one float32")
    if amax is not None and (amax.shape != (PARTS,) or amax.dtype != torch.float32 or not amax.is_contiguous()):
        raise ValueError(f"{op}: amax {tuple(amax.shape)} {amax.dtype}: expected ({PARTS},) float32")


@cached
def _launch(dtype: torch.dtype, rows: bool, columns: bool, amax: bool, chip: Chip) -> Launcher:
    constants = {
        "MANTISSA_BITS": MANTISSA_BITS[dtype],
        "LARGEST": torch.finfo(dtype).max,
        "HARDWARE": applies("float8_conversion", chip),  # elsewhere integer operations round: the same bits,
        "HAS_ROWS": rows,
        "HAS_COLUMNS": columns,
        "HAS_AMAX": amax,
        "ALIGNMENT": ALIGNMENT,
        "BLOCK_ROWS": BLOCK_ROWS,
        "BLOCK_COLS": BLOCK_COLS,
    }
    return Launcher(_quantize_float8_kernel, {**constants, "num_warps": NUM_WARPS, "num_stages": 2})


def quantize_float8(
    x: torch.Tensor,  # (..., C), N rows
    scale: torch.Tensor,  # () float32: multiplies x
    *,
    dtype: torch.dtype = torch.float8_e4m3fn,
    rows: bool = True,
    columns: bool = True,
    amax: torch.Tensor | None = None,  # (PARTS,) float32
) -> Float8Copies:
    """Return float8 copies of x by rows and by columns. Deterministic; no gradient.

    amax: running maxima of |x|, updated in place; the largest of them is that of all x seen. Raises ValueError for a
    dtype that is not float8_e4m3fn or float8_e5m2, and for a scale or amax of another shape or dtype.
    """
    if dtype not in MANTISSA_BITS:
        raise ValueError(f"quantize_float8: dtype {dtype}: expected float8_e4m3fn or float8_e5m2")
    check_scale("quantize_float8", scale, amax)
    if not x.numel() or not runs_triton(x):
        return quantize_float8_reference(x, scale, dtype=dtype, rows=rows, columns=columns, amax=amax)
    matrix = as_rows(x)
    n_rows, n_cols = matrix.shape
    by_rows = torch.empty(x.shape, dtype=dtype, device=x.device) if rows else None
    by_columns = torch.empty(n_cols, padded_rows(n_rows), dtype=dtype, device=x.device) if columns else None
    outputs = (scale if copy is None else copy.view(torch.uint8) for copy in (by_rows, by_columns))
    tiles = -(-n_rows // BLOCK_ROWS) * -(-n_cols // BLOCK_COLS)
    _launch(dtype, rows, columns, amax is not None, chip_of(x.device))(
        (min(tiles, PARTS), 1, 1), (matrix, scale, *outputs, scale if amax is None else amax),
        (n_cols, matrix.stride(0)), n_rows,
    )  # fmt: skip
    return Float8Copies(by_rows, by_columns)
