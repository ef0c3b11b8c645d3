"""Streaming data (data.streaming): examples that are read during training, from data sets larger than memory.

The recipe and the seed alone decide the examples. Data sets are read in parallel, at rates that let all of them end
together, or as `data.interleave` says, and their examples are shuffled in a buffer of fixed size. A resumed run reads
from the beginning and skips.
"""

from __future__ import annotations

import hashlib
import math
from collections.abc import Callable, Iterator
from itertools import chain, compress, count, islice
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np

from ligertune.data.dataset_report import WARN_SHARE, DatasetReport, remedy
from ligertune.data.examples import Example, Preparation
from ligertune.data.interleave import drawn_sets
from ligertune.data.row_pipeline import RowCounts, RowPipeline
from ligertune.data.rows.data_files import Record, display_path
from ligertune.data.rows.sources import RecordStream, files_of, unread_note
from ligertune.data.templates.label_masking import IGNORE_INDEX
from ligertune.errors import plural

if TYPE_CHECKING:
    from ligertune.planning.options import DatasetOptions

BUFFER = 10_000  # examples of the shuffle buffer: a few megabytes of short ones
_CHUNK = 100  # records that are tokenized together
_SAMPLE = 100  # records whose columns decide the format
_MAX_UNUSABLE = 10_000  # rows without a usable one after which a data set is an error


class StreamedDataset:
    """One data set of a stream, and the counts of its rows so far."""

    def __init__(self, spec: DatasetOptions, preparation: Preparation) -> None:
        self.spec = spec
        self.counts = RowCounts()
        self.path = display_path(Path(spec.path))
        self.max_bytes = preparation.data.max_record_bytes
        first = list(islice(RecordStream(spec, self.max_bytes), _SAMPLE))
        self.rows = RowPipeline(spec, preparation, first)
        counts = RowCounts()
        examples = self.rows.examples(first, counts)  # raises errors in the first rows before a model is loaded
        self.report = DatasetReport(self.path, **self.rows.about, examples=len(examples), sample=True, **counts.totals)
        if note := unread_note(spec):
            self.report = self.report.with_note(note)

    def examples(self, records: list[Record]) -> Iterator[Example]:
        """Yield the examples of these records. Raises UserError after many rows without a usable one."""
        yield from self.rows.examples(records, self.counts)
        if self.counts.rows_read >= _MAX_UNUSABLE:
            self.check_used()

    def check_used(self) -> None:
        """Raise UserError if none of the rows that were read can be used."""
        if not self.counts.rows_used:
            raise self.counts.nothing_used(self.path)


class _DatasetEpoch:
    """One epoch of one data set: its records in chunks, repeated `weight` times."""

    def __init__(self, streamed: StreamedDataset, rng: np.random.Generator) -> None:
        self.set = streamed
        self._rng = rng
        self._pass = 0
        self._stream = RecordStream(streamed.spec, streamed.max_bytes)
        self.chunks = self._read()

    @property
    def share(self) -> float:
        """The share of the epoch that was read."""
        return (self._pass + self._stream.share) / math.ceil(self.set.spec.weight)

    def _read(self) -> Iterator[list[Record]]:
        """Yield the records in chunks. The last pass of a fractional weight keeps a random part."""
        for number in range(math.ceil(self.set.spec.weight)):
            self._pass, self._stream = number, RecordStream(self.set.spec, self.set.max_bytes)
            records = iter(self._stream)
            part = self.set.spec.weight - number
            while chunk := list(islice(records, _CHUNK)):
                yield chunk if part >= 1 else list(compress(chunk, self._rng.random(len(chunk)) < part))


class _RepeatedDataset:
    """The examples of one data set, again and again. `exhausted`: all of them were taken at least once."""

    def __init__(self, streamed: StreamedDataset, rng: np.random.Generator) -> None:
        self.exhausted = False
        self._set = streamed
        self._rng = rng
        self._examples = self._read()
        self._next = next(self._examples)

    def take(self) -> Example:
        """Return the next example."""
        taken = self._next
        following = next(self._examples, None)
        if following is None:
            self.exhausted = True
            self._examples = self._read()
            following = next(self._examples)
        self._next = following
        return taken

    def _read(self) -> Iterator[Example]:
        for records in _DatasetEpoch(self._set, self._rng).chunks:
            yield from self._set.examples(records)
        self._set.check_used()


