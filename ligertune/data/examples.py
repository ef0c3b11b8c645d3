"""Examples: token ids and labels of prepared data, in flat arrays that may be memory-mapped."""

from __future__ import annotations

import hashlib
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np

from ligertune.data.templates.label_masking import IGNORE_INDEX

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

    from ligertune.data.modalities.modality import ModalityReader
    from ligertune.planning.options import DataOptions

# the arrays of a block, and their dtypes in a file
ARRAYS = {
    "input_ids": "<i4", "labels": "<i4", "lengths": "<i4", "trained": "<i4", "file_of": "<i4", "line_of": "<i8",
    "n_media": "<i4", "first_length": "<i4", "first_trained": "<i4", "desirable": "<i4",
    "n_targets": "<i4", "targets": "<f8",
}  # fmt: skip
_NO_LINE = -1
# keys of `data` that select among examples or decide how they are made, and do not change any example
_NOT_IN_KEY = {
    "datasets",
    "eval_datasets",
    "interleave",
    "val_split",
    "packing",
    "padding_free",
    "num_proc",
    "cache",
    "streaming",
    "max_dropped",
}


@dataclass(frozen=True)
class Preparation:
    """What turns rows into examples. Without `reader`, that of a modality, rows with files are refused.

    rows: name of the kind of rows. problem_type: of their targets, if the recipe names one.
    """

    data: DataOptions
    tokenizer: PreTrainedTokenizerBase
    reader: ModalityReader | None = None
    rows: str = "conversations"
    problem_type: str | None = None

    @property
    def example_options(self) -> dict[str, Any]:
        """The options of `data` that decide what an example is."""
        return {name: value for name, value in vars(self.data).items() if name not in _NOT_IN_KEY}


class Example(NamedTuple):
    """One tokenized example. `labels` are not shifted; IGNORE_INDEX marks tokens that are not trained.

    A pair is one example, so that packing keeps it together: the tokens of the chosen sequence, and then those of the
    rejected one.
    """

    input_ids: np.ndarray  # (T,) int32
    labels: np.ndarray  # (T,) int32
    source: str  # "file:line"
    media: tuple[str, ...] = ()  # files of a modality, in the order of the text
    first_length: int = 0  # tokens of the chosen sequence; 0: not a pair
    desirable: int = -1  # 1 or 0: whether the answer is desirable; -1: it has no label
    targets: tuple[str | float, ...] = ()  # labels or numbers of a text, or the margin of a pair

    def documents(self) -> list[Example]:
        """Return the sequences of the example: itself, or the chosen and then the rejected sequence of a pair."""
        first = self.first_length
        if not first:
            return [self]
        parts = (slice(None, first), slice(first, None))
        return [
            self._replace(input_ids=self.input_ids[part], labels=self.labels[part], first_length=0) for part in parts
        ]


