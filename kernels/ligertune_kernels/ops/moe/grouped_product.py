r"""Grouped products of `experts`: one matrix product per expert, over the rows of its pairs.

    rows       Y = X W_e             for the rows of expert e; X (S, I), W (X, I, O), Y (S, O)
    experts    G_e = sum of L_iᵀ R_i over the rows i of expert e; L (S, P), R (S, Q), G (X, P, Q)

X, L and R may be given by token, (N, ·): then the kernels of this package gather the rows while they load, and other
products gather them before. Sums are in fp32 and rounded once. Rows behind the last group are left out: what stands
there in Y is undefined. Groups without rows get G = 0.
"""

from __future__ import annotations

import torch
from torch.nn import functional as F

from ligertune_kernels.chips import ROW_TILE_GROUP
from ligertune_kernels.launcher import INTERPRETED, Launcher, cached, chip_of, tl, triton
from ligertune_kernels.ops.moe.kernels import Routing, gather_rows
from ligertune_kernels.ops.moe.tiles import GROUPED_ALIGNMENT, GroupedTile, Products, grouped_tile


class PairRows:
    """Rows of the pairs, given by token: gathered when they are first needed, at most once."""

    def __init__(self, source: torch.Tensor, routing: Routing) -> None:
        self.source = source
        self.routing = routing
        self._gathered: torch.Tensor | None = None

    @property
    def gathered(self) -> torch.Tensor:
        """The rows (S, C)."""
        if self._gathered is None:
            self._gathered = gather_rows(self.source, self.routing)
        return self._gathered

    @property
    def as_loaded(self) -> tuple[torch.Tensor, bool]:
        """A tensor, and whether a kernel has to gather its rows."""
        return (self.source, True) if self._gathered is None else (self._gathered, False)


Rows = torch.Tensor | PairRows


@triton.jit
def _dot(a, b, total, WIDE: tl.constexpr):
    if WIDE:  # Triton's interpreter computes products of bf16 wrongly
        a = a.to(tl.float32)
        b = b.to(tl.float32)
    return tl.dot(a, b, total, input_precision="ieee")


