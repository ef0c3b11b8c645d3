"""Rows of examples to what one forward pass takes, on the device."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from ligertune_kernels import labelled_rows

from ligertune.data.batches import collate, collate_packed, padded_length

if TYPE_CHECKING:
    from ligertune.data.examples import Examples
    from ligertune.data.stream import StreamedExamples

# Few sizes of the head's products: cuBLAS and the allocator take their time over each that is new.
ROWS_MULTIPLE_OF = 128


@dataclass(frozen=True)
class Batcher:
    """Makes micro batches of `examples`. T is a multiple of `multiple_of`.

    With `index_labels` a batch says which rows predict a label, for a loss that is computed in the head; `label_shifts`
    is how far ahead they look.
    """

    examples: Examples | StreamedExamples
    packed: bool
    multiple_of: int
    pad_token_id: int
    index_labels: bool
    device: torch.device
    label_shifts: tuple[int, ...] = (1,)

    def __call__(self, rows: Sequence[np.ndarray]) -> dict[str, Any]:
        """Rows of example indices -> input_ids and labels (B, T) padded on the right, or (1, T) packed.

        There is no attention mask. Padding stands behind every real token, where causal attention does not look, and
        without a mask the flash kernels stay available; packed documents are kept apart by where they begin. A rank
        without rows gets an example of which nothing is trained, so that all ranks make the same collective calls.
        """
        idle = len(rows) == 0
        indices = [0] if idle else np.concatenate(rows).tolist()
        make = collate_packed if self.packed else collate
        batch = make(
            [self.examples[i] for i in indices], pad_token_id=self.pad_token_id, pad_to_multiple_of=self.multiple_of
        )
        batch.pop("attention_mask", None)
        if idle:
            batch["labels"].fill_(-100)
        if self.index_labels:
            batch["labelled_rows"] = labelled_rows(
                batch["labels"], shift=self.label_shifts, multiple_of=ROWS_MULTIPLE_OF
            )
        return {
            name: value.to(self.device, non_blocking=True) if isinstance(value, torch.Tensor) else value
            for name, value in batch.items()
        }

    def slots(self, rows: Sequence[np.ndarray]) -> int:
        """Tokens that the forward pass over these rows computes, padding included."""
        lengths = [self.examples.lengths[row] for row in rows]
        if self.packed:
            return padded_length(int(sum(length.sum() for length in lengths)), self.multiple_of)
        return len(rows) * padded_length(int(max(length.max() for length in lengths)), self.multiple_of)