@dataclass(frozen=True)
class Block:
    """N examples as flat arrays.

    Example i comes from `files[file_of[i]]`, line `line_of[i]`. A source without a line number is a file name here.
    """

    input_ids: np.ndarray  # (sum of lengths,)
    labels: np.ndarray  # (sum of lengths,)
    lengths: np.ndarray  # (N,)
    trained: np.ndarray  # (N,) trained labels of each example
    file_of: np.ndarray  # (N,)
    line_of: np.ndarray  # (N,)
    n_media: np.ndarray  # (N,)
    first_length: np.ndarray  # (N,) tokens of the chosen sequence of a pair, or 0
    first_trained: np.ndarray  # (N,) trained labels among them
    desirable: np.ndarray  # (N,) 1, 0, or -1 without a label
    n_targets: np.ndarray  # (N,) labels or numbers of each example
    targets: np.ndarray  # (sum of n_targets,) float64: numbers, ids of labels, or indices into label_names
    files: tuple[str, ...] = ()
    media_files: tuple[str, ...] = ()  # (sum of n_media,)
    label_names: tuple[str, ...] = ()  # of labels that are names

    @classmethod
    def of(cls, examples: Iterable[Example]) -> Block:
        """Return the examples as a block."""
        examples = list(examples)
        places = [_split_source(example.source) for example in examples]
        files = {file: number for number, file in enumerate(dict.fromkeys(file for file, _ in places))}
        labels = _concatenated([example.labels for example in examples])
        lengths = np.array([len(example.labels) for example in examples], dtype=np.int32)
        first_length = np.array([example.first_length for example in examples], dtype=np.int32)
        trained_before = np.concatenate([[0], np.cumsum(labels != IGNORE_INDEX)])
        bounds = np.concatenate([[0], np.cumsum(lengths, dtype=np.int64)])
        first_ends = bounds[:-1] + first_length
        targets = [target for example in examples for target in example.targets]
        names = {name: index for index, name in enumerate(dict.fromkeys(t for t in targets if isinstance(t, str)))}
        return cls(
            input_ids=_concatenated([example.input_ids for example in examples]),
            labels=labels,
            lengths=lengths,
            trained=np.diff(trained_before[bounds]).astype(np.int32),
            file_of=np.array([files[file] for file, _ in places], dtype=np.int32),
            line_of=np.array([line for _, line in places], dtype=np.int64),
            n_media=np.array([len(example.media) for example in examples], dtype=np.int32),
            first_length=first_length,
            first_trained=(trained_before[first_ends] - trained_before[bounds[:-1]]).astype(np.int32),
            desirable=np.array([example.desirable for example in examples], dtype=np.int32),
            n_targets=np.array([len(example.targets) for example in examples], dtype=np.int32),
            targets=np.array([names[t] if isinstance(t, str) else t for t in targets], dtype=np.float64),
            label_names=tuple(names),
            files=tuple(files),
            media_files=tuple(path for example in examples for path in example.media),
        )

    @classmethod
    def concatenate(cls, blocks: Iterable[Block]) -> Block:
        """Return all examples of the blocks as one block."""
        names = FileNames()
        parts = [names.renumbered(block) for block in blocks] or [cls.of([])]
        arrays = {name: np.concatenate([getattr(part, name) for part in parts]) for name in ARRAYS}
        return cls.from_arrays(arrays, names.as_fields())

    @classmethod
    def from_arrays(cls, arrays: Mapping[str, np.ndarray], names: Mapping[str, Iterable[str]]) -> Block:
        """Return the block of these arrays, with the names that `FileNames.as_fields` returns."""
        return cls(
            input_ids=arrays["input_ids"],
            labels=arrays["labels"],
            lengths=arrays["lengths"],
            trained=arrays["trained"],
            file_of=arrays["file_of"],
            line_of=arrays["line_of"],
            n_media=arrays["n_media"],
            first_length=arrays["first_length"],
            first_trained=arrays["first_trained"],
            desirable=arrays["desirable"],
            n_targets=arrays["n_targets"],
            targets=arrays["targets"],
            files=tuple(names["files"]),
            media_files=tuple(names["media_files"]),
            label_names=tuple(names["label_names"]),
        )

    def __len__(self) -> int:
        return len(self.lengths)

    @cached_property
    def ends(self) -> np.ndarray:
        """The end of each example in `input_ids` and `labels`: (N,) int64."""
        return np.cumsum(self.lengths, dtype=np.int64)

    @cached_property
    def _media_ends(self) -> np.ndarray:
        return np.cumsum(self.n_media, dtype=np.int64)

    @cached_property
    def _target_ends(self) -> np.ndarray:
        return np.cumsum(self.n_targets, dtype=np.int64)

    def targets_of(self, index: int) -> tuple[float, ...]:
        """Return the labels or numbers of an example."""
        end = self._target_ends[index]
        return tuple(self.targets[end - self.n_targets[index] : end].tolist())

    def media(self, index: int) -> tuple[str, ...]:
        """Return the files of an example."""
        end = self._media_ends[index]
        return self.media_files[end - self.n_media[index] : end]

    def source(self, index: int) -> str:
        """Return the "file:line" of an example."""
        file = self.files[self.file_of[index]]
        line = int(self.line_of[index])
        return file if line == _NO_LINE else f"{file}:{line}"


class FileNames:
    """The names of files and labels of several blocks, concatenated."""

    def __init__(self) -> None:
        self.files: list[str] = []
        self.media_files: list[str] = []
        self._label_names: dict[str, int] = {}

    def renumbered(self, block: Block) -> Block:
        """Add the names of a block, and return it with `file_of` and `targets` as indices into all names."""
        renumbered = replace(block, file_of=block.file_of + len(self.files))
        self.files += block.files
        self.media_files += block.media_files
        if block.label_names:
            ids = [self._label_names.setdefault(name, len(self._label_names)) for name in block.label_names]
            renumbered = replace(renumbered, targets=np.array(ids, dtype=np.float64)[block.targets.astype(np.int64)])
        return renumbered

    def as_fields(self) -> dict[str, tuple[str, ...]]:
        """Return the names as fields of a Block."""
        names = {"files": self.files, "media_files": self.media_files, "label_names": self._label_names}
        return {field: tuple(values) for field, values in names.items()}


def _concatenated(arrays: list[np.ndarray]) -> np.ndarray:
    return np.concatenate([np.zeros(0, dtype=np.int32), *arrays])


def _split_source(source: str) -> tuple[str, int]:
    """Split "file:line" into ("file", line), if joining them gives the same source again."""
    file, _, line = source.rpartition(":")
    # of at most 18 digits, which fit in the int64 of `line_of`
    is_number = file and line.isascii() and line.isdigit() and (line == "0" or line[0] != "0") and len(line) < 19
    return (file, int(line)) if is_number else (source, _NO_LINE)