@triton.jit(do_not_specialize=["n_tiles"])
def _rows_kernel(
    x_ptr,  # (S, I), or (N, I) if GATHER
    w_ptr,  # (X, I, O)
    y_ptr,  # (S, O)
    pairs_ptr, offsets_ptr,
    tiles_ptr,  # (2, n_tiles)
    x_row_stride, w_expert_stride, w_inner_stride, w_col_stride, n_inner, n_cols, n_tiles,
    GATHER: tl.constexpr, ADD: tl.constexpr, EVEN: tl.constexpr, TOP_K: tl.constexpr, GROUP: tl.constexpr,
    ROWS: tl.constexpr, COLS: tl.constexpr, INNER: tl.constexpr, WIDE: tl.constexpr,
):  # fmt: skip
    # A group of row tiles computes all column tiles before the next group starts.
    col_tiles = tl.cdiv(n_cols, COLS)
    group = tl.program_id(0) // (GROUP * col_tiles)
    height = tl.minimum(n_tiles - group * GROUP, GROUP)
    within = tl.program_id(0) % (GROUP * col_tiles)
    tile = group * GROUP + within % height
    expert = tl.load(tiles_ptr + tile).to(tl.int64)
    if expert >= 0:
        rows = tl.load(tiles_ptr + n_tiles + tile) + tl.arange(0, ROWS)
        end = tl.load(offsets_ptr + expert)
        cols = (within // height) * COLS + tl.arange(0, COLS)
        offs = tl.arange(0, INNER)
        # Rows past the end load the last one and are not stored, so that loads need no mask of rows.
        x_rows = tl.minimum(rows, end - 1).to(tl.int64)
        if GATHER:
            x_rows = (tl.load(pairs_ptr + x_rows) // TOP_K).to(tl.int64)
        x_ptrs = x_ptr + x_rows[:, None] * x_row_stride + offs[None, :]
        w_ptrs = w_ptr + expert * w_expert_stride + cols.to(tl.int64)[None, :] * w_col_stride
        w_ptrs += offs.to(tl.int64)[:, None] * w_inner_stride
        col_mask = (cols < n_cols)[None, :]
        total = tl.zeros([ROWS, COLS], dtype=tl.float32)
        for start in range(0, n_inner, INNER):
            if EVEN:
                x = tl.load(x_ptrs)
                w = tl.load(w_ptrs, mask=col_mask, other=0.0)
            else:
                inner = start + offs < n_inner
                x = tl.load(x_ptrs, mask=inner[None, :], other=0.0)
                w = tl.load(w_ptrs, mask=inner[:, None] & col_mask, other=0.0)
            total = _dot(x, w, total, WIDE)
            x_ptrs += INNER
            w_ptrs += INNER * w_inner_stride
        y_ptrs = y_ptr + rows.to(tl.int64)[:, None] * n_cols + cols[None, :]
        mask = (rows < end)[:, None] & col_mask
        if ADD:
            total += tl.load(y_ptrs, mask=mask, other=0.0).to(tl.float32)
        tl.store(y_ptrs, total.to(y_ptr.dtype.element_ty), mask=mask)


@triton.jit
def _experts_kernel(
    left_ptr, right_ptr,  # (S, P) and (S, Q), or (N, P) and (N, Q) where they are gathered
    out_ptr,  # (X, P, Q)
    pairs_ptr, offsets_ptr,
    left_row_stride, right_row_stride, n_left, n_right,
    GATHER_LEFT: tl.constexpr, GATHER_RIGHT: tl.constexpr, TOP_K: tl.constexpr,
    ROWS: tl.constexpr, COLS: tl.constexpr, INNER: tl.constexpr, WIDE: tl.constexpr,
):  # fmt: skip
    row_tiles = tl.cdiv(n_left, ROWS)
    col_tiles = tl.cdiv(n_right, COLS)
    expert = (tl.program_id(0) // (row_tiles * col_tiles)).to(tl.int64)
    within = tl.program_id(0) % (row_tiles * col_tiles)
    left_cols = (within % row_tiles) * ROWS + tl.arange(0, ROWS)
    right_cols = (within // row_tiles) * COLS + tl.arange(0, COLS)
    first = tl.load(offsets_ptr + expert - 1, mask=expert > 0, other=0)
    end = tl.load(offsets_ptr + expert)
    total = tl.zeros([ROWS, COLS], dtype=tl.float32)
    for start in range(first, end, INNER):
        rows = start + tl.arange(0, INNER)
        left_rows = rows.to(tl.int64)
        right_rows = rows.to(tl.int64)
        if GATHER_LEFT or GATHER_RIGHT:
            tokens = (tl.load(pairs_ptr + rows, mask=rows < end, other=0) // TOP_K).to(tl.int64)
            if GATHER_LEFT:
                left_rows = tokens
            if GATHER_RIGHT:
                right_rows = tokens
        inside = (rows < end)[:, None]
        left_mask = inside & (left_cols < n_left)[None, :]
        right_mask = inside & (right_cols < n_right)[None, :]
        left_ptrs = left_ptr + left_rows[:, None] * left_row_stride + left_cols[None, :]
        right_ptrs = right_ptr + right_rows[:, None] * right_row_stride + right_cols[None, :]
        left = tl.load(left_ptrs, mask=left_mask, other=0.0)
        right = tl.load(right_ptrs, mask=right_mask, other=0.0)
        total = _dot(tl.trans(left), right, total, WIDE)
    out_ptrs = out_ptr + (expert * n_left + left_cols)[:, None] * n_right + right_cols[None, :]
    mask = (left_cols < n_left)[:, None] & (right_cols < n_right)[None, :]
    tl.store(out_ptrs, total.to(out_ptr.dtype.element_ty), mask=mask)


def _launch_options(tile: GroupedTile, cols: int) -> tuple[int, dict[str, int | bool]]:
    """Return the columns of a tile for a product of so many columns, and its launch."""
    cols = max(16, min(tile.cols, triton.next_power_of_2(cols)))
    options = {"num_warps": tile.warps, "num_stages": tile.stages, "enable_fp_fusion": True}
    return cols, {"WIDE": INTERPRETED, **options}


@cached
def _plan_rows(
    n_inner: int, n_cols: int, gather: bool, add: bool, top_k: int, tile: GroupedTile
) -> tuple[Launcher, int]:
    """Return the launcher, and the tiles of a row."""
    cols, options = _launch_options(tile, n_cols)
    constants = {
        "GATHER": gather,
        "ADD": add,
        "EVEN": n_inner % tile.inner == 0,
        "TOP_K": top_k,
        "GROUP": ROW_TILE_GROUP,
    }
    constants |= {"ROWS": tile.rows, "COLS": cols, "INNER": tile.inner, **options}
    return Launcher(_rows_kernel, constants), -(-n_cols // cols)


@cached
def _plan_experts(
    n_left: int, n_right: int, gather_left: bool, gather_right: bool, top_k: int, tile: GroupedTile
) -> tuple[Launcher, int]:
    """Return the launcher, and the tiles of an expert."""
    cols, options = _launch_options(tile, n_right)
    rows = max(16, min(tile.weight_rows, triton.next_power_of_2(n_left)))
    constants = {"GATHER_LEFT": gather_left, "GATHER_RIGHT": gather_right, "TOP_K": top_k}
    constants |= {"ROWS": rows, "COLS": cols, "INNER": tile.inner, **options}
    return Launcher(_experts_kernel, constants), -(-n_left // rows) * -(-n_right // cols)


def _unit_stride(t: torch.Tensor) -> torch.Tensor:
    return t if t.stride(-1) == 1 else t.contiguous()


def _tile(routing: Routing, x: torch.Tensor, *sizes: int) -> GroupedTile:
    """Return the tile of a product of x and a matrix of these sizes."""
    rows_per_expert = -(-len(routing.pairs) // len(routing.offsets))
    aligned = all(size * x.element_size() % GROUPED_ALIGNMENT == 0 for size in sizes)
    return grouped_tile(rows_per_expert, x.element_size(), chip_of(x.device), aligned=aligned)


def _triton_rows(x: Rows, weight: torch.Tensor, routing: Routing, add_to: torch.Tensor | None) -> torch.Tensor:
    x, gather = x.as_loaded if isinstance(x, PairRows) else (x, False)
    x = _unit_stride(x)
    n_cols = weight.shape[2]
    y = torch.empty((len(routing.pairs), n_cols), dtype=x.dtype, device=x.device) if add_to is None else add_to
    tile = _tile(routing, x, x.stride(0), *weight.shape[1:])
    launch, col_tiles = _plan_rows(x.shape[1], n_cols, gather, add_to is not None, routing.top_k, tile)
    n_tiles = routing.tiles.shape[1]
    tensors = (x, weight, y, routing.pairs, routing.offsets, routing.tiles)
    launch((n_tiles * col_tiles, 1, 1), tensors, (x.stride(0), *weight.stride(), x.shape[1], n_cols), n_tiles)
    return y


def _triton_experts(left: Rows, right: Rows, routing: Routing) -> torch.Tensor:
    (left, gather_left), (right, gather_right) = (
        t.as_loaded if isinstance(t, PairRows) else (t, False) for t in (left, right)
    )
    left = _unit_stride(left)
    right = _unit_stride(right)
    sizes = left.shape[1], right.shape[1]
    n_experts = len(routing.offsets)
    out = torch.empty((n_experts, *sizes), dtype=left.dtype, device=left.device)
    tile = _tile(routing, left, left.stride(0), right.stride(0), *sizes)
    launch, tiles = _plan_experts(*sizes, gather_left, gather_right, routing.top_k, tile)
    tensors = (left, right, out, routing.pairs, routing.offsets)
    launch((n_experts * tiles, 1, 1), tensors, (left.stride(0), right.stride(0), *sizes))
    return out


def _gathered(x: Rows) -> torch.Tensor:
    return x.gathered if isinstance(x, PairRows) else x


def _aligned(weight: torch.Tensor) -> torch.Tensor:
    """Return the weight (X, I, O) with strides that grouped_mm takes: a copy where its own are not."""
    unit, other = sorted(weight.stride()[1:])
    steps = (weight.stride(0), other)
    if unit == 1 and all(step * weight.element_size() % GROUPED_ALIGNMENT == 0 for step in steps):
        return weight
    return weight.contiguous()


def multiply_rows(
    x: Rows,  # (S, I), or by token
    weight: torch.Tensor,  # (X, I, O), any strides
    routing: Routing,
    products: Products,
    add_to: torch.Tensor | None = None,  # (S, O)
) -> torch.Tensor:  # (S, O)
    """Multiply each row by the matrix of its expert. add_to: a result to which the product is added, in place."""
    if products == "triton":
        return _triton_rows(x, weight, routing, add_to)
    rows = _gathered(x)
    if products == "grouped_mm":
        y = F.grouped_mm(rows.contiguous(), _aligned(weight), offs=routing.offsets)
        return y if add_to is None else add_to.add_(y)
    if add_to is not None:
        for expert, group in enumerate(routing.groups):
            add_to[group].addmm_(rows[group], weight[expert])
        return add_to
    y = torch.empty((len(rows), weight.shape[2]), dtype=rows.dtype, device=rows.device)
    for expert, group in enumerate(routing.groups):
        torch.mm(rows[group], weight[expert], out=y[group])
    return y


def multiply_experts(
    left: Rows,  # (S, P), or by token
    right: Rows,  # (S, Q), or by token
    routing: Routing,
    products: Products,
) -> torch.Tensor:  # (X, P, Q)
    """Return the sum of leftᵀ right over the rows of each expert."""
    if products == "triton":
        return _triton_experts(left, right, routing)
    left = _gathered(left)
    right = _gathered(right)
    if products == "grouped_mm":
        return F.grouped_mm(left.contiguous().t(), right.contiguous(), offs=routing.offsets)
    out = torch.empty((len(routing.offsets), left.shape[1], right.shape[1]), dtype=left.dtype, device=left.device)
    for expert, group in enumerate(routing.groups):
        torch.mm(left[group].t(), right[group], out=out[expert])
    return out
