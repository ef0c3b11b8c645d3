r"""Causal attention in a row of documents: no token sees another document, nor what comes behind it.

    S_ij = scale q_i · k_j          for start_i <= j <= i (and j > i - window), else -inf
    S    = softcap tanh(S / softcap), where there is one
    P    = softmax of the rows of S,    out_i = sum_j P_ij v_j

    dV = P^T dO      dP = dO V^T      dS_ij = P_ij (dP_ij - sum_d dO_id out_id) (1 - (S_ij / softcap)²)
    dQ = scale dS K      dK = scale dS^T Q

S and P are made tile by tile and never stored (FlashAttention-2, Dao, arXiv:2307.08691). A tile of queries may lie
across documents: it begins with the keys of its first one, so that many short documents cost no more tiles than one.
What the backward makes again, it makes twice, once for the gradient of the queries and once for those of keys and
values: each is then summed up by one program in one order, with one rounding at the end, and neither atomics nor copies
for each query head are needed.
"""

from __future__ import annotations

import torch

from ligertune_kernels.autocast import autocast_dtype, without_autocast
from ligertune_kernels.autograd import no_double_backward
from ligertune_kernels.chips import Chip
from ligertune_kernels.launcher import Launcher, cached, chip_of, runs_triton
from ligertune_kernels.ops.attention._document_attention_kernels import (
    _attention_forward_kernel,
    _attention_keys_kernel,
    _attention_queries_kernel,
)
from ligertune_kernels.shortcuts import fast_apply


def document_attention_reference(
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    starts: torch.Tensor,
    ends: torch.Tensor,
    *,
    scale: float | None = None,
    window: int | None = None,
    softcap: float | None = None,
) -> torch.Tensor:
    """The same in plain torch, which stores the scores (H, L, L) of a document; weights are rounded to the dtype."""
    scale = query.shape[-1] ** -0.5 if scale is None else scale
    out = [
        _attend(*(t[begin:end] for t in (query, key, value)), starts[begin:end] - begin, scale, window, softcap)
        for begin, end in _documents(starts)
    ]
    return torch.cat(out)


def _documents(starts: torch.Tensor) -> list[tuple[int, int]]:
    """Where each begins and ends; all of the row as one where values cannot be asked for. A row of no tokens is one."""
    if starts.is_meta or torch.compiler.is_compiling() or len(starts) == 0:
        return [(0, len(starts))]
    begins = starts.unique_consecutive().tolist()
    return list(zip(begins, [*begins[1:], len(starts)], strict=True))


def _attend(
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    starts: torch.Tensor,
    scale: float,
    window: int | None,
    softcap: float | None,
) -> torch.Tensor:
    """(L, H, D), (L, K, D) twice -> (L, H, D), contiguous; starts: from where on each token sees."""
    wide = torch.promote_types(query.dtype, torch.float32)
    group = query.shape[1] // key.shape[1]
    q, k, v = (t.to(wide).transpose(0, 1) for t in (query, key, value))
    k, v = k.repeat_interleave(group, 0), v.repeat_interleave(group, 0)
    scores = q @ k.transpose(1, 2) * scale
    if softcap is not None:
        scores = softcap * torch.tanh(scores / softcap)
    rows = torch.arange(query.shape[0], device=query.device)[:, None]
    cols = rows.T
    seen = (cols <= rows) & (cols >= starts[:, None])
    if window is not None:
        seen = seen & (cols > rows - window)
    weights = torch.softmax(scores.masked_fill(~seen, float("-inf")), -1).to(query.dtype)
    return (weights.to(wide) @ v).transpose(0, 1).to(query.dtype).contiguous()


@cached
def _launchers(
    heads: int, key_heads: int, head_dim: int, dtype: torch.dtype, window: int, has_cap: bool, chip: Chip
) -> tuple[tuple[Launcher, int], ...]:
    """The three kernels, and how many tokens a program of each has."""
    width = _width(head_dim)
    shared = {
        "HEADS": heads, "GROUP": heads // key_heads, "WINDOW": window, "HAS_CAP": has_cap,
        "WIDTH": width, "EVEN": width == head_dim,
    }  # fmt: skip
    kernels = _attention_forward_kernel, _attention_queries_kernel, _attention_keys_kernel
    made = []
    for kernel, (rows, cols, warps, stages) in zip(kernels, _tiles(head_dim, has_cap, dtype, chip), strict=True):
        constants = shared | {"ROWS": rows, "COLS": cols, "num_warps": warps, "num_stages": stages}
        made.append((Launcher(kernel, constants), cols if kernel is _attention_keys_kernel else rows))
    return tuple(made)


