"""Attention for packed rows, in which no document attends to another.

These functions are registered with transformers' AttentionInterface, chosen in `choice` and fed by the collator:

    document_attention           our kernels: all documents of a row in one launch
    fa4_or_document_attention    FlashAttention-4 for rows of long documents (flash_4.py), our kernels for others
    varlen                       torch's flash attention: all documents of a row in one launch
    per_document                 scaled_dot_product_attention for each document; plain torch if scores have a soft cap

transformers' own implementations (eager, flex_attention, flash_attention_2) find documents by position_ids, and do not
search where there is a cache or an attention mask, without a warning: `install_packing_checks` refuses such calls.
"""

from __future__ import annotations

import threading
from collections.abc import Mapping
from dataclasses import dataclass
from types import MappingProxyType
from typing import Any, NamedTuple, NoReturn

import torch
import torch.nn.functional as F
from ligertune_kernels import Documents, document_attention
from torch import Tensor, nn
from transformers import AttentionInterface, AttentionMaskInterface
from transformers.integrations.sdpa_attention import repeat_kv, sdpa_attention_forward
from transformers.masking_utils import sdpa_mask

from ligertune.attention import flash_4
from ligertune.attention.torch_attention import flash_varlen
from ligertune.data.batching.context_parallel import ContextParallelKeys
from ligertune.errors import UserError
from ligertune.planning.memory.layer_bytes import FA4_OR_DOCUMENT_ATTENTION
from ligertune.untraced_inputs import Untraced, reveal


class _RowState(threading.local):
    """State of the running forward. `packing_checks` sets it."""

    packed = False  # its rows are packed
    documents: Mapping[str, Any] = MappingProxyType({})  # entries of the batch that name the documents, for mixers
    documents_known = False  # nothing is gained by searching its position_ids for documents
    attended = False  # per_document has separated documents since this was last set to False
    mixed = False  # a kernel of a mixer has, since then


ROWS = _RowState()
# arguments for attention sinks: one for each head (gpt-oss), or for each head and token (Inkling 2)
SINKS = ("s_aux", "sinks")


@dataclass(frozen=True)
class WindowMask:
    """Take the place of the mask of a layer that sees `size` tokens back, itself included, within its document."""

    size: int


def document_mask(
    *args: Any, attention_mask: Tensor | None = None, local_size: int | None = None, **kwargs: Any
) -> Tensor | WindowMask | None:
    """Return the mask of our attention functions: sdpa's mask, or no tensor where rows are packed."""
    if not ROWS.packed:
        # args: transformers 5.24 gives all by keyword
        return sdpa_mask(*args, attention_mask=attention_mask, local_size=local_size, **kwargs)  # type: ignore[misc]
    if kwargs.get("use_vmap") or "allow_is_causal_skip" not in kwargs:
        _refuse("has its own attention pattern")
    return None if local_size is None else WindowMask(local_size)


def varlen(
    module: nn.Module,
    query: Tensor,  # (1, H, T, D)
    key: Tensor,  # (1, K, T, D)
    value: Tensor,  # (1, K, T, D)
    attention_mask: Tensor | WindowMask | None,
    *,
    context_parallel: ContextParallelKeys | None = None,
    key_rows: Tensor | None = None,  # for context parallel
    **kwargs: Any,  # cu_seq_lens_q, cu_seq_lens_k, max_length_q, max_length_k where rows are packed, and more
) -> tuple[Tensor, None]:  # (1, T, H, D)
    """Attend with torch's flash attention. Raises ValueError for a soft cap or dropout, which it does not have."""
    cu_seq_lens: tuple[Any, Any] = kwargs.get("cu_seq_lens_q"), kwargs.get("cu_seq_lens_k")
    if cu_seq_lens[0] is None:
        return _unpacked(module, query, key, value, attention_mask, **kwargs)
    max_lengths: tuple[Any, Any] = kwargs.get("max_length_q"), kwargs.get("max_length_k")
    if any(value is None for value in (*cu_seq_lens, *max_lengths)):
        raise ValueError("packed rows need cu_seq_lens and max_length of both the queries and the keys")
    terms = _layer_terms(module, attention_mask, **kwargs)
    if terms.softcap is not None or terms.dropout:
        raise ValueError("varlen attention has neither a soft cap nor dropout; use per_document or flex_attention")
    query, key, value = _autocast(query, key, value)
    value_dim = value.shape[-1]
    value = _pad_value(value, query)
    if context_parallel is not None:
        assert key_rows is not None  # the collator writes both
        key, value = (context_parallel.gather(t, key_rows) for t in (key, value))
    out = flash_varlen(
        *_tokens_first(query, key, value),
        cu_seq_lens,
        max_lengths,
        scale=terms.scaling,
        window=(-1 if terms.window is None else terms.window - 1, 0),
    )
    return out[None, ..., :value_dim], None


