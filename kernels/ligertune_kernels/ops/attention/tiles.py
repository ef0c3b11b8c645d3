"""Tiles of attention and RoPE: every number that was tuned, with its reason, and the choice of kernels."""

from __future__ import annotations

from typing import Literal, NamedTuple

from ligertune_kernels.chips import Chip, ChipRule

HOPPER_TILES = ChipRule(("sm90", "sm100", "sm103"), "228 KiB of shared memory for three stages")
GLUON_KERNELS = ChipRule(("sm90",), "warpgroup products and tensor copies of Hopper")


class Tile(NamedTuple):
    """Tile and launch of one attention kernel."""

    rows: int  # queries
    cols: int  # keys
    warps: int
    stages: int


class AttentionTiles(NamedTuple):
    """Tiles of the three attention kernels for heads of a (padded) width."""

    chips: Literal["hopper", "hopper_masked", "nvidia", "cdna", "rdna", "small"]
    width: int
    forward: Tile
    dq: Tile
    dkdv: Tile


# The Hopper tiles took about the least time on an H100 among three to five per kernel that spill nothing, over rows of
# 160 documents of 100 tokens up to one document of 16,384. The other tiles are the largest found that fit and spill
# nothing (triton 3.7; with 3.6, which timed them, dkdv of widths 128 and 256 spill 8 bytes per thread).
ATTENTION_TILES = (
    AttentionTiles("hopper", 64, Tile(64, 64, 4, 3), Tile(64, 64, 4, 3), Tile(64, 64, 4, 3)),  # fastest
    AttentionTiles("hopper", 128, Tile(64, 64, 4, 3), Tile(64, 64, 4, 2), Tile(32, 64, 4, 3)),  # fastest
    AttentionTiles("hopper", 256, Tile(128, 32, 8, 3), Tile(128, 32, 8, 2), Tile(16, 32, 4, 2)),  # fastest
    # A soft cap's derivative or a mask of columns takes registers: smaller or wider-spread backward tiles.
    AttentionTiles("hopper_masked", 64, Tile(64, 64, 4, 3), Tile(64, 64, 4, 2), Tile(32, 64, 4, 3)),  # fastest
    AttentionTiles("hopper_masked", 128, Tile(64, 64, 4, 3), Tile(64, 32, 4, 3), Tile(32, 64, 8, 3)),  # fastest
    AttentionTiles("hopper_masked", 256, Tile(128, 32, 8, 3), Tile(128, 32, 8, 2), Tile(16, 32, 8, 2)),  # fastest
    AttentionTiles("nvidia", 64, Tile(64, 64, 4, 3), Tile(64, 32, 4, 3), Tile(32, 64, 4, 2)),  # fits 100 KiB (sm120)
    AttentionTiles("nvidia", 128, Tile(64, 32, 4, 2), Tile(64, 32, 4, 3), Tile(32, 64, 8, 3)),  # fits 100 KiB
    AttentionTiles("nvidia", 256, Tile(64, 32, 8, 2), Tile(32, 32, 8, 1), Tile(16, 64, 8, 2)),  # fits 100 KiB
    AttentionTiles("cdna", 64, Tile(32, 16, 4, 1), Tile(32, 16, 4, 1), Tile(16, 32, 4, 1)),  # fits 64 KiB (gfx90a)
    AttentionTiles("cdna", 128, Tile(32, 16, 4, 1), Tile(32, 16, 4, 1), Tile(16, 32, 4, 1)),  # fits 64 KiB
    AttentionTiles("cdna", 256, Tile(32, 16, 4, 1), Tile(64, 16, 4, 2), Tile(16, 32, 4, 2)),  # fits 64 KiB
    AttentionTiles("rdna", 64, Tile(64, 32, 4, 2), Tile(32, 16, 4, 1), Tile(16, 32, 4, 1)),  # wider heads always spill
    # float32, whose products take a thread's registers, and the interpreter, where small tiles cover more branches.
    AttentionTiles("small", 64, Tile(16, 16, 4, 1), Tile(16, 16, 4, 1), Tile(16, 16, 4, 1)),
)


def padded_head_dim(head_dim: int) -> int:
    """Return the head's width in a tile: tl.dot takes powers of two."""
    return max(32, 1 << (head_dim - 1).bit_length())


def attention_tiles(head_dim: int, dtype_bytes: int, chip: Chip, *, has_cap: bool) -> AttentionTiles | None:
    """Return the tiles for heads of head_dim columns, None where no tile fits the chip."""
    width = padded_head_dim(head_dim)
    wave32_amd = chip.vendor == "amd" and chip.warp_size == 32
    if chip.vendor == "interpreter":
        chips = "small"
        width = 64
    elif dtype_bytes == 4:
        if wave32_amd:
            return None
        chips = "small"
    elif chip.vendor == "amd":
        chips = "rdna" if wave32_amd else "cdna"
    elif HOPPER_TILES.holds(chip):
        chips = "hopper_masked" if has_cap or head_dim < width else "hopper"
    else:
        chips = "nvidia"
    key = chips, max(64, width)
    return next((tiles for tiles in ATTENTION_TILES if tiles[:2] == key), None)
