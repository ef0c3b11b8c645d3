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

from collections.abc import Iterable
from typing import NamedTuple

import torch

from ligertune_kernels.chips import Chip
from ligertune_kernels.launcher import Launcher, as_rows, cached, chip_of, runs_triton, tl, triton
from ligertune_kernels.ops.float8.tiles import FLOAT8_CONVERSION, PARTS, QUANTIZE

ALIGNMENT = 16  # torch._scaled_mm: bytes of a row of an operand
MANTISSA_BITS = {torch.float8_e4m3fn: 3, torch.float8_e5m2: 2}


Output = bool | torch.Tensor  # of a copy: a new tensor, none, or the tensor to write


class Float8Copies(NamedTuple):
    """A matrix x (N, C) in float8. Either copy may be left out."""

    rows: torch.Tensor | None  # (N, C)
    columns: torch.Tensor | None  # (C, N rounded up to a multiple of 16), zeros at the end


def quantize_float8_reference(
    x: torch.Tensor,
    scale: torch.Tensor,
    *,
    dtype: torch.dtype = torch.float8_e4m3fn,
    rows: Output = True,
    columns: Output = True,
    amax: torch.Tensor | None = None,
) -> Float8Copies:
    """Compute `quantize_float8` in plain torch."""
    matrix = as_rows(x)
    largest = torch.finfo(dtype).max
    q = (matrix.to(torch.promote_types(x.dtype, torch.float32)) * scale).clamp(-largest, largest).to(dtype)
    if amax is not None and x.numel():
        amax[0] = torch.maximum(amax[0], torch.linalg.vector_norm(matrix, float("inf")))
    by_rows, by_columns = _outputs(x, dtype, rows, columns)
    if by_rows is not None:
        by_rows.view(torch.uint8).copy_(q.view(torch.uint8).view(by_rows.shape))
    if by_columns is not None:
        by_columns.view(torch.uint8)[:, : len(q)] = q.view(torch.uint8).t()
        by_columns.view(torch.uint8)[:, len(q) :] = 0
    return Float8Copies(by_rows, by_columns)