def kernel_attention(
    module: nn.Module,
    query: Tensor,  # (1, H, T, D)
    key: Tensor,  # (1, K, T, D)
    value: Tensor,  # (1, K, T, D)
    attention_mask: Tensor | WindowMask | None,
    *,
    document_places: Tensor | None = None,
    document_lengths: tuple[int, ...] | Untraced | None = None,
    **kwargs: Any,
) -> tuple[Tensor, None]:  # (1, T, H, D)
    """Attend with our kernels. Raises ValueError for dropout, which they do not have."""
    if document_places is None:
        return _unpacked(module, query, key, value, attention_mask, **kwargs)
    terms = _layer_terms(module, attention_mask, **kwargs)
    if terms.dropout:
        raise ValueError("document_attention has no dropout; use per_document")
    value_dim = value.shape[-1]
    value = _pad_value(value, query)
    count = None
    if document_lengths is not None and not torch.compiler.is_compiling():
        count = len(reveal(document_lengths))
    starts, ends = document_places
    out = document_attention(
        *_tokens_first(query, key, value),
        Documents(starts, ends, count),
        scale=terms.scaling,
        window=terms.window,
        softcap=terms.softcap,
    )
    return out[None, ..., :value_dim], None


def flash_4_or_kernel(
    module: nn.Module,
    query: Tensor,  # (1, H, T, D)
    key: Tensor,  # (1, K, T, D)
    value: Tensor,  # (1, K, T, D)
    attention_mask: Tensor | WindowMask | None,
    *,
    cu_seq_lens_q: Tensor | None = None,
    max_length_q: int | None = None,
    document_lengths: tuple[int, ...] | Untraced | None = None,
    **kwargs: Any,
) -> tuple[Tensor, None]:  # (1, T, H, D)
    """Attend with FlashAttention-4 where it is faster than our kernels, else with those."""
    if document_lengths is not None and not torch.compiler.is_compiling():
        terms = _layer_terms(module, attention_mask, **kwargs)
        tensors = _tokens_first(*_autocast(query, key, value))
        plain = terms.window is None and terms.softcap is None and not terms.dropout
        if plain and flash_4.takes(*tensors, documents=len(reveal(document_lengths))):
            assert cu_seq_lens_q is not None and max_length_q is not None  # the collator writes them with the lengths
            return flash_4.flash_4(*tensors, cu_seq_lens_q, max_length_q, scale=terms.scaling)[None], None
    kwargs["document_lengths"] = document_lengths
    return kernel_attention(module, query, key, value, attention_mask, **kwargs)


QueryKeyValue = tuple[Tensor, Tensor, Tensor]


def _autocast(query: Tensor, key: Tensor, value: Tensor) -> QueryKeyValue:
    """Cast as torch casts the inputs of sdpa under autocast: rope may return float32."""
    if not (query.is_cuda and torch.is_autocast_enabled("cuda")):
        return query, key, value
    dtype = torch.get_autocast_dtype("cuda")
    return query.to(dtype), key.to(dtype), value.to(dtype)


