"""Tiles of `experts` and of 4-bit weights: every number that was tuned, with its reason."""

from __future__ import annotations

from typing import Literal, NamedTuple

from ligertune_kernels.chips import Chip, ChipRule

TORCH_GROUPED_MM = ChipRule(("sm90", "sm100", "sm103"), "torch has a kernel of CUTLASS for bf16 on these")


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
