"""Row kernels of `experts`: gather, sum over the experts of a token, sum over the rows of an expert.

Rows are in the order of `Routing`. Rows behind the last group hold no values, and are neither read nor written.
Sums are computed in fp32 and rounded once.
"""

from __future__ import annotations

import torch

from ligertune_kernels.chips import Chip, launch_options
from ligertune_kernels.launcher import Launcher, cached, chip_of, tl, triton
from ligertune_kernels.ops.moe._routing import Routing

BLOCK = 2048  # columns per program of gather and sum
SUM_TILE = (32, 128)  # rows and columns at a time of the sum over an expert's rows


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
    block = min(BLOCK, triton.next_power_of_2(n_cols))
    constants = {"TOP_K": top_k, "BLOCK": block, **launch_options(block, chip)}
    if kind == "gather":
        return Launcher(_gather_kernel, constants), -(-n_cols // block)
    return Launcher(_sum_kernel, {"HAS_BIAS": has_bias, **constants}), -(-n_cols // block)


@cached
def _plan_expert_sum(by_token: bool, top_k: int, chip: Chip) -> Launcher:
    rows, block = SUM_TILE
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
    launch((n_experts * -(-n_cols // SUM_TILE[1]), 1, 1), tensors, (y.stride(0), n_cols))
    return out
