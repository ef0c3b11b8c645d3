"""Data order: which examples each rank sees at each step, as a pure function of seed and step.

A batch consists of rows: a row is a pack of examples, or one example without packing. The run's rows are the shuffled
epochs one after another, cut into global batches. Micro-batch m of rank r is a slice of the global batch, so 1 x 8,
8 x 1 and 2 ranks x 4 train on the same rows at the same step. A resumed run needs no sampler state, only its step.
"""

from __future__ import annotations

from collections import deque
from dataclasses import KW_ONLY, dataclass, field
from itertools import groupby
from typing import TYPE_CHECKING, Any, NamedTuple, Protocol

import numpy as np

from ligertune.data.batching.packing import Packs, pack
from ligertune.data.stream import StreamedExamples
from ligertune.errors import UserError
from ligertune.planning.batch_layout import Batching
from ligertune.planning.memory.states import SHARDED_WEIGHTS

if TYPE_CHECKING:
    from ligertune.data.examples import Examples
    from ligertune.data.modalities.modality import ModalityReader

# Global batches whose examples are sorted by length together: enough for batches of similar lengths, few enough that a
# batch stays a random draw.
WINDOW = 50

RowsOfEpoch = np.ndarray | Packs  # [i]: example indices of row i


class RowOrder(Protocol):
    """Which examples each rank sees at each step."""

    def step(self, step: int, /) -> list[np.ndarray]:
        """Return the rows of the global batch of `step` (from 0)."""
        ...

    def micro_batches(self, step: int, rank: int) -> list[list[np.ndarray]]:
        """Return this rank's rows of each micro-batch of the step; as many for each rank, some empty."""
        ...


