"""Candidate trees: continuations that one forward pass of a model verifies together, and their acceptance.

A path (r_1, ..., r_d) takes, for each depth j, the token that head j ranks r_j-th (from 0). All prefixes of a path are
in the tree. Node 0 is the root, the token that the model itself chose; node i lies `depths[i]` tokens after it.
Source: Cai et al. 2024, https://arxiv.org/abs/2401.10774, "Tree Attention".
"""

from __future__ import annotations

import heapq
from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple

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


# ---- acceptance: greedy, and typical acceptance


class Accepted(NamedTuple):
    """The accepted path of each row: the first `lengths` (B,) of `nodes` (B, D + 1), root first; then `next_tokens`."""

    nodes: Tensor
    lengths: Tensor
    next_tokens: Tensor  # (B,)


@dataclass(frozen=True)
class Greedy:
    """Accept a candidate if it is the model's most likely token. The text equals that of plain greedy decoding."""

    def accept(self, tree: CandidateTree, tokens: Tensor, logits: Tensor) -> Accepted:
        """tokens (B, N) of the nodes; logits (B, N, V) of the token after each node."""
        likeliest = logits.argmax(-1)  # (B, N)
        kept = tokens == likeliest[:, tree.parents]
        nodes, lengths, last = _longest_path(tree, kept)
        return Accepted(nodes, lengths, likeliest.gather(1, last[:, None]).squeeze(1))

    def first(self, logits: Tensor) -> Tensor:
        """Choose the first tokens (B,) from logits (B, V)."""
        return logits.argmax(-1)


@dataclass(frozen=True)
class Typical:
    """Accept a candidate x if p(x) > min(epsilon, delta exp(-H(p))), p at `temperature`; then sample the next token.

    H(p) is the entropy: if the model is unsure, less likely tokens pass. The text is as typical as sampled text, but
    does not follow the model's distribution. Source: Cai et al. 2024, "Typical Acceptance".
    """

    temperature: float
    # `posterior_threshold` and `posterior_alpha` in the paper's code
    epsilon: float = 0.09
    delta: float = 0.3

    def accept(self, tree: CandidateTree, tokens: Tensor, logits: Tensor) -> Accepted:
        """tokens (B, N) of the nodes; logits (B, N, V) of the token after each node."""
        p = self._probabilities(logits)  # (B, N, V)
        # a probability that underflows to 0 adds 0; 0 log 0 would be NaN
        entropy = -(p * p.clamp(min=1e-20).log()).sum(-1)  # (B, N)
        bound = torch.clamp(self.delta * torch.exp(-entropy), max=self.epsilon)
        of_token = p[:, tree.parents].gather(-1, tokens[..., None]).squeeze(-1)  # (B, N)
        nodes, lengths, last = _longest_path(tree, of_token > bound[:, tree.parents])
        after = p.gather(1, last[:, None, None].expand(-1, 1, p.shape[-1])).squeeze(1)
        return Accepted(nodes, lengths, torch.multinomial(after, 1).squeeze(1))

    def first(self, logits: Tensor) -> Tensor:
        """Sample the first tokens (B,) from logits (B, V)."""
        return torch.multinomial(self._probabilities(logits), 1).squeeze(1)

    def _probabilities(self, logits: Tensor) -> Tensor:
        return torch.softmax(logits.float() / self.temperature, dim=-1)


Acceptance = Greedy | Typical


def _longest_path(tree: CandidateTree, kept: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """Return (nodes, length, last node) of the longest path whose nodes are all in kept (B, N); the root always is."""
    exists = tree.leaves >= 0  # (L, D + 1)
    along = kept[:, tree.leaves.clamp(min=0)] & exists  # (B, L, D + 1)
    along[..., 0] = True
    lengths, leaf = along.long().cumprod(-1).sum(-1).max(-1)  # (B,)
    nodes = tree.leaves[leaf]
    return nodes, lengths, nodes.gather(1, lengths[:, None] - 1).squeeze(1)
