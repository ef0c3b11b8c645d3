r"""Causal attention within packed documents: no token attends to another document, nor to a later token.

    S_ij = scale q_i · k_j          for start_i <= j <= i (and j > i - window), else -inf
    S    = softcap tanh(S / softcap), if there is a soft cap
    P    = softmax of the rows of S,    out_i = sum_j P_ij v_j

    lse_i = log sum_j exp(S_ij)

    dV = P^T dO      dP = dO V^T      dS_ij = P_ij (dP_ij - sum_d dO_id out_id + dlse_i) (1 - (S_ij / softcap)²)
    dQ = scale dS K      dK = scale dS^T Q

Scores, softmax and sums are fp32; P and dS are rounded to the tensors' dtype for their products. S and P are computed
tile by tile and never stored (FlashAttention-2, Dao, arXiv:2307.08691). A tile of queries may span documents: it starts
with the keys of its first document, so that many short documents cost no more tiles than one long document.

The backward recomputes S and P twice, once for dQ and once for dK and dV. Each gradient is then summed by one program
in one order and rounded once, without atomics and without copies per query head. Kernels:
kernels.py; tiles and the choice of kernels: tiles.py. Long documents have other kernels on Hopper GPUs:
hopper_attention.py.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import NamedTuple

import torch

from ligertune_kernels.autograd import autocast_dtype, no_double_backward, without_autocast
from ligertune_kernels.chips import Chip
from ligertune_kernels.known_results import known_results
from ligertune_kernels.launcher import Launcher, cached, chip_of
from ligertune_kernels.ops.attention import hopper_attention, tiles
from ligertune_kernels.ops.attention.hopper_attention import AttentionTerms, HopperInputs, delta_buffer
from ligertune_kernels.ops.attention.kernels import attention_dkdv_kernel, attention_dq_kernel, attention_forward_kernel
from ligertune_kernels.ops.attention.tiles import Tile, attention_tiles, padded_head_dim


class Documents(NamedTuple):
    """First and last places of packed documents."""

    starts: torch.Tensor  # (T,) int32: index of the first token of each token's document
    ends: torch.Tensor  # (T,) int32: index after the last token of each token's document
    # The number of documents selects the kernels for long or for short ones on Hopper GPUs; without it, those for short
    # ones run. It is an int: to read it from a tensor, the host would wait for the GPU.
    count: int | None = None


def document_attention_reference(
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    documents: Documents,
    *,
    scale: float | None = None,
    window: int | None = None,
    softcap: float | None = None,
) -> torch.Tensor:
    """Compute `document_attention` in plain torch, with the scores (H, L, L) of one document at a time in memory.

    The softmax's weights are rounded to the tensors' dtype, as the kernels round them.
    """
    terms = AttentionTerms(_scale(query, scale), window, softcap)
    return _attend_documents(query, key, value, documents, terms)[0]


def _attend_documents(
    query: torch.Tensor,  # (T, H, D)
    key: torch.Tensor,  # (T, K, D)
    value: torch.Tensor,  # (T, K, D)
    documents: Documents,
    terms: AttentionTerms,
) -> tuple[torch.Tensor, torch.Tensor | None]:
    """Return the output (T, H, D), and with `terms.with_lse` the log-sum-exp of its scores (T, H), in plain torch."""
    outputs = []
    sums = []
    for begin, end in _bounds(documents.starts):
        tensors = (t[begin:end] for t in (query, key, value))
        out, scores = _attend_document(*tensors, documents.starts[begin:end] - begin, terms)
        outputs.append(out)
        if terms.with_lse:
            sums.append(scores.logsumexp(-1).t())
    return torch.cat(outputs), torch.cat(sums) if terms.with_lse else None


def _bounds(starts: torch.Tensor) -> list[tuple[int, int]]:
    """Return start and end of each document; the whole row as one where values cannot be read, or if it is empty."""
    if starts.is_meta or torch.compiler.is_compiling() or len(starts) == 0:
        return [(0, len(starts))]
    begins = starts.unique_consecutive().tolist()
    return list(zip(begins, [*begins[1:], len(starts)], strict=True))


def _attend_document(
    query: torch.Tensor,  # (L, H, D)
    key: torch.Tensor,  # (L, K, D)
    value: torch.Tensor,  # (L, K, D)
    starts: torch.Tensor,  # (L,)
    terms: AttentionTerms,
) -> tuple[torch.Tensor, torch.Tensor]:
    """Return (L, H, D), contiguous, and the scores (H, L, L); starts: the first token that each token attends to."""
    scale, window, softcap, _ = terms
    wide = torch.promote_types(query.dtype, torch.float32)
    group = query.shape[1] // key.shape[1]
    q, k, v = (t.to(wide).transpose(0, 1) for t in (query, key, value))
    k = k.repeat_interleave(group, 0)
    v = v.repeat_interleave(group, 0)
    scores = q @ k.transpose(1, 2) * scale
    if softcap is not None:
        scores = softcap * torch.tanh(scores / softcap)
    rows = torch.arange(query.shape[0], device=query.device)[:, None]
    cols = rows.T
    visible = (cols <= rows) & (cols >= starts[:, None])
    if window is not None:
        visible = visible & (cols > rows - window)
    scores = scores.masked_fill(~visible, float("-inf"))
    weights = torch.softmax(scores, -1).to(query.dtype)
    out = (weights.to(wide) @ v).transpose(0, 1).to(query.dtype).contiguous()
    return out, scores


class _Launchers(NamedTuple):
    """The launchers of the three kernels, and the tokens of a program of each."""

    forward: tuple[Launcher, int]
    dq: tuple[Launcher, int]
    dkdv: tuple[Launcher, int]


@cached
def _launchers(
    heads: int,
    key_heads: int,
    head_dim: int,
    dtype: torch.dtype,
    window: int,
    has_cap: bool,
    has_d_lse: bool,
    chip: Chip,
) -> _Launchers:
    chosen = attention_tiles(head_dim, dtype.itemsize, chip, has_cap=has_cap)
    width = padded_head_dim(head_dim)
    shared = {
        "HEADS": heads, "GROUP": heads // key_heads, "WINDOW": window, "HAS_CAP": has_cap,
        "WIDTH": width, "FITS": width == head_dim,
    }  # fmt: skip

    def launcher(kernel: Callable, tile: Tile, **more: bool) -> Launcher:
        sizes = {"ROWS": tile.rows, "COLS": tile.cols, "num_warps": tile.warps, "num_stages": tile.stages}
        return Launcher(kernel, shared | sizes | more)

    return _Launchers(
        (launcher(attention_forward_kernel, chosen.forward), chosen.forward.rows),
        (launcher(attention_dq_kernel, chosen.dq, HAS_D_LSE=has_d_lse), chosen.dq.rows),
        (launcher(attention_dkdv_kernel, chosen.dkdv), chosen.dkdv.cols),
    )


def _integers(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> tuple[int, ...]:
    """Return strides of tokens and heads, and the head's width: what Triton specialises on."""
    return (*(stride for t in (q, k, v) for stride in t.stride()[:2]), q.shape[-1])