class Examples(Sequence[Example]):
    """A sequence of Example over blocks of flat arrays, which are not copied.

    lengths, trained, n_media: tokens, trained labels and files of each example, (N,) int64. first_lengths,
    first_trained: those of the chosen sequences of pairs, else 0. desirable: 1, 0, or -1 without a label. block_of:
    (N,) int32.
    """

    def __init__(self, examples: Iterable[Example] = (), *, blocks: Sequence[Block] | None = None) -> None:
        """Hold these examples, or all examples of `blocks`, in their order."""
        self._blocks = [Block.of(examples)] if blocks is None else list(blocks)
        sizes = [len(block) for block in self._blocks]
        self.block_of = np.repeat(np.arange(len(sizes), dtype=np.int32), sizes)
        self._row_of = np.concatenate([np.zeros(0, dtype=np.int64), *map(np.arange, sizes)])

    def select(self, indices: Iterable[int]) -> Examples:
        """Return the examples at `indices`, in this order, over the same arrays."""
        chosen = np.fromiter(indices, dtype=np.int64)
        examples = Examples(blocks=self._blocks)
        examples.block_of = self.block_of[chosen]
        examples._row_of = self._row_of[chosen]
        return examples

    def _gathered(self, name: str) -> np.ndarray:
        """Return the value of each example from an array of its block."""
        values = np.zeros(len(self._row_of), dtype=np.int64)
        for number, block in enumerate(self._blocks):
            here = self.block_of == number
            values[here] = getattr(block, name)[self._row_of[here]]
        return values

    lengths = cached_property(lambda self: self._gathered("lengths"))
    trained = cached_property(lambda self: self._gathered("trained"))
    n_media = cached_property(lambda self: self._gathered("n_media"))
    first_lengths = cached_property(lambda self: self._gathered("first_length"))
    first_trained = cached_property(lambda self: self._gathered("first_trained"))
    desirable = cached_property(lambda self: self._gathered("desirable"))
    n_targets = cached_property(lambda self: self._gathered("n_targets"))
    _ends = cached_property(lambda self: self._gathered("ends"))

    def __len__(self) -> int:
        return len(self._row_of)

    def __getitem__(self, index: int) -> Example:  # type: ignore[override]  # nothing takes a slice
        index = range(len(self))[index]
        block = self._blocks[self.block_of[index]]
        row = self._row_of[index]
        end = self._ends[index]
        span = slice(end - self.lengths[index], end)
        more = block.media(row), int(block.first_length[row]), int(block.desirable[row]), block.targets_of(row)
        return Example(block.input_ids[span], block.labels[span], block.source(row), *more)

    @property
    def documents_per_example(self) -> int:
        """2 for pairs, else 1."""
        return 2 if self.first_lengths.any() else 1

    @cached_property
    def longest_documents(self) -> np.ndarray:
        """The length of the longer sequence of each pair, or of the only one: (N,)."""
        return np.maximum(self.first_lengths, self.lengths - self.first_lengths)

    @cached_property
    def squared_lengths(self) -> np.ndarray:
        """The sum of the squared lengths of each example's sequences, to which attention's work is proportional."""
        return self.first_lengths**2 + (self.lengths - self.first_lengths) ** 2

    @property
    def document_lengths(self) -> np.ndarray:
        """The length of each sequence; 2i is the chosen and 2i + 1 the rejected one of pair i."""
        if self.documents_per_example == 1:
            return self.lengths
        return np.stack([self.first_lengths, self.lengths - self.first_lengths], axis=1).ravel()

    @cached_property
    def fingerprint(self) -> str:
        """SHA-256 of the ids, the labels, the ends of examples and sequences, labels of answers, and media files."""
        digest = hashlib.sha256(self.lengths.astype("<i8").tobytes())
        for name in ("input_ids", "labels"):
            for piece in self._pieces(name):
                digest.update(np.ascontiguousarray(piece, dtype="<i4").data)
        for values, absent in ((self.first_lengths, 0), (self.desirable, -1)):
            if (values != absent).any():
                digest.update(values.astype("<i8").tobytes())
        if self.n_targets.any():
            digest.update(repr([example.targets for example in self]).encode())
        if self.n_media.any():
            digest.update("\n".join(path for example in self for path in example.media).encode())
        return digest.hexdigest()

    def _pieces(self, name: str) -> Iterator[np.ndarray]:
        """Yield an array of all examples in contiguous pieces: far fewer than examples, unless they are shuffled."""
        starts = self._ends - self.lengths
        breaks = (starts[1:] != self._ends[:-1]) | (self.block_of[1:] != self.block_of[:-1])
        for run in np.split(np.arange(len(self)), np.flatnonzero(breaks) + 1):
            if len(run):
                yield getattr(self._blocks[self.block_of[run[0]]], name)[starts[run[0]] : self._ends[run[-1]]]
