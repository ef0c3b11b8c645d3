"""Which of a tree's guesses are kept: those the model would have written itself, or those it finds typical."""

from __future__ import annotations

from dataclasses import dataclass
from typing import NamedTuple

import torch
from torch import Tensor

from ligertune.tasks.medusa.candidate_tree import Tree


class Accepted(NamedTuple):
    """The nodes kept of each row (B, D + 1), root first, of which the first `lengths` (B,) count; and what follows."""

    nodes: Tensor
    lengths: Tensor
    next_tokens: Tensor  # (B,)


@dataclass(frozen=True)
class Greedy:
    """A guess is kept where it is the model's likeliest token: what comes out is plain greedy decoding."""

    def accept(self, tree: Tree, tokens: Tensor, logits: Tensor) -> Accepted:
        """tokens (B, N) of the nodes, logits (B, N, V) behind each."""
        likeliest = logits.argmax(-1)  # (B, N)
        kept = tokens == likeliest[:, tree.parents]
        nodes, lengths, last = _longest(tree, kept)
        return Accepted(nodes, lengths, likeliest.gather(1, last[:, None]).squeeze(1))

    def first(self, logits: Tensor) -> Tensor:
        """The token (B,) that logits (B, V) begin with."""
        return logits.argmax(-1)


@dataclass(frozen=True)
class Typical:
    """A guess x is kept where p(x) > min(epsilon, delta exp(-H(p))), p at `temperature`; what follows is sampled.

    H(p) is the entropy: where the model is unsure, less likely tokens pass (Cai et al. 2024, section 2.3.2). The text
    is as typical as sampled text, but not drawn from the model's distribution.
    """

    temperature: float
    epsilon: float = 0.09
    delta: float = 0.3

    def accept(self, tree: Tree, tokens: Tensor, logits: Tensor) -> Accepted:
        """tokens (B, N) of the nodes, logits (B, N, V) behind each."""
        p = self._probabilities(logits)  # (B, N, V)
        entropy = -(p * p.clamp(min=1e-20).log()).sum(-1)  # (B, N)
        bound = torch.clamp(self.delta * torch.exp(-entropy), max=self.epsilon)
        of_token = p[:, tree.parents].gather(-1, tokens[..., None]).squeeze(-1)  # (B, N)
        nodes, lengths, last = _longest(tree, of_token > bound[:, tree.parents])
        behind = p.gather(1, last[:, None, None].expand(-1, 1, p.shape[-1])).squeeze(1)
        return Accepted(nodes, lengths, torch.multinomial(behind, 1).squeeze(1))

    def first(self, logits: Tensor) -> Tensor:
        """The token (B,) that logits (B, V) begin with."""
        return torch.multinomial(self._probabilities(logits), 1).squeeze(1)

    def _probabilities(self, logits: Tensor) -> Tensor:
        return torch.softmax(logits.float() / self.temperature, dim=-1)


Acceptance = Greedy | Typical


def _longest(tree: Tree, kept: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """Of kept (B, N): the longest path on which all nodes are kept, the root always; its length, and its last node."""
    there = tree.leaves >= 0  # (L, D + 1)
    along = kept[:, tree.leaves.clamp(min=0)] & there  # (B, L, D + 1)
    along[..., 0] = True
    lengths, leaf = along.long().cumprod(-1).sum(-1).max(-1)  # (B,)
    nodes = tree.leaves[leaf]
    return nodes, lengths, nodes.gather(1, lengths[:, None] - 1).squeeze(1)