def _pad_value(value: Tensor, query: Tensor) -> Tensor:
    """Pad the values of latent attention, which are narrower than its queries, to their head dimension."""
    missing = query.shape[-1] - value.shape[-1]
    return F.pad(value, (0, missing)) if missing > 0 else value


def _tokens_first(query: Tensor, key: Tensor, value: Tensor) -> QueryKeyValue:
    """(1, H, T, D) -> (T, H, D), each."""
    query, key, value = (t.squeeze(0).transpose(0, 1) for t in (query, key, value))
    return query, key, value


def per_document(
    module: nn.Module,
    query: Tensor,  # (1, H, T, D)
    key: Tensor,  # (1, K, T, D)
    value: Tensor,  # (1, K, T, D)
    attention_mask: Tensor | WindowMask | None,
    *,
    document_lengths: tuple[int, ...] | Untraced | None = None,
    context_parallel: ContextParallelKeys | None = None,
    key_rows: Tensor | None = None,  # for context parallel
    **kwargs: Any,
) -> tuple[Tensor, None]:  # (1, T, H, D)
    """Attend within one document after another."""
    if document_lengths is None:
        return _unpacked(module, query, key, value, attention_mask, **kwargs)
    terms = _layer_terms(module, attention_mask, **kwargs)
    return _each_document(query, key, value, document_lengths, context_parallel, key_rows, terms), None


# Compiled, this would be one graph per number of documents, of calls that torch.compile cannot fuse.
@torch.compiler.disable  # type: ignore[untyped-decorator]
def _each_document(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    document_lengths: tuple[int, ...] | Untraced,
    context_parallel: ContextParallelKeys | None,
    key_rows: Tensor | None,
    terms: _LayerTerms,
) -> Tensor:  # (1, T, H, D)
    ROWS.attended = True
    lengths = key_lengths = list(reveal(document_lengths))
    if context_parallel is not None:
        assert key_rows is not None  # the collator writes both
        key, value = (context_parallel.gather(t, key_rows) for t in (key, value))
        key_lengths = list(context_parallel.key_lengths)
    queries = torch.split(query, lengths, dim=2)
    keys = torch.split(key, key_lengths, dim=2)
    values = torch.split(value, key_lengths, dim=2)
    out = [_attend(q, k, v, terms) for q, k, v in zip(queries, keys, values, strict=True)]
    return torch.cat(out, dim=2).transpose(1, 2).contiguous()


def _attend(query: Tensor, key: Tensor, value: Tensor, terms: _LayerTerms) -> Tensor:
    """Attend causally within one document: query (1, H, T, D), key and value (1, K, keys, D) -> (1, H, T, D)."""
    length = query.shape[2]
    keys = key.shape[2]
    window = terms.window or keys
    if terms.softcap is not None:
        return _attend_capped(query, key, value, _band(length, keys, window, query.device), terms.softcap, terms)
    whole = length == keys and window >= keys
    return F.scaled_dot_product_attention(
        query,
        key,
        value,
        attn_mask=None if whole else _band(length, keys, window, query.device),
        is_causal=whole,
        dropout_p=terms.dropout,
        scale=terms.scaling,
        enable_gqa=query.shape[1] != key.shape[1],
    )


def _attend_capped(
    query: Tensor, key: Tensor, value: Tensor, band: Tensor, softcap: float, terms: _LayerTerms
) -> Tensor:
    """Attend with scores s -> softcap * tanh(s / softcap), as transformers' eager attention computes them."""
    groups = query.shape[1] // key.shape[1]
    key = repeat_kv(key, groups)
    value = repeat_kv(value, groups)
    scaling = query.shape[-1] ** -0.5 if terms.scaling is None else terms.scaling
    scores = softcap * torch.tanh(query @ key.transpose(2, 3) * scaling / softcap)  # (1, H, T, keys)
    scores = scores.masked_fill(~band, torch.finfo(scores.dtype).min)  # a row of padding may see nothing
    weights = F.softmax(scores, dim=-1, dtype=torch.float32).to(query.dtype)
    return F.dropout(weights, terms.dropout) @ value


