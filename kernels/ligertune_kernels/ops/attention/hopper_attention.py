"""document_attention on Hopper GPUs: launches of the Gluon kernels for long documents.

They run for bfloat16 and float16, for heads of 64, 128 and 256 columns that lie next to each other, where documents are
long: blocks and tiles of short documents would be mostly empty. In the backward of heads of 64 and 128 columns one
kernel computes all gradients, with five matrix products instead of seven. Elsewhere the kernels in
_document_attention_kernels.py run.
"""

from __future__ import annotations

from typing import NamedTuple

import torch

from ligertune_kernels.chips import Chip
from ligertune_kernels.launcher import TensorDescriptor, gl, on_device
from ligertune_kernels.ops.attention._hopper_backward_kernel import hopper_attention_backward_kernel
from ligertune_kernels.ops.attention._hopper_dq_kernels import attention_delta_kernel, attention_round_dq_kernel
from ligertune_kernels.ops.attention._hopper_forward_kernel import hopper_attention_forward_kernel
from ligertune_kernels.ops.attention._hopper_wide_dk_dv_kernel import hopper_attention_wide_dk_dv_kernel
from ligertune_kernels.ops.attention._hopper_wide_dq_kernel import hopper_attention_wide_dq_kernel
from ligertune_kernels.ops.attention.tiles import GLUON_KERNELS

TILE = 128  # tokens to which rows of lse, delta and the sums of dq are padded
ROWS = 64  # rows of a copied tile of queries
WIDE = 256  # head width whose backward has two kernels and needs no fp32 sums of dq
SUMS_AT_ONCE = 1 << 29  # bytes of the fp32 sums of dq in one launch of the backward, if a key head does not need more
# Bytes of these sums from which the backward computes a few heads at a time. The queries and output gradients are as
# large, and those of all heads would not stay in the L2 cache (50 MB on an H100). If they are smaller, all heads run at
# the same time, longest tiles first, so that the processors finish at about the same time.
GROUPED_FROM = 200 << 20
MOST_SUMS = 3 << 30  # bytes of the sums of a single key head; larger ones run the other kernels, which have none


class Width(NamedTuple):
    """Launch settings for one head width."""

    parts: int  # warpgroups of the forward, each with 64 queries
    cols: int  # keys of a block of the forward
    stages: int  # blocks of the forward in shared memory
    long: int  # tokens of the mean document from which these kernels take less time on an H100
    together: tuple[int, ...] = ()  # key heads that the backward computes at the same time, if it divides theirs


WIDTHS = {64: Width(4, 64, 4, 2048), 128: Width(2, 128, 2, 2048, (2,)), 256: Width(2, 64, 2, 512)}
TOGETHER = (8, 4)  # heads that the forward computes at the same time: the first that divides theirs


class Terms(NamedTuple):
    """Options of the attention scores."""

    scale: float
    window: int | None
    softcap: float | None


def runs_hopper_kernels(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, chip: Chip, documents: int | None) -> bool:
    """Return whether these kernels run for (T, H, D), (T, K, D) and (T, K, D) of this many documents, None: unknown."""
    n_tokens, heads, width = q.shape
    if documents is None or TensorDescriptor is None or not GLUON_KERNELS.holds(chip):
        return False
    if q.dtype not in (torch.bfloat16, torch.float16) or width not in WIDTHS or torch.compiler.is_compiling():
        return False
    if n_tokens < max(WIDTHS[width].long * documents, 1) or sums_bytes(n_tokens, heads, k.shape[1], width) > MOST_SUMS:
        return False
    return all(t.stride(1) == width and t.stride(0) % 8 == 0 and t.data_ptr() % 16 == 0 for t in (q, k, v))


def sums_bytes(n_tokens: int, heads: int, key_heads: int, width: int) -> int:
    """Return the bytes of the fp32 sums of dq, which the backward allocates and frees: those of one launch."""
    if width == WIDE:
        return 0
    return _heads_at_once(n_tokens, heads, key_heads, width) * _sums_of_key_head(n_tokens, heads, key_heads, width)


