"""The tree of guesses that one decoding step checks: which ranks of which heads, and how its nodes see each other.

A path (r_1, ..., r_d) takes the token that head j ranks r_j-th (from 0) for every j; all its prefixes are in the tree.
Node 0 is the root, the token that the model itself has decided on. Node i stands `depths[i]` behind it.
"""

from __future__ import annotations

import heapq
from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

Path = tuple[int, ...]


def chain(num_heads: int) -> list[Path]:
    """The likeliest token of each head, and nothing else."""
    return [(0,) * depth for depth in range(1, num_heads + 1)]


def best_paths(accuracy: Sequence[Sequence[float]], nodes: int) -> list[Path]:
    """The paths of a tree of at most `nodes` nodes, root included, that accept the most tokens.

    accuracy[k][r]: how often the token that head k + 1 ranks r-th is right. A path is taken to be right as often as
    the product says, so the expected number of accepted tokens is the sum over paths, and the likeliest ones are
    taken, longest last (Cai et al. 2024, section 2.3.3). Ranks that were never right are left out.
    """
    chosen: list[Path] = []
    heap: list[tuple[float, Path]] = [(-1.0, ())]
    while heap and len(chosen) < nodes:
        value, path = heapq.heappop(heap)
        chosen.append(path)
        if len(path) < len(accuracy):
            for rank, share in enumerate(accuracy[len(path)]):
                if share > 0:
                    heapq.heappush(heap, (value * share, (*path, rank)))
    return sorted(chosen[1:], key=lambda path: (len(path), path)) or [(0,)]


@dataclass(frozen=True)
class Tree:
    """N nodes, root first, in the order of their depths; L leaves."""

    paths: tuple[Path, ...]
    sees: Tensor  # (N, N) bool: whether node i sees node j, itself or one before it on its path
    depths: Tensor  # (N,)
    parents: Tensor  # (N,), the root its own
    heads: Tensor  # (N - 1,): which head gives node i + 1, from 0
    ranks: Tensor  # (N - 1,): and which of its tokens
    leaves: Tensor  # (L, D + 1): the nodes from the root to each leaf; behind it -1

    @staticmethod
    def of(paths: Sequence[Path], device: torch.device | str = "cpu") -> Tree:
        """From paths that hold all their prefixes, in any order."""
        paths = sorted({tuple(path) for path in paths}, key=lambda path: (len(path), path))
        index = {(): 0, **{path: i for i, path in enumerate(paths, start=1)}}
        orphans = [path for path in paths if path[:-1] not in index]
        if not paths or orphans or not all(path and min(path) >= 0 for path in paths):
            raise ValueError(f"Tree: paths {orphans or paths} are no tree: expected every prefix of a path beside it")
        lines = [[index[path[:depth]] for depth in range(len(path) + 1)] for path in [(), *paths]]
        sees = torch.zeros(len(lines), len(lines), dtype=torch.bool)
        for node, line in enumerate(lines):
            sees[node, line] = True
        inner = {path[:-1] for path in paths}
        ends = [lines[index[path]] for path in paths if path not in inner]
        longest = max(len(line) for line in ends)
        leaves = torch.tensor([line + [-1] * (longest - len(line)) for line in ends])
        of_nodes = {
            "depths": torch.tensor([len(line) - 1 for line in lines]),
            "parents": torch.tensor([line[max(len(line) - 2, 0)] for line in lines]),
            "heads": torch.tensor([len(path) - 1 for path in paths]),
            "ranks": torch.tensor([path[-1] for path in paths]),
        }
        on_device = {name: t.to(device) for name, t in {"sees": sees, "leaves": leaves, **of_nodes}.items()}
        return Tree(tuple(paths), **on_device)

    @property
    def depth(self) -> int:
        """How many heads it asks."""
        return self.leaves.shape[1] - 1

    @property
    def most_ranks(self) -> int:
        """How many tokens of a head it looks at."""
        return int(self.ranks.max()) + 1

    def __len__(self) -> int:
        return len(self.depths)
