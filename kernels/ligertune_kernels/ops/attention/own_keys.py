r"""Merge attention with further keys of each token's own, in one launch, from its output and log-sum-exp.

Token i attended to some keys: out_i, with lse_i the log-sum-exp of its scores. It has n more keys k_m and values v_m,
which no other token reads:

    s_m = scale q_i . k_m        L_i = log(exp(lse_i) + sum_m exp(s_m))
    w_0 = exp(lse_i - L_i)       w_m = exp(s_m - L_i)            merged_i = w_0 out_i + sum_m w_m v_m

    D = w_0 (dM . out) + sum_m w_m (dM . v_m)                    dM: gradient of merged
    dout = w_0 dM       dlse = w_0 (dM . out - D)       dv_m = w_m dM
    ds_m = w_m (dM . v_m - D)       dq = scale sum_m ds_m k_m    dk_m = scale ds_m q

dk_m and dv_m are summed over the query heads that share a key head. All is computed in fp32 and rounded once. A
program has a few tokens and all query heads of one key head.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import torch

from ligertune_kernels.autograd import autocast, no_double_backward
from ligertune_kernels.chips import Chip, launch_options
from ligertune_kernels.jit.device_functions import LOG2E, fp32
from ligertune_kernels.launcher import Launcher, cached, chip_of, runs_triton, tl, triton
from ligertune_kernels.ops.attention.tiles import own_keys_tokens, power_of_2


def merge_own_keys_reference(
    query: torch.Tensor,  # (T, H, D)
    out: torch.Tensor,  # (T, H, D)
    lse: torch.Tensor,  # (T, H)
    keys: Sequence[torch.Tensor],  # n of (T, K, D)
    values: Sequence[torch.Tensor],  # n of (T, K, D)
    *,
    scale: float | None = None,
) -> torch.Tensor:  # (T, H, D)
    """Compute `merge_own_keys` in plain torch."""
    if not keys:
        return out
    wide = torch.promote_types(out.dtype, torch.float32)
    heads = (keys[0].shape[1], -1)
    scale = query.shape[-1] ** -0.5 if scale is None else scale
    with torch.autocast(query.device.type, enabled=False):
        own = torch.stack(list(keys), dim=2).to(wide)  # (T, K, n, D)
        own_values = torch.stack(list(values), dim=2).to(wide)
        scores = query.to(wide).unflatten(1, heads) @ own.transpose(-1, -2) * scale  # (T, K, H / K, n)
        weights = torch.cat([lse.to(wide).unflatten(1, heads)[..., None], scores], dim=-1).softmax(-1)
        merged = weights[..., :1] * out.to(wide).unflatten(1, heads) + weights[..., 1:] @ own_values
    return merged.flatten(1, 2).to(out.dtype)


@triton.jit
def _rows_of(first, kv_head, n_tokens, TOKENS: tl.constexpr, GROUP: tl.constexpr, PADDED_GROUP: tl.constexpr):
    """Return tokens, query heads and mask of a tile's rows: the query heads of one token follow each other."""
    rows = tl.arange(0, TOKENS * PADDED_GROUP)
    tokens = (first + rows // PADDED_GROUP).to(tl.int64)
    in_group = rows % PADDED_GROUP
    return tokens, kv_head * GROUP + in_group, (tokens < n_tokens) & (in_group < GROUP)


@triton.jit
def _scores(query, key, scale):
    """Return the score of each row in bits."""
    return tl.sum(query * key.to(tl.float32), 1) * (scale * LOG2E)


@triton.jit(do_not_specialize=["n_tokens", "n_own"])
def _merge_kernel(
    q_ptr,  # (T, H, D)
    out_ptr,  # (T, H, D), contiguous
    lse_ptr,  # (T, H)
    keys_ptr, values_ptr,  # (n, T, K, D), contiguous
    merged_ptr,  # (T, H, D), contiguous
    total_ptr,  # (T, H) fp32, contiguous: L in bits
    q_token_stride, q_head_stride, lse_token_stride, lse_head_stride, head_dim,
    n_tokens, n_own, scale,
    KEY_HEADS: tl.constexpr, GROUP: tl.constexpr, PADDED_GROUP: tl.constexpr, TOKENS: tl.constexpr,
    WIDTH: tl.constexpr,
):  # fmt: skip
    scale = fp32(scale)
    first = tl.program_id(0) // KEY_HEADS * TOKENS
    kv_head = tl.program_id(0) % KEY_HEADS
    tokens, heads, in_range = _rows_of(first, kv_head, n_tokens, TOKENS, GROUP, PADDED_GROUP)
    cols = tl.arange(0, WIDTH)[None, :]
    mask = in_range[:, None] & (cols < head_dim)
    places = tokens * (KEY_HEADS * GROUP) + heads
    q_ptrs = q_ptr + (tokens * q_token_stride + heads.to(tl.int64) * q_head_stride)[:, None] + cols
    query = tl.load(q_ptrs, mask=mask, other=0.0).to(tl.float32)
    merged = tl.load(out_ptr + places[:, None] * head_dim + cols, mask=mask, other=0.0).to(tl.float32)
    lse_ptrs = lse_ptr + tokens * lse_token_stride + heads.to(tl.int64) * lse_head_stride
    highest = tl.load(lse_ptrs, mask=in_range, other=0.0).to(tl.float32) * LOG2E
    total = tl.full([TOKENS * PADDED_GROUP], 1.0, tl.float32)
    own = (tokens * KEY_HEADS + kv_head)[:, None] * head_dim + cols
    step = tl.full([], KEY_HEADS, tl.int64) * n_tokens * head_dim
    for _ in range(n_own):
        key = tl.load(keys_ptr + own, mask=mask, other=0.0)
        value = tl.load(values_ptr + own, mask=mask, other=0.0).to(tl.float32)
        score = _scores(query, key, scale)
        above = tl.maximum(highest, score)
        kept = tl.exp2(highest - above)
        added = tl.exp2(score - above)
        merged = merged * kept[:, None] + value * added[:, None]
        total = total * kept + added
        highest = above
        own += step
    merged = merged / total[:, None]
    ptrs = merged_ptr + places[:, None] * head_dim + cols
    tl.store(ptrs, merged.to(merged_ptr.dtype.element_ty), mask=mask)
    tl.store(total_ptr + places, highest + tl.log2(total), mask=in_range)


@triton.jit(do_not_specialize=["n_tokens", "n_own"])
def _merge_backward_kernel(
    q_ptr, out_ptr, lse_ptr, keys_ptr, values_ptr, total_ptr,  # as in the forward
    d_merged_ptr,  # (T, H, D), contiguous
    dq_ptr, d_out_ptr,  # (T, H, D), contiguous
    d_lse_ptr,  # (T, H) fp32, contiguous
    d_keys_ptr, d_values_ptr,  # (n, T, K, D), contiguous
    q_token_stride, q_head_stride, lse_token_stride, lse_head_stride, head_dim,
    n_tokens, n_own, scale,
    KEY_HEADS: tl.constexpr, GROUP: tl.constexpr, PADDED_GROUP: tl.constexpr, TOKENS: tl.constexpr,
    WIDTH: tl.constexpr,
):  # fmt: skip
    scale = fp32(scale)
    first = tl.program_id(0) // KEY_HEADS * TOKENS
    kv_head = tl.program_id(0) % KEY_HEADS
    tokens, heads, in_range = _rows_of(first, kv_head, n_tokens, TOKENS, GROUP, PADDED_GROUP)
    cols = tl.arange(0, WIDTH)[None, :]
    mask = in_range[:, None] & (cols < head_dim)
    places = tokens * (KEY_HEADS * GROUP) + heads
    tiles = places[:, None] * head_dim + cols
    q_ptrs = q_ptr + (tokens * q_token_stride + heads.to(tl.int64) * q_head_stride)[:, None] + cols
    query = tl.load(q_ptrs, mask=mask, other=0.0).to(tl.float32)
    d_merged = tl.load(d_merged_ptr + tiles, mask=mask, other=0.0).to(tl.float32)
    total = tl.load(total_ptr + places, mask=in_range, other=0.0)
    lse_ptrs = lse_ptr + tokens * lse_token_stride + heads.to(tl.int64) * lse_head_stride
    lse = tl.load(lse_ptrs, mask=in_range, other=0.0).to(tl.float32) * LOG2E
    weight = tl.exp2(lse - total)
    out = tl.load(out_ptr + tiles, mask=mask, other=0.0).to(tl.float32)
    d_weight = tl.sum(d_merged * out, 1)
    delta = weight * d_weight
    own = (tokens * KEY_HEADS + kv_head)[:, None] * head_dim + cols
    step = tl.full([], KEY_HEADS, tl.int64) * n_tokens * head_dim
    for _ in range(n_own):  # not from the merged output, which is rounded
        key = tl.load(keys_ptr + own, mask=mask, other=0.0)
        value = tl.load(values_ptr + own, mask=mask, other=0.0).to(tl.float32)
        delta += tl.exp2(_scores(query, key, scale) - total) * tl.sum(d_merged * value, 1)
        own += step
    tl.store(d_out_ptr + tiles, (weight[:, None] * d_merged).to(d_out_ptr.dtype.element_ty), mask=mask)
    tl.store(d_lse_ptr + places, weight * (d_weight - delta), mask=in_range)
    dq = tl.zeros([TOKENS * PADDED_GROUP, WIDTH], tl.float32)
    own = (tokens * KEY_HEADS + kv_head)[:, None] * head_dim + cols
    own_tokens = (first + tl.arange(0, TOKENS)).to(tl.int64)
    own_mask = (own_tokens < n_tokens)[:, None] & (cols < head_dim)
    summed = (own_tokens * KEY_HEADS + kv_head)[:, None] * head_dim + cols
    for _ in range(n_own):
        key = tl.load(keys_ptr + own, mask=mask, other=0.0).to(tl.float32)
        value = tl.load(values_ptr + own, mask=mask, other=0.0).to(tl.float32)
        weight = tl.exp2(_scores(query, key, scale) - total)
        d_score = weight * (tl.sum(d_merged * value, 1) - delta) * scale
        dq += d_score[:, None] * key
        d_key = tl.sum(tl.reshape(d_score[:, None] * query, (TOKENS, PADDED_GROUP, WIDTH)), 1)
        d_value = tl.sum(tl.reshape(weight[:, None] * d_merged, (TOKENS, PADDED_GROUP, WIDTH)), 1)
        tl.store(d_keys_ptr + summed, d_key.to(d_keys_ptr.dtype.element_ty), mask=own_mask)
        tl.store(d_values_ptr + summed, d_value.to(d_values_ptr.dtype.element_ty), mask=own_mask)
        own += step
        summed += step
    tl.store(dq_ptr + tiles, dq.to(dq_ptr.dtype.element_ty), mask=mask)


class _Launchers(NamedTuple):
    """Launchers of both directions, and the tokens of a program."""

    forward: Launcher
    backward: Launcher
    tokens: int


@cached
def _launchers(heads: int, key_heads: int, head_dim: int, chip: Chip) -> _Launchers:
    group = heads // key_heads
    padded_group = power_of_2(group)
    width = power_of_2(head_dim)
    tokens = own_keys_tokens(padded_group * width)
    constants = {
        "KEY_HEADS": key_heads, "GROUP": group, "PADDED_GROUP": padded_group, "TOKENS": tokens, "WIDTH": width,
        **launch_options(tokens * padded_group * width, chip),
    }  # fmt: skip
    return _Launchers(Launcher(_merge_kernel, constants), Launcher(_merge_backward_kernel, constants), tokens)


class _MergeOwnKeys(torch.autograd.Function):
    @staticmethod
    def forward(ctx, query, out, lse, scale, *own):
        n_tokens, heads, head_dim = query.shape
        n_own = len(own) // 2
        key_heads = own[0].shape[1]
        launchers = _launchers(heads, key_heads, head_dim, chip_of(query.device))
        keys = torch.stack(own[:n_own])
        values = torch.stack(own[n_own:])
        merged = torch.empty_like(out)
        total = lse.new_empty(lse.shape, dtype=torch.float32)
        ctx.grid = (-(-n_tokens // launchers.tokens) * key_heads, 1, 1)
        ctx.integers = (*query.stride()[:2], *lse.stride(), head_dim)
        ctx.numbers = (n_tokens, n_own, scale)
        ctx.launch = launchers.backward
        launchers.forward(ctx.grid, (query, out, lse, keys, values, merged, total), ctx.integers, *ctx.numbers)
        # not the stacked tensors: their parts are kept anyway, by the steps before
        ctx.save_for_backward(query, out, lse, total, *own)
        return merged

    @staticmethod
    @no_double_backward
    def backward(ctx, d_merged):
        query, out, lse, total, *own = ctx.saved_tensors
        n_own = len(own) // 2
        keys = torch.stack(own[:n_own])
        values = torch.stack(own[n_own:])
        dq = query.new_empty(query.shape)
        d_out = torch.empty_like(out)
        d_lse = torch.empty_like(total)
        d_keys = torch.empty_like(keys)
        d_values = torch.empty_like(values)
        tensors = (query, out, lse, keys, values, total, d_merged.contiguous(), dq, d_out, d_lse, d_keys, d_values)
        ctx.launch(ctx.grid, tensors, ctx.integers, *ctx.numbers)
        return dq, d_out, d_lse.to(lse.dtype), None, *d_keys.unbind(), *d_values.unbind()


def merge_own_keys(
    query: torch.Tensor,  # (T, H, D)
    out: torch.Tensor,  # (T, H, D)
    lse: torch.Tensor,  # (T, H), float32
    keys: Sequence[torch.Tensor],  # n of (T, K, D)
    values: Sequence[torch.Tensor],  # n of (T, K, D)
    *,
    scale: float | None = None,
) -> torch.Tensor:  # (T, H, D)
    """Merge attention, of which `out` and `lse` are output and log-sum-exp in nats, with n more keys of each token.

    Token t reads row t of each of `keys`, and no other. Query head h reads key head h // (H / K). scale: of the scores,
    by default D ** -0.5. All inputs get gradients. Without keys `out` is returned.

    Raises ValueError on mismatched shapes or dtypes.
    """
    scale = query.shape[-1] ** -0.5 if scale is None else float(scale)
    query, out, *own = autocast(query, out, *keys, *values)
    values = own[len(keys) :]
    keys = own[: len(keys)]
    _check(query, out, lse, keys, values)
    if not keys or query.numel() == 0 or not runs_triton(query):
        return merge_own_keys_reference(query, out, lse, keys, values, scale=scale)
    query = query if query.stride(-1) == 1 else query.contiguous()
    return _MergeOwnKeys.apply(query, out.contiguous(), lse, scale, *keys, *values)


def _check(
    query: torch.Tensor,
    out: torch.Tensor,
    lse: torch.Tensor,
    keys: Sequence[torch.Tensor],
    values: Sequence[torch.Tensor],
) -> None:
    own = [*keys, *values]
    if out.shape != query.shape or lse.shape != query.shape[:2]:
        shapes = f"query {tuple(query.shape)}, out {tuple(out.shape)} and lse {tuple(lse.shape)}"
        raise ValueError(f"merge_own_keys: {shapes} are not (T, H, D), (T, H, D) and (T, H)")
    if len(keys) != len(values) or len({t.shape for t in own}) > 1:
        raise ValueError(f"merge_own_keys: keys and values are {[tuple(t.shape) for t in own]}; expected equal shapes")
    if not own:
        return
    n_tokens, key_heads, head_dim = own[0].shape
    if (n_tokens, head_dim) != (query.shape[0], query.shape[2]) or key_heads == 0 or query.shape[1] % key_heads:
        raise ValueError(f"merge_own_keys: keys are {tuple(own[0].shape)}, and the query {tuple(query.shape)}")
    if len({t.dtype for t in (query, out, *own)}) > 1:
        raise ValueError(f"merge_own_keys: dtypes differ: {[t.dtype for t in (query, out, *own)]}")