def _sums_of_key_head(n_tokens: int, heads: int, key_heads: int, width: int) -> int:
    return heads // key_heads * -(-n_tokens // TILE) * TILE * width * 4


def _heads_at_once(n_tokens: int, heads: int, key_heads: int, width: int) -> int:
    """Return how many key heads one launch of the backward computes."""
    return max(1, min(key_heads, SUMS_AT_ONCE // max(1, _sums_of_key_head(n_tokens, heads, key_heads, width))))


def _together(heads: int, wanted: tuple[int, ...]) -> int:
    """Return the first of the wanted numbers that divides the heads, else all heads."""
    return next((n for n in wanted if heads % n == 0), heads)


def _rows_of(t: torch.Tensor, rows: int) -> TensorDescriptor:
    """Describe tiles of `rows` tokens of one head of (T, H, D)."""
    n_tokens, heads, width = t.shape
    layout = gl.NVMMASharedLayout(128, 16, 2)
    return TensorDescriptor(t, [n_tokens, heads * width], [t.stride(0), 1], [rows, width], layout)


def _values_of(t: torch.Tensor, rows: int) -> TensorDescriptor:
    """Describe pieces of fp32 values."""
    return TensorDescriptor(t, [t.numel()], [1], [rows], gl.NVMMASharedLayout(0, 32, 1))


def _constants(q: torch.Tensor, k: torch.Tensor, terms: Terms) -> dict[str, int | bool]:
    return {"GROUP": q.shape[1] // k.shape[1], "WINDOW": terms.window or 0, "HAS_CAP": terms.softcap is not None}


def forward(
    q: torch.Tensor,  # (T, H, D)
    k: torch.Tensor,  # (T, K, D)
    v: torch.Tensor,  # (T, K, D)
    starts: torch.Tensor,  # (T,) int32
    terms: Terms,
) -> tuple[torch.Tensor, torch.Tensor]:
    """Return the output (T, H, D), and the log2-sum-exp2 of rows (H, T rounded up to 128) in fp32."""
    n_tokens, heads, width = q.shape
    n_tiles = -(-n_tokens // TILE)
    tile = WIDTHS[width]
    rows = tile.parts * ROWS
    out = q.new_empty(q.shape)
    lse = q.new_empty((heads, n_tiles * TILE), dtype=torch.float32)
    descriptors = _rows_of(q, ROWS), _rows_of(k, tile.cols), _rows_of(v, tile.cols), _rows_of(out, ROWS)
    with on_device(q):
        hopper_attention_forward_kernel[(-(-n_tokens // rows) * heads,)](
            *descriptors, starts, lse, n_tokens, terms.scale, terms.softcap or 1.0, HEADS=heads,
            TOGETHER=_together(heads, TOGETHER), ROWS=rows, PARTS=tile.parts, COLS=tile.cols, WIDTH=width,
            STAGES=tile.stages, **_constants(q, k, terms), num_warps=4,
        )  # fmt: skip
    return out, lse


def backward(
    q: torch.Tensor,  # (T, H, D)
    k: torch.Tensor,  # (T, K, D)
    v: torch.Tensor,  # (T, K, D)
    starts: torch.Tensor,  # (T,) int32
    ends: torch.Tensor,  # (T,) int32
    out: torch.Tensor,  # (T, H, D), contiguous
    d_out: torch.Tensor,  # (T, H, D), contiguous
    lse: torch.Tensor,  # (H, padded tokens) fp32
    terms: Terms,
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Return dq, dk and dv, contiguous. The same inputs give the same bits."""
    if q.shape[2] == WIDE:
        return _wide_backward(q, k, v, starts, ends, out, d_out, lse, terms)
    (n_tokens, heads, width), key_heads = q.shape, k.shape[1]
    padded = lse.shape[1]
    group = heads // key_heads
    at_once = _heads_at_once(n_tokens, heads, key_heads, width)
    sums = lse.new_empty((at_once * group, padded, width))
    delta = torch.empty_like(lse)
    counters = lse.new_empty((at_once * group, padded // ROWS), dtype=torch.int32)
    dq = q.new_empty(q.shape)
    dk = k.new_empty(k.shape)
    dv = v.new_empty(v.shape)
    rows = 4096 // width
    block = 128 if width == 64 and terms.softcap is None else ROWS  # queries
    with on_device(q):
        for first in range(0, key_heads, at_once):
            keys = slice(first, min(first + at_once, key_heads))
            queries = slice(keys.start * group, keys.stop * group)
            n_keys = keys.stop - keys.start
            n_queries = queries.stop - queries.start
            sizes = {"ALL_HEADS": heads, "HEADS": n_queries, "WIDTH": width, "ROWS": rows}
            some_delta = delta[queries]
            some_d_out = d_out[:, queries]
            wanted = WIDTHS[width].together if sums.nbytes >= GROUPED_FROM else ()
            attention_delta_kernel[(-(-padded * n_queries // rows),)](
                out[:, queries], some_d_out, some_delta, sums, counters, n_tokens, HAS_SUMS=True, **sizes
            )
            hopper_attention_backward_kernel[(-(-n_tokens // 128) * n_keys,)](
                _rows_of(q[:, queries], block), _rows_of(k[:, keys], ROWS), _rows_of(v[:, keys], ROWS),
                _rows_of(some_d_out, block), _values_of(lse[queries], block), _values_of(some_delta, block), starts,
                ends, counters, sums, dk[:, keys], dv[:, keys], n_tokens, terms.scale, terms.softcap or 1.0,
                ALL_KEY_HEADS=key_heads, KEY_HEADS=n_keys, TOGETHER=_together(n_keys, wanted),
                ROWS=block, WIDTH=width, STAGES=3, **_constants(q, k, terms), num_warps=4,
            )  # fmt: skip
            attention_round_dq_kernel[(-(-n_tokens * n_queries // rows),)](
                sums, dq[:, queries], n_tokens, terms.scale, BLOCK=block, **sizes
            )
    return dq, dk, dv


def _wide_backward(
    q: torch.Tensor,  # (T, H, 256)
    k: torch.Tensor,  # (T, K, 256)
    v: torch.Tensor,  # (T, K, 256)
    starts: torch.Tensor,  # (T,) int32
    ends: torch.Tensor,  # (T,) int32
    out: torch.Tensor,  # (T, H, 256), contiguous
    d_out: torch.Tensor,  # (T, H, 256), contiguous
    lse: torch.Tensor,  # (H, padded tokens) fp32
    terms: Terms,
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Return dq, dk and dv of heads of 256 columns: one kernel computes dk and dv, another dq."""
    (n_tokens, heads, width), key_heads = q.shape, k.shape[1]
    delta = torch.empty_like(lse)
    dq = q.new_empty(q.shape)
    dk = k.new_empty(k.shape)
    dv = v.new_empty(v.shape)
    inputs = _rows_of(q, ROWS), _rows_of(k, ROWS), _rows_of(v, ROWS), _rows_of(d_out, ROWS)
    scalars = n_tokens, terms.scale, terms.softcap or 1.0
    constants = _constants(q, k, terms) | {"num_warps": 4}
    with on_device(q):
        attention_delta_kernel[(-(-delta.numel() // 16),)](
            out, d_out, delta, None, None, n_tokens, ALL_HEADS=heads, HEADS=heads, WIDTH=width, HAS_SUMS=False, ROWS=16
        )
        hopper_attention_wide_dk_dv_kernel[(-(-n_tokens // ROWS) * key_heads,)](
            *inputs, _values_of(lse, ROWS), _values_of(delta, ROWS), _rows_of(dk, ROWS), _rows_of(dv, ROWS), ends,
            *scalars, KEY_HEADS=key_heads, **constants,
        )  # fmt: skip
        hopper_attention_wide_dq_kernel[(-(-n_tokens // TILE) * heads,)](
            *inputs, _rows_of(dq, ROWS), lse, delta, starts, *scalars, HEADS=heads, **constants
        )
    return dq, dk, dv
