"""Examples to the tensors of one forward pass."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from ligertune.data.encode import IGNORE_INDEX
from ligertune.data.examples import Example


def padded_length(longest: int, pad_to_multiple_of: int) -> int:
    """T of a batch whose longest example has `longest` tokens."""
    return -(-longest // pad_to_multiple_of) * pad_to_multiple_of


def collate(examples: Sequence[Example], *, pad_token_id: int, pad_to_multiple_of: int = 1) -> dict[str, Tensor]:
    """`input_ids`, `attention_mask`, `labels`: (B, T) int64, padded on the right to the longest of these examples."""
    longest = max(len(example.input_ids) for example in examples)
    shape = len(examples), padded_length(longest, pad_to_multiple_of)
    input_ids = torch.full(shape, pad_token_id)
    attention_mask = torch.zeros(shape, dtype=torch.int64)
    labels = torch.full(shape, IGNORE_INDEX)
    for row, example in enumerate(examples):
        length = len(example.input_ids)
        input_ids[row, :length] = torch.from_numpy(example.input_ids)
        attention_mask[row, :length] = 1
        labels[row, :length] = torch.from_numpy(example.labels)
    return {"input_ids": input_ids, "attention_mask": attention_mask, "labels": labels}
