"""Packing: examples in rows of at most `max_length` tokens, by best fit decreasing, so that few slots are padding.

Which lengths share a row depends only on the lengths, and so does the number of rows. Which examples of equal length go
where is shuffled in each epoch. Documents of a row are kept apart by collate_packed and the attention.
"""

from __future__ import annotations

from bisect import bisect_left, insort
from collections import defaultdict
from collections.abc import Sequence
from itertools import pairwise

import numpy as np


class Packs(Sequence[np.ndarray]):
    """Rows of example indices: `packs[i]` is (documents,) int64; every example is in one row."""

    def __init__(self, lengths: np.ndarray, max_length: int, places: np.ndarray, row_of_place: np.ndarray) -> None:
        """Assign examples to rows. places: examples in order of falling length; row_of_place: the row of each."""
        self.example_lengths = lengths
        self.max_length = max_length
        self._row_of_place = row_of_place
        self._members = places[np.argsort(row_of_place, kind="stable")]
        self._ends = np.cumsum(np.bincount(row_of_place)) if len(places) else np.zeros(0, dtype=np.int64)

    def __len__(self) -> int:
        return len(self._ends)

    def __getitem__(self, index: int) -> np.ndarray:  # type: ignore[override]  # nothing takes a slice
        index = range(len(self))[index]
        return self._members[self._ends[index - 1] if index else 0 : self._ends[index]]

    @property
    def lengths(self) -> np.ndarray:
        """Tokens of each row."""
        return self.sums(self.example_lengths)

    def sums(self, values: np.ndarray) -> np.ndarray:
        """Return the sum over the examples of each row. values: (N,) of all examples."""
        totals = np.concatenate([[0], np.cumsum(values[self._members])])
        return np.diff(totals[np.concatenate([[0], self._ends])])

    @property
    def most_documents(self) -> int:
        """The largest number of examples in a row."""
        return int(np.diff(self._ends, prepend=0).max(initial=0))

    @property
    def fill(self) -> float:
        """Tokens / slots of all rows."""
        return float(self.example_lengths.sum()) / max(len(self) * self.max_length, 1)

    def shuffled(self, rng: np.random.Generator) -> Packs:
        """Return rows of the same lengths, with examples of equal length exchanged at random."""
        places = np.lexsort((rng.random(len(self.example_lengths)), -self.example_lengths))
        return Packs(self.example_lengths, self.max_length, places, self._row_of_place)


def pack(lengths: np.ndarray, max_length: int) -> Packs:
    """Pack examples of these lengths, deterministically, a million in seconds. Raises ValueError for longer ones."""
    lengths = np.asarray(lengths, dtype=np.int64)
    if len(lengths) and not 0 < lengths.min() <= lengths.max() <= max_length:
        raise ValueError(f"pack: lengths {lengths.min()} to {lengths.max()}; expected 1 to max_length {max_length}")
    places = np.argsort(-lengths, kind="stable")
    return Packs(lengths, max_length, places, _best_fit(lengths[places], max_length))


def _best_fit(falling: np.ndarray, max_length: int) -> np.ndarray:
    """Return the row of each of some falling lengths: the fullest row with room for it, or a new one.

    Examples of equal length are placed together: as many as fit into each of the fullest rows, then into the next
    fullest. Placing them one by one gives the same rows, because a row that took one is fuller than before.
    """
    row_of_place = np.empty(len(falling), dtype=np.int64)
    n_rows = 0
    rows_with: dict[int, list[np.ndarray]] = defaultdict(list)  # room -> rows that have it
    rooms: list[int] = []  # the keys of rows_with, rising

    def leave(rows: np.ndarray, room: int) -> None:
        if len(rows) and room > 0:
            if room not in rows_with:
                insort(rooms, room)
            rows_with[room].append(rows)

    changes = np.flatnonzero(np.diff(falling, prepend=0, append=0))  # where a length begins, and the end
    for first, end in pairwise(changes.tolist()):
        length = int(falling[first])
        while first < end:
            fullest = bisect_left(rooms, length)
            if fullest < len(rooms):
                room = rooms[fullest]
                rows = rows_with[room].pop()
                if not rows_with[room]:
                    del rows_with[room], rooms[fullest]
            else:
                room = max_length
                rows = np.arange(n_rows, n_rows - (first - end) // (max_length // length))
                n_rows += len(rows)
            each = room // length
            needed = -((first - end) // each)
            used = rows[:needed]
            leave(rows[needed:], room)
            placed = min(len(used) * each, end - first)
            row_of_place[first : first + placed] = np.repeat(used, each)[:placed]
            in_last = placed - (len(used) - 1) * each
            leave(used[:-1], room - each * length)
            leave(used[-1:], room - in_last * length)
            first += placed
    return row_of_place
