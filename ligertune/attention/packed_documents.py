"""Attention for rows that hold several documents, in which no document sees another.

Functions for transformers' AttentionInterface, chosen by `attention_choice` and fed by the collator's keywords:

    document_attention    our kernels over all documents of a row in one launch
    varlen                torch's flash attention over all of them in one launch
    per_document          scaled_dot_product_attention of one document after another; soft caps in plain torch

transformers' own ways (eager, flex_attention, flash_attention_2) find the documents by position ids, and silently do
not look where a cache is built or an attention mask comes along: `guard` refuses such a call for all of them.
"""

from __future__ import annotations

import threading
from dataclasses import dataclass
from typing import Any, NoReturn

import ligertune_kernels
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from transformers import AttentionInterface, AttentionMaskInterface, PreTrainedModel
from transformers.integrations.sdpa_attention import repeat_kv, sdpa_attention_forward
from transformers.masking_utils import sdpa_mask

from ligertune.attention.context_parallel import ContextParallelKeys
from ligertune.attention.flash import flash_varlen
from ligertune.attention.untraced_inputs import Unseen, look
from ligertune.errors import UserError


class _ThisThread(threading.local):
    """Whether a forward over packed rows is running: masks are made for no one else to see."""

    packed = False


THREAD = _ThisThread()


@dataclass(frozen=True)
class LocalWindow:
    """What stands in for the mask of a layer that sees `size` tokens back, itself included, within its document."""

    size: int


def document_mask(
    *args: Any, attention_mask: Tensor | None = None, local_size: int | None = None, **kwargs: Any
) -> Tensor | LocalWindow | None:
    """transformers' mask function of both: for packed rows nothing is made, for others what sdpa gets."""
    if not THREAD.packed:
        return sdpa_mask(*args, attention_mask=attention_mask, local_size=local_size, **kwargs)
    if kwargs.get("use_vmap") or "allow_is_causal_skip" not in kwargs:
        _refuse("attends by a pattern of its own")
    return None if local_size is None else LocalWindow(local_size)


def varlen(
    module: nn.Module,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: Tensor | LocalWindow | None,
    *,
    scaling: float | None = None,
    sliding_window: int | None = None,
    cu_seq_lens_q: Tensor | None = None,
    cu_seq_lens_k: Tensor | None = None,
    max_length_q: int | None = None,
    max_length_k: int | None = None,
    context_parallel: ContextParallelKeys | None = None,
    key_rows: Tensor | None = None,
    **kwargs: Any,
) -> tuple[Tensor, None]:
    """query (1, H, T, D), key and value (1, K, T, D) -> (1, T, H, D). key_rows: for context parallel."""
    if cu_seq_lens_q is None:
        return _one_document_a_row(
            module, query, key, value, attention_mask, scaling=scaling, sliding_window=sliding_window, **kwargs
        )
    _check_layer(attention_mask, sliding_window, kwargs.get("s_aux"))
    if kwargs.get("softcap") is not None or kwargs.get("dropout"):
        raise ValueError("varlen attention has neither a soft cap nor dropout; use per_document or flex_attention")
    if query.is_cuda and torch.is_autocast_enabled("cuda"):  # rotation may have left float32, and torch casts sdpa only
        query, key, value = (t.to(torch.get_autocast_dtype("cuda")) for t in (query, key, value))
    head_dim, value_dim = query.shape[-1], value.shape[-1]
    if value_dim < head_dim:  # latent attention
        value = F.pad(value, (0, head_dim - value_dim))
    if context_parallel is not None:
        key, value = (context_parallel.gather(t, key_rows) for t in (key, value))
    out = flash_varlen(
        *(t.squeeze(0).transpose(0, 1) for t in (query, key, value)),  # (T, H, D)
        (cu_seq_lens_q, cu_seq_lens_k),
        (max_length_q, max_length_k),
        scale=scaling,
        window=(-1 if sliding_window is None else sliding_window - 1, 0),
    )
    return out[None, ..., :value_dim], None


