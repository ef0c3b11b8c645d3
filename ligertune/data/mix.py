"""Mixing data sets by weight: how often an epoch sees the examples of each."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np


def mixed(set_of: np.ndarray, weights: Sequence[float], *, seed: int) -> np.ndarray:
    """The places of an epoch's examples, set by set. set_of: the number of each example's data set, (N,).

    Weight 2.5 is all examples twice, and a half of them once more: a draw that depends on the seed and is the same in
    every epoch. Examples that are seen several times follow one another; the order of training shuffles them.
    """
    rng = np.random.default_rng(seed)
    chosen = []
    for number, weight in enumerate(weights):
        places = np.flatnonzero(set_of == number)
        whole = int(weight)
        more = rng.permutation(len(places))[: round((weight - whole) * len(places))]
        times = np.full(len(places), whole)
        times[more] += 1
        chosen.append(np.repeat(places, times))
    return np.concatenate(chosen) if chosen else np.zeros(0, dtype=np.int64)
