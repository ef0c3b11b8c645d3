"""document_attention on Hopper GPUs: launches of the Gluon kernels for long documents.

They run for bfloat16 and float16, for heads of 64, 128 and 256 columns that lie next to each other, where documents are
long: blocks and tiles of short documents would be mostly empty (`runs_hopper_kernels` in tiles.py). In the backward of
heads of 64 and 128 columns one kernel computes all gradients, with five matrix products instead of seven. Elsewhere the
kernels in kernels.py run.
"""

from __future__ import annotations

import math
from typing import NamedTuple

import torch

from ligertune_kernels.launcher import TensorDescriptor, gl, on_device
from ligertune_kernels.ops.attention import tiles
from ligertune_kernels.ops.attention.hopper_kernels import (
    hopper_attention_backward_kernel,
    hopper_attention_forward_kernel,
)
from ligertune_kernels.ops.attention.hopper_wide_kernels import (
    hopper_attention_wide_dk_dv_kernel,
    hopper_attention_wide_dq_kernel,
)
from ligertune_kernels.ops.attention.kernels import attention_delta_kernel, attention_round_dq_kernel
from ligertune_kernels.ops.attention.tiles import COPIED_ROWS, PADDED_TILE


class AttentionTerms(NamedTuple):
    """Options of the attention scores."""

    scale: float
    window: int | None
    softcap: float | None
    with_lse: bool = False  # the log-sum-exp of the scores is an output, with a gradient


def _rows_of(t: torch.Tensor, rows: int) -> TensorDescriptor:
    """Describe tiles of `rows` tokens of one head of (T, H, D)."""
    n_tokens, heads, width = t.shape
    layout = gl.NVMMASharedLayout(128, 16, 2)
    return TensorDescriptor(t, [n_tokens, heads * width], [t.stride(0), 1], [rows, width], layout)


def _values_of(t: torch.Tensor, rows: int) -> TensorDescriptor:
    """Describe pieces of fp32 values."""
    return TensorDescriptor(t, [t.numel()], [1], [rows], gl.NVMMASharedLayout(0, 32, 1))


