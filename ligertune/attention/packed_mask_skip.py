"""Rows of which it is known whether they hold several documents, so that nobody need look.

transformers finds packed documents by the values of position ids, which makes the host wait for the device at the start
of every forward: a GPU that has come to the end of its work then idles until the host has launched more. Where a call
brings no position ids, the model counts them itself and each row is one document; and of packed rows our own attention
is told where documents begin, so that it needs no mask. Of a mask that is not there, transformers 5.17 does not say so
while a CUDA graph is recorded, and makes one.
"""

from __future__ import annotations

import threading
from typing import Any

import torch
from torch import Tensor
from transformers import PreTrainedModel, masking_utils

from ligertune.attention.packed_documents import guard

TOLD = ("document_attention", "varlen", "per_document")


class _ThisThread(threading.local):
    """Whether a forward over such rows is running."""

    known = False


THREAD = _ThisThread()


def know_rows(model: PreTrainedModel, *, packed: bool) -> None:
    """From now on `model` does not look into position ids that tell it nothing, and guards the rows that are packed."""
    if packed:
        guard(model)
    _say_of_no_mask()
    look = getattr(masking_utils, "find_packed_sequence_indices", None)
    if look is None:  # an internal name: without it every forward looks as before
        return
    if not hasattr(look, "before"):
        masking_utils.find_packed_sequence_indices = _unless_known(look)
    model.register_forward_pre_hook(_enter, with_kwargs=True)
    model.register_forward_hook(_leave, always_call=True)


def _say_of_no_mask() -> None:
    """Where there is no mask there are no values, so that a graph that is recorded need not do without them."""
    traced = getattr(masking_utils, "is_tracing", None)
    if traced is None or hasattr(traced, "before"):
        return

    def is_tracing(tensor: Any = None) -> bool:
        if tensor is not None or torch.compiler.is_compiling() or not torch.cuda.is_available():
            return traced(tensor)
        return not torch.cuda.is_current_stream_capturing() and traced(tensor)

    is_tracing.before = traced
    masking_utils.is_tracing = is_tracing


def _unless_known(look: Any) -> Any:
    def find_packed_sequence_indices(position_ids: Tensor) -> Tensor | None:
        return None if THREAD.known else look(position_ids)

    find_packed_sequence_indices.before = look
    return find_packed_sequence_indices


def _enter(model: PreTrainedModel, args: tuple, kwargs: dict[str, Any]) -> None:
    packed = kwargs.get("document_lengths") is not None
    counts_itself = len(args) <= 1 and kwargs.get("position_ids") is None
    THREAD.known = model.config._attn_implementation in TOLD if packed else counts_itself


def _leave(model: PreTrainedModel, args: tuple, output: Any) -> None:
    THREAD.known = False
