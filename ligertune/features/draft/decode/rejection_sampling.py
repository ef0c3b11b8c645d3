"""Speculative sampling: drafted tokens are accepted so that texts follow the target's distribution exactly.

At a node p is the target's distribution of the next token and q the head's, which is 0 outside the draft vocabulary.
The children x_1, x_2, ... are draws from q without repetition. Child x is accepted with probability
min(1, p(x) / q(x)); after a rejection p becomes max(p - q, 0), normalised, and q loses x. If no child is left, the next
token is drawn from p. A single child is accepted with probability Σ min(p, q).
Sources: Leviathan et al. 2023, https://arxiv.org/abs/2211.17192; for several children Miao et al. 2023 (SpecInfer),
https://arxiv.org/abs/2305.09781.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from ligertune.decode.answers.token_choice import TokenFilters, probabilities_of
from ligertune.decode.speculative.candidate_tree import CandidateTree
from ligertune.features.draft.decode.drafter import Drafted


@dataclass(frozen=True)
class AcceptedPath:
    """Accepted nodes from the root, and the token after the last. overlaps: Σ min(p, q) at each node of the path."""

    nodes: list[int]
    next_token: int
    overlaps: list[float]


class RejectionSampler:
    """Accepts drafted tokens at a temperature above 0. Distributions of target and head are filtered alike."""

    def __init__(self, tree: CandidateTree, draft_ids: Tensor, filters: TokenFilters) -> None:
        """draft_ids (D,): the target's ids of the draft vocabulary."""
        self._draft_ids = draft_ids
        self._filters = filters
        self._children: dict[int, list[int]] = {}
        for node, parent in enumerate(tree.parents[1:].tolist(), start=1):
            self._children.setdefault(parent, []).append(node)

    def first(self, logits: Tensor) -> Tensor:
        """Draw the first token () from logits (V,)."""
        return torch.multinomial(probabilities_of(logits[None], self._filters)[0], 1)[0]

    def accept(self, drafted: Drafted, logits: Tensor) -> AcceptedPath:
        """Return the accepted path of a tree, whose nodes' logits are (N, V)."""
        target = probabilities_of(logits, self._filters)
        tokens = drafted.tokens.tolist()
        nodes = [0]
        overlaps = []
        while (children := self._children.get(nodes[-1])) is not None:
            node = nodes[-1]
            draft = torch.zeros_like(target[node])
            draft[self._draft_ids] = drafted.distributions[node]
            overlaps.append(float(torch.minimum(target[node], draft).sum()))
            child, rest = _choose_child([(child, tokens[child]) for child in children], target[node], draft)
            if child is None:
                return AcceptedPath(nodes, _draw(rest), overlaps)
            nodes.append(child)
        return AcceptedPath(nodes, _draw(target[nodes[-1]]), overlaps)


def _choose_child(children: list[tuple[int, int]], p: Tensor, q: Tensor) -> tuple[int | None, Tensor]:
    """Return the accepted one of (node, token) pairs, or None, and the distribution (V,) of the next token then."""
    for node, token in children:
        if q[token] <= 0:  # all tokens that the head could draw are used up
            break
        if float(torch.rand(())) * float(q[token]) < float(p[token]):
            return node, p
        rest = (p - q).clamp(min=0)
        if rest.sum() <= 0:  # p and q differ by rounding only
            break
        p = rest / rest.sum()
        q = q.clone()
        q[token] = 0
        q = q / q.sum().clamp(min=torch.finfo(q.dtype).tiny)
    return None, p


def _draw(p: Tensor) -> int:
    return int(torch.multinomial(p, 1))
