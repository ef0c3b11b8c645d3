"""Decoding with a draft head: it drafts a chain or a tree of tokens, and one forward pass of the target verifies them.

Greedy text equals that of plain greedy decoding: exactly in float32; in bfloat16 near ties may differ. Sampled text
follows the target's distribution at the temperature, cut off by top_p.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from ligertune.decode.answers.token_choice import TokenFilters
from ligertune.decode.speculative.cached_text import CachedText, append_tokens
from ligertune.decode.speculative.candidate_tree import CandidateTree, Greedy
from ligertune.features.draft.decode.drafter import Drafted, Drafter
from ligertune.features.draft.decode.rejection_sampling import AcceptedPath, RejectionSampler
from ligertune.features.draft.draft_head import DraftHead
from ligertune.features.draft.target_states import StateCapture
from ligertune.features.output_head import LogitTransform, backbone_of
from ligertune.models.score_head import embedding_of, lm_head_of

if TYPE_CHECKING:
    from transformers import PreTrainedModel

OPTION = "--draft"


@dataclass(frozen=True)
class TargetModel:
    """A model, and how it computes logits from its last hidden state."""

    model: PreTrainedModel
    transform: LogitTransform

    def logits(self, hidden: Tensor) -> Tensor:
        """Return logits (..., V) of hidden states (..., E)."""
        return self.transform.logits(lm_head_of(self.model)(hidden))


@dataclass
class AcceptanceCounts:
    """Accepted drafts by position in their chain, from 0, summed over forward passes.

    trials: passes in which all drafts before this position were accepted. overlaps: of a chain with sampling, the sum
    of Σ min(p, q) over these passes, whose mean is the expected share of accepted drafts.
    """

    trials: list[int]
    accepted: list[int]
    overlaps: list[float]

    @staticmethod
    def of_depth(depth: int) -> AcceptanceCounts:
        """Return counts of no passes."""
        return AcceptanceCounts([0] * depth, [0] * depth, [0.0] * depth)

    def record(self, path: AcceptedPath, *, reached: int) -> None:
        """Add a pass. reached: positions of its drafts that belong to the text, which may end before the last."""
        accepted = len(path.nodes) - 1
        for position in range(min(reached, accepted + 1, len(self.trials))):
            self.trials[position] += 1
            self.accepted[position] += position < accepted
        for position, overlap in enumerate(path.overlaps[:reached]):
            self.overlaps[position] += overlap

    def add(self, other: AcceptanceCounts) -> None:
        """Add the passes of other counts."""
        for position in range(len(self.trials)):
            self.trials[position] += other.trials[position]
            self.accepted[position] += other.accepted[position]
            self.overlaps[position] += other.overlaps[position]

    @property
    def shares(self) -> list[float]:
        """Share of accepted drafts at each position, among those whose predecessors were accepted."""
        return [done / max(1, tried) for done, tried in zip(self.accepted, self.trials, strict=True)]

    @property
    def expected_shares(self) -> list[float]:
        """Mean of Σ min(p, q) at each position."""
        return [overlap / max(1, tried) for overlap, tried in zip(self.overlaps, self.trials, strict=True)]


@dataclass(frozen=True)
class DraftedText:
    """New tokens of a text, with the end-of-text token, and its forward passes after the prompt."""

    tokens: list[int] = field(default_factory=list)
    passes: int = 0
    counts: AcceptanceCounts = field(default_factory=lambda: AcceptanceCounts.of_depth(0))

    @property
    def accepted_length(self) -> float:
        """Mean number of tokens per forward pass; plain decoding has 1."""
        return len(self.tokens) / max(1, self.passes)


@torch.no_grad()
def decode_with_draft(
    target: TargetModel,
    head: DraftHead,
    prompt: Sequence[int],
    tree: CandidateTree,
    *,
    max_new_tokens: int,
    stop_at: Sequence[int] = (),
    temperature: float = 0.0,
    top_p: float = 1.0,
) -> DraftedText:
    """Continue a prompt (token ids) until a token of `stop_at` or `max_new_tokens`. Temperature 0 is greedy decoding.

    top_p: tokens are drawn from the likeliest ones with this mass. Random numbers are torch's. Raises UserError for
    models whose cache holds more than keys and values.
    """
    model = target.model.eval()
    filters = TokenFilters(temperature, top_k=0, top_p=top_p, min_p=0.0)
    rule = _GreedyRule(tree) if not temperature else RejectionSampler(tree, head.draft_ids(), filters)
    drafter = Drafter(head, embedding_of(model).weight, tree, filters)
    text = CachedText(model, backbone_of(model), [prompt], option=OPTION)
    tokens: list[int] = []
    passes = 0
    counts = AcceptanceCounts.of_depth(tree.depth)
    with StateCapture(model, head.config.layer_ids) as capture:
        root = rule.first(target.logits(text.read_prompts())[0])
        known = torch.tensor(prompt[1:], dtype=torch.long, device=root.device)
        drafter.read(capture.take()[0], torch.cat([known, root[None]]))
        while True:
            drafted = drafter.draft(root)
            logits = target.logits(text.verify(tree, drafted.tokens[None]))[0]  # (N, V)
            path = rule.accept(drafted, logits)
            states = capture.take()[0, path.nodes]
            nodes = torch.tensor([path.nodes], device=root.device)
            text.keep(nodes, torch.tensor([len(path.nodes)], device=root.device), longest=len(path.nodes))
            kept = drafted.tokens[path.nodes]
            before = len(tokens)
            has_ended = append_tokens(tokens, kept.tolist(), max_new_tokens, stop_at)
            passes += 1
            is_stopped = has_ended and tokens[-1] in stop_at
            counts.record(path, reached=len(tokens) - before - 1 if is_stopped else tree.depth)
            if has_ended:
                return DraftedText(tokens, passes, counts)
            root = torch.tensor(path.next_token, device=root.device)
            drafter.read(states, torch.cat([kept[1:], root[None]]))


class _GreedyRule:
    """Accept the target's most likely tokens."""

    def __init__(self, tree: CandidateTree) -> None:
        self._tree = tree

    def first(self, logits: Tensor) -> Tensor:
        """Choose the first token () from logits (V,)."""
        return logits.argmax()

    def accept(self, drafted: Drafted, logits: Tensor) -> AcceptedPath:
        """Return the accepted path of a tree, whose nodes' logits are (N, V)."""
        found = Greedy().accept(self._tree, drafted.tokens[None], logits[None])
        nodes = found.nodes[0, : int(found.lengths[0])].tolist()
        return AcceptedPath(nodes, int(found.next_tokens[0]), [])
