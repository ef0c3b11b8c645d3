"""Tiles of the float8 ops: every number that was tuned, with its reason."""

from __future__ import annotations

from typing import NamedTuple

from ligertune_kernels.chips import ChipRule

FLOAT8_CONVERSION = ChipRule(("sm89", "sm90", "sm10", "sm12", "gfx950", "gfx12"), "elsewhere no OCP float8")
PARTS = 1024  # running maxima, one per program: 8 programs for each of an H100's 132 processors


class Float8Tile(NamedTuple):
    """Tile and warps of a kernel's program."""

    rows: int
    cols: int
    num_warps: int


QUANTIZE = Float8Tile(128, 64, 8)  # 128 bytes per row in memory, of x and of both copies but one
SWIGLU = Float8Tile(16, 256, 16)  # writes no columns: long pieces of rows
# By the bytes of an element. Twice as many bytes take twice the registers.
SWIGLU_BACKWARD = {2: Float8Tile(128, 64, 16), 4: Float8Tile(32, 64, 8)}
