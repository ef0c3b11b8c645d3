r"""Kernels of `experts` over rows of pairs: their order by expert, the gated activation, gather and sums.

S = N·K pairs of token and expert are sorted by expert, stably, so that results do not depend on the GPU. A pair whose
index is outside [0, X) sorts behind all others: its row is in no group. Rows behind the last group hold no values, and
are neither read nor written. Nothing waits for the GPU, except for `Routing.ends`.

Activation: a = p · act(g) · (u + offset) for rows z = (g, u), and the backward

    h = act(g) · (u + offset)     dp = sum over F of da · h  +  dout · b2     d_g = p da (u + offset) act'(g)
    d_u = p da act(g)

The biases b1 of z and b2 of the down projection are not in memory: they are added where z is read, and where the
outputs are summed. Everything is computed in fp32 and rounded once.
"""

from __future__ import annotations

from typing import Literal, NamedTuple

import torch

from ligertune_kernels.chips import Chip, launch_options
from ligertune_kernels.jit.device_functions import gelu_erf, gelu_erf_grad, gelu_tanh, gelu_tanh_grad
from ligertune_kernels.launcher import Launcher, cached, chip_of, tl, triton
from ligertune_kernels.ops.moe.tiles import (
    ACTIVATION_BLOCK,
    MAPPED_TILES,
    ORDER_BLOCK,
    ROW_BLOCK,
    SUM_COLS,
    SUM_ROWS,
    grouped_tile,
)

GATE_FUNCTIONS = ("silu", "gelu_tanh", "gelu_erf")