def document_attention(
    module: nn.Module,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: Tensor | LocalWindow | None,
    *,
    scaling: float | None = None,
    dropout: float = 0.0,
    sliding_window: int | None = None,
    softcap: float | None = None,
    document_places: Tensor | None = None,
    **kwargs: Any,
) -> tuple[Tensor, None]:
    """query (1, H, T, D), key and value (1, K, T, D) -> (1, T, H, D)."""
    if document_places is None:
        kwargs |= {"softcap": softcap} if softcap is not None else {}
        keywords = {"scaling": scaling, "dropout": dropout, "sliding_window": sliding_window}
        return _one_document_a_row(module, query, key, value, attention_mask, **keywords, **kwargs)
    _check_layer(attention_mask, sliding_window, kwargs.get("s_aux"))
    if dropout:
        raise ValueError("document_attention has no dropout; use per_document")
    head_dim, value_dim = query.shape[-1], value.shape[-1]
    if value_dim < head_dim:  # latent attention
        value = F.pad(value, (0, head_dim - value_dim))
    tensors = (t.squeeze(0).transpose(0, 1) for t in (query, key, value))  # (T, H, D)
    terms = {"scale": scaling, "window": sliding_window, "softcap": softcap}
    return ligertune_kernels.document_attention(*tensors, *document_places, **terms)[None, ..., :value_dim], None


def per_document(
    module: nn.Module,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: Tensor | LocalWindow | None,
    *,
    scaling: float | None = None,
    dropout: float = 0.0,
    sliding_window: int | None = None,
    softcap: float | None = None,
    document_lengths: tuple[int, ...] | Unseen | None = None,
    context_parallel: ContextParallelKeys | None = None,
    key_rows: Tensor | None = None,
    **kwargs: Any,
) -> tuple[Tensor, None]:
    """query (1, H, T, D), key and value (1, K, T, D) -> (1, T, H, D). key_rows: for context parallel."""
    if document_lengths is None:
        kwargs |= {"softcap": softcap} if softcap is not None else {}
        return _one_document_a_row(
            module,
            query,
            key,
            value,
            attention_mask,
            scaling=scaling,
            dropout=dropout,
            sliding_window=sliding_window,
            **kwargs,
        )
    _check_layer(attention_mask, sliding_window, kwargs.get("s_aux"))
    out = _each_document(
        query, key, value, document_lengths, context_parallel, key_rows,
        scaling=scaling, dropout=dropout, window=sliding_window, softcap=softcap,
    )  # fmt: skip
    return out, None


@torch.compiler.disable  # compiled, it would be a graph for each number of documents, of calls that it cannot fuse
def _each_document(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    document_lengths: tuple[int, ...] | Unseen,
    context_parallel: ContextParallelKeys | None,
    key_rows: Tensor | None,
    *,
    scaling: float | None,
    dropout: float,
    window: int | None,
    softcap: float | None,
) -> Tensor:
    """`per_document` where a row has several: (1, T, H, D)."""
    lengths = key_lengths = look(document_lengths)
    if context_parallel is not None:
        key, value = (context_parallel.gather(t, key_rows) for t in (key, value))
        key_lengths = context_parallel.key_lengths
    each = (lengths, key_lengths, key_lengths)
    parts = (t.split(lengths, dim=2) for t, lengths in zip((query, key, value), each, strict=True))
    documents = zip(*parts, strict=True)
    if softcap is None:
        out = [_attend(*document, scaling=scaling, dropout=dropout, window=window) for document in documents]
    else:
        scaling = query.shape[-1] ** -0.5 if scaling is None else scaling
        out = [
            _attend_capped(*document, scaling=scaling, dropout=dropout, window=window, softcap=softcap)
            for document in documents
        ]
    return torch.cat(out, dim=2).transpose(1, 2).contiguous()


def _attend(
    query: Tensor, key: Tensor, value: Tensor, *, scaling: float | None, dropout: float, window: int | None
) -> Tensor:
    """Causal attention within one document: (1, H, T, D), (1, K, keys, D) twice -> (1, H, T, D)."""
    length, keys = query.shape[2], key.shape[2]
    whole = length == keys and (window is None or window >= keys)
    return F.scaled_dot_product_attention(
        query,
        key,
        value,
        attn_mask=None if whole else _band(length, keys, window or keys, query.device),
        is_causal=whole,
        dropout_p=dropout,
        scale=scaling,
        enable_gqa=query.shape[1] != key.shape[1],
    )


