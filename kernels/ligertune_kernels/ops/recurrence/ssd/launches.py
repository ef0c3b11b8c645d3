"""Launches of ssd's kernels: the constants of each, by the shape of a call and the chip."""

from __future__ import annotations

from collections.abc import Callable
from typing import NamedTuple

import torch

from ligertune_kernels.chips import Chip
from ligertune_kernels.launcher import Launcher, cached
from ligertune_kernels.ops.recurrence.ssd import kernels, ssd_gradients, tiles
from ligertune_kernels.ops.recurrence.ssd.tiles import SsdTile


class StepOptions(NamedTuple):
    """The function from dt to dt', as constants of the kernels."""

    has_bias: bool
    softplus: bool
    limits: tuple[float, float]

    def constants(self) -> dict[str, bool | float]:
        """Return the constants. Where a limit is infinite, no kernel reads it."""
        low, high = (float(limit) for limit in self.limits)
        is_floored = low > float("-inf")
        is_capped = high < float("inf")
        return {
            "HAS_BIAS": self.has_bias, "SOFTPLUS": self.softplus, "FLOORED": is_floored, "CAPPED": is_capped,
            "LOW": low if is_floored else 0.0, "HIGH": high if is_capped else 0.0,
        }  # fmt: skip


class SsdShape(NamedTuple):
    """Key of the launches."""

    heads: int
    group: int  # heads of a group
    head_dim: int
    state_dim: int
    dtype: torch.dtype
    steps: StepOptions
    has_d: bool
    d_columns: bool  # D is (H, P)
    has_z: bool
    has_documents: bool = False
    has_initial: bool = False
    has_final: bool = False  # forward: the final state is asked for; backward: it has a gradient


class SsdLaunches(NamedTuple):
    """The launches of all kernels."""

    chunk: int  # tokens
    parts: int  # of a group's heads
    prepare_tiles: int  # of a chunk: heads, and products
    scan_tiles: int  # of a state
    key_tiles: int  # of N
    row_tiles: int  # of the products of a chunk
    prepare: Launcher
    scan: Launcher
    scan_back: Launcher
    outputs: Launcher
    outputs_back: Launcher
    inputs: Launcher
    products: Launcher
    reads: Launcher
    writes: Launcher
    steps: Launcher


@cached
def ssd_launches(shape: SsdShape, chip: Chip) -> SsdLaunches:
    """Return the launches of a shape on a chip that has tiles for it."""
    chosen = tiles.ssd_tiles(shape.state_dim, shape.head_dim, shape.dtype.itemsize, chip)
    parts = -(-shape.group // tiles.PART_HEADS)
    head = {"HEADS": shape.heads, "CHUNK": chosen.chunk}
    group = {"GROUP": shape.group, "DOT": "ieee"}
    documents = {"HAS_DOCUMENTS": shape.has_documents}
    skip = {"HAS_D": shape.has_d, "D_COLUMNS": shape.d_columns}
    state = {"STATE_DIM": shape.state_dim}
    width = {"HEAD_DIM": shape.head_dim}
    both = state | width
    keys = chosen.keys.fitted(shape.state_dim, shape.head_dim, chip)
    scan = chosen.scan.fitted(shape.state_dim, shape.head_dim, chip)
    key_tiles = -(-shape.state_dim // keys.state_cols)

    def launch(kernel: Callable, tile: SsdTile, *constants: dict[str, int | bool | float | str]) -> Launcher:
        tile = tile.fitted(shape.state_dim, shape.head_dim, chip)
        joined = dict(head)
        for some in (*constants, tile.constants(chip)):
            joined |= some
        if "STATE_DIM" in joined:
            joined["STATE_COLS"] = tile.state_cols
        if "HEAD_DIM" in joined:
            joined["HEAD_COLS"] = tile.head_cols
        return Launcher(kernel, joined)

    ends = {"HAS_BEGIN": shape.has_initial, "HAS_END": shape.has_final, "BACK": False}
    ends_back = {"HAS_BEGIN": shape.has_final, "HAS_END": shape.has_initial, "BACK": True}
    shared = group | documents | both
    outputs = shared | skip | {"HAS_Z": shape.has_z}
    of_heads = {"TILE_HEADS": tiles.TILE_HEADS}
    prepare_tiles = -(-shape.heads // tiles.TILE_HEADS) + shape.heads // shape.group
    in_parts = {"PARTS": parts}
    row_tiles = chosen.chunk // chosen.product_rows
    in_rows = in_parts | {"ROWS": chosen.product_rows}
    counts = {"KEY_TILES": key_tiles, "ROW_TILES": row_tiles}
    to_steps = documents | shape.steps.constants() | {"BLOCK": min(tiles.SUM_TOKENS, chosen.chunk)}
    return SsdLaunches(
        chunk=chosen.chunk,
        parts=parts,
        prepare_tiles=prepare_tiles,
        scan_tiles=-(-shape.state_dim // scan.state_cols) * -(-shape.head_dim // scan.head_cols),
        key_tiles=key_tiles,
        row_tiles=row_tiles,
        prepare=launch(kernels.ssd_prepare_kernel, chosen.prepare, group, state, to_steps, of_heads),
        scan=launch(kernels.ssd_scan_kernel, chosen.scan, shared, ends),
        scan_back=launch(kernels.ssd_scan_kernel, chosen.scan, shared, ends_back),
        outputs=launch(kernels.ssd_outputs_kernel, chosen.outputs, outputs, {"BACK": False}),
        outputs_back=launch(kernels.ssd_outputs_kernel, chosen.outputs, outputs, {"BACK": True}),
        inputs=launch(ssd_gradients.ssd_input_gradients_kernel, chosen.inputs, shared, skip),
        products=launch(
            ssd_gradients.ssd_product_gradients_kernel, chosen.products, group, documents, width, in_parts, in_rows
        ),
        reads=launch(ssd_gradients.ssd_key_gradients_kernel, chosen.keys, group, both, in_parts, {"WRITES": False}),
        writes=launch(ssd_gradients.ssd_key_gradients_kernel, chosen.keys, group, both, in_parts, {"WRITES": True}),
        steps=launch(ssd_gradients.ssd_step_gradients_kernel, chosen.steps, to_steps, counts),
    )