class GatedActivation(NamedTuple):
    """How the gate and up halves of an expert are combined: act(gate) · (up + up_offset).

    alpha: silu is gate · sigmoid(alpha · gate). limit: gate is at most limit, and up within ±limit, before all else.
    """

    function: Literal["silu", "gelu_tanh", "gelu_erf"] = "silu"
    alpha: float = 1.0
    limit: float | None = None
    up_offset: float = 0.0


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
def _plan_routing(n_experts: int, tile_rows: int, chip: Chip) -> tuple[Launcher, Launcher]:
    order = Launcher(_order_kernel, {"BLOCK": ORDER_BLOCK, **launch_options(ORDER_BLOCK, chip)})
    padded = triton.next_power_of_2(n_experts)
    constants = {"EXPERTS": padded, "ROWS": tile_rows, "TILES": MAPPED_TILES}
    return order, Launcher(_tiles_kernel, {**constants, **launch_options(padded * MAPPED_TILES, chip)})


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
    invert, find_tiles = _plan_routing(n_experts, tile_rows, chip)
    invert((-(-n_pairs // ORDER_BLOCK), 1, 1), (order, pairs, rows), (), n_pairs)
    find_tiles((-(-n_tiles // MAPPED_TILES), 1, 1), (offsets, tiles), (n_experts,), n_tiles)
    return Routing(pairs, rows, experts, offsets, tiles, expert_index.shape[-1], tile_rows)


@triton.jit
def _halves(ptr, first, n_cols, INTERLEAVED: tl.constexpr, BLOCK: tl.constexpr):
    """Load gate and up of the columns [first, first + BLOCK) of a row of 2 n_cols."""
    if INTERLEAVED:
        cols = 2 * first + tl.arange(0, 2 * BLOCK)
        both = tl.load(ptr + cols, mask=cols < 2 * n_cols, other=0.0).to(tl.float32)
        return tl.split(tl.reshape(both, [BLOCK, 2]))
    else:
        cols = first + tl.arange(0, BLOCK)
        gate = tl.load(ptr + cols, mask=cols < n_cols, other=0.0).to(tl.float32)
        return gate, tl.load(ptr + n_cols + cols, mask=cols < n_cols, other=0.0).to(tl.float32)


@triton.jit
def _store_halves(ptr, first, n_cols, gate, up, INTERLEAVED: tl.constexpr, BLOCK: tl.constexpr):
    gate = gate.to(ptr.dtype.element_ty)
    up = up.to(ptr.dtype.element_ty)
    if INTERLEAVED:
        cols = 2 * first + tl.arange(0, 2 * BLOCK)
        tl.store(ptr + cols, tl.interleave(gate, up), mask=cols < 2 * n_cols)
    else:
        cols = first + tl.arange(0, BLOCK)
        tl.store(ptr + cols, gate, mask=cols < n_cols)
        tl.store(ptr + n_cols + cols, up, mask=cols < n_cols)


@triton.jit
def _activate(gate, FUNCTION: tl.constexpr, ALPHA: tl.constexpr):
    """Return act(gate) and act'(gate)."""
    if FUNCTION == "silu":
        s = tl.sigmoid(ALPHA * gate)
        return gate * s, s * (1.0 + ALPHA * gate * (1.0 - s))
    elif FUNCTION == "gelu_tanh":
        return gelu_tanh(gate), gelu_tanh_grad(gate)
    else:
        return gelu_erf(gate), gelu_erf_grad(gate)


@triton.jit
def _activation_kernel(
    z_ptr,  # (S, 2F), without the bias
    a_ptr,  # (S, F)
    bias_ptr,  # (X, 2F)
    weights_ptr,  # (N, K)
    pairs_ptr, offsets_ptr, experts_ptr,
    n_cols, n_experts,
    FUNCTION: tl.constexpr, ALPHA: tl.constexpr, LIMIT: tl.constexpr, UP_OFFSET: tl.constexpr,
    HAS_LIMIT: tl.constexpr, HAS_BIAS: tl.constexpr, INTERLEAVED: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    blocks = tl.cdiv(n_cols, BLOCK)
    row = (tl.program_id(0) // blocks).to(tl.int64)
    first = (tl.program_id(0) % blocks) * BLOCK
    if row < tl.load(offsets_ptr + n_experts - 1):
        weight = tl.load(weights_ptr + tl.load(pairs_ptr + row)).to(tl.float32)
        gate, up = _halves(z_ptr + row * (2 * n_cols), first, n_cols, INTERLEAVED, BLOCK)
        if HAS_BIAS:
            expert = tl.load(experts_ptr + row).to(tl.int64)
            more = _halves(bias_ptr + expert * (2 * n_cols), first, n_cols, INTERLEAVED, BLOCK)
            gate = gate + more[0]
            up = up + more[1]
        if HAS_LIMIT:
            gate = tl.minimum(gate, LIMIT)
            up = tl.minimum(tl.maximum(up, -LIMIT), LIMIT)
        activated, _ = _activate(gate, FUNCTION, ALPHA)
        a = weight * activated * (up + UP_OFFSET)
        cols = first + tl.arange(0, BLOCK)
        tl.store(a_ptr + row * n_cols + cols, a.to(a_ptr.dtype.element_ty), mask=cols < n_cols)


@triton.jit
def _activation_backward_kernel(
    z_ptr,  # (S, 2F), without the bias
    da_ptr,  # (S, F); replaced by a if STORE_A
    dz_ptr,  # (S, 2F); may be z
    d_weights_ptr,  # (N, K)
    bias_ptr,  # (X, 2F)
    weights_ptr,  # (N, K)
    dout_ptr,  # (N, E)
    down_bias_ptr,  # (X, E)
    pairs_ptr, offsets_ptr, experts_ptr,
    n_cols, n_experts, dout_row_stride, n_outputs,
    FUNCTION: tl.constexpr, ALPHA: tl.constexpr, LIMIT: tl.constexpr, UP_OFFSET: tl.constexpr,
    HAS_LIMIT: tl.constexpr, HAS_BIAS: tl.constexpr, HAS_DOWN_BIAS: tl.constexpr, INTERLEAVED: tl.constexpr,
    STORE_A: tl.constexpr, STORE_DZ: tl.constexpr, TOP_K: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    row = tl.program_id(0).to(tl.int64)
    pair = tl.load(pairs_ptr + row)
    if row < tl.load(offsets_ptr + n_experts - 1):
        weight = tl.load(weights_ptr + pair).to(tl.float32)
        expert = tl.load(experts_ptr + row).to(tl.int64)
        total = tl.zeros([BLOCK], dtype=tl.float32)
        for first in range(0, n_cols, BLOCK):
            gate, up = _halves(z_ptr + row * (2 * n_cols), first, n_cols, INTERLEAVED, BLOCK)
            if HAS_BIAS:
                more = _halves(bias_ptr + expert * (2 * n_cols), first, n_cols, INTERLEAVED, BLOCK)
                gate = gate + more[0]
                up = up + more[1]
            low = gate
            high = up
            if HAS_LIMIT:
                low = tl.minimum(gate, LIMIT)
                high = tl.minimum(tl.maximum(up, -LIMIT), LIMIT)
            cols = first + tl.arange(0, BLOCK)
            da = tl.load(da_ptr + row * n_cols + cols, mask=cols < n_cols, other=0.0).to(tl.float32)
            activated, derivative = _activate(low, FUNCTION, ALPHA)
            product = activated * (high + UP_OFFSET)
            total += da * product
            # a over da, and dz over z: the thread that stores has loaded the same, unless gate and up are interleaved.
            if INTERLEAVED and (STORE_A or STORE_DZ):
                tl.debug_barrier()
            if STORE_A:
                a = (weight * product).to(da_ptr.dtype.element_ty)
                tl.store(da_ptr + row * n_cols + cols, a, mask=cols < n_cols)
            if STORE_DZ:
                d_gate = weight * da * (high + UP_OFFSET) * derivative
                d_up = weight * da * activated
                if HAS_LIMIT:  # as torch's clamp: the bounds themselves have a gradient
                    d_gate = tl.where(gate <= LIMIT, d_gate, 0.0)
                    d_up = tl.where((up >= -LIMIT) & (up <= LIMIT), d_up, 0.0)
                _store_halves(dz_ptr + row * (2 * n_cols), first, n_cols, d_gate, d_up, INTERLEAVED, BLOCK)
        if HAS_DOWN_BIAS:
            dout_ptr += (pair // TOP_K).to(tl.int64) * dout_row_stride
            for first in range(0, n_outputs, BLOCK):
                cols = first + tl.arange(0, BLOCK)
                dout = tl.load(dout_ptr + cols, mask=cols < n_outputs, other=0.0).to(tl.float32)
                bias = tl.load(down_bias_ptr + expert * n_outputs + cols, mask=cols < n_outputs, other=0.0)
                total += dout * bias.to(tl.float32)
        tl.store(d_weights_ptr + pair, tl.sum(total, 0).to(d_weights_ptr.dtype.element_ty))
    else:
        tl.store(d_weights_ptr + pair, 0.0)


def _activation_constants(activation: GatedActivation) -> dict[str, object]:
    limit = activation.limit
    return {
        "FUNCTION": activation.function, "ALPHA": float(activation.alpha), "UP_OFFSET": float(activation.up_offset),
        "LIMIT": 0.0 if limit is None else float(limit), "HAS_LIMIT": limit is not None,
    }  # fmt: skip


class _Flags(NamedTuple):
    """What the kernels of the activation do."""

    interleaved: bool
    has_bias: bool
    has_down_bias: bool = False
    store_a: bool = False
    store_dz: bool = False


@cached
def _plan_activation(n_cols: int, activation: GatedActivation, flags: _Flags, chip: Chip) -> tuple:
    """Return the launcher of the forward, and the programs per row."""
    block = min(ACTIVATION_BLOCK, triton.next_power_of_2(n_cols))
    constants = {**_activation_constants(activation), "HAS_BIAS": flags.has_bias, "INTERLEAVED": flags.interleaved}
    launcher = Launcher(_activation_kernel, {**constants, "BLOCK": block, **launch_options(block, chip)})
    return launcher, -(-n_cols // block)


@cached
def _plan_activation_backward(
    n_cols: int, top_k: int, activation: GatedActivation, flags: _Flags, chip: Chip
) -> Launcher:
    block = min(ACTIVATION_BLOCK, triton.next_power_of_2(n_cols))
    constants = {
        **_activation_constants(activation), "HAS_BIAS": flags.has_bias, "HAS_DOWN_BIAS": flags.has_down_bias,
        "INTERLEAVED": flags.interleaved, "STORE_A": flags.store_a, "STORE_DZ": flags.store_dz, "TOP_K": top_k,
    }  # fmt: skip
    return Launcher(_activation_backward_kernel, {**constants, "BLOCK": block, **launch_options(block, chip)})


def activate_rows(
    z: torch.Tensor,  # (S, 2F), without the bias
    bias: torch.Tensor | None,  # (X, 2F)
    weights: torch.Tensor,  # (N, K)
    routing: Routing,
    activation: GatedActivation,
    interleaved: bool,
) -> torch.Tensor:  # (S, F)
    """Return the router's weight times act(gate) · (up + offset) of each row."""
    n_rows = z.shape[0]
    n_cols = z.shape[1] // 2
    a = torch.empty((n_rows, n_cols), dtype=z.dtype, device=z.device)
    flags = _Flags(interleaved, bias is not None)
    launch, blocks = _plan_activation(n_cols, activation, flags, chip_of(z.device))
    tensors = (z, a, z if bias is None else bias, weights, routing.pairs, routing.offsets, routing.experts)
    launch((n_rows * blocks, 1, 1), tensors, (n_cols, len(routing.offsets)))
    return a


class ActivationBackward(NamedTuple):
    """Inputs of the backward of the activation, of all experts."""

    z: torch.Tensor  # (S, 2F), without the bias
    bias: torch.Tensor | None  # (X, 2F)
    weights: torch.Tensor  # (N, K)
    dout: torch.Tensor  # (N, E)
    down_bias: torch.Tensor | None  # (X, E)
    activation: GatedActivation
    interleaved: bool

    def run(
        self,
        da: torch.Tensor,  # (S, F)
        routing: Routing,
        *,
        needs_a: bool,
        needs_dz: bool,
        over_z: bool,
    ) -> tuple[torch.Tensor | None, torch.Tensor]:  # (S, 2F), (N, K)
        """Return dz if it is needed, and the gradient of the router's weights.

        a is written over da if it is needed. over_z: write dz over z.
        """
        z = self.z
        absent = self.z
        n_rows = z.shape[0]
        n_cols = z.shape[1] // 2
        dz = (z if over_z else torch.empty_like(z)) if needs_dz else None
        d_weights = torch.empty_like(self.weights)
        flags = _Flags(self.interleaved, self.bias is not None, self.down_bias is not None, needs_a, needs_dz)
        launch = _plan_activation_backward(n_cols, routing.top_k, self.activation, flags, chip_of(z.device))
        tensors = (
            z, da, absent if dz is None else dz, d_weights, absent if self.bias is None else self.bias, self.weights,
            self.dout, absent if self.down_bias is None else self.down_bias,
            routing.pairs, routing.offsets, routing.experts,
        )  # fmt: skip
        integers = n_cols, len(routing.offsets), self.dout.stride(0), self.dout.shape[1]
        launch((n_rows, 1, 1), tensors, integers)
        return dz, d_weights


@triton.jit
def _gather_kernel(
    x_ptr,  # (N, C)
    y_ptr,  # (S, C)
    pairs_ptr, offsets_ptr,
    x_row_stride, n_cols, n_experts,
    TOP_K: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    blocks = tl.cdiv(n_cols, BLOCK)
    row = (tl.program_id(0) // blocks).to(tl.int64)
    if row < tl.load(offsets_ptr + n_experts - 1):
        cols = (tl.program_id(0) % blocks) * BLOCK + tl.arange(0, BLOCK)
        token = (tl.load(pairs_ptr + row) // TOP_K).to(tl.int64)
        x = tl.load(x_ptr + token * x_row_stride + cols, mask=cols < n_cols, other=0.0)
        tl.store(y_ptr + row * n_cols + cols, x, mask=cols < n_cols)


@triton.jit
def _sum_kernel(
    y_ptr,  # (S, E)
    out_ptr,  # (N, E)
    rows_ptr, offsets_ptr, experts_ptr,
    weights_ptr,  # (N, K)
    bias_ptr,  # (X, E)
    n_cols, n_experts,
    HAS_BIAS: tl.constexpr, TOP_K: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    blocks = tl.cdiv(n_cols, BLOCK)
    token = (tl.program_id(0) // blocks).to(tl.int64)
    cols = (tl.program_id(0) % blocks) * BLOCK + tl.arange(0, BLOCK)
    n_rows = tl.load(offsets_ptr + n_experts - 1)
    total = tl.zeros([BLOCK], dtype=tl.float32)
    for k in tl.static_range(TOP_K):
        row = tl.load(rows_ptr + token * TOP_K + k).to(tl.int64)
        mask = (cols < n_cols) & (row < n_rows)
        total += tl.load(y_ptr + row * n_cols + cols, mask=mask, other=0.0).to(tl.float32)
        if HAS_BIAS:
            expert = tl.load(experts_ptr + row).to(tl.int64)
            weight = tl.load(weights_ptr + token * TOP_K + k).to(tl.float32)
            total += weight * tl.load(bias_ptr + expert * n_cols + cols, mask=mask, other=0.0).to(tl.float32)
    tl.store(out_ptr + token * n_cols + cols, total.to(out_ptr.dtype.element_ty), mask=cols < n_cols)


@triton.jit
def _expert_sum_kernel(
    y_ptr,  # (S, C), or (N, C) if BY_TOKEN
    out_ptr,  # (X, C)
    weights_ptr,  # (N, K)
    pairs_ptr, offsets_ptr,
    y_row_stride, n_cols,
    BY_TOKEN: tl.constexpr, TOP_K: tl.constexpr, ROWS: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    blocks = tl.cdiv(n_cols, BLOCK)
    expert = (tl.program_id(0) // blocks).to(tl.int64)
    cols = (tl.program_id(0) % blocks) * BLOCK + tl.arange(0, BLOCK)
    start = tl.load(offsets_ptr + expert - 1, mask=expert > 0, other=0)
    end = tl.load(offsets_ptr + expert)
    total = tl.zeros([ROWS, BLOCK], dtype=tl.float32)
    for first in range(start, end, ROWS):
        rows = first + tl.arange(0, ROWS)
        mask = (rows < end)[:, None] & (cols < n_cols)[None, :]
        if BY_TOKEN:
            pairs = tl.load(pairs_ptr + rows, mask=rows < end, other=0)
            weights = tl.load(weights_ptr + pairs, mask=rows < end, other=0.0).to(tl.float32)
            offs = (pairs // TOP_K).to(tl.int64)[:, None] * y_row_stride + cols[None, :]
            total += weights[:, None] * tl.load(y_ptr + offs, mask=mask, other=0.0).to(tl.float32)
        else:
            offs = rows.to(tl.int64)[:, None] * y_row_stride + cols[None, :]
            total += tl.load(y_ptr + offs, mask=mask, other=0.0).to(tl.float32)
    tl.store(out_ptr + expert * n_cols + cols, tl.sum(total, 0).to(out_ptr.dtype.element_ty), mask=cols < n_cols)


@cached
def _plan_rows(kind: str, n_cols: int, top_k: int, has_bias: bool, chip: Chip) -> tuple[Launcher, int]:
    """Return the launcher of gather or sum, and the programs per row."""
    block = min(ROW_BLOCK, triton.next_power_of_2(n_cols))
    constants = {"TOP_K": top_k, "BLOCK": block, **launch_options(block, chip)}
    if kind == "gather":
        return Launcher(_gather_kernel, constants), -(-n_cols // block)
    return Launcher(_sum_kernel, {"HAS_BIAS": has_bias, **constants}), -(-n_cols // block)


@cached
def _plan_expert_sum(by_token: bool, top_k: int, chip: Chip) -> Launcher:
    rows = SUM_ROWS
    block = SUM_COLS
    constants = {"BY_TOKEN": by_token, "TOP_K": top_k, "ROWS": rows, "BLOCK": block}
    return Launcher(_expert_sum_kernel, {**constants, **launch_options(rows * block, chip)})


def gather_rows(x: torch.Tensor, routing: Routing) -> torch.Tensor:
    """Return the token's row of x (N, C) for each row: (S, C)."""
    n_rows = len(routing.pairs)
    n_cols = x.shape[1]
    y = torch.empty((n_rows, n_cols), dtype=x.dtype, device=x.device)
    launch, blocks = _plan_rows("gather", n_cols, routing.top_k, False, chip_of(x.device))
    integers = x.stride(0), n_cols, len(routing.offsets)
    launch((n_rows * blocks, 1, 1), (x, y, routing.pairs, routing.offsets), integers)
    return y


def sum_pairs(
    y: torch.Tensor,  # (S, E)
    routing: Routing,
    weights: torch.Tensor | None = None,  # (N, K)
    bias: torch.Tensor | None = None,  # (X, E)
) -> torch.Tensor:  # (N, E)
    """Add the rows of each token's pairs, and their experts' biases times the weights if there are biases."""
    n_tokens = len(routing.rows) // routing.top_k
    n_cols = y.shape[1]
    out = torch.empty((n_tokens, n_cols), dtype=y.dtype, device=y.device)
    launch, blocks = _plan_rows("sum", n_cols, routing.top_k, bias is not None, chip_of(y.device))
    added = (y, y) if bias is None else (weights, bias)
    tensors = (y, out, routing.rows, routing.offsets, routing.experts, *added)
    launch((n_tokens * blocks, 1, 1), tensors, (n_cols, len(routing.offsets)))
    return out


def sum_expert_rows(
    y: torch.Tensor,  # (S, C), or (N, C) with weights
    routing: Routing,
    weights: torch.Tensor | None = None,  # (N, K)
) -> torch.Tensor:  # (X, C)
    """Add the rows of each expert. With weights y has a row per token, which is multiplied by the pair's weight."""
    n_experts = len(routing.offsets)
    n_cols = y.shape[1]
    out = torch.empty((n_experts, n_cols), dtype=y.dtype, device=y.device)
    launch = _plan_expert_sum(weights is not None, routing.top_k, chip_of(y.device))
    tensors = (y, out, y if weights is None else weights, routing.pairs, routing.offsets)
    launch((n_experts * -(-n_cols // SUM_COLS), 1, 1), tensors, (y.stride(0), n_cols))
    return out