class _Attention(torch.autograd.Function):
    """Return out (T, H, D), and with `terms.with_lse` also the log2-sum-exp2 of each row's scores, (H, T) in fp32."""

    @staticmethod
    def forward(ctx, q, k, v, starts, ends, terms, known):
        scale, window, softcap, with_lse = terms
        n_tokens, heads, _ = q.shape
        key_heads, head_dim = k.shape[1:]
        has_cap = softcap is not None
        launchers = _launchers(heads, key_heads, head_dim, q.dtype, window or 0, has_cap, with_lse, chip_of(q.device))
        others = n_tokens, scale, softcap or 1.0

        def computed() -> tuple[torch.Tensor, ...]:
            out = q.new_empty(q.shape)
            lse = q.new_empty((heads, n_tokens), dtype=torch.float32)
            launch, rows = launchers.forward
            launch((-(-n_tokens // rows) * heads, 1, 1), (q, k, v, starts, out, lse), _integers(q, k, v), *others)
            return out, lse

        out, lse = computed() if known is None else known.result(computed)
        ctx.save_for_backward(q, k, v, starts, ends, out, lse)
        ctx.launchers = launchers
        ctx.others = others
        return (out, lse) if with_lse else out

    @staticmethod
    @no_double_backward
    def backward(ctx, d_out, d_lse=None):
        q, k, v, starts, ends, out, lse = ctx.saved_tensors
        n_tokens, heads, _ = q.shape
        key_heads = k.shape[1]
        d_out = d_out.contiguous()
        delta = delta_buffer(lse, d_lse)
        dq = q.new_empty(q.shape)
        dk = k.new_empty(k.shape)
        dv = v.new_empty(v.shape)
        integers = _integers(q, k, v)
        # dq first: it writes delta, which dkdv reads.
        launch, rows = ctx.launchers.dq
        tensors = q, k, v, starts, out, d_out, lse, delta, dq
        launch((-(-n_tokens // rows) * heads, 1, 1), tensors, integers, *ctx.others)
        # A program has a tile of keys of one key head, and adds up the query heads that share it.
        launch, cols = ctx.launchers.dkdv
        tensors = q, k, v, starts, ends, d_out, lse, delta, dk, dv
        launch((-(-n_tokens // cols) * key_heads, 1, 1), tensors, integers, *ctx.others)
        return dq, dk, dv, *(None,) * 4


class _HopperAttention(torch.autograd.Function):
    """As `_Attention`; lse is (H, T rounded up to 128)."""

    @staticmethod
    def forward(ctx, q, k, v, starts, ends, terms, known):
        def computed() -> tuple[torch.Tensor, ...]:
            return hopper_attention.forward(q, k, v, starts, terms)

        out, lse = computed() if known is None else known.result(computed)
        ctx.save_for_backward(q, k, v, starts, ends, out, lse)
        ctx.terms = terms
        return (out, lse) if terms.with_lse else out

    @staticmethod
    @no_double_backward
    def backward(ctx, d_out, d_lse=None):
        kept = HopperInputs(*ctx.saved_tensors)
        grads = hopper_attention.backward(kept, d_out.contiguous(), ctx.terms, d_lse)
        return *grads, *(None,) * 4


def document_attention(
    query: torch.Tensor,  # (T, H, D)
    key: torch.Tensor,  # (T, K, D), K divides H: neighbouring query heads share a key head
    value: torch.Tensor,  # (T, K, D)
    documents: Documents,
    *,
    scale: float | None = None,
    window: int | None = None,
    softcap: float | None = None,
) -> torch.Tensor:  # (T, H, D), contiguous
    """Compute causal attention within packed documents. Deterministic.

    scale: factor of the products, by default 1 / sqrt(D). window: how many tokens back a token attends to, itself
    included. softcap: bound of the scores (Gemma 2). The number of documents does not change what is computed. Under
    autocast all tensors are converted to its dtype, as in torch's attention. The reference runs for heads wider
    than 256, for heads wider than 64 on RDNA and in float32, and for all heads in float32 on RDNA.

    Raises ValueError on mismatched shapes or dtypes, and on a scale, window or softcap that is not positive.
    """
    return _attention(query, key, value, documents, AttentionTerms(_scale(query, scale), window, softcap))[0]


def document_attention_with_lse(
    query: torch.Tensor,  # (T, H, D)
    key: torch.Tensor,  # (T, K, D)
    value: torch.Tensor,  # (T, K, D)
    documents: Documents,
    *,
    scale: float | None = None,
    window: int | None = None,
    softcap: float | None = None,
) -> tuple[torch.Tensor, torch.Tensor]:
    """Compute `document_attention` (T, H, D), and the log-sum-exp of each token's scores (T, H) in float32, in nats.

    Both have gradients, so that attention to further keys can be merged with this one. Raises ValueError as
    `document_attention` does.
    """
    terms = AttentionTerms(_scale(query, scale), window, softcap, with_lse=True)
    return _attention(query, key, value, documents, terms)


def _scale(query: torch.Tensor, scale: float | None) -> float:
    return query.shape[-1] ** -0.5 if scale is None else float(scale)


def _attention(
    query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, documents: Documents, terms: AttentionTerms
) -> tuple[torch.Tensor, torch.Tensor | None]:
    """Return the output, and the log-sum-exp if it is asked for: as an output of autograd it costs host time."""
    dtype = autocast_dtype(query.device)
    if dtype is not None and query.dtype is not torch.float64:  # RoPE may leave float32 queries and keys
        query, key, value = (t.to(dtype) for t in (query, key, value))
    _check(query, key, value, documents, terms)
    if query.numel() == 0 or not tiles.runs_kernels(query, has_cap=terms.softcap is not None):
        with without_autocast(query.device):
            return _attend_documents(query, key, value, documents, terms)
    # Strides of tokens and heads are arguments of the kernels; columns are neighbours.
    query, key, value = (t if t.stride(-1) == 1 else t.contiguous() for t in (query, key, value))
    on_hopper = tiles.runs_hopper_kernels(query, key, value, chip_of(query.device), documents.count)
    function = _HopperAttention if on_hopper else _Attention
    known = known_results()
    found = function.apply(query, key, value, documents.starts, documents.ends, terms, known)
    out, bits = found if terms.with_lse else (found, None)
    if known is not None:
        known.attended(out)
    return out, None if bits is None else bits[:, : len(query)].t() * math.log(2)


def document_attention_memory(n_tokens: int, heads: int, key_heads: int, head_dim: int) -> int:
    """Return the bytes of the temporary fp32 sums of dq in the backward of long documents on a Hopper GPU."""
    if head_dim not in tiles.HOPPER_WIDTHS:
        return 0
    size = tiles.sums_bytes(n_tokens, heads, key_heads, head_dim)
    return size if size <= tiles.MAX_SUMS else 0


def _check(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, documents: Documents, terms: AttentionTerms) -> None:
    scale, window, softcap, _ = terms
    n_tokens, heads, head_dim = q.shape
    if k.shape != v.shape or (k.shape[0], k.shape[2]) != (n_tokens, head_dim) or k.shape[1] == 0 or heads % k.shape[1]:
        raise ValueError(
            f"document_attention: query {tuple(q.shape)}, key {tuple(k.shape)}, value {tuple(v.shape)}; expected "
            "(T, H, D) and twice (T, K, D) where K divides H"
        )
    if not (q.dtype == k.dtype == v.dtype):
        raise ValueError(f"document_attention: query is {q.dtype}, key {k.dtype}, value {v.dtype}; expected one dtype")
    for name, places in (("starts", documents.starts), ("ends", documents.ends)):
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
