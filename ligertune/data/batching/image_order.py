"""Micro batches of examples that show equally many images, for models that cannot mix them (Llama-3.2-Vision).

A row with fewer images than another would be padded with empty ones, and its first tokens would see those.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np

from ligertune.data.batching.order import DataOrder
from ligertune.errors import UserError
from ligertune.planning.parallelism import SHARING_WEIGHTS

if TYPE_CHECKING:
    from ligertune.data.examples import Examples
    from ligertune.data.stream import StreamedExamples


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


def check_sharded(strategy: str, examples: Examples | StreamedExamples, family: str) -> None:
    """A UserError where ranks that share the weights would not ask for the same layers, and wait for each other."""
    streamed = not isinstance(examples.n_images, np.ndarray)
    if strategy in SHARING_WEIGHTS and (streamed or (examples.n_images == 0).any()):
        raise UserError(
            f"parallel.strategy: with {strategy}, {family} cannot train on rows without images: it skips layers for"
            " them, and ranks that have images would wait.",
            hint="Leave these rows out, or write parallel.strategy: ddp.",
        )
