"""Drafter: fills a tree of candidates with the tokens of a draft head, level by level.

Row i of the head reads token i + 1 and the target's state of token i. Rows of the text stay in the head's cache, with
the target's states. A node of the tree reads its token and the head's own state of its parent; it attends to the text
and to its ancestors, as in training. Rows of the tree leave the cache once it is filled: the target's states of the
accepted tokens replace them.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor

from ligertune.decode.answers.token_choice import TokenFilters, probabilities_of
from ligertune.decode.speculative.candidate_tree import CandidateTree
from ligertune.features.draft.draft_cache import DraftCache, run_head
from ligertune.features.draft.draft_head import DraftHead


@dataclass(frozen=True)
class Drafted:
    """Tokens of a tree, and the distributions that they were drawn from, by their parent's node.

    distributions: node -> probabilities (D,) of its children over the draft vocabulary; empty with greedy decoding.
    """

    tokens: Tensor  # (N,)
    distributions: dict[int, Tensor]


class Drafter:
    """Drafts for one text. With a temperature, children of a node are drawn one after another, without repetition."""

    def __init__(self, head: DraftHead, embedding: Tensor, tree: CandidateTree, filters: TokenFilters) -> None:
        """embedding (V, E): the target's input embedding."""
        self._head = head
        self._embedding = embedding
        self._tree = tree
        self._filters = filters
        self._ids = head.draft_ids()
        self._cache = DraftCache(head)
        self._state = embedding.new_empty(0)  # (E,): of the text's last row
        self._parents = tree.parents.tolist()
        self._ranks = [0, *tree.ranks.tolist()]
        self._children: dict[int, list[int]] = {}
        for node in range(1, len(tree)):  # sorted by rank, as the tree's nodes are
            self._children.setdefault(self._parents[node], []).append(node)
        depths = tree.depths.tolist()
        inner = sorted(self._children)
        self._levels = [[node for node in inner if depths[node] == depth] for depth in range(tree.depth)]
        if tree.num_ranks > head.config.draft_vocab_size:
            raise ValueError(f"the tree has {tree.num_ranks} ranks, and the head {len(self._ids)} tokens")

    def read(self, states: Tensor, tokens: Tensor) -> None:
        """Read the target's states (M, 3E) of the text's next tokens, and the token (M,) after each of them."""
        hidden = self._head.combine(states.to(self._head.fc.weight.dtype))
        positions = len(self._cache) + torch.arange(len(tokens), device=tokens.device)
        self._state = run_head(self._head, self._cache, hidden, self._embed(tokens), positions)[-1]

    def draft(self, root: Tensor) -> Drafted:
        """Return the tree's tokens after `root` (), the token that the text's last row has read."""
        tokens = root.new_zeros(len(self._tree))
        tokens[0] = root
        length = len(self._cache)
        states = {0: self._state}
        distributions: dict[int, Tensor] = {}
        for depth, nodes in enumerate(self._levels):
            if depth > 0:
                states |= self._run_level(depth, nodes, tokens, states, length)
            logits = self._head.logits(self._head.norm(torch.stack([states[node] for node in nodes])))
            self._choose_children(nodes, logits, tokens, distributions)
        self._cache.shorten(length)
        return Drafted(tokens, distributions)

    def _run_level(
        self, depth: int, nodes: list[int], tokens: Tensor, states: dict[int, Tensor], length: int
    ) -> dict[int, Tensor]:
        """Return the states of nodes of this depth, which read the states of their parents. length: of the text."""
        before = [node for level in self._levels[1:depth] for node in level]  # in the cache, after the text
        mask = self._tree.mask[nodes][:, [*before, *nodes]]
        visible = torch.cat([mask.new_ones(len(nodes), length), mask], dim=1)
        hidden = torch.stack([states[self._parents[node]] for node in nodes])
        # the text's last row has position length - 1
        positions = torch.full((len(nodes),), length - 1 + depth, device=tokens.device)
        found = run_head(self._head, self._cache, hidden, self._embed(tokens[nodes]), positions, visible)
        return dict(zip(nodes, found, strict=True))

    def _choose_children(
        self, nodes: list[int], logits: Tensor, tokens: Tensor, distributions: dict[int, Tensor]
    ) -> None:
        """Set the tokens of the nodes' children by logits (M, D): the likeliest ones, or draws."""
        if self._filters.temperature:
            distributions |= zip(nodes, probabilities_of(logits, self._filters), strict=True)
        for node, row in zip(nodes, logits.float(), strict=True):
            children = self._children[node]
            if self._filters.temperature:
                # in falling order, p / Exp(1) are draws without repetition
                draws = distributions[node] / torch.empty_like(row).exponential_()
                chosen = draws.topk(len(children)).indices
            else:
                ranks = [self._ranks[child] for child in children]
                chosen = row.topk(max(ranks) + 1).indices[ranks]
            tokens[children] = self._ids[chosen]

    def _embed(self, tokens: Tensor) -> Tensor:
        return F.embedding(tokens, self._embedding).to(self._head.fc.weight.dtype)
