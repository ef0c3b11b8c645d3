r"""Attention of one new token of each text over the keys and values of its slot: generation with a static cache.

    out_h = Σ_c softmax_c(cap(scale q_h · k_c)) v_c        c in [first, end) of the slot

A program has the query heads of one key head of one slot, and reads no column outside of the range, so short texts
cost less than long ones. fp32 sums, in one order; no backward. The softmax is computed online (Milakov and Gimelshein,
arXiv:1805.02867). A slot whose range is empty gets zeros.
"""

from __future__ import annotations

import torch
from torch import Tensor

from ligertune_kernels.chips import Chip
from ligertune_kernels.jit.device_functions import LOG2E, fp32, scale_and_cap
from ligertune_kernels.launcher import Launcher, cached, chip_of, runs_triton, tl, triton
from ligertune_kernels.ops.attention.tiles import decode_tile


def decode_attention_reference(
    query: Tensor, keys: Tensor, values: Tensor, first: Tensor, end: Tensor, *, scale: float, softcap: float = 0.0
) -> Tensor:
    """Compute `decode_attention` in plain torch."""
    n_slots, n_heads, head_dim = query.shape
    wide = torch.promote_types(query.dtype, torch.float32)
    grouped = query.reshape(n_slots, keys.shape[1], -1, head_dim).to(wide)  # (S, K, H / K, D)
    columns = torch.arange(keys.shape[2], device=query.device)
    inside = (columns >= first[:, None]) & (columns < end[:, None])  # (S, C)
    scores = grouped @ keys.to(wide).transpose(2, 3) * scale
    if softcap:
        scores = softcap * torch.tanh(scores / softcap)
    # not -inf: the softmax of an empty range would be NaN
    weights = scores.masked_fill(~inside[:, None, None], torch.finfo(wide).min).softmax(-1)
    weights = weights * inside[:, None, None]
    return (weights @ values.to(wide)).reshape(n_slots, n_heads, -1).to(query.dtype)


@triton.jit
def _decode_kernel(
    q_ptr,  # (S, H, D)
    k_ptr,  # (S, K, C, D)
    v_ptr,  # (S, K, C, V)
    first_ptr, end_ptr,  # (S,) int32
    out_ptr,  # (S, H, V), contiguous
    q_slot_stride, q_head_stride, k_slot_stride, k_head_stride, k_col_stride,
    v_slot_stride, v_head_stride, v_col_stride,
    scale, cap,
    GROUP: tl.constexpr, HEAD_DIM: tl.constexpr, VALUE_DIM: tl.constexpr, WIDTH: tl.constexpr, V_WIDTH: tl.constexpr,
    ROWS: tl.constexpr, COLS: tl.constexpr, HAS_CAP: tl.constexpr,
):  # fmt: skip
    slot = tl.program_id(1).to(tl.int64)
    head = tl.program_id(0).to(tl.int64)
    first = tl.load(first_ptr + slot)
    end = tl.load(end_ptr + slot)
    rows = tl.arange(0, ROWS)  # query heads of the key head, padded: tl.dot takes 16 rows
    dims = tl.arange(0, WIDTH)
    v_dims = tl.arange(0, V_WIDTH)
    q_ptrs = q_ptr + slot * q_slot_stride + (head * GROUP + rows[:, None]) * q_head_stride + dims[None, :]
    q = tl.load(q_ptrs, mask=(rows[:, None] < GROUP) & (dims[None, :] < HEAD_DIM), other=0.0)
    k_ptrs = k_ptr + slot * k_slot_stride + head * k_head_stride + dims[None, :]
    v_ptrs = v_ptr + slot * v_slot_stride + head * v_head_stride + v_dims[None, :]
    row_max = tl.full([ROWS], -1.0e30, tl.float32)  # finite: -inf minus it is not NaN
    total = tl.zeros([ROWS], tl.float32)
    weighted = tl.zeros([ROWS, V_WIDTH], tl.float32)
    for start in range(first, end, COLS):
        cols = start + tl.arange(0, COLS)
        inside = cols[:, None] < end
        k = tl.load(k_ptrs + cols[:, None] * k_col_stride, mask=inside & (dims[None, :] < HEAD_DIM), other=0.0)
        products = tl.dot(q, tl.trans(k), input_precision="ieee")
        if HAS_CAP:
            bits, _ = scale_and_cap(products, cap, scale, True)
        else:
            bits = products * (fp32(scale) * LOG2E)
        bits = tl.where(cols[None, :] < end, bits, float("-inf"))
        new_max = tl.maximum(row_max, tl.max(bits, 1))
        weights = tl.exp2(bits - new_max[:, None])
        rescale = tl.exp2(row_max - new_max)
        v = tl.load(v_ptrs + cols[:, None] * v_col_stride, mask=inside & (v_dims[None, :] < VALUE_DIM), other=0.0)
        weighted = tl.dot(weights.to(v.dtype), v, weighted * rescale[:, None], input_precision="ieee")
        total = total * rescale + tl.sum(weights, 1)
        row_max = new_max
    out = weighted / tl.where(total > 0, total, 1.0)[:, None]
    n_heads = tl.num_programs(0) * GROUP
    out_ptrs = out_ptr + (slot * n_heads + head * GROUP + rows[:, None]) * VALUE_DIM + v_dims[None, :]
    mask = (rows[:, None] < GROUP) & (v_dims[None, :] < VALUE_DIM)
    tl.store(out_ptrs, out.to(out_ptr.dtype.element_ty), mask=mask)


