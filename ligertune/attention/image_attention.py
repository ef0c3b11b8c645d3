"""Attention of a tower over images of any size: each image attends to itself, all of them in one launch.

The towers of the Qwen family concatenate the images of a batch, or windows of them, along the sequence. Without
flash-attn, transformers attends within one image after another, and copies the lengths from the GPU in every layer.
`patching.rope` rebuilds their forward so that it calls `per_image_attention` on the whole sequence.
"""

from __future__ import annotations

from collections.abc import Set
from types import SimpleNamespace
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.utils.weak import WeakIdKeyDictionary

from ligertune.attention.torch_attention import flash_varlen

# Lengths of the images by the tensor of their bounds, which all layers share: they are copied from the GPU once.
_LENGTHS = WeakIdKeyDictionary()
WIDEST_HEAD = 256  # columns: a limit of FlashAttention, which also takes multiples of 8 only


def per_image_attention(
    module: nn.Module,
    query: Tensor,  # (1, H, S, D), images concatenated
    key: Tensor,  # (1, H, S, D)
    value: Tensor,  # (1, H, S, D)
    attention_mask: Tensor | None = None,
    *,
    scaling: float | None = None,
    dropout: float = 0.0,
    cu_seq_lens_q: Tensor,  # (images + 1,): where each image begins
    **kwargs: Any,
) -> tuple[Tensor, None]:  # (1, S, H, D)
    """Attend within each image, neither causally nor with a mask."""
    if query.is_cuda and torch.is_autocast_enabled("cuda"):
        query, key, value = (t.to(torch.get_autocast_dtype("cuda")) for t in (query, key, value))
    if _one_launch(query, dropout):
        longest = max(_lengths(cu_seq_lens_q))
        bounds = cu_seq_lens_q.to(torch.int32)
        query, key, value = (t.squeeze(0).transpose(0, 1) for t in (query, key, value))  # (S, H, D)
        return flash_varlen(query, key, value, (bounds, bounds), (longest, longest), scale=scaling)[None], None
    lengths = _lengths(cu_seq_lens_q)
    images = zip(*(torch.split(t, lengths, dim=2) for t in (query, key, value)), strict=True)
    out = [F.scaled_dot_product_attention(q, k, v, dropout_p=dropout, scale=scaling) for q, k, v in images]
    return torch.cat(out, dim=2).transpose(1, 2).contiguous(), None


def _one_launch(query: Tensor, dropout: float) -> bool:
    half = query.dtype in (torch.bfloat16, torch.float16)
    nvidia = query.is_cuda and torch.version.hip is None  # torch's flash attention on AMD was not tried
    return nvidia and half and not dropout and query.shape[-1] <= WIDEST_HEAD and query.shape[-1] % 8 == 0


def _lengths(cu_seqlens: Tensor) -> list[int]:
    if cu_seqlens not in _LENGTHS:
        _LENGTHS[cu_seqlens] = cu_seqlens.diff().tolist()
    return _LENGTHS[cu_seqlens]


# Replacements of globals that such a forward reads. It then takes its branch for flash attention, which passes the
# bounds of the images on; the longest length is not needed, since `per_image_attention` computes it.
IMAGE_ATTENTION_GLOBALS: dict[str, Any] = {
    "ALL_ATTENTION_FUNCTIONS": SimpleNamespace(get_interface=lambda name, default: per_image_attention),
    "is_flash_attention_requested": lambda config: True,
    "get_max_seqlen": lambda cu_seqlens, *args, **kwargs: None,
}


def attends_per_image(names: Set[str]) -> bool:
    """Return whether a forward that reads these names attends within one image after another."""
    return {"ALL_ATTENTION_FUNCTIONS", "is_flash_attention_requested", "cu_seq_lens_q", "split"} <= names