def _band(length: int, keys: int, window: int, device: torch.device) -> Tensor:
    """Return a bool mask (T, keys): a query sees `window` keys up to its own; the last query's own key is the last."""
    back = torch.arange(keys - length, keys, device=device)[:, None] - torch.arange(keys, device=device)
    return (back >= 0) & (back < window)


def _unpacked(module: nn.Module, *args: Any, **kwargs: Any) -> tuple[Tensor, None]:
    """Attend to rows of one document each (generation, other evaluation loops) with transformers' sdpa and its mask."""
    if ROWS.packed:
        _refuse("does not pass the places of documents to its attention")
    if _has_sinks(kwargs):  # transformers' sdpa would ignore them
        raise ValueError("sdpa has no attention sinks; use eager attention")
    if kwargs.get("softcap") is not None:  # which transformers' sdpa refuses
        return _unpacked_capped(*args, **kwargs), None
    return sdpa_attention_forward(module, *args, **kwargs)


def _unpacked_capped(
    query: Tensor,  # (B, H, T, D)
    key: Tensor,  # (B, K, keys, D)
    value: Tensor,  # (B, K, keys, D)
    attention_mask: Tensor | None,  # (B, 1, T, keys): bool, or added to the scores; None: causal
    *,
    softcap: float,
    scaling: float | None = None,
    dropout: float = 0.0,
    **_: Any,
) -> Tensor:  # (B, T, H, D)
    """Attend with capped scores to rows of one document each."""
    if attention_mask is None:
        visible = _band(query.shape[2], key.shape[2], key.shape[2], query.device)
    else:
        visible = attention_mask if attention_mask.dtype is torch.bool else attention_mask == 0
    terms = _LayerTerms(scaling, dropout, None, softcap)
    return _attend_capped(query, key, value, visible, softcap, terms).transpose(1, 2).contiguous()


class _LayerTerms(NamedTuple):  # torch.compile traces it, unlike a frozen dataclass
    """What a layer passes to its attention besides tensors and the places of documents."""

    scaling: float | None
    dropout: float
    window: int | None
    softcap: float | None


def _layer_terms(
    module: nn.Module,
    attention_mask: Tensor | WindowMask | None,
    *,
    scaling: float | None = None,
    dropout: float = 0.0,
    sliding_window: int | None = None,
    softcap: float | None = None,
    position_bias: Tensor | None = None,
    **others: Any,
) -> _LayerTerms:
    """Check that the layer attends causally, within the window for which the model made its mask."""
    if isinstance(attention_mask, Tensor):
        raise ValueError("packed rows came with a mask tensor: call install_packing_checks(model) first")
    masked_window = None if attention_mask is None else attention_mask.size
    if masked_window != sliding_window:
        _refuse("has its own attention pattern")
    if _has_sinks(others):
        _refuse(f"has attention sinks in its {type(module).__name__}")
    if position_bias is not None:  # (1, H, T, T): of each pair of tokens of the row
        _refuse(f"adds a position bias to the scores of its {type(module).__name__}")
    return _LayerTerms(scaling, dropout, sliding_window, softcap)


def _has_sinks(options: Mapping[str, Any]) -> bool:
    return any(options.get(name) is not None for name in SINKS)


def _refuse(what: str) -> NoReturn:
    raise UserError(f"data.packing: this model {what}, so it cannot be packed.", hint="Write data.packing: false.")


FUNCTIONS = {
    "document_attention": kernel_attention,
    FA4_OR_DOCUMENT_ATTENTION: flash_4_or_kernel,
    "varlen": varlen,
    "per_document": per_document,
}
for _name, _function in FUNCTIONS.items():
    AttentionInterface.register(_name, _function)
    AttentionMaskInterface.register(_name, document_mask)
