"""Attention of a tower that sees pictures of any size: each attends to itself, all in one launch.

Qwen's towers hold the pictures of a batch (or windows of them) one behind the other. Where flash-attn is not installed,
transformers cuts queries, keys and values apart and attends to one picture after another, and asks the GPU for the
lengths in every layer. Their forward is rebuilt (`rope`) so that it hands all of them to `pictures_apart` at once.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.utils.weak import WeakIdKeyDictionary

from ligertune.attention.flash import flash_varlen

# the lengths of the pictures, by the tensor of their bounds: all layers have the same one, and the GPU is asked once
_LENGTHS = WeakIdKeyDictionary()
WIDEST_HEAD = 256


def pictures_apart(
    module: nn.Module,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: Tensor | None = None,
    *,
    scaling: float | None = None,
    dropout: float = 0.0,
    cu_seq_lens_q: Tensor,
    **kwargs: Any,
) -> tuple[Tensor, None]:
    """query, key, value (1, H, S, D), pictures one behind the other -> (1, S, H, D). Not causal, no mask."""
    if query.is_cuda and torch.is_autocast_enabled("cuda"):
        query, key, value = (t.to(torch.get_autocast_dtype("cuda")) for t in (query, key, value))
    if _one_launch(query, dropout):
        longest, bounds = max(_lengths(cu_seq_lens_q)), cu_seq_lens_q.to(torch.int32)
        tokens_first = (t.squeeze(0).transpose(0, 1) for t in (query, key, value))  # (S, H, D)
        return flash_varlen(*tokens_first, (bounds, bounds), (longest, longest), scale=scaling)[None], None
    pieces = zip(*(t.split(_lengths(cu_seq_lens_q), dim=2) for t in (query, key, value)), strict=True)
    out = [F.scaled_dot_product_attention(*piece, dropout_p=dropout, scale=scaling) for piece in pieces]
    return torch.cat(out, dim=2).transpose(1, 2).contiguous(), None


def _one_launch(query: Tensor, dropout: float) -> bool:
    half = query.dtype in (torch.bfloat16, torch.float16)
    nvidia = query.is_cuda and torch.version.hip is None  # torch's own on AMD was not tried
    return nvidia and half and not dropout and query.shape[-1] <= WIDEST_HEAD and query.shape[-1] % 8 == 0


def _lengths(cu_seqlens: Tensor) -> list[int]:
    if cu_seqlens not in _LENGTHS:
        _LENGTHS[cu_seqlens] = cu_seqlens.diff().tolist()
    return _LENGTHS[cu_seqlens]


class _AttentionFunctions:
    """What stands in for transformers' table of attention functions in the rebuilt forward."""

    @staticmethod
    def get_interface(name: str, default: Any) -> Any:
        return pictures_apart


# names that such a forward reads in its modelling file, and what they are in its private copy; it takes the branch for
# attention that knows where pictures begin
STAND_INS = {
    "ALL_ATTENTION_FUNCTIONS": _AttentionFunctions(),
    "is_flash_attention_requested": lambda config: True,
    "get_max_seqlen": lambda cu_seqlens, *args, **kwargs: None,  # `pictures_apart` knows
}


def cuts_pictures_apart(names: tuple[str, ...]) -> bool:
    """Whether a forward that reads these names is one that attends to one picture after another."""
    return {"ALL_ATTENTION_FUNCTIONS", "is_flash_attention_requested", "cu_seq_lens_q", "split"} <= set(names)
