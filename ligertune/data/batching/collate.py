"""Examples to the tensors of one forward pass: padded to a rectangle, or packed one behind another."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch import Tensor

from ligertune.data.examples import Example
from ligertune.data.templates.tokenize import IGNORE_INDEX


def padded_length(longest: int, pad_to_multiple_of: int) -> int:
    """T of a batch whose longest example has `longest` tokens."""
    return -(-longest // pad_to_multiple_of) * pad_to_multiple_of


def collate(examples: Sequence[Example], *, pad_token_id: int, pad_to_multiple_of: int = 1) -> dict[str, Tensor]:
    """`input_ids`, `attention_mask`, `labels`: (B, T) int64, padded on the right to the longest of these examples."""
    longest = max(len(example.input_ids) for example in examples)
    shape = len(examples), padded_length(longest, pad_to_multiple_of)
    input_ids = np.full(shape, pad_token_id, dtype=np.int64)
    attention_mask = np.zeros(shape, dtype=np.int64)
    labels = np.full(shape, IGNORE_INDEX, dtype=np.int64)
    for row, example in enumerate(examples):
        length = len(example.input_ids)
        input_ids[row, :length] = example.input_ids
        attention_mask[row, :length] = 1
        labels[row, :length] = example.labels
    batch = {"input_ids": input_ids, "attention_mask": attention_mask, "labels": labels}
    return {name: torch.from_numpy(array) for name, array in batch.items()}


@dataclass(frozen=True)
class Alike:
    """What all packed batches of a run have in common, so that no graph (torch.compile's, CUDA's) meets a new size."""

    tokens: int  # T
    longest: int  # tokens of a document; one that is longer is said to be, which is another graph
    documents: int  # in a row; one with more gets room for twice as many, or more


def collate_packed(
    examples: Sequence[Example], *, pad_token_id: int, pad_to_multiple_of: int = 1, alike: Alike | None = None
) -> dict[str, Any]:
    """Documents one behind another: `input_ids`, `labels`, `position_ids` (1, T) int64, and where each begins.

    A document's first label is ignored, or the last token of the one before would be trained to predict it. What fills
    T up to the multiple is a document of its own, untrained. Everything that attention needs is known here, on the CPU:
    `cu_seq_lens_*` (documents + 1,) int32, `max_length_*` and `document_lengths` as Python numbers, `document_places`
    (2, T) int32: where each token's document begins, and the place behind it. There is no mask.

    With `alike` T and `max_length_*` are what it says, T is filled up by documents no longer than that, and
    `cu_seq_lens_*` ends in empty ones: attention is never told less than there is.
    """
    lengths = [len(example.input_ids) for example in examples]
    multiple = pad_to_multiple_of if alike is None else alike.tokens
    missing = padded_length(sum(lengths), multiple) - sum(lengths)
    longest = max([missing, *lengths] if alike is None else [alike.longest, *lengths])
    input_ids = np.concatenate([*(example.input_ids for example in examples), np.full(missing, pad_token_id)])
    labels = np.concatenate([*(example.labels for example in examples), np.full(missing, IGNORE_INDEX)])
    whole, rest = divmod(missing, longest)
    lengths += [longest] * whole + [rest] * (rest > 0)
    begins = np.cumsum([0, *lengths])
    labels[begins[:-1]] = IGNORE_INDEX
    places = np.repeat(np.stack((begins[:-1], begins[1:])), lengths, axis=1)
    position_ids = np.arange(begins[-1]) - places[0]
    empty = 0 if alike is None else padded_length(len(lengths), alike.documents) - len(lengths)
    cu_seq_lens = torch.from_numpy(np.pad(begins, (0, empty), mode="edge").astype(np.int32))
    rows = {"input_ids": input_ids, "labels": labels, "position_ids": position_ids}
    return {
        **{name: torch.from_numpy(row.astype(np.int64))[None] for name, row in rows.items()},
        "cu_seq_lens_q": cu_seq_lens,
        "cu_seq_lens_k": cu_seq_lens,
        "max_length_q": longest,
        "max_length_k": longest,
        "document_lengths": tuple(lengths),
        "document_places": torch.from_numpy(places.astype(np.int32)),
    }
