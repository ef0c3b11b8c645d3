"""What training reads: token ids and labels of many examples."""

from __future__ import annotations

import hashlib
from collections.abc import Iterable, Iterator, Sequence
from functools import cached_property
from typing import NamedTuple

import numpy as np

from ligertune.data.blocks import Block


class Example(NamedTuple):
    """`labels` stand under `input_ids`, not shifted; -100 is not trained."""

    input_ids: np.ndarray  # (T,) int32
    labels: np.ndarray  # (T,) int32
    source: str  # "file:line"
    images: tuple[str, ...] = ()  # files, in the order in which they stand in the text


class Examples(Sequence[Example]):
    """A sequence of `Example` over blocks of flat arrays, which it does not copy: they may be mapped from files."""

    def __init__(self, examples: Iterable[Example] = ()) -> None:
        self._hold([Block.of(examples)])

    @classmethod
    def of_blocks(cls, blocks: Sequence[Block]) -> Examples:
        """All examples of the blocks, in their order."""
        found = cls.__new__(cls)
        found._hold(list(blocks))
        return found

    def _hold(self, blocks: list[Block]) -> None:
        sizes = [len(block) for block in blocks]
        rows = np.concatenate([np.arange(size) for size in sizes] or [np.zeros(0, dtype=np.int64)])
        self._choose(blocks, np.repeat(np.arange(len(blocks), dtype=np.int32), sizes), rows)

    def _choose(self, blocks: list[Block], block_of: np.ndarray, row_of: np.ndarray) -> None:
        """`row_of`: the example's number within its block."""
        self._blocks, self._block_of, self._row_of = blocks, block_of, row_of
        self.lengths = self._gathered([block.lengths for block in blocks])  # (N,) int64
        self._ends = self._gathered([block.ends for block in blocks])

    def _gathered(self, values: Sequence[np.ndarray]) -> np.ndarray:
        """The value of each example from those of each block."""
        found = np.zeros(len(self._row_of), dtype=np.int64)
        for number, per_row in enumerate(values):
            here = self._block_of == number
            found[here] = per_row[self._row_of[here]]
        return found

    def __len__(self) -> int:
        return len(self._row_of)

    def __getitem__(self, index: int) -> Example:
        index = range(len(self))[index]
        block, end = self._blocks[self._block_of[index]], self._ends[index]
        span = slice(end - self.lengths[index], end)
        row = self._row_of[index]
        return Example(block.input_ids[span], block.labels[span], block.source(row), block.images(row))

    @property
    def sources(self) -> list[str]:
        """ "file:line" of each."""
        places = zip(self._block_of.tolist(), self._row_of.tolist(), strict=True)
        return [self._blocks[block].source(row) for block, row in places]

    @property
    def block_of(self) -> np.ndarray:
        """The number of the block that each is of: (N,)."""
        return self._block_of

    @cached_property
    def trained(self) -> np.ndarray:
        """How many labels of each are trained: (N,) int64. The first label of an example never is."""
        return self._gathered([block.trained for block in self._blocks])

    @cached_property
    def n_images(self) -> np.ndarray:
        """How many images each shows: (N,) int64."""
        return self._gathered([block.n_images for block in self._blocks])

    def select(self, indices: Iterable[int]) -> Examples:
        """The examples at these places, in this order, over the same arrays."""
        chosen = np.fromiter(indices, dtype=np.int64)
        found = Examples.__new__(Examples)
        found._choose(self._blocks, self._block_of[chosen], self._row_of[chosen])
        return found

    @cached_property
    def fingerprint(self) -> str:
        """SHA-256 over the ids, the labels and where one example ends: equal data, equal fingerprint."""
        digest = hashlib.sha256(self.lengths.astype("<i8").tobytes())
        for name in ("input_ids", "labels"):
            for piece in self._pieces(name):
                digest.update(np.ascontiguousarray(piece, dtype="<i4"))
        if self.n_images.any():
            digest.update("\n".join(path for example in self for path in example.images).encode())
        return digest.hexdigest()

    def _pieces(self, name: str) -> Iterator[np.ndarray]:
        """The array `name` of all examples, in pieces as long as they stand one behind the other."""
        if len(self) == 0:
            return
        starts = self._ends - self.lengths
        breaks = (starts[1:] != self._ends[:-1]) | (self._block_of[1:] != self._block_of[:-1])
        first = np.concatenate([[0], np.flatnonzero(breaks) + 1])
        last = np.concatenate([first[1:], [len(self)]]) - 1
        for one, other in zip(first.tolist(), last.tolist(), strict=True):
            yield getattr(self._blocks[self._block_of[one]], name)[starts[one] : self._ends[other]]
