"""Which examples each rank sees at each step: a pure function of seed and step, whatever the micro batch or the ranks.

A batch is made of rows: a row is a pack of examples, or without packing one example. The run's rows are the epochs'
orders one after another, cut into global batches. Micro batch m of rank r is a slice of the global batch, so 1 x 8,
8 x 1 and 2 ranks x 4 train on the same rows at the same step. To resume is to go on at a step; no sampler state exists.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from ligertune.data.batching.packing import Packs
from ligertune.planning.plan import Batching

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