@dataclass(eq=False)
class DataOrder:
    """The shuffled order of a data set in memory.

    total_rows: of the run, which may end inside an epoch. packs: the rows, if examples are packed; examples of equal
    length are exchanged between rows in each epoch. grouped: examples of a global batch have similar lengths, longest
    first, and so have those of a micro-batch.
    """

    lengths: np.ndarray  # (N,) int64
    _: KW_ONLY
    total_rows: int
    seed: int
    batching: Batching
    packs: Packs | None = None
    grouped: bool = False
    _epochs: dict[int, tuple[np.ndarray, RowsOfEpoch]] = field(default_factory=dict, init=False)

    @property
    def rows_per_epoch(self) -> int:
        """Packs, or examples without packing."""
        return len(self.lengths) if self.packs is None else len(self.packs)

    def step(self, step: int) -> list[np.ndarray]:
        """Return the rows of the global batch of `step` (from 0). The last step of a run may have fewer."""
        first = step * self.batching.global_batch_size
        last = min(first + self.batching.global_batch_size, self.total_rows)
        rows = []
        for i in range(first, last):
            order, contents = self._epoch(i // self.rows_per_epoch)
            rows.append(contents[order[i % self.rows_per_epoch]])
        return sorted(rows, key=lambda row: -self.lengths[row[0]]) if self.grouped else rows

    def micro_batches(self, step: int, rank: int) -> list[list[np.ndarray]]:
        """Return this rank's slices of the step, one for each micro-batch that any rank has. A slice may be empty."""
        size = self.batching.micro_batch_size
        world = self.batching.row_ranks
        rows = self.step(step)
        n_micro = -(-len(rows) // (size * world))
        starts = ((m * world + rank) * size for m in range(n_micro))
        return [rows[start : start + size] for start in starts]

    def in_order(self, values: np.ndarray) -> np.ndarray:
        """Return a value of each row of the run (total_rows,), as its micro-batches read them one after another.

        values: (N,) of the examples. The value of a pack is the sum over its examples.
        """
        found = []
        longest = []
        for epoch in range(-(-self.total_rows // self.rows_per_epoch)):
            order, contents = self._epoch(epoch)
            found.append((contents.sums(values) if isinstance(contents, Packs) else values)[order])
            longest.append(self.lengths[order] if self.grouped else order)
        ordered = np.concatenate(found)[: self.total_rows]
        if not self.grouped:
            return ordered
        # as `step` does: the longest rows of a global batch come first
        batches = np.arange(self.total_rows) // self.batching.global_batch_size
        return ordered[np.lexsort((-np.concatenate(longest)[: self.total_rows], batches))]

    def _epoch(self, epoch: int) -> tuple[np.ndarray, RowsOfEpoch]:
        """Return (order of the rows, rows as example indices) of an epoch."""
        if epoch not in self._epochs:
            rng = np.random.default_rng([self.seed, epoch])
            order = rng.permutation(self.rows_per_epoch)
            if self.grouped:
                order = self._group(order, epoch, rng)
            contents: RowsOfEpoch = np.arange(len(self.lengths))[:, None]
            if self.packs is not None:
                contents = self.packs.shuffled(rng)
            self._epochs = {k: v for k, v in self._epochs.items() if k == epoch - 1}  # a step can straddle two
            self._epochs[epoch] = order, contents
        return self._epochs[epoch]

    def _group(self, order: np.ndarray, epoch: int, rng: np.random.Generator) -> np.ndarray:
        """Sort by length within windows, and shuffle the resulting batches.

        Rows that share a global batch with another epoch keep their places.
        """
        size = self.batching.global_batch_size
        lead = min(-epoch * self.rows_per_epoch % size, len(order))
        end = lead + (len(order) - lead) // size * size
        batches = []
        for start in range(lead, end, WINDOW * size):
            window = order[start : min(start + WINDOW * size, end)]
            by_length = window[np.argsort(self.lengths[window], kind="stable")].reshape(-1, size)
            batches.append(rng.permutation(by_length).reshape(-1))
        return np.concatenate([order[:lead], *batches, order[end:]])


# Examples that are packed together: 4,096 of Alpaca's fill 200 rows of 2,048 tokens to 99.9 %.
STREAM_WINDOW = 4096


class _Window(NamedTuple):
    """The rows of STREAM_WINDOW examples."""

    first: int  # number of its first row
    begin: int  # number of its first example
    rows: list[np.ndarray]


class StreamOrder(DataOrder):
    """The order of a stream: examples are read when a step needs them, and forgotten after the last step that does.

    The rows of a window are packs of `max_length`, or single examples if it is None, shuffled from `seed`. Every rank
    reads the whole stream and takes its slices. A resumed run reads up to its step.
    """

    def __init__(self, examples: StreamedExamples, *, seed: int, batching: Batching, max_length: int | None) -> None:
        self.batching = batching
        self.seed = seed
        self._examples = examples
        self._max_length = max_length
        self._windows: deque[_Window] = deque()
        self._made = self._rows = 0  # windows, and the rows in them

    def step(self, step: int) -> list[np.ndarray]:
        """Return the rows of the global batch of `step`."""
        size = self.batching.global_batch_size
        first = step * size
        while self._rows < first + size:
            self._make_window()
            while len(self._windows) > 1 and self._windows[1].first <= first:
                self._windows.popleft()
            self._examples.forget(self._windows[0].begin)
        rows = [row for window in self._windows for row in window.rows]
        start = first - self._windows[0].first
        return rows[start : start + size]

    def _make_window(self) -> None:
        begin = self._made * STREAM_WINDOW
        self._examples.read_to(begin + STREAM_WINDOW)
        lengths = self._examples.lengths[np.arange(begin, begin + STREAM_WINDOW)]
        rows = np.arange(STREAM_WINDOW)[:, None] if self._max_length is None else pack(lengths, self._max_length)
        order = np.random.default_rng([self.seed, self._made]).permutation(len(rows))
        self._windows.append(_Window(self._rows, begin, [rows[i] + begin for i in order]))
        self._made, self._rows = self._made + 1, self._rows + len(rows)


class NumberOfEach(Protocol):
    """A number of each example, by an array of indices. That of a stream is known once its examples are read."""

    def __getitem__(self, indices: Any, /) -> Any: ...


class ByFileCount:
    """Splits the micro-batches of a DataOrder by the number of their files, for models that need equal numbers.

    Every rank gets equally many micro-batches, some empty, so that all make the same collective calls. The steps have
    the same rows as before.
    """

    packs = None  # rows of such models are not packed

    def __init__(self, order: DataOrder | StreamOrder, n_files: NumberOfEach) -> None:
        self.batching = order.batching
        self._order = order
        self._n_files = n_files
        self.step = order.step

    def micro_batches(self, step: int, rank: int) -> list[list[np.ndarray]]:
        """Return this rank's rows of each micro-batch of the step; all with equally many files."""
        ranks = [self._order.micro_batches(step, other) for other in range(self.batching.world_size)]
        split = [[self._split(rows) for rows in batches] for batches in ranks]
        found: list[list[np.ndarray]] = []
        for number, own in enumerate(split[rank]):
            most = max(len(batches[number]) for batches in split)
            found += own + [[]] * (most - len(own))
        return found

    def _split(self, rows: list[np.ndarray]) -> list[list[np.ndarray]]:
        def n_files(row: np.ndarray) -> int:
            return self._n_files[row[0]]

        return [list(group) for _, group in groupby(sorted(rows, key=n_files), key=n_files)] or [[]]


def check_files_on_all_rows(strategy: str, examples: Examples | StreamedExamples, reader: ModalityReader) -> None:
    """Raise UserError for rows without files if ranks share the weights: they would skip layers that others gather."""
    if strategy not in SHARDED_WEIGHTS:
        return
    # which rows of a stream have files is not known before they are read
    if isinstance(examples, StreamedExamples) or (examples.n_media == 0).any():
        raise UserError(
            f"parallel.strategy: with {strategy}, {reader.family_name} cannot train on rows without {reader.inputs}: it"
            f" skips layers for them, and ranks that have {reader.inputs} would wait.",
            hint="Leave these rows out, or write parallel.strategy: ddp.",
        )