# By the width of a head: queries and keys of a tile, warps and stages of the forward, the queries' gradient, the keys'.
# Hopper's took about the least time of those that spill no register on an H100, of three to five for each, over rows of
# 160 documents of 100 tokens up to one of 16,384. No other was chosen by its time; all fit and spill none (triton 3.7;
# with 3.6, by which they were timed, the keys' of 128 and 256 spill 8 bytes a thread).
_HOPPER = {
    64: ((64, 64, 4, 3), (64, 64, 4, 3), (64, 64, 4, 3)),
    128: ((64, 64, 4, 3), (64, 64, 4, 2), (32, 64, 4, 3)),
    256: ((128, 32, 8, 3), (128, 32, 8, 2), (16, 32, 4, 2)),
}
_HOPPER_SHORT = {  # of registers: a cap's slope, a mask of columns
    64: (_HOPPER[64][0], (64, 64, 4, 2), (32, 64, 4, 3)),
    128: (_HOPPER[128][0], (64, 32, 4, 3), (32, 64, 8, 3)),
    256: (_HOPPER[256][0], (128, 32, 8, 2), (16, 32, 8, 2)),
}
_NVIDIA = {
    64: ((64, 64, 4, 3), (64, 32, 4, 3), (32, 64, 4, 2)),
    128: ((64, 32, 4, 2), (64, 32, 4, 3), (32, 64, 8, 3)),
    256: ((64, 32, 8, 2), (32, 32, 8, 1), (16, 64, 8, 2)),
}
_CDNA = {
    64: ((32, 16, 4, 1), (32, 16, 4, 1), (16, 32, 4, 1)),
    128: ((32, 16, 4, 1), (32, 16, 4, 1), (16, 32, 4, 1)),
    256: ((32, 16, 4, 1), (64, 16, 4, 2), (16, 32, 4, 2)),
}
_RDNA = {64: ((64, 32, 4, 2), (32, 16, 4, 1), (16, 32, 4, 1))}  # wider heads spill whatever the tile
_ANY = ((16, 16, 4, 1),) * 3  # float32, whose products take a thread's registers; and under the interpreter


@cached
def _tiles(
    head_dim: int, has_cap: bool, dtype: torch.dtype, chip: Chip
) -> tuple[tuple[int, int, int, int], ...] | None:
    """None where the chip has no room for such a head."""
    width = _width(head_dim)
    if chip.vendor == "interpreter":
        return _ANY
    if dtype is torch.float32:
        return _ANY if width <= 64 and not (chip.vendor == "amd" and chip.warp_size == 32) else None
    if chip.vendor == "amd":
        return (_CDNA if chip.warp_size > 32 else _RDNA).get(max(64, width))
    if chip.arch not in ("sm90", "sm100", "sm103"):
        return _NVIDIA.get(max(64, width))
    return (_HOPPER_SHORT if has_cap or head_dim < width else _HOPPER).get(max(64, width))


def _width(head_dim: int) -> int:
    return max(32, 1 << (head_dim - 1).bit_length())


