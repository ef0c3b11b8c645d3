"""Tiles of `experts` and of 4-bit weights: every number that was tuned, with its reason."""

from __future__ import annotations

from typing import Literal, NamedTuple

import torch

from ligertune_kernels.chips import Chip, ChipRule

TORCH_GROUPED_MM = ChipRule(("sm90", "sm100", "sm103"), "torch has a kernel of CUTLASS for bf16 on these")

# Rows of pairs.
ORDER_BLOCK = 1024  # pairs per program
MAPPED_TILES = 16  # tiles per program of the tile map
ACTIVATION_BLOCK = 1024  # columns of gate and of up at a time: both, and their derivatives, take registers
ROW_BLOCK = 2048  # columns per program of gather and sum
# Rows and columns at a time of the sum over an expert's rows.
SUM_ROWS = 32
SUM_COLS = 128

# Weights in 4 bits.
QUANTISED_CHUNK = 1 << 24  # weights that are quantised at once
DEQUANTISED_BLOCKS = 64  # blocks that a program dequantises

# Grouped products.
# Multiplications of one expert's product from which `loop_pays`. Measured on an H100 only (2026-11-26, bfloat16,
# forward and backward). Time of the loop to that of grouped_mm: 1.14 at 0.6e10, 1.08 at 1.7e10, 1.01 at 3e10, 0.95 at
# 6e10, 0.98 at 7e10, 0.95 at 24e10, 0.93 at 96e10.
LOOP_PRODUCT = 4e10
GROUPED_ALIGNMENT = 16  # bytes; torch's grouped_mm takes strides that are multiples

Products = Literal["grouped_mm", "triton", "loop"]
"""What computes the grouped products: torch's grouped_mm, kernels of this package, or one product per expert, which
waits for the GPU to read the number of rows of each."""


class GroupedTile(NamedTuple):
    """Tile and launch of the grouped products of `experts`."""

    rows: int  # pairs; a tile holds rows of one expert
    weight_rows: int  # of the gradient of a weight
    cols: int
    inner: int  # per step
    warps: int
    stages: int


class GroupedTiles(NamedTuple):
    """Tiles of the grouped products by kind of chip: for many rows per expert, and for few."""

    chips: Literal["sm90", "sm100", "nvidia", "cdna", "rdna", "fp32", "interpreter"]
    many: GroupedTile
    few: GroupedTile


FEW_EXPERT_ROWS = 48  # rows per expert up to which the smaller tile wastes less than it loses

GROUPED_TILES = (
    GroupedTiles("sm90", GroupedTile(128, 128, 256, 64, 8, 4), GroupedTile(64, 64, 128, 64, 4, 4)),  # fits 227 KiB
    GroupedTiles("sm100", GroupedTile(128, 128, 128, 64, 8, 4), GroupedTile(64, 64, 128, 64, 4, 4)),  # wider: spill
    GroupedTiles("nvidia", GroupedTile(128, 128, 128, 32, 8, 4), GroupedTile(64, 64, 64, 64, 4, 3)),  # fits 99 KiB
    GroupedTiles("cdna", GroupedTile(128, 128, 128, 32, 8, 2), GroupedTile(64, 64, 64, 32, 4, 2)),  # fits 64 KiB
    GroupedTiles("rdna", GroupedTile(64, 64, 64, 32, 4, 2), GroupedTile(32, 32, 64, 32, 4, 2)),  # wider tiles spill
    GroupedTiles("fp32", GroupedTile(32, 32, 32, 16, 4, 2), GroupedTile(16, 16, 32, 16, 4, 2)),  # products in registers
    GroupedTiles("interpreter", GroupedTile(16, 16, 32, 16, 4, 1), GroupedTile(16, 16, 16, 16, 4, 1)),  # more branches
)


def grouped_tile(rows_per_expert: int, dtype_bytes: int, chip: Chip, *, aligned: bool = True) -> GroupedTile:
    """Return the tile of the grouped products, for the mean number of rows of an expert.

    aligned: rows of all tensors start at multiples of 16 bytes. It changes no number of rows.
    """
    if chip.vendor == "interpreter":
        chips = "interpreter"
    elif dtype_bytes == 4:
        chips = "fp32"
    elif chip.vendor == "amd":
        chips = "rdna" if chip.warp_size == 32 else "cdna"
    else:
        chips = {"sm90": "sm90", "sm100": "sm100", "sm103": "sm100"}.get(chip.arch, "nvidia")
    tiles = next(tiles for tiles in GROUPED_TILES if tiles.chips == chips)
    tile = tiles.few if rows_per_expert <= FEW_EXPERT_ROWS else tiles.many
    # Unaligned rows are loaded element by element, each with a pointer in registers: larger tiles spill.
    return tile if aligned else tile._replace(cols=min(tile.cols, 64), inner=min(tile.inner, 32), stages=2)


def loop_pays(n_rows: int, gate_up: tuple[int, int, int], chip: Chip) -> bool:
    """Return whether to compute one product of cuBLAS or hipBLAS per expert, for which the host waits for the GPU.

    n_rows: pairs of token and expert. gate_up: shape of that weight.
    """
    # A compiled graph, and a CUDA graph in capture, cannot wait.
    if torch.compiler.is_compiling() or chip.vendor == "interpreter":
        return False
    if n_rows / gate_up[0] * gate_up[1] * gate_up[2] < LOOP_PRODUCT:
        return False
    return not (torch.cuda.is_available() and torch.cuda.is_current_stream_capturing())


def product_for(shape: tuple[int, int], dtype: torch.dtype, chip: Chip, *, has_ends: bool = False) -> Products:
    """Return what computes the product with a matrix of this shape for each expert, on this chip.

    has_ends: the host knows the rows of each expert, because `loop_pays`.
    """
    if has_ends:
        return "loop"
    # On other chips, and for other dtypes, torch's grouped_mm is a loop that waits for the GPU. Under the interpreter
    # it runs on the CPU, where interpreted products would take long.
    fast = chip.vendor == "interpreter" or (dtype is torch.bfloat16 and TORCH_GROUPED_MM.holds(chip))
    return "grouped_mm" if fast and is_aligned(shape, dtype) else "triton"


def is_aligned(shape: tuple[int, int], dtype: torch.dtype) -> bool:
    """Return whether torch's grouped_mm takes matrices of this shape."""
    return all(size * dtype.itemsize % GROUPED_ALIGNMENT == 0 for size in shape)