@cached
def _launch(group: int, head_dim: int, value_dim: int, has_cap: bool, itemsize: int, chip: Chip) -> Launcher:
    tile = decode_tile(group, head_dim, value_dim, itemsize, chip)
    constants = {
        "GROUP": group, "HEAD_DIM": head_dim, "VALUE_DIM": value_dim,
        "WIDTH": tile.width, "V_WIDTH": tile.value_width, "ROWS": tile.rows, "COLS": tile.cols, "HAS_CAP": has_cap,
        "num_warps": tile.warps, "num_stages": tile.stages,
    }  # fmt: skip
    return Launcher(_decode_kernel, constants)


def decode_attention(
    query: Tensor,  # (S, H, D)
    keys: Tensor,  # (S, K, C, D), K divides H
    values: Tensor,  # (S, K, C, V)
    first: Tensor,  # (S,) int32: first column that the slot's token attends to
    end: Tensor,  # (S,) int32: the column after the last one
    *,
    scale: float,
    softcap: float = 0.0,
) -> Tensor:  # (S, H, V), contiguous
    """Attend from one token of each slot to the columns [first, end) of the slot.

    softcap: scores become softcap * tanh(score / softcap); 0: they do not. Raises ValueError on mismatched shapes and
    dtypes. Not differentiable. Deterministic.
    """
    n_slots, n_heads, head_dim = query.shape
    n_key_heads = keys.shape[1]
    fits = keys.shape[:3] == values.shape[:3] and keys.shape[3] == head_dim and keys.shape[0] == n_slots
    if not fits or n_heads % n_key_heads or first.shape != (n_slots,) or end.shape != (n_slots,):
        shapes = ", ".join(str(tuple(t.shape)) for t in (query, keys, values, first, end))
        raise ValueError(
            f"decode_attention: shapes {shapes}: expected (S, H, D), (S, K, C, D), (S, K, C, V), (S,), (S,)"
        )
    if not query.dtype == keys.dtype == values.dtype:
        raise ValueError(f"decode_attention: dtypes {query.dtype}, {keys.dtype}, {values.dtype}: expected one")
    if not runs_triton(query):
        return decode_attention_reference(query, keys, values, first, end, scale=scale, softcap=softcap)
    query, keys, values = (t if t.stride(-1) == 1 else t.contiguous() for t in (query, keys, values))
    value_dim = values.shape[3]
    out = query.new_empty(n_slots, n_heads, value_dim)
    if out.numel():
        group = n_heads // n_key_heads
        launch = _launch(group, head_dim, value_dim, softcap > 0, query.itemsize, chip_of(query.device))
        launch(
            (n_key_heads, n_slots, 1),
            (query, keys, values, first.int().contiguous(), end.int().contiguous(), out),
            (*query.stride()[:2], *keys.stride()[:3], *values.stride()[:3]),
            scale, softcap,
        )  # fmt: skip
    return out