class ExampleStream:
    """Endless, shuffled examples of a recipe's data sets. `sets` hold the counts of rows so far."""

    def __init__(self, preparation: Preparation, *, seed: int, buffer: int = BUFFER) -> None:
        self.sets = [StreamedDataset(spec, preparation) for spec in preparation.data.datasets]
        self.epoch = 0  # epochs begun
        self.max_length = preparation.data.max_length
        self._preparation = preparation
        self._interleave = preparation.data.interleave
        self._seed = seed
        self._buffer = buffer

    @property
    def template(self) -> str:
        """The names of the prompt templates of all data sets."""
        return ", ".join(dict.fromkeys(part.rows.template.name for part in self.sets))

    @property
    def fingerprint(self) -> str:
        """SHA-256 of the options, and the files' names, sizes and times, because their content was not read yet."""
        digest = hashlib.sha256(repr(self._preparation.example_options).encode())
        if self._interleave.probabilities is not None:
            digest.update(repr(self._interleave).encode())
        for part in self.sets:
            digest.update(repr(part.spec).encode())
            for file in files_of(part.spec):
                stat = file.stat()
                digest.update(f"{file}|{stat.st_size}|{stat.st_mtime_ns}".encode())
        return digest.hexdigest()

    def account(self) -> list[str]:
        """Return a sentence for each data set about the rows that were read so far."""
        sentences = []
        for path, counts in ((part.path, part.counts) for part in self.sets):
            reasons = dict(counts.dropped.most_common())
            dropped = "".join(f"; {number} {reason}" for reason, number in reasons.items())
            dropped += f"; {plural(counts.unplaced, 'answer')} cannot be placed" if counts.unplaced else ""
            sentence = f"{path}: {counts.rows_used} of the {plural(counts.rows_read, 'row')} read are used{dropped}."
            many = sum(reasons.values()) >= WARN_SHARE * max(counts.rows_read, 1)
            sentences.append(f"{sentence} {remedy(reasons, self._preparation.data)}" if many else sentence)
        return sentences

    def __iter__(self) -> Iterator[Example]:
        return chain.from_iterable(map(self._shuffled, count(self.epoch)))

    def _shuffled(self, epoch: int) -> Iterator[Example]:
        self.epoch = epoch + 1
        rng = np.random.default_rng([self._seed, epoch])
        held: list[Example] = []
        in_order = self._in_order if self._interleave.probabilities is None else self._interleaved
        for example in in_order(epoch):
            # a copy, because an example is a view that would keep its whole batch of texts in memory
            alone = example._replace(input_ids=example.input_ids.copy(), labels=example.labels.copy())
            if len(held) < self._buffer:
                held.append(alone)
            else:
                place = int(rng.integers(self._buffer))
                yield held[place]
                held[place] = alone
        for place in rng.permutation(len(held)):
            yield held[place]

    def _draws_of(self, epoch: int, number: int) -> np.random.Generator:
        """Return the random numbers of one data set in one epoch."""
        return np.random.default_rng([self._seed, epoch, number])

    def _in_order(self, epoch: int) -> Iterator[Example]:
        """Yield the epoch's examples, always from the data set with the smallest share read."""
        lanes = [_DatasetEpoch(part, self._draws_of(epoch, number)) for number, part in enumerate(self.sets)]
        while lanes:
            lane = min(lanes, key=lambda lane: lane.share)
            records = next(lane.chunks, None)
            if records is None:
                lanes.remove(lane)
                lane.set.check_used()
            else:
                yield from lane.set.examples(records)

    def _interleaved(self, epoch: int) -> Iterator[Example]:
        """Yield the epoch's examples as `data.interleave` draws them; other ones in each epoch."""
        sources = [_RepeatedDataset(part, self._draws_of(epoch, number)) for number, part in enumerate(self.sets)]
        is_over = any if self._interleave.stopping_strategy == "first_exhausted" else all
        in_turn = self._interleave.probabilities == "round_robin"
        rng = np.random.default_rng([self._seed, epoch])
        for block in drawn_sets(self._interleave.probabilities, len(sources), rng):
            for number in block:
                yield sources[number].take()
                if not in_turn and is_over(source.exhausted for source in sources):
                    return
            if is_over(source.exhausted for source in sources):  # in turn, an epoch ends with the round
                return


class StreamedExamples:
    """The examples of a stream by number: those that are read and not forgotten.

    `lengths` and the other counts are indexed by arrays of numbers, like the arrays of Examples.
    """

    def __init__(self, stream: ExampleStream) -> None:
        self.stream = stream
        self._source = iter(stream)
        self._held: list[Example] = []
        self._forgotten = 0
        self.lengths = _LazyArray(self, lambda example: len(example.labels))
        self.trained = _LazyArray(self, lambda example: int((example.labels != IGNORE_INDEX).sum()))
        self.n_media = _LazyArray(self, lambda example: len(example.media))
        self.squared_lengths = _LazyArray(self, lambda example: len(example.labels) ** 2)
        self.longest_documents = self.lengths  # pairs are not streamed

    def read_to(self, number: int) -> None:
        """Read the examples with a number below `number`."""
        self._held += islice(self._source, max(number - self._forgotten - len(self._held), 0))

    def forget(self, before: int) -> None:
        """Drop the examples with a number below `before`."""
        del self._held[: before - self._forgotten]
        self._forgotten = before

    def __getitem__(self, number: int) -> Example:
        return self._held[number - self._forgotten]

    @property
    def documents_per_example(self) -> int:
        return 1

    @property
    def fingerprint(self) -> str:
        return self.stream.fingerprint


class _LazyArray:
    """A number of each example, computed when it is indexed by an array of example numbers."""

    def __init__(self, examples: StreamedExamples, value: Callable[[Example], int]) -> None:
        self._examples = examples
        self._value = value

    def __getitem__(self, places: np.ndarray) -> np.ndarray:
        values = [self._value(self._examples[int(place)]) for place in np.ravel(places)]
        return np.array(values, dtype=np.int64).reshape(np.shape(places))
