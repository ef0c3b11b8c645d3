"""Acceptance rules of Medusa decoding: greedy, and typical acceptance."""

from __future__ import annotations

from dataclasses import dataclass
from typing import NamedTuple

import torch
from torch import Tensor

from ligertune.features.medusa.decode.candidate_tree import CandidateTree


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
    # `posterior_threshold` and `posterior_alpha` of `medusa_generate` in the paper's code
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
