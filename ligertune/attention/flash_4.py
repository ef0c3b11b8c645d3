"""FlashAttention-4 for rows of long documents, from the package flash-attn-4.

Its fast backward adds the parts of dq in any order, so gradients differ in the last bits from run to run. Its
deterministic mode takes longer than document_attention, except for heads of 64 columns and one document of 65,536
tokens (docs/benchmarks/attention_h100_202611.md). So only runs with train.full_determinism: false use it.
"""

from __future__ import annotations

import warnings
from collections.abc import Callable
from functools import cache
from typing import Any

import torch
from torch import Tensor

from ligertune.errors import UserError
from ligertune.planning.memory.layer_bytes import MOST_SUMS, flash_4_memory

PACKAGE = "flash-attn-4"
# Head width -> tokens of the mean document from which it takes less time than document_attention, forward and backward,
# on an H100 (docs/benchmarks/attention_h100_202611.md).
LONG = {64: 2048, 128: 2048}


def takes(query: Tensor, key: Tensor, value: Tensor, documents: int) -> bool:
    """Return whether FlashAttention-4 is the faster one for a row: query (T, H, D), key and value (T, K, D)."""
    n_tokens, heads, width = query.shape
    fits = value.shape == key.shape and query.dtype == key.dtype and query.dtype in (torch.bfloat16, torch.float16)
    long = width in LONG and n_tokens >= max(LONG[width] * documents, 1)
    return fits and long and flash_4_memory(n_tokens, heads, key.shape[1], width) <= MOST_SUMS


def flash_4(query: Tensor, key: Tensor, value: Tensor, bounds: Tensor, longest: int, *, scale: float | None) -> Tensor:
    """Return causal attention of packed documents: query (T, H, D), key and value (T, K, D) -> (T, H, D).

    bfloat16 or float16. bounds: (documents + 1,) int32, where each document begins. longest: tokens of the longest.
    Source: flash_attn.cute of https://github.com/Dao-AILab/flash-attention. For Hopper: FlashAttention-3,
    arXiv:2407.08608.
    """
    arguments = {"cu_seqlens_q": bounds, "cu_seqlens_k": bounds, "max_seqlen_q": longest, "max_seqlen_k": longest}
    out = _function()(query, key, value, **arguments, softmax_scale=scale, causal=True)
    return out[0] if isinstance(out, tuple) else out  # some versions also return the log-sum-exp


@cache
def _function() -> Callable[..., Any]:
    try:
        from flash_attn.cute import flash_attn_varlen_func
    except ImportError as error:  # a package that it needs is missing or of another version
        raise UserError(
            f"{PACKAGE} is installed, and cannot be imported: {error}",
            hint="Repair or remove it, or write kernels.attention: true.",
        ) from error

    # When it compiles a kernel, it warns of arguments that are of no use to its callers.
    warnings.filterwarnings("ignore", message="Argument .* cannot be converted to a JitArgument")
    return flash_attn_varlen_func
