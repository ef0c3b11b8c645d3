"""Checks of packed rows before each forward, and attention masks without a search of position_ids.

transformers looks for packed documents in the values of position_ids, so the host waits for the GPU at the start of
every forward, and a GPU that has finished its work idles until the host has launched more. The search is useless where
a call has no position_ids (the model then counts them itself, and each row is one document), and where our attention
gets the places of documents from the collator. In these cases a model on which `prepare_masks` was called creates its
masks without position_ids: the forwards that create masks are rebuilt, in that model alone.
"""

from __future__ import annotations

import functools
import inspect
import types
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn
from transformers import PreTrainedModel, masking_utils

from ligertune.attention.packed_documents import FUNCTIONS, ROWS
from ligertune.patching.module_patch import ModulePatch, decorator_chain, names_in, patch_module, rebuild_function
from ligertune.untraced_inputs import reveal

DOCUMENTS = ("document_places", "seq_idx")  # of the row, for mixers


def install_packing_checks(model: PreTrainedModel) -> None:
    """Let `model` refuse packed rows in every call in which documents would attend to each other."""
    model.register_forward_pre_hook(_check_packed, with_kwargs=True)
    base = model.base_model
    if base is not model and any(p.kind is p.VAR_KEYWORD for p in inspect.signature(base.forward).parameters.values()):
        base.register_forward_pre_hook(_add_documents, with_kwargs=True)
    # always: after a forward that raised, the next call would count as packed
    model.register_forward_hook(_reset, always_call=True)


def prepare_masks(model: PreTrainedModel) -> None:
    """Skip the search for documents where it is useless, and install the checks of packed rows."""
    install_packing_checks(model)
    for module in model.modules():
        # A module takes one patch. A model whose loss is patched makes no masks: the base model in it does.
        unpatched = isinstance(module, PreTrainedModel) and not isinstance(module, ModulePatch)
        # a forward on the instance would hide the class's, which is rebuilt
        if unpatched and "forward" not in vars(module) and _mask_functions(type(module).forward):
            patch_module(module, SearchlessMasks)


class SearchlessMasks(ModulePatch):
    """Mixin of a model whose forward creates attention masks."""

    @classmethod
    def class_body(cls, original: type[nn.Module], spec: Any) -> dict[str, Any]:
        return {"forward": rebuild_function(original.forward, _mask_functions(original.forward))}


def _mask_functions(function: Callable[..., Any]) -> dict[str, Callable[..., Any]]:
    """Return replacements, by name, of the functions through which `function` creates masks.

    They are transformers' own, or helpers of the modelling file that call those. Empty if `function` cannot be rebuilt.
    """
    innermost = decorator_chain(function)[-1]
    if hasattr(innermost, "__wrapped__") or not isinstance(innermost, types.FunctionType):
        return {}
    found = {}
    for name in sorted(names_in(innermost.__code__)):
        create = innermost.__globals__.get(name)
        if not name.startswith("create_") or not isinstance(create, types.FunctionType):
            continue
        if create.__module__ == masking_utils.__name__:
            if "position_ids" in inspect.signature(create).parameters:
                found[name] = _without_search(create)
        elif inner := _mask_functions(create):
            found[name] = rebuild_function(create, inner)
    return found


def _without_search(create: Callable[..., Any]) -> Callable[..., Any]:
    @functools.wraps(create)
    def create_mask(*args: Any, **kwargs: Any) -> Any:
        if ROWS.documents_known and kwargs.get("position_ids") is not None:
            kwargs["position_ids"] = None
            if not args and _needs_no_mask(create.__name__, **kwargs):
                return None
        return create(*args, **kwargs)

    return create_mask


def _needs_no_mask(name: str, config: Any = None, inputs_embeds: Tensor | None = None, **others: Any) -> bool:
    """Return whether sdpa needs no mask during CUDA graph capture, where transformers before 5.24 always makes one."""
    capturing = torch.cuda.is_available() and torch.cuda.is_current_stream_capturing()
    plain = not any(value is not None for value in others.values()) and getattr(config, "is_causal", True)
    if not capturing or not plain or config._attn_implementation != "sdpa":
        return False
    if name == "create_sliding_window_causal_mask":
        return inputs_embeds is not None and inputs_embeds.shape[1] < config.sliding_window
    return name == "create_causal_mask"


def _check_packed(model: PreTrainedModel, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
    packed = kwargs.get("document_lengths") is not None
    if packed:
        if kwargs.get("attention_mask") is not None:
            raise ValueError("packed rows came with an attention_mask: transformers then searches for no documents")
        cached = kwargs.get("cache") is not None or kwargs.get("past_key_values") is not None  # 5.24 renamed it
        if kwargs.get("use_cache") is not False or cached:
            raise ValueError("packed rows need use_cache=False: with a cache transformers searches for no documents")
        part = kwargs.get("context_parallel")
        lengths = reveal(kwargs["document_lengths"])
        _check_positions(kwargs.get("position_ids"), lengths, lengths if part is None else part.key_lengths)
    counts_positions = len(args) <= 1 and kwargs.get("position_ids") is None
    ROWS.documents_known = model.config._attn_implementation in FUNCTIONS if packed else counts_positions
    ROWS.packed = packed
    ROWS.documents = {name: kwargs[name] for name in DOCUMENTS if name in kwargs} if packed else {}


def _add_documents(
    base: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]
) -> tuple[tuple[Any, ...], dict[str, Any]] | None:
    """Give a base model the documents of the row if the model around it does not, as that of Mamba 2."""
    missing = ROWS.documents.keys() - kwargs.keys()
    return (args, kwargs | {name: ROWS.documents[name] for name in missing}) if missing else None


def _reset(model: PreTrainedModel, args: tuple[Any, ...], output: Any) -> None:
    ROWS.packed = ROWS.documents_known = False
    ROWS.documents = {}


def _check_positions(
    position_ids: Tensor | None, document_lengths: tuple[int, ...], key_lengths: tuple[int, ...]
) -> None:
    """Check that positions restart with each document; values are read only on the CPU, which waits for no GPU.

    A part of a document (context parallel) holds its last tokens and has more keys than tokens. position_ids: (1, T),
    or (4, 1, T) if images have positions of their own; its first row counts the text.
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
