"""data.streaming: examples read while training, of data sets larger than memory.

What is read depends on the recipe and the seed alone: the data sets are read side by side, each as fast as it takes
for all to end together, and their examples leave a buffer of fixed size in random order. To resume is to read again
from the beginning and to skip.
"""

from __future__ import annotations

import hashlib
import math
from collections.abc import Callable, Iterator
from itertools import chain, islice
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np

from ligertune.data.examples import Example
from ligertune.data.row_pipeline import RowCounts, RowPipeline, image_tokens
from ligertune.data.rows.conversation import DROP_REASONS
from ligertune.data.rows.formats import check_columns, recognise_format
from ligertune.data.rows.sources import Record, RecordStream, display_path, find_files
from ligertune.errors import UserError

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

    from ligertune.planning.options import DataOptions, DatasetOptions
    from ligertune.vision.reader import ImageReader

BUFFER = 10_000  # examples among which the next is drawn: a few megabytes of short ones
_CHUNK = 100  # records that are tokenised together
_FIRST = 100  # records whose columns say what format all have
_HOPELESS = 10_000  # rows of a data set of which none could be used


class StreamedDataset:
    """One data set, and what was counted of it so far."""

    def __init__(
        self,
        spec: DatasetOptions,
        data: DataOptions,
        tokenizer: PreTrainedTokenizerBase,
        images: ImageReader | None = None,
    ) -> None:
        check_columns(spec.columns)
        self.spec, self.tally = spec, RowCounts()
        self.path = display_path(Path(spec.path))
        first = list(islice(RecordStream(spec), _FIRST))
        if not first:
            raise UserError(f"{spec.path} holds no records.")
        columns = {column for record in first for column in record.row}
        format = recognise_format(spec.format, columns, self.path)
        self.rows = RowPipeline(spec, data, format, tokenizer, image_tokens(data, images))
        self.rows.examples(first, RowCounts())  # what is wrong with the first of them is said before a model is loaded

    def check(self, *, ended: bool) -> None:
        """Complains if nothing of it can be used."""
        if not self.tally.rows_used and (ended or self.tally.rows_read >= _HOPELESS):
            reason, source = next(iter(self.tally.first_dropped.items()))
            raise UserError(
                f"{self.path}: no row can be used of the first {self.tally.rows_read}, the first at {source}.",
                hint=f"{reason}: {DROP_REASONS[reason]}.",
            )


class _Lane:
    """An epoch of one data set: its records in chunks, `weight` times over."""

    def __init__(self, streamed: StreamedDataset, rng: np.random.Generator) -> None:
        self.set, self._rng = streamed, rng
        self._passes = math.ceil(streamed.spec.weight)
        self._pass = 0
        self._begin()

    def _begin(self) -> None:
        self._stream = RecordStream(self.set.spec)
        self._records = iter(self._stream)

    @property
    def share(self) -> float:
        """How much of the epoch is read."""
        return (self._pass + self._stream.share) / self._passes

    def chunk(self) -> list[Record] | None:
        """The next records, of which a part-pass keeps a part; None at the end."""
        records = list(islice(self._records, _CHUNK))
        if not records:
            self._pass += 1
            if self._pass >= self._passes:
                return None
            self._begin()
            return self.chunk()
        part = self.set.spec.weight - self._pass
        if part >= 1:
            return records
        kept = self._rng.random(len(records)) < part
        return [record for record, keep in zip(records, kept, strict=True) if keep]


