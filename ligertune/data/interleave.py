"""Interleaved data sets: which examples an epoch has, as `datasets.interleave_datasets` chooses them.

Each next example is the next one of a data set that is drawn with its probability, or of the next data set in turn
(round_robin). A data set that has been read begins again. The epoch ends with the last example of the data set that is
read first (first_exhausted) or last (all_exhausted); in turn, it ends with the round.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import TYPE_CHECKING, Literal

import numpy as np

if TYPE_CHECKING:
    from ligertune.planning.options import InterleaveOptions

_DRAWS = 1000  # at a time, as `datasets` draws them: the same seed gives the same examples


def interleave(set_of: np.ndarray, n_sets: int, options: InterleaveOptions, *, seed: int) -> np.ndarray:
    """Return the indices of an epoch's examples, in the order in which they are drawn: the same in every epoch.

    set_of: (N,) the data set of each example. Every data set needs examples, and `options` probabilities.
    """
    places = [np.flatnonzero(set_of == number) for number in range(n_sets)]
    lengths = np.array([len(found) for found in places])
    chosen = _chosen_sets(lengths, options, seed=seed)
    epoch = np.empty(len(chosen), dtype=np.int64)
    for number, found in enumerate(places):
        here = np.flatnonzero(chosen == number)
        epoch[here] = found[np.arange(len(here)) % len(found)]
    return epoch


def _chosen_sets(lengths: np.ndarray, options: InterleaveOptions, *, seed: int) -> np.ndarray:
    """Return the data set of each example of an epoch."""
    ends_first = options.stopping_strategy == "first_exhausted"
    if options.probabilities == "round_robin":
        rounds = lengths.min() if ends_first else lengths.max()
        return np.tile(np.arange(len(lengths)), rounds)
    blocks: list[np.ndarray] = []
    read = np.zeros(len(lengths), dtype=np.int64)
    draws = drawn_sets(options.probabilities, len(lengths), np.random.default_rng(seed))
    while not ((read >= lengths).any() if ends_first else (read >= lengths).all()):
        block = next(draws)
        blocks.append(block)
        read += np.bincount(block, minlength=len(lengths))
    chosen = np.concatenate(blocks)
    ends = [
        np.flatnonzero(chosen == number)[length - 1] for number, length in enumerate(lengths) if read[number] >= length
    ]
    return chosen[: (min(ends) if ends_first else max(ends)) + 1]


def drawn_sets(
    probabilities: Sequence[float] | Literal["round_robin"] | None, n_sets: int, rng: np.random.Generator
) -> Iterator[np.ndarray]:
    """Yield the numbers of the data sets that come next, in arrays, without end."""
    while True:
        if probabilities == "round_robin" or probabilities is None:
            yield np.arange(n_sets)
        else:
            shares = np.array(probabilities, dtype=np.float64)
            yield rng.choice(n_sets, size=_DRAWS, p=shares / shares.sum())


def expected_examples(lengths: Sequence[int], options: InterleaveOptions) -> float:
    """Return about how many examples an epoch will have, before any is drawn."""
    choose = min if options.stopping_strategy == "first_exhausted" else max
    if options.probabilities == "round_robin" or options.probabilities is None:
        return float(choose(lengths) * len(lengths))
    return choose(length / share for length, share in zip(lengths, options.probabilities, strict=True))
