"""Examples to the tensors of one forward pass."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from ligertune.data.encode import IGNORE_INDEX
from ligertune.data.examples import Example


def collate(examples: Sequence[Example], *, pad_token_id: int) -> dict[str, Tensor]:
    """`input_ids`, `attention_mask`, `labels`: (B, T) int64, padded on the right to the longest of these examples."""
    shape = len(examples), max(len(example.input_ids) for example in examples)
    input_ids = torch.full(shape, pad_token_id)
    attention_mask = torch.zeros(shape, dtype=torch.int64)
    labels = torch.full(shape, IGNORE_INDEX)
    for row, example in enumerate(examples):
        length = len(example.input_ids)
        input_ids[row, :length] = torch.from_numpy(example.input_ids)
        attention_mask[row, :length] = 1
        labels[row, :length] = torch.from_numpy(example.labels)
    return {"input_ids": input_ids, "attention_mask": attention_mask, "labels": labels}