class ExampleStream:
    """Endless examples of the data sets of a recipe, shuffled; `sets` say what was counted on the way."""

    def __init__(
        self,
        data: DataOptions,
        tokenizer: PreTrainedTokenizerBase,
        *,
        seed: int,
        buffer: int = BUFFER,
        images: ImageReader | None = None,
    ) -> None:
        self.sets = [StreamedDataset(spec, data, tokenizer, images) for spec in data.datasets]
        self.epoch = 0
        self.max_length = data.max_length
        self._seed, self._buffer = seed, buffer

    @property
    def template(self) -> str:
        return ", ".join(dict.fromkeys(part.rows.template.name for part in self.sets))

    @property
    def fingerprint(self) -> str:
        """SHA-256 over the files' names, sizes and times: what is in them was not read yet."""
        digest = hashlib.sha256()
        for part in self.sets:
            digest.update(repr(part.spec).encode())
            for file in find_files(part.spec.path):
                about = file.stat()
                digest.update(f"{file}|{about.st_size}|{about.st_mtime_ns}".encode())
        return digest.hexdigest()

    def account(self) -> list[str]:
        """What became of the rows that were read so far, a sentence for each data set."""
        return [
            f"{part.path}: {part.tally.rows_used} of {part.tally.rows_read} rows that were read are used"
            + "".join(f"; {count} {reason}" for reason, count in part.tally.dropped.most_common())
            + "."
            for part in self.sets
        ]

    def __iter__(self) -> Iterator[Example]:
        return chain.from_iterable(self._shuffled(epoch) for epoch in iter(self._next_epoch, None))

    def _next_epoch(self) -> int:
        self.epoch += 1
        return self.epoch - 1

    def _shuffled(self, epoch: int) -> Iterator[Example]:
        rng = np.random.default_rng([self._seed, epoch])
        held: list[Example] = []
        for example in self._in_order(epoch):
            # a copy: an example is a view of the batch that it was tokenised in, and would hold all of it
            alone = example._replace(input_ids=example.input_ids.copy(), labels=example.labels.copy())
            if len(held) < self._buffer:
                held.append(alone)
            else:
                place = int(rng.integers(self._buffer))
                yield held[place]
                held[place] = alone
        for place in rng.permutation(len(held)):
            yield held[place]

    def _in_order(self, epoch: int) -> Iterator[Example]:
        """The epoch's examples, the next ones always from the data set that has got least far."""
        lanes = [
            _Lane(part, np.random.default_rng([self._seed, epoch, number])) for number, part in enumerate(self.sets)
        ]
        while lanes:
            lane = min(lanes, key=lambda lane: lane.share)
            records = lane.chunk()
            if records is None:
                lanes.remove(lane)
            else:
                yield from lane.set.rows.examples(records, lane.set.tally)
            lane.set.check(ended=records is None)


class StreamedExamples:
    """The examples of a stream by their number in it, as far as they are read and not yet forgotten."""

    def __init__(self, stream: ExampleStream) -> None:
        self.stream = stream
        self._source = iter(stream)
        self._held: list[Example] = []
        self._forgotten = 0

    def reach(self, count: int) -> None:
        """Reads until there were `count`."""
        self._held += islice(self._source, max(count - self._forgotten - len(self._held), 0))

    def forget(self, before: int) -> None:
        """Lets go of all with a smaller number."""
        del self._held[: before - self._forgotten]
        self._forgotten = before

    def __getitem__(self, number: int) -> Example:
        return self._held[number - self._forgotten]

    @property
    def lengths(self) -> _Numbers:
        return _Numbers(self, lambda example: len(example.labels))

    @property
    def trained(self) -> _Numbers:
        """How many labels of each are trained."""
        return _Numbers(self, lambda example: int((example.labels != -100).sum()))

    @property
    def n_images(self) -> _Numbers:
        """How many images each shows."""
        return _Numbers(self, lambda example: len(example.images))

    @property
    def fingerprint(self) -> str:
        return self.stream.fingerprint


class _Numbers:
    """A number of each example, looked up by an array of the examples' places, as in an array of all."""

    def __init__(self, examples: StreamedExamples, count: Callable[[Example], int]) -> None:
        self._examples, self._count = examples, count

    def __getitem__(self, places: np.ndarray) -> np.ndarray:
        chosen = [self._examples[int(place)] for place in np.ravel(places)]
        return np.array([self._count(one) for one in chosen], dtype=np.int64).reshape(np.shape(places))
