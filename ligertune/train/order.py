"""Which examples each rank sees at each step: a pure function of seed and step, whatever the micro batch or the ranks.

The run's examples are the epochs' permutations one after another, cut into global batches. Micro batch m of rank r is
a slice of the global batch, so 1 x 8, 8 x 1 and 2 ranks x 4 train on the same examples at the same step. To resume is
to go on at a step; no sampler state exists.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import lru_cache

import numpy as np

from ligertune.plan import Batching


@dataclass(frozen=True)
class DataOrder:
    """`examples` per epoch, `total_examples` in the run (the last epoch may be a part), shuffled from `seed`."""

    examples: int
    total_examples: int
    seed: int
    batching: Batching

    def step(self, step: int) -> np.ndarray:
        """Indices of the global batch of `step` (from 0); shorter at the end of the run."""
        first = step * self.batching.global_batch_size
        last = min(first + self.batching.global_batch_size, self.total_examples)
        return np.array([_permutation(self.seed, i // self.examples, self.examples)[i % self.examples]
                         for i in range(first, last)], dtype=np.int64)  # fmt: skip

    def micro_batches(self, step: int, rank: int) -> list[np.ndarray]:
        """This rank's slices of the step, one per micro batch that any rank has examples for; a slice may be empty."""
        size, world = self.batching.micro_batch_size, self.batching.world_size
        indices = self.step(step)
        n_micro = -(-len(indices) // (size * world))
        starts = ((m * world + rank) * size for m in range(n_micro))
        return [indices[start : start + size] for start in starts]


@lru_cache(maxsize=2)  # a step can straddle two epochs
def _permutation(seed: int, epoch: int, examples: int) -> np.ndarray:
    return np.random.default_rng([seed, epoch]).permutation(examples)
