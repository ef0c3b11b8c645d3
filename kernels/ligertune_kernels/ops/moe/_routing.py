"""Routing of pairs of token and expert: their order by expert, and tiles of rows of one expert.

S = N·K pairs are sorted by expert, stably, so that results do not depend on the GPU. A pair whose index is outside
[0, X) sorts behind all others: its row is in no group, and whatever reads rows leaves it out. Nothing waits for the
GPU, except for `ends`.
"""

from __future__ import annotations

from typing import NamedTuple

import torch

from ligertune_kernels.chips import Chip, launch_options
from ligertune_kernels.launcher import Launcher, cached, chip_of, tl, triton
from ligertune_kernels.ops.moe.tiles import grouped_tile

BLOCK = 1024  # pairs per program
TILES = 16  # tiles per program of the tile map


class Routing(NamedTuple):
    """Order of the S pairs by expert. A row is a place in this order."""

    pairs: torch.Tensor  # (S,) int32: the pair n·K + k of each row
    rows: torch.Tensor  # (S,) int32: the row of each pair
    experts: torch.Tensor  # (S,) uint8, int16 or int32: the expert of each row, X behind the last group
    offsets: torch.Tensor  # (X,) int32: the row behind the last one of each expert
    tiles: torch.Tensor  # (2, tiles) int32: expert and first row of each tile of tile_rows rows, -1 for no tile
    top_k: int
    tile_rows: int
    ends: tuple[int, ...] | None = None  # offsets on the host, for one product per expert

    @property
    def groups(self) -> list[slice]:
        """The rows of each expert, from `ends`."""
        return [slice(start, end) for start, end in zip((0, *self.ends[:-1]), self.ends, strict=True)]

    def with_ends(self) -> Routing:
        """Return it with `ends`. Waits for the GPU."""
        return self._replace(ends=tuple(self.offsets.tolist()))


@triton.jit(do_not_specialize=["n_pairs"])
def _order_kernel(order_ptr, pairs_ptr, rows_ptr, n_pairs, BLOCK: tl.constexpr):
    row = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    mask = row < n_pairs
    pair = tl.load(order_ptr + row, mask=mask, other=0)
    tl.store(pairs_ptr + row, pair.to(tl.int32), mask=mask)
    tl.store(rows_ptr + pair, row, mask=mask)


@triton.jit(do_not_specialize=["n_tiles"])
def _tiles_kernel(
    offsets_ptr,  # (X,)
    tiles_ptr,  # (2, tiles)
    n_experts, n_tiles,
    EXPERTS: tl.constexpr, ROWS: tl.constexpr, TILES: tl.constexpr,
):  # fmt: skip
    expert = tl.arange(0, EXPERTS)
    end = tl.load(offsets_ptr + expert, mask=expert < n_experts, other=0)
    start = tl.load(offsets_ptr + expert - 1, mask=(expert > 0) & (expert < n_experts), other=0)
    height = (end - start + ROWS - 1) // ROWS
    last = tl.cumsum(height, 0)
    tile = tl.program_id(0) * TILES + tl.arange(0, TILES)
    before = last[None, :] <= tile[:, None]  # experts whose tiles all come earlier
    found = tl.sum(before.to(tl.int32), 1)
    row = tl.sum(tl.where(before, (end - start)[None, :], 0), 1)
    row += (tile - tl.sum(tl.where(before, height[None, :], 0), 1)) * ROWS
    there = tile < tl.sum(height, 0)
    mask = tile < n_tiles
    tl.store(tiles_ptr + tile, tl.where(there, found, -1), mask=mask)
    tl.store(tiles_ptr + n_tiles + tile, row, mask=mask)


@cached
def _plans(n_experts: int, tile_rows: int, chip: Chip) -> tuple[Launcher, Launcher]:
    order = Launcher(_order_kernel, {"BLOCK": BLOCK, **launch_options(BLOCK, chip)})
    padded = triton.next_power_of_2(n_experts)
    constants = {"EXPERTS": padded, "ROWS": tile_rows, "TILES": TILES}
    return order, Launcher(_tiles_kernel, {**constants, **launch_options(padded * TILES, chip)})


def _key_dtype(n_experts: int) -> torch.dtype:
    # A radix sort passes over the pairs once per byte of the key.
    return torch.uint8 if n_experts < 1 << 8 else torch.int16 if n_experts < 1 << 15 else torch.int32


def route(
    expert_index: torch.Tensor,  # (N, K) integers; outside [0, X): no expert
    n_experts: int,
    dtype: torch.dtype,
) -> Routing:
    """Sort the pairs by expert. dtype: that of the products."""
    chip = chip_of(expert_index.device)
    n_pairs = expert_index.numel()
    index = expert_index.reshape(-1)
    keys = _key_dtype(n_experts)
    inside = (index >= 0) & (index < n_experts)
    experts, order = torch.sort(torch.where(inside, index, n_experts).to(keys), stable=True)
    numbers = torch.arange(n_experts, dtype=keys, device=index.device)
    offsets = torch.searchsorted(experts, numbers, right=True, out_int32=True)
    pairs, rows = (torch.empty(n_pairs, dtype=torch.int32, device=index.device) for _ in range(2))
    tile_rows = grouped_tile(-(-n_pairs // n_experts), dtype.itemsize, chip).rows
    n_tiles = -(-n_pairs // tile_rows) + min(n_experts, n_pairs)  # each expert may have one tile that is not full
    tiles = torch.empty((2, n_tiles), dtype=torch.int32, device=index.device)
    invert, find_tiles = _plans(n_experts, tile_rows, chip)
    invert((-(-n_pairs // BLOCK), 1, 1), (order, pairs, rows), (), n_pairs)
    find_tiles((-(-n_tiles // TILES), 1, 1), (offsets, tiles), (n_experts,), n_tiles)
    return Routing(pairs, rows, experts, offsets, tiles, expert_index.shape[-1], tile_rows)
