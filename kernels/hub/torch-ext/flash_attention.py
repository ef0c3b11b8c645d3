"""`document_attention` under the names of FlashAttention, for transformers' `attn_implementation="org/repo"`.

Causal self-attention for training and for the first forward of a prompt. Not for generation with a cache: there the
keys outnumber the queries, which raises ValueError.
"""

import torch

from .ops.attention.document_attention import Documents, document_attention


def flash_attn_varlen_func(
    q: torch.Tensor,  # (T, H, D)
    k: torch.Tensor,  # (T, K, D), K divides H
    v: torch.Tensor,  # (T, K, D)
    cu_seqlens_q: torch.Tensor,  # (documents + 1,) int32: index of each document's first token, then T
    cu_seqlens_k: torch.Tensor,  # equal to cu_seqlens_q
    max_seqlen_q: int | None = None,  # not needed
    max_seqlen_k: int | None = None,
    dropout_p: float = 0.0,
    softmax_scale: float | None = None,
    causal: bool = False,
    window_size: tuple[int, int] = (-1, -1),
    softcap: float = 0.0,
    deterministic: bool = True,
    s_aux: torch.Tensor | None = None,  # attention sinks; transformers drops them where a function does not take them
) -> torch.Tensor:  # (T, H, D)
    """Compute causal attention within packed documents. Deterministic, whatever `deterministic` is.

    window_size: tokens to the left that a token attends to besides itself, -1 for all; the right side is causal's.
    Raises ValueError for dropout, attention sinks, non-causal attention, and keys of other tokens than the queries'.
    """
    _check("flash_attn_varlen_func", q, k, dropout_p, causal, s_aux)
    if cu_seqlens_q.shape != cu_seqlens_k.shape:
        raise ValueError(
            f"flash_attn_varlen_func: cu_seqlens_q is {tuple(cu_seqlens_q.shape)}, cu_seqlens_k "
            f"{tuple(cu_seqlens_k.shape)}; expected the same documents"
        )
    n_tokens = q.shape[0]
    tokens = torch.arange(n_tokens, device=q.device, dtype=cu_seqlens_q.dtype)
    document = torch.searchsorted(cu_seqlens_q, tokens, right=True)
    edges = torch.cat((cu_seqlens_q, cu_seqlens_q.new_full((1,), n_tokens)))  # tokens behind the last document are one
    documents = Documents(edges[document - 1].int(), edges[document].int(), len(cu_seqlens_q) - 1)
    return document_attention(q, k, v, documents, **_options(softmax_scale, window_size, softcap))


def flash_attn_func(
    q: torch.Tensor,  # (B, T, H, D)
    k: torch.Tensor,  # (B, T, K, D), K divides H
    v: torch.Tensor,  # (B, T, K, D)
    dropout_p: float = 0.0,
    softmax_scale: float | None = None,
    causal: bool = False,
    window_size: tuple[int, int] = (-1, -1),
    softcap: float = 0.0,
    deterministic: bool = True,
    s_aux: torch.Tensor | None = None,  # attention sinks; transformers drops them where a function does not take them
) -> torch.Tensor:  # (B, T, H, D)
    """Compute causal attention within each row of a batch; arguments and errors as of `flash_attn_varlen_func`."""
    _check("flash_attn_func", q, k, dropout_p, causal, s_aux)
    n_rows, length = q.shape[:2]
    starts = torch.arange(n_rows, device=q.device, dtype=torch.int32).repeat_interleave(length) * length
    flat = (t.flatten(0, 1) for t in (q, k, v))
    documents = Documents(starts, starts + length, n_rows)
    out = document_attention(*flat, documents, **_options(softmax_scale, window_size, softcap))
    return out.view(q.shape)


def _check(
    name: str, q: torch.Tensor, k: torch.Tensor, dropout_p: float, causal: bool, s_aux: torch.Tensor | None
) -> None:
    if s_aux is not None:
        raise ValueError(f"{name}: these kernels have no attention sinks: use attn_implementation='eager'")
    if dropout_p:
        raise ValueError(f"{name}: dropout_p is {dropout_p}; expected 0: these kernels have no dropout")
    if not causal:
        raise ValueError(f"{name}: causal is False; these kernels compute causal attention: use sdpa instead")
    if q.shape[:-2] != k.shape[:-2]:
        raise ValueError(
            f"{name}: q has {tuple(q.shape[:-2])} tokens and k {tuple(k.shape[:-2])}; expected the same tokens: "
            "generate with attn_implementation='sdpa'"
        )


def _options(scale: float | None, window_size: tuple[int, int], softcap: float | None) -> dict[str, float | None]:
    return {"scale": scale, "window": window_size[0] + 1 if window_size[0] >= 0 else None, "softcap": softcap or None}
