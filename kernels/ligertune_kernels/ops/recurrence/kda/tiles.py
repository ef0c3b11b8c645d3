"""Tiles of kda: every number that was tuned, with its reason."""

from __future__ import annotations

from typing import NamedTuple

import torch

from ligertune_kernels.chips import Chip
from ligertune_kernels.launcher import chip_of, runs_triton
from ligertune_kernels.ops.recurrence.tiles import Chips, product_chips

REFERENCE_CHUNK = 16  # tokens of a chunk of the reference, which holds a decay per pair of tokens and channel


class KdaTile(NamedTuple):
    """Launch of one kernel. cols: columns of v, or of k, or of both one after another, that it holds at a time."""

    cols: int
    warps: int
    stages: int = 1


class ChannelTile(NamedTuple):
    """Launch of a kernel for some channels of a head.

    cols: channels of a program; values: columns of v that it holds at a time.
    """

    cols: int
    values: int
    warps: int
    stages: int = 1


class KdaTiles(NamedTuple):
    """Launches of all kernels, for heads up to a width and numbers of a size."""

    chips: tuple[Chips, ...]
    width: int
    itemsize: int
    chunk: int  # tokens
    products: KdaTile
    factors: KdaTile
    states: KdaTile
    outputs: KdaTile
    local: KdaTile
    scan: KdaTile
    values: KdaTile
    readers: ChannelTile
    decays: ChannelTile  # with the columns of `readers`
    keys: KdaTile  # cols: tokens of a program


# None of them was timed. They are the largest that spill nothing, or, on Hopper, addresses outside of the inner loops;
# chunks of 64 tokens halve the steps of the scans and the states in memory.
KDA_TILES = (
    KdaTiles(
        ("hopper",), width=128, itemsize=2, chunk=64,
        products=KdaTile(64, 4), factors=KdaTile(64, 4), states=KdaTile(32, 4, 3), outputs=KdaTile(64, 4),
        local=KdaTile(64, 4, 3), scan=KdaTile(32, 4, 2), values=KdaTile(64, 4, 2),
        readers=ChannelTile(64, 64, 4, 2), decays=ChannelTile(64, 64, 4, 2),
        keys=KdaTile(32, 4),
    ),
    KdaTiles(
        ("hopper", "nvidia", "interpreter"), width=256, itemsize=2, chunk=32,
        products=KdaTile(64, 4), factors=KdaTile(64, 4, 2), states=KdaTile(32, 4), outputs=KdaTile(64, 4),
        local=KdaTile(64, 4), scan=KdaTile(32, 4), values=KdaTile(64, 4),
        readers=ChannelTile(64, 64, 4), decays=ChannelTile(64, 64, 4),
        keys=KdaTile(16, 4),
    ),
    KdaTiles(
        ("cdna",), width=128, itemsize=2, chunk=32,  # a thread of 4 warps has 512 registers
        products=KdaTile(64, 4), factors=KdaTile(64, 4), states=KdaTile(32, 4), outputs=KdaTile(64, 4),
        local=KdaTile(64, 4), scan=KdaTile(32, 4), values=KdaTile(64, 4),
        readers=ChannelTile(64, 64, 4), decays=ChannelTile(64, 64, 4),
        keys=KdaTile(16, 4),
    ),
    KdaTiles(
        ("cdna",), width=256, itemsize=2, chunk=32,
        products=KdaTile(64, 4), factors=KdaTile(64, 4), states=KdaTile(16, 4), outputs=KdaTile(64, 4),
        local=KdaTile(64, 4), scan=KdaTile(16, 4), values=KdaTile(64, 4),
        readers=ChannelTile(64, 64, 4), decays=ChannelTile(64, 64, 4),
        keys=KdaTile(16, 4),
    ),
    KdaTiles(
        ("rdna",), width=128, itemsize=2, chunk=16,
        products=KdaTile(32, 4), factors=KdaTile(32, 4), states=KdaTile(16, 8), outputs=KdaTile(16, 4),
        local=KdaTile(32, 4), scan=KdaTile(16, 8), values=KdaTile(32, 4),
        readers=ChannelTile(32, 32, 4), decays=ChannelTile(32, 32, 4),
        keys=KdaTile(16, 4),
    ),
    KdaTiles(
        ("rdna",), width=256, itemsize=2, chunk=16,
        products=KdaTile(32, 4), factors=KdaTile(32, 4), states=KdaTile(16, 16), outputs=KdaTile(16, 4),
        local=KdaTile(32, 4), scan=KdaTile(16, 16), values=KdaTile(32, 4),
        readers=ChannelTile(32, 32, 4), decays=ChannelTile(32, 32, 4),
        keys=KdaTile(16, 4),
    ),
    # float32 without matrix units: both factors of a product are in registers
    KdaTiles(
        ("hopper", "nvidia", "rdna"), width=128, itemsize=4, chunk=16,
        products=KdaTile(16, 4), factors=KdaTile(32, 4), states=KdaTile(16, 8), outputs=KdaTile(16, 8),
        local=KdaTile(16, 4), scan=KdaTile(16, 8), values=KdaTile(32, 4),
        readers=ChannelTile(32, 16, 4), decays=ChannelTile(32, 16, 4),
        keys=KdaTile(16, 4),
    ),
    KdaTiles(
        ("cdna",), width=256, itemsize=4, chunk=32,
        products=KdaTile(32, 4), factors=KdaTile(32, 4), states=KdaTile(16, 4), outputs=KdaTile(16, 4),
        local=KdaTile(32, 4), scan=KdaTile(16, 4), values=KdaTile(32, 4),
        readers=ChannelTile(32, 16, 4), decays=ChannelTile(32, 16, 4),
        keys=KdaTile(16, 4),
    ),
    KdaTiles(
        ("interpreter",), width=256, itemsize=4, chunk=64,  # the inverse and the levels of a chunk of Hopper
        products=KdaTile(16, 4), factors=KdaTile(16, 4), states=KdaTile(16, 4), outputs=KdaTile(16, 4),
        local=KdaTile(16, 4), scan=KdaTile(16, 4), values=KdaTile(16, 4),
        readers=ChannelTile(16, 32, 4), decays=ChannelTile(16, 32, 4),
        keys=KdaTile(32, 4),
    ),
)  # fmt: skip


def kda_tiles(width: int, itemsize: int, chip: Chip) -> KdaTiles | None:
    """Return the launches for heads of at most this width, None where no tile fits the chip."""
    chips = product_chips(chip)
    fitting = (t for t in KDA_TILES if chips in t.chips and width <= t.width and itemsize == t.itemsize)
    return next(fitting, None)


def runs_kda_kernels(query: torch.Tensor, width: int) -> bool:
    """Return whether kernels compute kda of heads of at most this width; else the reference does."""
    return runs_triton(query) and kda_tiles(width, query.dtype.itemsize, chip_of(query.device)) is not None