def _constants(q: torch.Tensor, k: torch.Tensor, terms: AttentionTerms) -> dict[str, int | bool]:
    return {"GROUP": q.shape[1] // k.shape[1], "WINDOW": terms.window or 0, "HAS_CAP": terms.softcap is not None}


class HopperInputs(NamedTuple):
    """What the forward keeps for the backward."""

    q: torch.Tensor  # (T, H, D)
    k: torch.Tensor  # (T, K, D)
    v: torch.Tensor  # (T, K, D)
    starts: torch.Tensor  # (T,) int32
    ends: torch.Tensor  # (T,) int32
    out: torch.Tensor  # (T, H, D), contiguous
    lse: torch.Tensor  # (H, padded tokens) fp32


def forward(
    q: torch.Tensor,  # (T, H, D)
    k: torch.Tensor,  # (T, K, D)
    v: torch.Tensor,  # (T, K, D)
    starts: torch.Tensor,  # (T,) int32
    terms: AttentionTerms,
) -> tuple[torch.Tensor, torch.Tensor]:
    """Return the output (T, H, D), and the log2-sum-exp2 of rows (H, T rounded up to 128) in fp32."""
    n_tokens, heads, width = q.shape
    n_tiles = -(-n_tokens // PADDED_TILE)
    tile = tiles.HOPPER_WIDTHS[width]
    rows = tile.parts * COPIED_ROWS
    out = q.new_empty(q.shape)
    lse = q.new_empty((heads, n_tiles * PADDED_TILE), dtype=torch.float32)
    descriptors = _rows_of(q, COPIED_ROWS), _rows_of(k, tile.cols), _rows_of(v, tile.cols), _rows_of(out, COPIED_ROWS)
    with on_device(q):
        hopper_attention_forward_kernel[(-(-n_tokens // rows) * heads,)](
            *descriptors, starts, lse, n_tokens, terms.scale, terms.softcap or 1.0, HEADS=heads,
            TOGETHER=tiles.heads_together(heads, tiles.HEADS_TOGETHER), ROWS=rows, PARTS=tile.parts, COLS=tile.cols,
            WIDTH=width, STAGES=tile.stages, **_constants(q, k, terms), num_warps=4,
        )  # fmt: skip
    return out, lse


def delta_buffer(lse: torch.Tensor, d_lse: torch.Tensor | None) -> torch.Tensor:
    """Return the tensor that the backward overwrites with delta. It holds the gradient of lse in nats, if there is one.

    lse and d_lse are in bits.
    """
    delta = torch.empty_like(lse)
    return delta if d_lse is None else torch.div(d_lse, math.log(2), out=delta)


def backward(
    kept: HopperInputs,
    d_out: torch.Tensor,  # (T, H, D), contiguous
    terms: AttentionTerms,
    d_lse: torch.Tensor | None = None,  # (H, padded tokens) fp32
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Return dq, dk and dv, contiguous. The same inputs give the same bits."""
    q, k, v, starts, ends, out, lse = kept
    n_tokens, heads, width = q.shape
    if width == tiles.WIDE_HEAD:
        return _wide_backward(kept, d_out, terms, d_lse)
    key_heads = k.shape[1]
    padded = lse.shape[1]
    group = heads // key_heads
    at_once = tiles.heads_at_once(n_tokens, heads, key_heads, width)
    sums = lse.new_empty((at_once * group, padded, width))
    delta = delta_buffer(lse, d_lse)
    counters = lse.new_empty((at_once * group, padded // COPIED_ROWS), dtype=torch.int32)
    dq = q.new_empty(q.shape)
    dk = k.new_empty(k.shape)
    dv = v.new_empty(v.shape)
    rows = tiles.DELTA_ELEMENTS // width
    block = tiles.query_block(width, has_cap=terms.softcap is not None)
    with on_device(q):
        for first in range(0, key_heads, at_once):
            keys = slice(first, min(first + at_once, key_heads))
            queries = slice(keys.start * group, keys.stop * group)
            n_keys = keys.stop - keys.start
            n_queries = queries.stop - queries.start
            sizes = {"ALL_HEADS": heads, "HEADS": n_queries, "WIDTH": width, "ROWS": rows}
            some_delta = delta[queries]
            some_d_out = d_out[:, queries]
            wanted = tiles.HOPPER_WIDTHS[width].together if sums.nbytes >= tiles.GROUPED_FROM else ()
            attention_delta_kernel[(-(-padded * n_queries // rows),)](
                out[:, queries], some_d_out, some_delta, sums, counters, n_tokens,
                HAS_SUMS=True, HAS_D_LSE=d_lse is not None, **sizes,
            )  # fmt: skip
            hopper_attention_backward_kernel[(-(-n_tokens // 128) * n_keys,)](
                _rows_of(q[:, queries], block), _rows_of(k[:, keys], COPIED_ROWS), _rows_of(v[:, keys], COPIED_ROWS),
                _rows_of(some_d_out, block), _values_of(lse[queries], block), _values_of(some_delta, block), starts,
                ends, counters, sums, dk[:, keys], dv[:, keys], n_tokens, terms.scale, terms.softcap or 1.0,
                ALL_KEY_HEADS=key_heads, KEY_HEADS=n_keys, TOGETHER=tiles.heads_together(n_keys, wanted),
                ROWS=block, WIDTH=width, STAGES=tiles.QUERY_STAGES, **_constants(q, k, terms), num_warps=4,
            )  # fmt: skip
            attention_round_dq_kernel[(-(-n_tokens * n_queries // rows),)](
                sums, dq[:, queries], n_tokens, terms.scale, BLOCK=block, **sizes
            )
    return dq, dk, dv


def _wide_backward(
    kept: HopperInputs,  # of heads of 256 columns
    d_out: torch.Tensor,  # (T, H, 256), contiguous
    terms: AttentionTerms,
    d_lse: torch.Tensor | None,
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Return dq, dk and dv of heads of 256 columns: one kernel computes dk and dv, another dq."""
    q, k, v, starts, ends, out, lse = kept
    n_tokens, heads, width = q.shape
    key_heads = k.shape[1]
    rows = tiles.DELTA_ELEMENTS // width
    delta = delta_buffer(lse, d_lse)
    dq = q.new_empty(q.shape)
    dk = k.new_empty(k.shape)
    dv = v.new_empty(v.shape)
    inputs = _rows_of(q, COPIED_ROWS), _rows_of(k, COPIED_ROWS), _rows_of(v, COPIED_ROWS), _rows_of(d_out, COPIED_ROWS)
    scalars = n_tokens, terms.scale, terms.softcap or 1.0
    constants = _constants(q, k, terms) | {"num_warps": 4}
    with on_device(q):
        attention_delta_kernel[(-(-delta.numel() // rows),)](
            out, d_out, delta, None, None, n_tokens,
            ALL_HEADS=heads, HEADS=heads, WIDTH=width, HAS_SUMS=False, ROWS=rows,
            HAS_D_LSE=d_lse is not None,
        )  # fmt: skip
        hopper_attention_wide_dk_dv_kernel[(-(-n_tokens // COPIED_ROWS) * key_heads,)](
            *inputs, _values_of(lse, COPIED_ROWS), _values_of(delta, COPIED_ROWS),
            _rows_of(dk, COPIED_ROWS), _rows_of(dv, COPIED_ROWS), ends,
            *scalars, KEY_HEADS=key_heads, **constants,
        )  # fmt: skip
        hopper_attention_wide_dq_kernel[(-(-n_tokens // PADDED_TILE) * heads,)](
            *inputs, _rows_of(dq, COPIED_ROWS), lse, delta, starts, *scalars, HEADS=heads, **constants
        )
    return dq, dk, dv