def _attend_capped(
    query: Tensor, key: Tensor, value: Tensor, *, scaling: float, dropout: float, window: int | None, softcap: float
) -> Tensor:
    """`_attend` with scores s -> softcap * tanh(s / softcap), as transformers' eager attention computes it."""
    groups, (length, keys) = query.shape[1] // key.shape[1], (query.shape[2], key.shape[2])
    key, value = repeat_kv(key, groups), repeat_kv(value, groups)
    scores = softcap * torch.tanh(query @ key.transpose(2, 3) * scaling / softcap)  # (1, H, T, keys)
    scores = scores.masked_fill(~_band(length, keys, window or keys, query.device), float("-inf"))
    weights = F.softmax(scores, dim=-1, dtype=torch.float32).to(query.dtype)
    return F.dropout(weights, dropout) @ value


def _band(length: int, keys: int, window: int, device: torch.device) -> Tensor:
    """(T, keys): a query sees keys up to its own, `window` of them; the last query's own is the last key."""
    back = torch.arange(keys - length, keys, device=device)[:, None] - torch.arange(keys, device=device)
    return (back >= 0) & (back < window)


def _one_document_a_row(module: nn.Module, *args: Any, **kwargs: Any) -> tuple[Tensor, None]:
    """Rows that are not packed (evaluation by others, generation): transformers' own sdpa, mask and all."""
    if THREAD.packed:
        _refuse("does not hand the places of documents to its attention")
    return sdpa_attention_forward(module, *args, **kwargs)


def _check_layer(attention_mask: Tensor | LocalWindow | None, sliding_window: int | None, sinks: Tensor | None) -> None:
    """The layer attends as `document_mask` was asked to mask: causally, within the window that it names."""
    if isinstance(attention_mask, Tensor):
        raise ValueError("packed rows came to a model that does not expect them: call guard(model) first")
    asked = None if attention_mask is None else attention_mask.size
    if asked != sliding_window:
        _refuse("masks its attention by a pattern of its own")
    if sinks is not None:
        _refuse("has attention sinks")


def _refuse(what: str) -> NoReturn:
    raise UserError(f"data.packing: this model {what}, so it cannot be packed.", hint="Write data.packing: false.")


for _function in (document_attention, varlen, per_document):
    AttentionInterface.register(_function.__name__, _function)
    AttentionMaskInterface.register(_function.__name__, document_mask)


def guard(model: PreTrainedModel) -> None:
    """From now on `model` refuses packed rows in every call in which documents would see each other."""
    model.register_forward_pre_hook(_enter, with_kwargs=True)
    model.register_forward_hook(_leave, always_call=True)


def _enter(model: PreTrainedModel, args: tuple, kwargs: dict[str, Any]) -> None:
    packed = kwargs.get("document_lengths") is not None
    if packed:
        if kwargs.get("attention_mask") is not None:
            raise ValueError("packed rows came with an attention_mask: transformers then looks for no documents")
        if kwargs.get("use_cache") is not False or kwargs.get("past_key_values") is not None:
            raise ValueError("packed rows need use_cache=False: with a cache transformers looks for no documents")
        part = kwargs.get("context_parallel")
        lengths = look(kwargs["document_lengths"])
        _check_positions(kwargs.get("position_ids"), lengths, lengths if part is None else part.key_lengths)
    THREAD.packed = packed


def _leave(model: PreTrainedModel, args: tuple, output: Any) -> None:
    THREAD.packed = False


def _check_positions(
    position_ids: Tensor | None, document_lengths: tuple[int, ...], key_lengths: tuple[int, ...]
) -> None:
    """Whether positions restart with each document; values are looked at on the CPU only, a GPU would be waited for.

    A document of which this is a part has more keys than tokens here, which are its last.

    (1, T), or for models that see (4, 1, T), whose first row is that of the text.
    """
    if position_ids is not None and position_ids.ndim == 3 and position_ids.shape[0] == 4:
        position_ids = position_ids[0]
    if position_ids is None or position_ids.shape != (1, sum(document_lengths)):
        raise ValueError("packed rows need position_ids (1, T) over all their documents")
    if position_ids.device.type == "cpu":
        lengths = zip(document_lengths, key_lengths, strict=True)
        expected = torch.cat([torch.arange(keys - length, keys) for length, keys in lengths])
        if not torch.equal(position_ids[0], expected):
            raise ValueError("position_ids do not restart with each document of a packed row")
