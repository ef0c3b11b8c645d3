"""Medusa decoding with tree attention: one forward pass verifies a tree of candidates.

In each step the heads propose tokens from the last hidden state; all nodes of the tree go through the model at once,
each attending to the text and to its own ancestors; the longest accepted path stays in the KV cache, and the token
after it is the next root. Source: Cai et al. 2024, https://arxiv.org/abs/2401.10774, "Tree Attention".
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from ligertune.decode.speculative.cached_text import CachedText, append_tokens
from ligertune.decode.speculative.candidate_tree import Acceptance, CandidateTree, Greedy
from ligertune.features.medusa.heads import MedusaHeads
from ligertune.features.output_head import LogitTransform, backbone_of
from ligertune.models.score_head import lm_head_of

if TYPE_CHECKING:
    from transformers import PreTrainedModel


@dataclass(frozen=True)
class Decoded:
    """New tokens of each row, with the end-of-text token, and its number of forward passes after the prompt."""

    tokens: list[list[int]]
    passes: list[int]

    @property
    def accepted_length(self) -> float:
        """Mean number of tokens per forward pass; plain decoding has 1."""
        return sum(map(len, self.tokens)) / max(1, sum(self.passes))


@torch.no_grad()
def decode_with_heads(
    model: PreTrainedModel,
    heads: MedusaHeads,
    transform: LogitTransform,
    prompts: Sequence[Sequence[int]],
    tree: CandidateTree,
    *,
    max_new_tokens: int,
    stop_at: Sequence[int] = (),
    acceptance: Acceptance | None = None,
) -> Decoded:
    """Continue prompts (token ids) until a token of `stop_at` or `max_new_tokens`.

    With greedy acceptance, the default, the text equals that of plain greedy decoding (exactly in fp32; in bf16 near
    ties may differ). Raises UserError for models whose cache holds more than keys and values.
    """
    model.eval()
    proposer = _Proposer(model, heads, tree)
    rule = acceptance or Greedy()
    text = CachedText(model, backbone_of(model), prompts, option="--medusa")
    hidden = text.read_prompts()  # (B, E)
    root = rule.first(transform.logits(proposer.lm_head(hidden)))
    out: list[list[int]] = [[] for _ in prompts]
    passes = [0] * len(prompts)
    done = [False] * len(prompts)
    while not all(done):
        tokens = proposer.tokens(root, hidden)  # (B, N)
        states = text.verify(tree, tokens)  # (B, N, E)
        found = rule.accept(tree, tokens, transform.logits(proposer.lm_head(states)))
        kept = tokens.gather(1, found.nodes.clamp(min=0)).tolist()
        lengths = found.lengths.tolist()
        text.keep(found.nodes, found.lengths, longest=max(lengths))
        last = found.nodes.gather(1, found.lengths[:, None] - 1)  # (B, 1)
        hidden = states.gather(1, last[..., None].expand(-1, -1, states.shape[-1])).squeeze(1)
        root = found.next_tokens
        for row, (new, length) in enumerate(zip(kept, lengths, strict=True)):
            if not done[row]:
                passes[row] += 1
                done[row] = append_tokens(out[row], new[:length], max_new_tokens, stop_at)
    return Decoded(out, passes)


class _Proposer:
    """Fill a candidate tree with the heads' most likely tokens."""

    def __init__(self, model: PreTrainedModel, heads: MedusaHeads, tree: CandidateTree) -> None:
        if tree.depth > len(heads):
            raise ValueError(f"the tree is {tree.depth} deep, and there are {len(heads)} heads")
        self.lm_head = lm_head_of(model)
        weight = self.lm_head.weight
        self.tree = tree
        self.num_ranks = min(tree.num_ranks, len(weight))
        projections = heads.projections(weight)[: tree.depth]
        self.heads = [(heads.blocks(k), projection) for k, projection in enumerate(projections)]

    def tokens(self, root: Tensor, hidden: Tensor) -> Tensor:
        """root (B,), hidden (B, E) -> (B, N)."""
        likeliest = torch.stack([(blocks(hidden) @ w.t()).topk(self.num_ranks).indices for blocks, w in self.heads], 1)
        return torch.cat([root[:, None], likeliest[:, self.tree.heads, self.tree.ranks]], 1)
