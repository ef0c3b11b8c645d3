"""What training reads: token ids and labels of many examples."""

from __future__ import annotations

import hashlib
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from typing import NamedTuple

import numpy as np

from ligertune.data.templates.label_masking import IGNORE_INDEX

# the arrays of a block, and how each is kept in a file
ARRAYS = {
    "input_ids": "<i4", "labels": "<i4", "lengths": "<i4", "trained": "<i4", "file_of": "<i4", "line_of": "<i8",
    "n_images": "<i4", "image_of": "<i4",
}  # fmt: skip
_NO_LINE = -1


@dataclass(frozen=True)
class Block:
    """`input_ids` and `labels` of all examples one behind the other; `lengths` says where each ends.

    Example i stands at `files[file_of[i]]`, line `line_of[i]`; a source that names no line is kept whole in `files`.
    """

    input_ids: np.ndarray  # (sum of lengths,)
    labels: np.ndarray  # (sum of lengths,)
    lengths: np.ndarray  # (N,)
    trained: np.ndarray  # (N,), how many labels of each are trained
    file_of: np.ndarray  # (N,)
    line_of: np.ndarray  # (N,)
    n_images: np.ndarray  # (N,)
    image_of: np.ndarray  # (sum of n_images,), places in `pictures`
    files: tuple[str, ...]
    pictures: tuple[str, ...] = ()

    @classmethod
    def of(cls, examples: Iterable[Example]) -> Block:
        examples = list(examples)
        numbers: dict[str, int] = {}
        places = [_place(example.source) for example in examples]
        file_of = [numbers.setdefault(file, len(numbers)) for file, _ in places]
        empty = np.zeros(0, dtype=np.int32)
        labels = np.concatenate([empty, *(example.labels for example in examples)])
        lengths = np.array([len(example.input_ids) for example in examples], dtype=np.int32)
        trained_before = np.concatenate([[0], np.cumsum(labels != IGNORE_INDEX)])
        bounds = np.concatenate([[0], np.cumsum(lengths)])
        pictures: dict[str, int] = {}
        image_of = [pictures.setdefault(path, len(pictures)) for example in examples for path in example.images]
        return cls(
            input_ids=np.concatenate([empty, *(example.input_ids for example in examples)]),
            labels=labels,
            lengths=lengths,
            trained=np.diff(trained_before[bounds]).astype(np.int32),
            file_of=np.array(file_of, dtype=np.int32),
            line_of=np.array([line for _, line in places], dtype=np.int64),
            n_images=np.array([len(example.images) for example in examples], dtype=np.int32),
            image_of=np.array(image_of, dtype=np.int32),
            files=tuple(numbers),
            pictures=tuple(pictures),
        )

    @classmethod
    def from_arrays(cls, arrays: Mapping[str, np.ndarray], files: Sequence[str], pictures: Sequence[str] = ()) -> Block:
        return cls(**{name: arrays[name] for name in ARRAYS}, files=tuple(files), pictures=tuple(pictures))

    @classmethod
    def joined(cls, blocks: Sequence[Block]) -> Block:
        """The blocks one behind the other, as one."""
        names = FileTable()
        parts = [names.renamed(block) for block in blocks] or [cls.of([])]
        arrays = {name: np.concatenate([getattr(part, name) for part in parts]) for name in ARRAYS}
        return cls.from_arrays(arrays, names.files, names.pictures)

    def __len__(self) -> int:
        return len(self.lengths)

    @cached_property
    def ends(self) -> np.ndarray:
        """Where each example ends in `input_ids` and `labels`: (N,) int64."""
        return np.cumsum(self.lengths, dtype=np.int64)

    @cached_property
    def _image_ends(self) -> np.ndarray:
        return np.cumsum(self.n_images, dtype=np.int64)

    def images(self, index: int) -> tuple[str, ...]:
        """The files of an example's images."""
        if not self.n_images[index]:
            return ()
        end = int(self._image_ends[index])
        return tuple(self.pictures[place] for place in self.image_of[end - int(self.n_images[index]) : end].tolist())

    def source(self, index: int) -> str:
        """ "file:line" """
        file, line = self.files[self.file_of[index]], int(self.line_of[index])
        return file if line == _NO_LINE else f"{file}:{line}"


class FileTable:
    """The files and pictures of several blocks, each once."""

    def __init__(self) -> None:
        self._numbers: dict[str, int] = {}
        self._pictures: dict[str, int] = {}

    @property
    def files(self) -> tuple[str, ...]:
        return tuple(self._numbers)

    @property
    def pictures(self) -> tuple[str, ...]:
        return tuple(self._pictures)

    def renamed(self, block: Block) -> Block:
        """The block, its files and pictures numbered as here."""
        number_of = [self._numbers.setdefault(file, len(self._numbers)) for file in block.files]
        file_of = np.array(number_of, dtype=np.int32)[block.file_of] if len(block) else block.file_of
        here = [self._pictures.setdefault(path, len(self._pictures)) for path in block.pictures]
        image_of = np.array(here, dtype=np.int32)[block.image_of] if len(block.image_of) else block.image_of
        return replace(block, file_of=file_of, files=self.files, image_of=image_of, pictures=self.pictures)


def _place(source: str) -> tuple[str, int]:
    """("file", line) of "file:line"."""
    file, _, line = source.rpartition(":")
    plain = file and line.isascii() and line.isdigit() and (line == "0" or line[0] != "0") and len(line) < 19
    return (file, int(line)) if plain else (source, _NO_LINE)


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
