"""Attention of one new token of each slot, registered with transformers under the name SLOTS.

Its masks are ranges of columns, int32 (2, S, 1, 1): each slot's token attends to [first, end). Models hand on a mask of
four dimensions as it is. Other queries, such as those of a prompt, have transformers' masks, and attend as `sdpa` does.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from ligertune_kernels import decode_attention, runs_triton
from torch import Tensor, nn
from transformers import AttentionInterface, AttentionMaskInterface
from transformers.integrations.sdpa_attention import sdpa_attention_forward
from transformers.masking_utils import sdpa_mask

SLOTS = "ligertune_slots"


class NoSlotsError(Exception):
    """A model has something that cannot be computed slot by slot."""


_UNKNOWN = ("s_aux", "sinks", "position_bias")  # what a layer may add to its scores


def slot_mask(*, config: Any, mask_function: Callable[..., Tensor], **arguments: Any) -> Tensor | None:
    """Return the mask of a forward by the mask function of transformers.

    config.slot_positions (S,): positions of the new tokens, if the forward adds one to each slot. config.slot_masks:
    the attention that reads the mask.
    """
    positions = getattr(config, "slot_positions", None)
    if positions is None:
        return sdpa_mask(mask_function=mask_function, **arguments)
    rows = torch.arange(len(positions), device=positions.device)[:, None, None, None]
    columns = torch.arange(arguments["kv_length"], device=positions.device)
    # (S, 1, 1, C): a text's columns are its positions, so masks of positions are masks of columns
    allowed = mask_function(rows, 0, positions[:, None, None, None], columns)
    if config.slot_masks == SLOTS:
        first = allowed.int().argmax(-1)
        return torch.stack([first, first + allowed.sum(-1)]).int()
    if config.slot_masks == "sdpa":
        return allowed
    dtype = arguments["dtype"]
    return torch.where(allowed, 0.0, torch.finfo(dtype).min).to(dtype)


def slot_attention(
    module: nn.Module,
    query: Tensor,  # (S, H, T, D)
    key: Tensor,  # (S, K, C, D)
    value: Tensor,  # (S, K, C, V)
    attention_mask: Tensor | None,
    *,
    scaling: float | None = None,
    softcap: float | None = None,
    **options: Any,
) -> tuple[Tensor, None]:  # (S, T, H, V)
    """Compute a layer's attention. Raises NoSlotsError for terms that depend on positions in a way of their own."""
    if attention_mask is None or attention_mask.dtype != torch.int32:
        return sdpa_attention_forward(
            module, query, key, value, attention_mask, scaling=scaling, softcap=softcap, **options
        )
    unknown = [name for name in _UNKNOWN if options.get(name) is not None]
    if unknown:
        raise NoSlotsError(f"{type(module).__name__} adds {unknown[0]} to its scores")
    first, end = attention_mask.flatten(1)
    if not runs_triton(query):
        columns = torch.arange(key.shape[2], device=key.device)
        allowed = (columns >= first[:, None]) & (columns < end[:, None])
        mask = allowed[:, None, None]
        return sdpa_attention_forward(module, query, key, value, mask, scaling=scaling, softcap=softcap, **options)
    scale = query.shape[-1] ** -0.5 if scaling is None else scaling
    out = decode_attention(query[:, :, 0], key, value, first, end, scale=scale, softcap=softcap or 0.0)
    return out[:, None], None


AttentionInterface.register(SLOTS, slot_attention)
AttentionMaskInterface.register(SLOTS, slot_mask)
