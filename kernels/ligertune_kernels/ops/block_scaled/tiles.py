"""Tiles of block-scaled weights: every number that was tuned, with its reason."""

from __future__ import annotations

DEQUANTISED_MX_BLOCKS = 128  # blocks of 32 weights per program: the tile of 4,096 weights that NF4 has
# Rows and columns of float8 weights per program; a warp reads 128 neighbouring bytes.
FLOAT8_ROWS = 16
FLOAT8_COLUMNS = 128
QUANTISED_ROWS = 1 << 24  # weights that are quantised at once