def _numbers(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> tuple[int, ...]:
    return (*(stride for t in (q, k, v) for stride in t.stride()[:2]), q.shape[-1])


class _Attention(torch.autograd.Function):
    @staticmethod
    def forward(ctx, q, k, v, starts, ends, scale, window, softcap):
        n_tokens, heads, _ = q.shape
        launchers = _launchers(
            *q.shape[1:2], *k.shape[1:], q.dtype, window or 0, softcap is not None, chip_of(q.device)
        )
        out, lse = q.new_empty(q.shape), q.new_empty((heads, n_tokens), dtype=torch.float32)
        launch, rows = launchers[0]
        others = n_tokens, scale, softcap or 1.0
        launch((-(-n_tokens // rows) * heads, 1, 1), (q, k, v, starts, out, lse), _numbers(q, k, v), *others)
        ctx.save_for_backward(q, k, v, starts, ends, out, lse)
        ctx.launchers, ctx.others = launchers, others
        return out

    @staticmethod
    @no_double_backward
    def backward(ctx, grad):
        q, k, v, starts, ends, out, lse = ctx.saved_tensors
        (n_tokens, heads, _), key_heads = q.shape, k.shape[1]
        grad, delta = grad.contiguous(), torch.empty_like(lse)
        dq, dk, dv = q.new_empty(q.shape), k.new_empty(k.shape), v.new_empty(v.shape)
        numbers = _numbers(q, k, v)
        launch, rows = ctx.launchers[1]
        tensors = q, k, v, starts, out, grad, lse, delta, dq
        launch((-(-n_tokens // rows) * heads, 1, 1), tensors, numbers, *ctx.others)
        launch, cols = ctx.launchers[2]
        tensors = q, k, v, starts, ends, grad, lse, delta, dk, dv
        launch((-(-n_tokens // cols) * key_heads, 1, 1), tensors, numbers, *ctx.others)
        return dq, dk, dv, *(None,) * 5


_apply = fast_apply(_Attention, 5)


def document_attention(
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    starts: torch.Tensor,
    ends: torch.Tensor,
    *,
    scale: float | None = None,
    window: int | None = None,
    softcap: float | None = None,
) -> torch.Tensor:
    """query (T, H, D), key and value (T, K, D) of a row's tokens -> (T, H, D), contiguous.

    starts, ends (T,), int32: where each token's document begins, and the place behind its last token. K divides H:
    neighbouring query heads share a key head. scale: of the products, by default 1 / sqrt(D). window: how many tokens
    back a token sees, itself included; softcap: the bound of a score (Gemma 2). All of one dtype; under
    autocast of its, as torch's attention. Heads wider than 256 take the reference, as do those wider than 64 on RDNA
    and in float32, and all in float32 on RDNA.
    """
    scale = query.shape[-1] ** -0.5 if scale is None else float(scale)
    dtype = autocast_dtype(query.device)
    if dtype is not None and query.dtype is not torch.float64:  # which rotation may have left in float32, but no value
        query, key, value = (t.to(dtype) for t in (query, key, value))
    _check(query, key, value, starts, ends, scale, window, softcap)
    if query.numel() == 0 or not _runs(query, softcap):
        with without_autocast(query.device):
            return document_attention_reference(
                query, key, value, starts, ends, scale=scale, window=window, softcap=softcap
            )
    query, key, value = (t if t.stride(-1) == 1 else t.contiguous() for t in (query, key, value))
    return _apply(query, key, value, starts, ends, scale, window, softcap)


def _runs(query: torch.Tensor, softcap: float | None) -> bool:
    if not runs_triton(query):
        return False
    return _tiles(query.shape[-1], softcap is not None, query.dtype, chip_of(query.device)) is not None


def _check(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    starts: torch.Tensor,
    ends: torch.Tensor,
    scale: float,
    window: int | None,
    softcap: float | None,
) -> None:
    n_tokens, heads, head_dim = q.shape
    if k.shape != v.shape or (k.shape[0], k.shape[2]) != (n_tokens, head_dim) or k.shape[1] == 0 or heads % k.shape[1]:
        raise ValueError(
            f"document_attention: query {tuple(q.shape)}, key {tuple(k.shape)}, value {tuple(v.shape)}; expected "
            "(T, H, D) and twice (T, K, D) where K divides H"
        )
    if not (q.dtype == k.dtype == v.dtype):
        raise ValueError(f"document_attention: query is {q.dtype}, key {k.dtype}, value {v.dtype}; expected one dtype")
    for name, places in (("starts", starts), ("ends", ends)):
        if places.shape != (n_tokens,) or places.dtype is not torch.int32 or not places.is_contiguous():
            raise ValueError(
                f"document_attention: {name} is {places.dtype} {tuple(places.shape)}; expected int32 ({n_tokens},)"
            )
    if scale <= 0:
        raise ValueError(f"document_attention: scale is {scale}; expected a positive number")
    if window is not None and window < 1:
        raise ValueError(f"document_attention: window is {window}; expected at least 1")
    if softcap is not None and softcap <= 0:
        raise ValueError(f"document_attention: softcap is {softcap}; expected a positive number")
