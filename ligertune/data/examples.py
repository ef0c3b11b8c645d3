"""What training reads: token ids and labels of many examples, kept in three arrays."""

from __future__ import annotations

import hashlib
from collections.abc import Iterable, Sequence
from functools import cached_property
from typing import NamedTuple

import numpy as np


class Example(NamedTuple):
    """`labels` stand under `input_ids`, not shifted; -100 is not trained."""

    input_ids: np.ndarray  # (T,) int32
    labels: np.ndarray  # (T,) int32
    source: str  # "file:line"


class Examples(Sequence[Example]):
    """A sequence of `Example` over one concatenated int32 array of ids and one of labels."""

    def __init__(self, examples: Iterable[Example]) -> None:
        examples = list(examples)
        self.sources = [example.source for example in examples]
        self.lengths = np.array([len(example.input_ids) for example in examples], dtype=np.int64)
        self._ends = np.cumsum(self.lengths)
        empty = np.zeros(0, dtype=np.int32)
        self._input_ids = np.concatenate([empty, *(example.input_ids for example in examples)])
        self._labels = np.concatenate([empty, *(example.labels for example in examples)])

    def __len__(self) -> int:
        return len(self.sources)

    def __getitem__(self, index: int) -> Example:
        index = range(len(self))[index]
        span = slice(self._ends[index] - self.lengths[index], self._ends[index])
        return Example(self._input_ids[span], self._labels[span], self.sources[index])

    def select(self, indices: Iterable[int]) -> Examples:
        """The examples at these places, in this order, as arrays of their own."""
        return Examples(self[index] for index in indices)

    @cached_property
    def fingerprint(self) -> str:
        """SHA-256 over the ids, the labels and where one example ends: equal data, equal fingerprint."""
        digest = hashlib.sha256()
        for array in (self.lengths, self._input_ids, self._labels):
            digest.update(array.astype(array.dtype.newbyteorder("<")).tobytes())
        return digest.hexdigest()
