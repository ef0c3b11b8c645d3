"""Which examples each rank sees at each step: a pure function of seed and step, whatever the micro batch or the ranks.

A batch is made of rows: a row is a pack of examples, or without packing one example. The run's rows are the epochs'
orders one after another, cut into global batches. Micro batch m of rank r is a slice of the global batch, so 1 x 8,
8 x 1 and 2 ranks x 4 train on the same rows at the same step. To resume is to go on at a step; no sampler state exists.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence
from typing import TYPE_CHECKING, NamedTuple

import numpy as np

from ligertune.data.batching.packing import Packs, pack
from ligertune.data.stream import StreamedExamples
from ligertune.errors import UserError
from ligertune.planning.memory.states import SHARDED_WEIGHTS
from ligertune.planning.micro_batch import Batching

if TYPE_CHECKING:
    from ligertune.data.examples import Examples

# Global batches whose examples are sorted among themselves: enough for batches of one length, few enough that a batch
# stays a draw from all examples.
WINDOW = 50


class DataOrder:
    """Rows of `lengths`' examples, `total_rows` in the run (the last epoch may be a part), shuffled from `seed`.

    With `packs` those are the rows, examples of equal length dealt anew each epoch. With `grouped` the examples of a
    global batch are of about one length, longest first, and so are those of a micro batch.
    """

    packs: Packs | None = None

    def __init__(
        self,
        lengths: np.ndarray,
        *,
        total_rows: int,
        seed: int,
        batching: Batching,
        packs: Packs | None = None,
        grouped: bool = False,
    ) -> None:
        self.lengths, self.packs, self.grouped = np.asarray(lengths, dtype=np.int64), packs, grouped
        self.total_rows, self.seed, self.batching = total_rows, seed, batching
        self.rows_per_epoch = len(lengths) if packs is None else len(packs)
        self._epochs: dict[int, tuple[np.ndarray, Sequence[np.ndarray]]] = {}

    def step(self, step: int) -> list[np.ndarray]:
        """The rows of the global batch of `step` (from 0), as example indices; fewer at the end of the run."""
        first = step * self.batching.global_batch_size
        last = min(first + self.batching.global_batch_size, self.total_rows)
        rows = []
        for i in range(first, last):
            order, contents = self._epoch(i // self.rows_per_epoch)
            rows.append(contents[order[i % self.rows_per_epoch]])
        return sorted(rows, key=lambda row: -self.lengths[row[0]]) if self.grouped else rows

    def micro_batches(self, step: int, rank: int) -> list[list[np.ndarray]]:
        """This rank's slices of the step, one per micro batch that any rank has rows for; a slice may be empty."""
        size, world = self.batching.micro_batch_size, self.batching.row_ranks
        rows = self.step(step)
        n_micro = -(-len(rows) // (size * world))
        starts = ((m * world + rank) * size for m in range(n_micro))
        return [rows[start : start + size] for start in starts]

    def _epoch(self, epoch: int) -> tuple[np.ndarray, Sequence[np.ndarray]]:
        """(order of the rows, rows as example indices) of an epoch."""
        if epoch not in self._epochs:
            rng = np.random.default_rng([self.seed, epoch])
            order = rng.permutation(self.rows_per_epoch)
            if self.grouped:
                order = self._group(order, epoch, rng)
            contents = np.arange(len(self.lengths))[:, None] if self.packs is None else self.packs.dealt(rng)
            self._epochs = {k: v for k, v in self._epochs.items() if k == epoch - 1}  # a step can straddle two
            self._epochs[epoch] = order, contents
        return self._epochs[epoch]

    def _group(self, order: np.ndarray, epoch: int, rng: np.random.Generator) -> np.ndarray:
        """The epoch's whole global batches made of like lengths; what completes other epochs' batches is left as is."""
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
    """The rows of STREAM_WINDOW examples. `first` is the number of its first row, `begin` that of its first example."""

    first: int
    begin: int
    rows: list[np.ndarray]


class StreamOrder(DataOrder):
    """As `DataOrder`, of examples that are read when a step needs them and forgotten when no later step does.

    The rows of a window are its packs of `max_length`, or with None single examples; shuffled from `seed`. Every rank
    reads the whole stream and takes its slices. To go on at a step is to read up to it.
    """

    def __init__(
        self,
        examples: StreamedExamples,
        *,
        seed: int,
        batching: Batching,
        max_length: int | None,
        window: int = STREAM_WINDOW,
    ) -> None:
        self.batching, self.seed = batching, seed
        self._examples, self._max_length, self._window = examples, max_length, window
        self._windows: deque[_Window] = deque()
        self._made = self._rows = 0  # windows, and the rows in them

    def step(self, step: int) -> list[np.ndarray]:
        """The rows of the global batch of `step`."""
        size = self.batching.global_batch_size
        first = step * size
        while self._rows < first + size:
            self._make_window()
            self._forget(first)
        rows = [row for window in self._windows for row in window.rows]
        start = first - self._windows[0].first
        return rows[start : start + size]

    def _make_window(self) -> None:
        begin = self._made * self._window
        self._examples.read_to(begin + self._window)
        lengths = self._examples.lengths[np.arange(begin, begin + self._window)]
        rows = np.arange(self._window)[:, None] if self._max_length is None else pack(lengths, self._max_length)
        order = np.random.default_rng([self.seed, self._made]).permutation(len(rows))
        self._windows.append(_Window(self._rows, begin, [rows[i] + begin for i in order]))
        self._made, self._rows = self._made + 1, self._rows + len(rows)

    def _forget(self, first: int) -> None:
        """Lets go of the windows whose rows all stand before `first`."""
        while len(self._windows) > 1 and self._windows[1].first <= first:
            self._windows.popleft()
        self._examples.forget(self._windows[0].begin)


class ByImageCount:
    """A `DataOrder` whose micro batches are split further. Every rank gets equally many, empty ones where it has less,
    so that all make the same collective calls; the steps hold the same rows as before."""

    packs = None  # rows of tiles are not packed

    def __init__(self, order: DataOrder, n_images: np.ndarray) -> None:
        self.batching, self._order, self._n_images = order.batching, order, n_images

    def step(self, step: int) -> list[np.ndarray]:
        return self._order.step(step)

    def micro_batches(self, step: int, rank: int) -> list[list[np.ndarray]]:
        ranks = [self._order.micro_batches(step, other) for other in range(self.batching.world_size)]
        split = [[self._split(rows) for rows in batches] for batches in ranks]
        found: list[list[np.ndarray]] = []
        for number, mine in enumerate(split[rank]):
            most = max(len(batches[number]) for batches in split)
            found += mine + [[]] * (most - len(mine))
        return found

    def _split(self, rows: list[np.ndarray]) -> list[list[np.ndarray]]:
        groups: dict[int, list[np.ndarray]] = {}
        for row in rows:
            groups.setdefault(int(self._n_images[row[0]]), []).append(row)
        return [groups[count] for count in sorted(groups)] or [[]]


def check_images_on_all_rows(strategy: str, examples: Examples | StreamedExamples, family: str) -> None:
    """A UserError where ranks that share the weights would not ask for the same layers, and wait for each other."""
    streamed = not isinstance(examples.n_images, np.ndarray)
    if strategy in SHARDED_WEIGHTS and (streamed or (examples.n_images == 0).any()):
        raise UserError(
            f"parallel.strategy: with {strategy}, {family} cannot train on rows without images: it skips layers for"
            " them, and ranks that have images would wait.",
            hint="Leave these rows out, or write parallel.strategy: ddp.",
        )
