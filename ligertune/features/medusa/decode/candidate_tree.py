"""Candidate tree of Medusa decoding: the continuations that one forward pass verifies together.

A path (r_1, ..., r_d) takes, for each depth j, the token that head j ranks r_j-th (from 0). All prefixes of a path are
in the tree. Node 0 is the root, the token that the model itself chose; node i lies `depths[i]` tokens after it.
Source: Cai et al. 2024, https://arxiv.org/abs/2401.10774, "Tree Attention".
"""

from __future__ import annotations

import heapq
from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

Path = tuple[int, ...]


def chain(num_heads: int) -> list[Path]:
    """Return the paths of a tree without branches: the most likely token of each head."""
    return [(0,) * depth for depth in range(1, num_heads + 1)]


def best_paths(accuracy: Sequence[Sequence[float]], nodes: int) -> list[Path]:
    """Return the paths of the tree of at most `nodes` nodes (with the root) that accepts the most tokens on average.

    accuracy[k][r]: share of positions at which the token that head k + 1 ranks r-th is right. Heads are taken to be
    independent, so a path is accepted with the product of its accuracies, and the most likely paths are chosen. Ranks
    that were never right are left out. Source: "Searching for the Optimized Tree Construction" in the same paper.
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
class CandidateTree:
    """N nodes sorted by depth, root first, and L leaves; D is the depth of the deepest leaf."""

    mask: Tensor  # (N, N) bool: node i attends to node j, which is i or one of its ancestors
    depths: Tensor  # (N,)
    parents: Tensor  # (N,); the root is its own parent
    heads: Tensor  # (N - 1,): the head that proposes node i + 1, from 0
    ranks: Tensor  # (N - 1,): the rank of node i + 1 among that head's tokens
    leaves: Tensor  # (L, D + 1): the nodes from the root to each leaf, padded with -1

    @staticmethod
    def from_paths(paths: Sequence[Path], device: torch.device | str = "cpu") -> CandidateTree:
        """Build the tree of paths in any order. Raises ValueError if a prefix of a path is missing."""
        paths = sorted({tuple(path) for path in paths}, key=lambda path: (len(path), path))
        index = {(): 0, **{path: i for i, path in enumerate(paths, start=1)}}
        orphans = [path for path in paths if path[:-1] not in index]
        if not paths or orphans or not all(path and min(path) >= 0 for path in paths):
            raise ValueError(f"CandidateTree: expected every prefix of every path, found {orphans or paths}")
        lines = [[index[path[:depth]] for depth in range(len(path) + 1)] for path in [(), *paths]]  # root to node
        mask = torch.zeros(len(lines), len(lines), dtype=torch.bool)
        for node, line in enumerate(lines):
            mask[node, line] = True
        inner = {path[:-1] for path in paths}
        to_leaves = [lines[index[path]] for path in paths if path not in inner]
        longest = max(map(len, to_leaves))
        return CandidateTree(
            mask=mask.to(device),
            depths=torch.tensor([len(line) - 1 for line in lines], device=device),
            parents=torch.tensor([line[max(len(line) - 2, 0)] for line in lines], device=device),
            heads=torch.tensor([len(path) - 1 for path in paths], device=device),
            ranks=torch.tensor([path[-1] for path in paths], device=device),
            leaves=torch.tensor([line + [-1] * (longest - len(line)) for line in to_leaves], device=device),
        )

    @property
    def depth(self) -> int:
        """Number of heads that the tree uses."""
        return self.leaves.shape[1] - 1

    @property
    def num_ranks(self) -> int:
        """Number of top tokens of a head that the tree uses, at most."""
        return int(self.ranks.max()) + 1

    def __len__(self) -> int:
        return len(self.depths)