def padded_rows(n: int) -> int:
    """Return the length of a column of the transposed copy."""
    return -(-n // ALIGNMENT) * ALIGNMENT


def _outputs(x: torch.Tensor, dtype: torch.dtype, rows: Output, columns: Output) -> Float8Copies:
    """Return the tensors to write."""
    n_rows = x.shape[:-1].numel()
    n_cols = x.shape[-1]
    by_rows = _output("rows", rows, (n_rows, n_cols), dtype, x.device)
    by_columns = _output("columns", columns, (n_cols, padded_rows(n_rows)), dtype, x.device)
    return Float8Copies(by_rows.view(x.shape) if rows is True else by_rows, by_columns)


def _output(
    name: str, wanted: Output, shape: tuple[int, int], dtype: torch.dtype, device: torch.device
) -> torch.Tensor | None:
    if isinstance(wanted, bool):
        return torch.empty(shape, dtype=dtype, device=device) if wanted else None
    aligned = wanted.ndim == 2 and wanted.stride(1) == 1 and not (wanted.stride(0) | wanted.data_ptr()) % ALIGNMENT
    if wanted.shape != shape or wanted.dtype != dtype or not aligned:
        raise ValueError(
            f"quantize_float8: {name} {tuple(wanted.shape)} {wanted.dtype} with strides {wanted.stride()}: expected "
            f"{shape} {dtype}, with rows at multiples of {ALIGNMENT} bytes"
        )
    return wanted


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


@triton.jit
def store_by_columns(words, columns_ptr, stride, quads, cols, n_cols, n_words):
    """Store a tile transposed. words: uint32 that hold one column of four rows each; quads: their rows / 4.

    Moving words between threads takes a fourth of the instructions that bytes take.
    """
    at = cols.to(tl.int64)[:, None] * stride + quads[None, :]
    tl.store(columns_ptr + at, tl.trans(words), mask=(cols < n_cols)[:, None] & (quads < n_words)[None, :])


@triton.jit
def add_maximum(amax_ptr, values):
    """Raise the program's running maximum to the largest of its values (tile, float32)."""
    at = amax_ptr + tl.program_id(0)
    tl.store(at, tl.maximum(tl.load(at), tl.max(tl.max(values, axis=1), axis=0)))


@triton.jit(do_not_specialize=["n_rows", "columns_stride"])
def _quantize_float8_kernel(
    x_ptr,  # (N, C)
    scale_ptr,  # () float32
    rows_ptr,  # (N, C) uint8
    columns_ptr,  # (C, N rounded up / 4) uint32
    amax_ptr,  # (programs,) float32
    n_cols, x_row_stride, rows_stride, n_rows, columns_stride,
    MANTISSA_BITS: tl.constexpr, LARGEST: tl.constexpr, HARDWARE: tl.constexpr,
    HAS_ROWS: tl.constexpr, HAS_COLUMNS: tl.constexpr, HAS_AMAX: tl.constexpr,
    ALIGNMENT: tl.constexpr, BLOCK_ROWS: tl.constexpr, BLOCK_COLS: tl.constexpr,
):  # fmt: skip
    """Each program quantises every n-th tile, and adds their largest value to its running maximum.

    columns_stride: in ALIGNMENT bytes.
    """
    program = tl.program_id(0)
    scale = tl.load(scale_ptr)
    n_words = (n_rows + ALIGNMENT - 1) // ALIGNMENT * (ALIGNMENT // 4)  # of a column
    col_blocks = tl.cdiv(n_cols, BLOCK_COLS)
    QUADS: tl.constexpr = BLOCK_ROWS // 4
    largest = tl.zeros((QUADS, BLOCK_COLS), tl.float32)
    for tile in range(program, tl.cdiv(n_words, QUADS) * col_blocks, tl.num_programs(0)):
        quads = (tile // col_blocks) * QUADS + tl.arange(0, QUADS)
        cols = (tile % col_blocks) * BLOCK_COLS + tl.arange(0, BLOCK_COLS)
        words = tl.zeros((QUADS, BLOCK_COLS), tl.uint32)
        for i in tl.static_range(4):
            rows = quads * 4 + i
            inside = (rows < n_rows)[:, None] & (cols < n_cols)[None, :]
            at = rows.to(tl.int64)[:, None] * x_row_stride + cols[None, :]
            x = tl.load(x_ptr + at, mask=inside, other=0.0).to(tl.float32)
            if HAS_AMAX:
                largest = tl.maximum(largest, tl.abs(x))
            q = float8_bits(x * scale, MANTISSA_BITS, LARGEST, HARDWARE)
            if HAS_ROWS:
                tl.store(rows_ptr + rows.to(tl.int64)[:, None] * rows_stride + cols[None, :], q, mask=inside)
            words |= q.to(tl.uint32) << (8 * i)
        if HAS_COLUMNS:
            store_by_columns(words, columns_ptr, columns_stride * (ALIGNMENT // 4), quads, cols, n_cols, n_words)
    if HAS_AMAX:
        add_maximum(amax_ptr, largest)


def as_integers(
    by_rows: Iterable[torch.Tensor | None], by_columns: Iterable[torch.Tensor | None], *, instead: torch.Tensor
) -> list[torch.Tensor]:
    """Return float8 copies as the kernels write them: rows as bytes, columns as words. instead: what None becomes."""
    copies = [(copy, torch.uint8) for copy in by_rows] + [(copy, torch.uint32) for copy in by_columns]
    return [instead if copy is None else copy.view(dtype) for copy, dtype in copies]


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
        "HARDWARE": FLOAT8_CONVERSION.holds(chip),  # elsewhere integer operations round: the same bits,
        "HAS_ROWS": rows,
        "HAS_COLUMNS": columns,
        "HAS_AMAX": amax,
        "ALIGNMENT": ALIGNMENT,
        "BLOCK_ROWS": QUANTIZE.rows,
        "BLOCK_COLS": QUANTIZE.cols,
    }
    return Launcher(_quantize_float8_kernel, {**constants, "num_warps": QUANTIZE.num_warps, "num_stages": 2})


def quantize_float8(
    x: torch.Tensor,  # (..., C), N rows
    scale: torch.Tensor,  # () float32: multiplies x
    *,
    dtype: torch.dtype = torch.float8_e4m3fn,
    rows: Output = True,
    columns: Output = True,
    amax: torch.Tensor | None = None,  # (PARTS,) float32
) -> Float8Copies:
    """Return float8 copies of x by rows and by columns. Deterministic; no gradient.

    rows, columns: False leaves a copy out; a tensor (N, C), or (C, N rounded up), is written instead of a new one. It
    may be a slice of a larger matrix, with rows at multiples of 16 bytes.
    amax: running maxima of |x|, updated in place; the largest of them is that of all x seen. Raises ValueError for a
    dtype that is not float8_e4m3fn or float8_e5m2, and for a scale, amax or output of another shape or dtype.
    """
    if dtype not in MANTISSA_BITS:
        raise ValueError(f"quantize_float8: dtype {dtype}: expected float8_e4m3fn or float8_e5m2")
    check_scale("quantize_float8", scale, amax)
    if not x.numel() or not runs_triton(x):
        return quantize_float8_reference(x, scale, dtype=dtype, rows=rows, columns=columns, amax=amax)
    matrix = as_rows(x)
    n_rows, n_cols = matrix.shape
    copies = _outputs(x, dtype, rows, columns)
    by_rows, by_columns = copies
    outputs = as_integers((by_rows,), (by_columns,), instead=scale)
    rows_stride = by_rows.stride(0) if isinstance(rows, torch.Tensor) else n_cols
    columns_stride = 0 if by_columns is None else by_columns.stride(0) // ALIGNMENT
    tiles = -(-n_rows // QUANTIZE.rows) * -(-n_cols // QUANTIZE.cols)
    _launch(dtype, by_rows is not None, by_columns is not None, amax is not None, chip_of(x.device))(
        (min(tiles, PARTS), 1, 1), (matrix, scale, *outputs, scale if amax is None else amax),
        (n_cols, matrix.stride(0), rows_stride), n_rows, columns_stride,
    )  # fmt: skip
    return copies
