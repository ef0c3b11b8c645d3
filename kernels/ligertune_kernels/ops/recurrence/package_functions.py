"""The ops under the names and arguments of the packages causal-conv1d and flash-linear-attention.

transformers' hybrid models call these four functions and take them from a package where it is installed. Documents of a
packed row come in the packages' own arguments, or as `document_places`, which needs no search for them:

    seq_idx           (1, T): a number for each token, which changes with each document
    cu_seqlens        (documents + 1,): the places where documents begin, then the number of tokens
    document_places   (2, T) int32: the first token, and the one after the last, of each token's document

The two functions of the rule take by name:

    initial_state             (B, X, K, V)
    output_final_state        bool
    use_qk_l2norm_in_kernel   bool
    scale                     factor of the outputs, by default 1 / sqrt(K)

Other arguments of the packages change how they compute, and are accepted without effect where transformers passes them.
"""

from __future__ import annotations

from typing import Any

import torch

from ligertune_kernels.ops.attention.document_attention import Documents
from ligertune_kernels.ops.recurrence import decode
from ligertune_kernels.ops.recurrence.causal_conv1d import Activation, causal_conv1d
from ligertune_kernels.ops.recurrence.gated_delta_rule import gated_delta_rule, gated_delta_rule_with_states

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
    **options: Any,
) -> tuple[torch.Tensor, torch.Tensor | None]:  # (B, T, X, V), (B, X, K, V) float32
    """Compute the gated delta rule within documents, as chunk_gated_delta_rule of flash-linear-attention.

    Raises ValueError for states of packed documents.
    """
    tensors = (query, key, value, g, beta)
    documents = _documents(query.shape[1], options.get("document_places"), options.get("cu_seqlens"), None)
    l2_norm = options.get("use_qk_l2norm_in_kernel", False)
    initial_state = options.get("initial_state")
    if initial_state is None and not options.get("output_final_state"):
        return _scaled(gated_delta_rule(*tensors, l2_norm=l2_norm, documents=documents), key, options), None
    if documents is not None:
        raise ValueError(
            "gated_delta_rule: packed documents start from zeros and leave no state; leave out initial_state and "
            "output_final_state, or pass use_cache=False to the model"
        )
    out, state = gated_delta_rule_with_states(*tensors, l2_norm=l2_norm, initial_state=initial_state)
    return _scaled(out, key, options), state if options.get("output_final_state") else None


def fused_recurrent_gated_delta_rule(
    query: torch.Tensor,  # (B, T, H, K)
    key: torch.Tensor,  # (B, T, H, K)
    value: torch.Tensor,  # (B, T, X, V)
    g: torch.Tensor,  # (B, T, X)
    beta: torch.Tensor,  # (B, T, X)
    **options: Any,
) -> tuple[torch.Tensor, torch.Tensor | None]:  # (B, T, X, V), (B, X, K, V) float32
    """Compute the gated delta rule of few tokens, as fused_recurrent_gated_delta_rule of flash-linear-attention.

    With gradients or documents, chunks compute the same.
    """
    tensors = (query, key, value, g, beta)
    needs_grad = torch.is_grad_enabled() and any(t.requires_grad for t in tensors)
    if needs_grad or options.get("cu_seqlens") is not None or options.get("document_places") is not None:
        return chunk_gated_delta_rule(*tensors, **options)
    out, state = decode.gated_delta_rule_step(
        *tensors, l2_norm=options.get("use_qk_l2norm_in_kernel", False), initial_state=options.get("initial_state")
    )
    return _scaled(out, key, options), state if options.get("output_final_state") else None


def _scaled(out: torch.Tensor, key: torch.Tensor, options: dict[str, Any]) -> torch.Tensor:
    """Return outputs, which have the factor 1 / sqrt(K), with that of the options."""
    scale = options.get("scale")
    return out if scale is None else out * (scale * key.shape[-1] ** 0.5)


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
