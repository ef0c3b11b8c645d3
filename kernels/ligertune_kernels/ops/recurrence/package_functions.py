"""The ops under the names and arguments of the packages causal-conv1d and flash-linear-attention.

transformers' hybrid models call these four functions and take them from a package where it is installed. Documents of a
packed row come in the packages' own arguments, or as `document_places`, which needs no search for them:

    seq_idx           (1, T): a number for each token, which changes with each document
    cu_seqlens        (documents + 1,): the places where documents begin, then the number of tokens
    document_places   (2, T) int32: the first token, and the one after the last, of each token's document

Other arguments of the packages change how they compute, and are accepted without effect where transformers passes them.
"""

from __future__ import annotations

from typing import Any

import torch

from ligertune_kernels.ops.attention.document_attention import Documents
from ligertune_kernels.ops.recurrence import decode
from ligertune_kernels.ops.recurrence.causal_conv1d import Activation, causal_conv1d
from ligertune_kernels.ops.recurrence.gated_delta_rule import gated_delta_rule

ACTIVATIONS: dict[str | None, Activation | None] = {None: None, "silu": "silu", "swish": "silu"}


def causal_conv1d_fn(
    x: torch.Tensor,  # (B, C, T)
    weight: torch.Tensor,  # (C, W)
    bias: torch.Tensor | None = None,  # (C,)
    seq_idx: torch.Tensor | None = None,
    *,
    activation: str | None = None,
    document_places: torch.Tensor | None = None,
    **kwargs: Any,
) -> torch.Tensor:  # (B, C, T)
    """Convolve within documents, as causal_conv1d_fn of causal-conv1d. Raises ValueError for other activations."""
    # transformers' models pass on what attention gets, and not always seq_idx
    documents = _documents(x.shape[-1], document_places, kwargs.get("cu_seq_lens_q"), seq_idx)
    return causal_conv1d(x, weight, bias, activation=_activation(activation), documents=documents)


def causal_conv1d_update(
    x: torch.Tensor,  # (B, C) or (B, C, L)
    conv_state: torch.Tensor,  # (B, C, S), in place
    weight: torch.Tensor,  # (C, W)
    bias: torch.Tensor | None = None,  # (C,)
    activation: str | None = None,
) -> torch.Tensor:  # as x
    """Convolve the next tokens, as causal_conv1d_update of causal-conv1d."""
    tokens = x[..., None] if x.ndim == 2 else x
    y = decode.causal_conv1d_step(tokens, conv_state, weight, bias, activation=_activation(activation))
    return y[..., 0] if x.ndim == 2 else y


def chunk_gated_delta_rule(
    query: torch.Tensor,  # (B, T, H, K)
    key: torch.Tensor,  # (B, T, H, K)
    value: torch.Tensor,  # (B, T, X, V)
    g: torch.Tensor,  # (B, T, X)
    beta: torch.Tensor,  # (B, T, X)
    scale: float | None = None,
    initial_state: torch.Tensor | None = None,  # (B, X, K, V)
    output_final_state: bool = False,
    use_qk_l2norm_in_kernel: bool = False,
    cu_seqlens: torch.Tensor | None = None,
    *,
    document_places: torch.Tensor | None = None,
    **kwargs: Any,
) -> tuple[torch.Tensor, torch.Tensor | None]:  # (B, T, X, V), (B, X, K, V) float32
    """Compute the gated delta rule within documents, as chunk_gated_delta_rule of flash-linear-attention.

    Raises ValueError for states of packed documents.
    """
    return gated_delta_rule(
        query,
        key,
        value,
        g,
        beta,
        scale=scale,
        l2_norm=use_qk_l2norm_in_kernel,
        initial_state=initial_state,
        output_final_state=output_final_state,
        documents=_documents(query.shape[1], document_places, cu_seqlens, None),
    )


def fused_recurrent_gated_delta_rule(
    query: torch.Tensor,  # (B, T, H, K)
    key: torch.Tensor,  # (B, T, H, K)
    value: torch.Tensor,  # (B, T, X, V)
    g: torch.Tensor,  # (B, T, X)
    beta: torch.Tensor,  # (B, T, X)
    scale: float | None = None,
    initial_state: torch.Tensor | None = None,  # (B, X, K, V)
    output_final_state: bool = False,
    use_qk_l2norm_in_kernel: bool = False,
    cu_seqlens: torch.Tensor | None = None,
    **kwargs: Any,
) -> tuple[torch.Tensor, torch.Tensor | None]:  # (B, T, X, V), (B, X, K, V) float32
    """Compute the gated delta rule of few tokens, as fused_recurrent_gated_delta_rule of flash-linear-attention.

    With gradients or documents, chunks compute the same.
    """
    tensors = (query, key, value, g, beta)
    needs_grad = torch.is_grad_enabled() and any(t.requires_grad for t in tensors)
    if needs_grad or cu_seqlens is not None or kwargs.get("document_places") is not None:
        return chunk_gated_delta_rule(
            *tensors, scale, initial_state, output_final_state, use_qk_l2norm_in_kernel, cu_seqlens, **kwargs
        )
    out, state = decode.gated_delta_rule_step(
        *tensors, scale=scale, l2_norm=use_qk_l2norm_in_kernel, initial_state=initial_state
    )
    return out, state if output_final_state else None


def _activation(name: str | None) -> Activation | None:
    if name not in ACTIVATIONS:
        raise ValueError(f"causal_conv1d: activation is {name!r}; expected silu, swish or None")
    return ACTIVATIONS[name]


def _documents(
    n_tokens: int, places: torch.Tensor | None, cu_seqlens: torch.Tensor | None, seq_idx: torch.Tensor | None
) -> Documents | None:
    """Return the documents of a packed row by whichever argument tells of them; None without any.

    Nothing waits for the device: the number of documents is not read.
    """
    if places is not None:
        return Documents(places[0], places[1])
    if seq_idx is not None:
        tokens = torch.arange(n_tokens, dtype=torch.int32, device=seq_idx.device)
        changes = seq_idx[0, 1:] != seq_idx[0, :-1]
        starts = tokens.clone()
        starts[1:] *= changes
        ends = tokens + 1
        ends[:-1] = torch.where(changes, ends[:-1], n_tokens)
        last_start = starts.cummax(0).values
        return Documents(last_start, ends.flip(0).cummin(0).values.flip(0))
    if cu_seqlens is None:
        return None
    tokens = torch.arange(n_tokens, dtype=cu_seqlens.dtype, device=cu_seqlens.device)
    after = torch.searchsorted(cu_seqlens, tokens, right=True)
    return Documents(cu_seqlens[after - 1].int(), cu_seqlens[after].int())
