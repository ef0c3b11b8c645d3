r"""Block float8: weights in e4m3 with a scale for each block of rows and columns, as DeepSeek-V3 stores them.

    w = e4m3[byte] · scale[row // 128, column // 128]

Blocks at the edges are smaller. Weights that were merged (gate and up of an expert) consist of parts, whose blocks
start with their first row. Computed in float32 and rounded once. Source: DeepSeek-V3 technical report, section 3.3.
There is no backward: such weights are frozen.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import NamedTuple

import torch
from torch.nn import functional

from ligertune_kernels.chips import Chip, launch_options
from ligertune_kernels.launcher import Launcher, cached, chip_of, runs_triton, tl, triton
from ligertune_kernels.ops.block_scaled.tiles import FLOAT8_COLUMNS, FLOAT8_ROWS

FLOAT8_BLOCK = (128, 128)  # rows and columns that share a scale
LARGEST = 448.0  # of e4m3


class Float8Blocks(NamedTuple):
    """Weights (X, rows, columns) in e4m3 with a scale per block. parts: pieces of `rows // parts` rows with blocks of
    their own."""

    values: torch.Tensor  # (X, rows, columns) float8_e4m3fn
    scales: torch.Tensor  # (X, parts · ceil(rows / parts / block rows), ceil(columns / block columns)) float32
    block: tuple[int, int] = FLOAT8_BLOCK
    parts: int = 1

    @property
    def tensors(self) -> tuple[torch.Tensor, ...]:
        """The parts that are tensors, in the order of the fields."""
        return self.values, self.scales

    @property
    def names(self) -> tuple[str, ...]:
        """Names of the fields that are tensors."""
        return self._fields[: len(self.tensors)]

    @property
    def constants(self) -> tuple[tuple[int, int], int]:
        """The other fields."""
        return self.block, self.parts

    @property
    def shape(self) -> tuple[int, ...]:
        """Shape of the weights."""
        return tuple(self.values.shape)

    def apply(self, function: Callable[[torch.Tensor], torch.Tensor]) -> Float8Blocks:
        """Return the weights with a function applied to each tensor."""
        return Float8Blocks(function(self.values), function(self.scales), self.block, self.parts)

    def dequantize(self, shape: tuple[int, ...], dtype: torch.dtype) -> torch.Tensor:
        """Return the weights as `dequantize_float8_blocks` does."""
        return dequantize_float8_blocks(self, shape, dtype)

    def write(self, out: torch.Tensor) -> None:
        """Write the weights to `out` (X, rows, columns), in its dtype. Outside traces only."""
        _check_shape(self, tuple(out.shape))
        _write(self, out)

    def magnitudes(self) -> torch.Tensor:
        """Return the scales, and behind them NaN if a weight is no number, else 0."""
        bad = ((self.values.view(torch.uint8) & 127) == 127).any()
        return torch.cat((self.scales.flatten(), torch.where(bad, float("nan"), 0.0).view(1)))


def scales_shape(shape: tuple[int, ...], block: tuple[int, int], parts: int = 1) -> tuple[int, int, int]:
    """Return the shape of the scales of weights (X, rows, columns)."""
    n_experts, n_rows, n_columns = shape
    return n_experts, parts * -(-(n_rows // parts) // block[0]), -(-n_columns // block[1])


def quantize_float8_blocks(
    weight: torch.Tensor,  # (X, rows, columns) floating point
    *,
    block: tuple[int, int] = FLOAT8_BLOCK,
    scale_dtype: torch.dtype = torch.float32,
) -> Float8Blocks:
    """Quantise weights: a block's scale is its largest absolute value / 448, rounded to `scale_dtype`.

    Values are rounded to the nearest of e4m3, ties to even. scale_dtype: float8_e8m0fnu rounds scales up to powers of
    two. Blocks of zeros have scale 1. Raises ValueError for a weight that is not in floating point.
    """
    if weight.ndim != 3 or not weight.is_floating_point():
        found = f"{tuple(weight.shape)} {weight.dtype}"
        raise ValueError(f"quantize_float8_blocks: weight is {found}: expected (X, rows, columns) in floating point")
    n_experts, n_rows, n_columns = weight.shape
    values = torch.empty(weight.shape, dtype=torch.float8_e4m3fn, device=weight.device)
    scales = torch.empty(scales_shape(weight.shape, block), device=weight.device)
    for expert in range(n_experts):
        padded = functional.pad(weight[expert].float(), (0, -n_columns % block[1], 0, -n_rows % block[0]))
        tiles = padded.unflatten(1, (-1, block[1])).unflatten(0, (-1, block[0]))  # (rows, block, columns, block)
        largest = tiles.abs().amax((1, 3))
        scale = torch.where(largest > 0, largest / LARGEST, 1.0)
        if scale_dtype is getattr(torch, "float8_e8m0fnu", None):
            scale = torch.exp2(torch.ceil(torch.log2(scale)))
        scales[expert] = scale.to(scale_dtype).float()
        scaled = tiles / scales[expert][:, None, :, None]
        rounded = scaled.clamp(-LARGEST, LARGEST).reshape(padded.shape)[:n_rows, :n_columns]
        values[expert] = rounded.to(torch.float8_e4m3fn)
    return Float8Blocks(values, scales, block)


def dequantize_float8_blocks_reference(
    stored: Float8Blocks, shape: tuple[int, ...], dtype: torch.dtype
) -> torch.Tensor:
    """Compute `dequantize_float8_blocks` in plain torch."""
    out = torch.empty(shape, dtype=dtype, device=stored.values.device)
    _write_reference(stored, out)
    return out


def _write_reference(stored: Float8Blocks, out: torch.Tensor) -> None:
    """Write the weights to `out`, one expert after the other to bound the temporaries."""
    n_rows, n_columns = stored.shape[1:]
    part_rows = n_rows // stored.parts
    for expert, (values, scales) in enumerate(zip(*stored.tensors, strict=True)):
        wide = scales.repeat_interleave(stored.block[1], 1)[:, :n_columns]
        by_part = wide.view(stored.parts, -1, n_columns).repeat_interleave(stored.block[0], 1)[:, :part_rows]
        out[expert] = values.float() * by_part.reshape(n_rows, n_columns)


@triton.jit
def _dequantize_float8_kernel(
    values_ptr,  # (Y, n_rows, n_cols) uint8, Y parts of experts
    scales_ptr,  # (Y, row_blocks, col_blocks)
    out_ptr,  # (Y, n_rows, n_cols)
    n_rows, n_cols, row_blocks, col_blocks,
    BLOCK_ROWS: tl.constexpr, BLOCK_COLS: tl.constexpr, ROWS: tl.constexpr, COLS: tl.constexpr,
):  # fmt: skip
    part = tl.program_id(2).to(tl.int64)  # a layer can have more than 2**31 weights
    rows = tl.program_id(1) * ROWS + tl.arange(0, ROWS)
    cols = tl.program_id(0) * COLS + tl.arange(0, COLS)
    inside = (rows < n_rows)[:, None] & (cols < n_cols)[None, :]
    scale_offs = (part * row_blocks + rows // BLOCK_ROWS)[:, None] * col_blocks + (cols // BLOCK_COLS)[None, :]
    scale = tl.load(scales_ptr + scale_offs, mask=inside, other=0.0)
    offs = (part * n_rows + rows)[:, None] * n_cols + cols[None, :]
    byte = tl.load(values_ptr + offs, mask=inside, other=0).to(tl.int32)
    # The bits of e4m3 in float16 are 1/256 of the value, also for subnormal ones: chips without e4m3 read it, too.
    bits = ((byte & 127) << 7 | (byte & 128) << 8).to(tl.int16)
    value = bits.to(tl.float16, bitcast=True).to(tl.float32) * 256.0
    value = tl.where((byte & 127) == 127, float("nan"), value) * scale
    tl.store(out_ptr + offs, value.to(out_ptr.dtype.element_ty), mask=inside)


@cached
def _float8_launch(chip: Chip, block: tuple[int, int]) -> Launcher:
    constants = {"BLOCK_ROWS": block[0], "BLOCK_COLS": block[1], "ROWS": FLOAT8_ROWS, "COLS": FLOAT8_COLUMNS}
    return Launcher(_dequantize_float8_kernel, {**constants, **launch_options(FLOAT8_ROWS * FLOAT8_COLUMNS, chip)})


def dequantize_float8_blocks(
    stored: Float8Blocks, shape: tuple[int, ...], dtype: torch.dtype
) -> torch.Tensor:  # (X, rows, columns)
    """Return the weights of X experts in `dtype`. Deterministic, the same bits on every device; no gradient.

    Raises ValueError for a shape that does not fit the bytes.
    """
    _check_shape(stored, shape)
    if stored.values.is_meta:  # compiled for a GPU that is absent: the operator would launch nothing
        return _dequantize(stored, dtype)
    # one operator in every kind of trace, which reads 8 bits
    return _dequantize_op(*stored.tensors, list(stored.block), stored.parts, dtype)


def _check_shape(stored: Float8Blocks, shape: tuple[int, ...]) -> None:
    if stored.shape != tuple(shape):
        raise ValueError(f"dequantize_float8_blocks: shape is {tuple(shape)}: the values have {stored.shape}")
    expected = scales_shape(stored.shape, stored.block, stored.parts)
    if tuple(stored.scales.shape) != expected:
        found = tuple(stored.scales.shape)
        raise ValueError(f"dequantize_float8_blocks: scales are {found}: expected {expected}")


def _dequantize(stored: Float8Blocks, dtype: torch.dtype) -> torch.Tensor:
    out = torch.empty(stored.shape, dtype=dtype, device=stored.values.device)
    _write(stored, out)
    return out


def _write(stored: Float8Blocks, out: torch.Tensor) -> None:
    if not out.is_contiguous():
        raise ValueError("dequantize_float8_blocks: out is not contiguous")
    if out.dtype is torch.float64 or not out.numel() or not runs_triton(stored.scales):
        _write_reference(stored, out)
        return
    n_experts, n_rows, n_columns = stored.shape
    part_rows = n_rows // stored.parts
    scales = stored.scales.contiguous()
    grid = (-(-n_columns // FLOAT8_COLUMNS), -(-part_rows // FLOAT8_ROWS), n_experts * stored.parts)
    integers = (part_rows, n_columns, scales.shape[1] // stored.parts, scales.shape[2])
    tensors = (stored.values.contiguous().view(torch.uint8), scales, out)
    _float8_launch(chip_of(out.device), stored.block)(grid, tensors, integers)


@torch.library.custom_op("ligertune_kernels::dequantize_float8_blocks", mutates_args=())
def _dequantize_op(
    values: torch.Tensor, scales: torch.Tensor, block: list[int], parts: int, dtype: torch.dtype
) -> torch.Tensor:
    return _dequantize(Float8Blocks(values, scales, (block[0], block[1]), parts), dtype)


@_dequantize_op.register_fake
def _(values: torch.Tensor, scales: torch.Tensor, block: list[int], parts: int, dtype: torch.dtype) -> torch.Tensor:
    return values.new_empty(values.shape, dtype=dtype)
