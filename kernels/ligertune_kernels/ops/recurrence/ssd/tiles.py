"""Tiles of ssd: each chosen number, with its reason. Other numbers were not measured."""

from __future__ import annotations

from typing import NamedTuple

import torch

from ligertune_kernels.chips import Chip
from ligertune_kernels.launcher import chip_of, runs_triton
from ligertune_kernels.ops.recurrence.tiles import Chips, delta_options, padded, product_chips

REFERENCE_CHUNK = 64  # tokens of a chunk of the reference
PART = 1024  # tokens of a packed row in which a program of the scan looks for documents of its own
PART_HEADS = 16  # of a group whose gradients a program adds: more programs, and more partial sums in memory
SUM_TOKENS = 32  # whose numbers of a chunk are added at once to those of tokens: masks of more take registers
TILE_HEADS = 16  # whose factors a program computes: neighbouring numbers of dt, and the least columns of a product
MAX_WIDTH = 256  # of a head and of a state
STEP_ROWS = 16  # of the state in a program of the step: 256 columns of them are 32 registers of a thread


class SsdTile(NamedTuple):
    """Launch of one kernel. state_cols, head_cols: columns of N and of P that it holds at a time."""

    state_cols: int
    head_cols: int
    warps: int
    stages: int = 1

    def fitted(self, state_dim: int, head_dim: int, chip: Chip) -> SsdTile:
        """Return the tile without columns that narrower heads and states do not have."""
        state_cols = min(self.state_cols, padded(state_dim, chip))
        return self._replace(state_cols=state_cols, head_cols=min(self.head_cols, padded(head_dim, chip)))

    def constants(self, chip: Chip) -> dict[str, int | bool]:
        """Return options of the compiler."""
        return {"num_warps": self.warps, "num_stages": self.stages, **delta_options(chip)}


class SsdTiles(NamedTuple):
    """Launches of all kernels, for numbers of a size."""

    chips: tuple[Chips, ...]
    itemsize: int
    chunk: int  # tokens
    product_rows: int  # of a chunk's products, whose gradients a program computes
    prepare: SsdTile
    scan: SsdTile
    outputs: SsdTile
    inputs: SsdTile
    products: SsdTile
    keys: SsdTile
    steps: SsdTile = SsdTile(16, 16, 4)  # it has no columns


# The largest that spill little or nothing. Chunks of 128 tokens halve the states in memory, which are read and written
# most, and make a product within a chunk as large as one with the state. A program of the scan holds a tile of a state:
# with 64 x 64 numbers, 128 heads of Nemotron-H make 256 programs.
SSD_TILES = (
    SsdTiles(
        ("hopper",), itemsize=2, chunk=128, product_rows=64,
        prepare=SsdTile(64, 64, 8), scan=SsdTile(64, 64, 4, 3), outputs=SsdTile(64, 64, 8, 2),
        inputs=SsdTile(64, 64, 8, 2), products=SsdTile(64, 64, 8, 2), keys=SsdTile(64, 64, 8, 3),
    ),
    SsdTiles(
        ("nvidia",), itemsize=2, chunk=64, product_rows=32,
        prepare=SsdTile(64, 64, 4), scan=SsdTile(64, 64, 4, 2), outputs=SsdTile(64, 64, 8, 2),
        inputs=SsdTile(64, 64, 8, 2), products=SsdTile(64, 64, 8, 2), keys=SsdTile(64, 64, 8, 2),
    ),
    SsdTiles(
        ("cdna",), itemsize=2, chunk=64, product_rows=32,
        prepare=SsdTile(64, 64, 4), scan=SsdTile(64, 64, 4), outputs=SsdTile(64, 64, 8),
        inputs=SsdTile(64, 64, 4), products=SsdTile(64, 64, 8), keys=SsdTile(64, 64, 4),
    ),
    SsdTiles(
        ("rdna",), itemsize=2, chunk=32, product_rows=32,
        prepare=SsdTile(32, 32, 4), scan=SsdTile(32, 32, 4), outputs=SsdTile(32, 32, 4),
        inputs=SsdTile(32, 32, 4), products=SsdTile(32, 32, 4), keys=SsdTile(32, 32, 4),
    ),
    # float32 without matrix units: both factors of a product are in registers
    SsdTiles(
        ("hopper", "nvidia", "rdna"), itemsize=4, chunk=32, product_rows=32,
        prepare=SsdTile(16, 16, 4), scan=SsdTile(16, 16, 4), outputs=SsdTile(16, 16, 4),
        inputs=SsdTile(16, 16, 4), products=SsdTile(16, 16, 4), keys=SsdTile(16, 16, 4),
    ),
    SsdTiles(
        ("cdna",), itemsize=4, chunk=32, product_rows=32,
        prepare=SsdTile(32, 32, 4), scan=SsdTile(32, 32, 4), outputs=SsdTile(32, 32, 4),
        inputs=SsdTile(32, 32, 4), products=SsdTile(32, 32, 4), keys=SsdTile(32, 32, 4),
    ),
    # tiles of few columns and rows, so that tests of narrow heads reach the loops over them
    SsdTiles(
        ("interpreter",), itemsize=2, chunk=64, product_rows=32,
        prepare=SsdTile(32, 32, 4), scan=SsdTile(32, 32, 4), outputs=SsdTile(32, 32, 4),
        inputs=SsdTile(32, 32, 4), products=SsdTile(32, 32, 4), keys=SsdTile(32, 32, 4),
    ),
    SsdTiles(
        ("interpreter",), itemsize=4, chunk=32, product_rows=16,
        prepare=SsdTile(16, 16, 4), scan=SsdTile(16, 16, 4), outputs=SsdTile(16, 16, 4),
        inputs=SsdTile(16, 16, 4), products=SsdTile(16, 16, 4), keys=SsdTile(16, 16, 4),
    ),
)  # fmt: skip


def ssd_tiles(state_dim: int, head_dim: int, itemsize: int, chip: Chip) -> SsdTiles | None:
    """Return the launches for heads and states of these widths, None where no tile fits."""
    if max(state_dim, head_dim) > MAX_WIDTH:
        return None
    chips = product_chips(chip)
    return next((t for t in SSD_TILES if chips in t.chips and itemsize == t.itemsize), None)


def runs_ssd_kernels(x: torch.Tensor, state_dim: int) -> bool:
    """Return whether kernels compute ssd of these heads; else the reference does."""
    if not runs_triton(x):
        return False
    return ssd_tiles(state_dim, x.shape[-1], x.dtype.itemsize, chip_of(x.device)) is not None
