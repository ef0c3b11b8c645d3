"""Largest micro-batch of a run, from the lengths of its examples and the order in which the run reads them."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np

from ligertune.data.batching.order import DataOrder
from ligertune.data.batching.packing import Packs, pack
from ligertune.planning.batch_layout import Batching, BatchShape, Rows

if TYPE_CHECKING:
    from ligertune.data.examples import Examples

# Above this number of rows, or of epochs, the order is not computed and an upper bound is returned: 4 million rows take
# about a second, and so do 1,000 epochs of a small data set.
MAX_ROWS = 4_000_000
MAX_EPOCHS = 1000


@dataclass(frozen=True, eq=False)
class ExampleSizes:
    """Sizes of N examples in memory. They decide how many tokens each micro-batch holds."""

    lengths: np.ndarray  # (N,) tokens; of a pair, those of both sequences
    trained: np.ndarray  # (N,) labels
    longest_documents: np.ndarray  # (N,) tokens of the longest sequence of each example
    seed: int  # of the data order

    @staticmethod
    def of(examples: Examples, seed: int) -> ExampleSizes:
        """Return those of prepared examples."""
        return ExampleSizes(examples.lengths, examples.trained, examples.longest_documents, seed)

    def largest_batch(self, rows: Rows, batching: Batching, total_rows: int) -> BatchShape:
        """Return the shape of the micro-batch with the most token slots, over all ranks and steps of a run.

        Its labels are the most of any micro-batch, which may be another one. An upper bound for a very long run.
        """
        packs = pack(self.lengths, rows.length) if rows.packed else None
        row_tokens = self.lengths if packs is None else packs.lengths
        if total_rows > MAX_ROWS or total_rows > MAX_EPOCHS * len(row_tokens):
            return self._bound(rows, batching.micro_batch_size, packs, row_tokens)
        order = DataOrder(
            self.longest_documents,
            total_rows=total_rows,
            seed=self.seed,
            batching=batching,
            packs=packs,
            grouped=rows.kind == "grouped",
        )
        size = batching.micro_batch_size
        starts = np.arange(0, total_rows, size)
        labels = int(np.add.reduceat(order.in_order(self.trained), starts).max())
        if rows.is_padding_free:
            tokens = int(np.add.reduceat(order.in_order(self.lengths), starts).max())
            return _flattened(rows, size, tokens, labels)
        longest = np.maximum.reduceat(order.in_order(self.longest_documents), starts)
        padded = -(-longest // rows.multiple_of) * rows.multiple_of
        number = np.minimum(size, total_rows - starts)  # the last micro-batch may have fewer rows
        place = int((padded * number).argmax())
        return BatchShape(int(number[place]) * rows.documents, int(padded[place]), labels)

    def _bound(self, rows: Rows, size: int, packs: Packs | None, row_tokens: np.ndarray) -> BatchShape:
        """Return sizes that no micro-batch exceeds, whatever the order is."""
        most_labels = row_tokens if packs is not None else self.trained  # packs are made anew in each epoch
        labels = most_in_batch(most_labels, size)
        if rows.is_padding_free:
            return _flattened(rows, size, most_in_batch(row_tokens, size), labels)
        longest = int(self.longest_documents.max())
        padded = -(-longest // rows.multiple_of) * rows.multiple_of
        return BatchShape(size * rows.documents, padded, labels)


def most_in_batch(values: np.ndarray, size: int) -> int:
    """Return the largest sum of `values` over `size` consecutive rows of shuffled epochs, whatever their order is.

    values: (N,) of the rows. Such rows lie in at most (size - 2) // N + 2 epochs, and have each row once per epoch.
    """
    falling = np.sort(values)[::-1]
    copies = 1 if size == 1 else (size - 2) // len(values) + 2
    whole, rest = divmod(size, copies)
    return int(copies * falling[:whole].sum() + rest * falling[whole : whole + 1].sum())


def _flattened(rows: Rows, size: int, tokens: int, labels: int) -> BatchShape:
    """Return the shape of a micro-batch that is one row. size: its packs or examples."""
    multiple_of = rows.multiple_of
    if rows.packed and multiple_of >= rows.length // rows.documents:
        multiple_of *= size  # all batches have one length, which one CUDA graph or one compiled graph serves
    return BatchShape(1, -(-tokens // multiple_of) * multiple_of, labels)
