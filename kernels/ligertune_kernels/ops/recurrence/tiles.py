"""Tiles of the recurrences: every number that was tuned, with its reason."""

from __future__ import annotations

from typing import NamedTuple

from ligertune_kernels.chips import Chip
from ligertune_kernels.launcher import triton

CHUNK = 64  # tokens of a chunk: a row of Hopper's products; longer chunks would need a larger inverse
PART = 1024  # tokens of a packed row in which a program of a scan looks for documents of its own
MIN_WIDTH = 16  # of a factor of a product


class DeltaTile(NamedTuple):
    """Launch of one kernel of the gated delta rule. cols: columns of v (or of k and v) that it holds at a time."""

    cols: int
    warps: int
    stages: int


class DeltaTiles(NamedTuple):
    """Launches of all kernels, for key heads up to a width and numbers of a size."""

    key_width: int
    itemsize: int
    chunk: int  # tokens
    prepare: DeltaTile
    states: DeltaTile
    outputs: DeltaTile
    local: DeltaTile
    gradients: DeltaTile
    queries: DeltaTile
    corrections: DeltaTile
    keys: DeltaTile
    products: DeltaTile


# Not measured yet: the largest that spill nothing.
DELTA_TILES = (
    DeltaTiles(
        128, 2, CHUNK,
        prepare=DeltaTile(64, 4, 1), states=DeltaTile(32, 4, 2), outputs=DeltaTile(64, 4, 1),
        local=DeltaTile(64, 4, 1), gradients=DeltaTile(32, 4, 1), queries=DeltaTile(32, 8, 1),
        corrections=DeltaTile(32, 8, 1), keys=DeltaTile(32, 8, 1), products=DeltaTile(32, 8, 1),
    ),
    DeltaTiles(
        256, 2, CHUNK,
        prepare=DeltaTile(64, 4, 1), states=DeltaTile(32, 8, 1), outputs=DeltaTile(32, 8, 1),
        local=DeltaTile(32, 8, 1), gradients=DeltaTile(16, 8, 1), queries=DeltaTile(16, 8, 1),
        corrections=DeltaTile(16, 8, 1), keys=DeltaTile(16, 8, 1), products=DeltaTile(16, 8, 1),
    ),
    DeltaTiles(
        128, 4, CHUNK,
        prepare=DeltaTile(32, 8, 1), states=DeltaTile(16, 8, 1), outputs=DeltaTile(16, 8, 1),
        local=DeltaTile(32, 8, 1), gradients=DeltaTile(16, 8, 1), queries=DeltaTile(16, 8, 1),
        corrections=DeltaTile(16, 8, 1), keys=DeltaTile(16, 8, 1), products=DeltaTile(16, 8, 1),
    ),
    DeltaTiles(
        256, 4, CHUNK,
        prepare=DeltaTile(32, 8, 1), states=DeltaTile(16, 8, 1), outputs=DeltaTile(16, 8, 1),
        local=DeltaTile(16, 8, 1), gradients=DeltaTile(16, 8, 1), queries=DeltaTile(16, 8, 1),
        corrections=DeltaTile(16, 8, 1), keys=DeltaTile(16, 8, 1), products=DeltaTile(16, 8, 1),
    ),
)  # fmt: skip


def padded(width: int) -> int:
    """Return the width of a tile for heads of `width` columns."""
    return max(MIN_WIDTH, triton.next_power_of_2(width))


def delta_tiles(key_dim: int, itemsize: int, chip: Chip) -> DeltaTiles:
    """Return the launches for heads of at most 256 columns."""
    return next(t for t in DELTA_TILES if padded(key_dim) <= t.key_width and itemsize == t.itemsize)


def inverse_precision(itemsize: int, chip: Chip) -> str:
    """Return the precision of the products of the inverse, which is rounded to the tensors' dtype afterwards."""
    # tf32 has the 10 bits of fp16 and more than bf16; AMD's compiler has it on few GPUs, and its fp32 products are fast
    return "tf32" if itemsize == 2 and chip.vendor == "nvidia" else "ieee"
