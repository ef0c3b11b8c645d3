"""Kimi's delta attention under flash-linear-attention's names and arguments, which transformers' Kimi Linear uses.

Arguments of documents and states, names that have no effect and names that are refused are those of the gated delta
rule: package_functions.py.
"""

from __future__ import annotations

from typing import Any

import torch

from ligertune_kernels.ops.recurrence.kda.kda_step import kda_step
from ligertune_kernels.ops.recurrence.kda.op import kda, kda_with_states
from ligertune_kernels.ops.recurrence.package_functions import (
    DOCUMENTS,
    RULE,
    accept_short_names,
    check_options,
    documents_of_options,
    scaled,
)


@accept_short_names
def chunk_kda(
    query: torch.Tensor,  # (B, T, H, K)
    key: torch.Tensor,  # (B, T, H, K)
    value: torch.Tensor,  # (B, T, X, V)
    g: torch.Tensor,  # (B, T, X, K): the decay's logarithms, at most 0
    beta: torch.Tensor,  # (B, T, X)
    **options: Any,
) -> tuple[torch.Tensor, torch.Tensor | None]:  # (B, T, X, V), (B, X, K, V) float32
    """Compute Kimi's delta attention within documents, as chunk_kda of flash-linear-attention.

    Raises ValueError for states of packed documents and for what these kernels do not compute, TypeError for unknown
    names.
    """
    check_options("chunk_kda", options, RULE)
    tensors = (query, key, value, g, beta)
    documents = documents_of_options("chunk_kda", query, 4, options)
    l2_norm = bool(options.get("use_qk_l2norm_in_kernel"))
    initial_state = options.get("initial_state")
    if initial_state is None and not options.get("output_final_state"):
        return scaled(kda(*tensors, l2_norm=l2_norm, documents=documents), key, options), None
    if documents is not None:
        raise ValueError(
            "kda: packed documents start from zeros and leave no state; leave out initial_state and "
            "output_final_state, or pass use_cache=False to the model"
        )
    out, state = kda_with_states(*tensors, l2_norm=l2_norm, initial_state=initial_state)
    return scaled(out, key, options), state if options.get("output_final_state") else None


@accept_short_names
def fused_recurrent_kda(
    query: torch.Tensor,  # (B, T, H, K)
    key: torch.Tensor,  # (B, T, H, K)
    value: torch.Tensor,  # (B, T, X, V)
    g: torch.Tensor,  # (B, T, X, K): the decay's logarithms, at most 0
    beta: torch.Tensor,  # (B, T, X)
    **options: Any,
) -> tuple[torch.Tensor, torch.Tensor | None]:  # (B, T, X, V), (B, X, K, V) float32
    """Compute Kimi's delta attention of few tokens, as fused_recurrent_kda of flash-linear-attention.

    With gradients or documents, chunks compute the same. Raises what chunk_kda raises.
    """
    check_options("fused_recurrent_kda", options, RULE)
    tensors = (query, key, value, g, beta)
    states = options.get("initial_state")
    # an object that is no tensor is refused by the op
    needs_grad = torch.is_grad_enabled() and any(getattr(t, "requires_grad", False) for t in (*tensors, states))
    if needs_grad or any(options.get(name) is not None for name in DOCUMENTS):
        return chunk_kda(*tensors, **options)
    l2_norm = bool(options.get("use_qk_l2norm_in_kernel"))
    out, state = kda_step(*tensors, l2_norm=l2_norm, initial_state=states)
    return scaled(out, key, options), state if options.get("output_final_state") else None
