"""Measure decoding with a draft head: accepted drafts by position, accepted length, speed against plain decoding."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from ligertune.decode.speculative.cached_text import eos_token_ids
from ligertune.decode.speculative.candidate_tree import CandidateTree
from ligertune.decode.speculative.plain_decoding import decode_plainly, timed
from ligertune.features.draft.decode.draft_decoding import AcceptanceCounts, TargetModel, decode_with_draft
from ligertune.features.draft.draft_cache import DraftCache, run_head
from ligertune.features.draft.draft_head import DraftHead
from ligertune.features.draft.target_states import StateCapture
from ligertune.features.output_head import backbone_of
from ligertune.models.score_head import embedding_of

RANKS = 10  # likeliest drafts of a position that trees use; published trees go as far
# Logits of both tokens differ by at most this share of the larger: each was rounded to 8 bits, and so were the states.
NEAR_TIE = 2**-6


@dataclass(frozen=True)
class DraftMeasurement:
    """The same prompts, decoded one at a time with the head and by `model.generate`.

    accepted: at each position of a chain, the share of drafts accepted among those whose predecessors were. expected:
    with sampling and a chain, what Σ min(p, q) predicts for it. identical: greedy texts equal to plain ones. near_ties:
    other texts whose first difference is between two tokens of nearly equal logits, as in bfloat16.
    """

    prompts: int
    new_tokens: int
    tree_nodes: int  # with the root
    tree_depth: int
    temperature: float
    accepted_length: float  # tokens per forward pass; plain decoding has 1
    accepted: list[float]
    expected: list[float] | None
    identical: int | None  # None: sampled
    near_ties: int | None
    tokens_per_second: float
    plain_tokens_per_second: float
    speed_up: float

    def as_dict(self) -> dict[str, Any]:
        """Return the values for a JSON report."""
        return dataclasses.asdict(self)


@torch.no_grad()
def measure_draft(
    target: TargetModel,
    head: DraftHead,
    prompts: Sequence[Sequence[int]],
    tree: CandidateTree,
    *,
    max_new_tokens: int,
    temperature: float = 0.0,
) -> DraftMeasurement:
    """Decode each prompt with the head, and greedily without it; the first one once more, as a warm-up.

    The model must have an attention that takes any mask, such as sdpa, and must not be compiled for each length.
    """
    model = target.model.eval()
    stop_at = eos_token_ids(model)
    options: dict[str, Any] = {"max_new_tokens": max_new_tokens, "stop_at": stop_at, "temperature": temperature}
    runs = []
    for prompt in [prompts[0], *prompts]:
        # The two ways take turns, so that other work on the machine slows both.
        drafted = timed(model.device, decode_with_draft, target, head, prompt, tree, **options)
        runs.append((*drafted, *timed(model.device, decode_plainly, model, prompt, max_new_tokens)))
    found, seconds, plain, plain_seconds = zip(*runs[1:], strict=True)
    counts = AcceptanceCounts.of_depth(tree.depth)
    for text in found:
        counts.add(text.counts)
    new_tokens = sum(len(text.tokens) for text in found)
    speed = new_tokens / sum(seconds)
    plain_speed = sum(map(len, plain)) / sum(plain_seconds)
    differing = [(p, a.tokens, b) for p, a, b in zip(prompts, found, plain, strict=True) if a.tokens != b]
    is_chain = len(tree) == tree.depth + 1
    return DraftMeasurement(
        prompts=len(prompts),
        new_tokens=new_tokens,
        tree_nodes=len(tree),
        tree_depth=tree.depth,
        temperature=temperature,
        accepted_length=new_tokens / max(1, sum(text.passes for text in found)),
        accepted=counts.shares,
        expected=counts.expected_shares if temperature and is_chain else None,
        identical=None if temperature else len(prompts) - len(differing),
        near_ties=None if temperature else sum(is_near_tie(target, *texts) for texts in differing),
        tokens_per_second=speed,
        plain_tokens_per_second=plain_speed,
        speed_up=speed / plain_speed,
    )


def is_near_tie(target: TargetModel, prompt: Sequence[int], text: list[int], plain: list[int]) -> bool:
    """Return whether the first tokens that differ have nearly equal logits; a text that only ends earlier differs."""
    length = next((i for i, pair in enumerate(zip(text, plain, strict=False)) if pair[0] != pair[1]), None)
    if length is None:
        return False
    ids = torch.tensor([[*prompt, *text[:length]]], device=target.model.device)
    logits = target.logits(backbone_of(target.model)(input_ids=ids, use_cache=False)[0][:, -1])[0]
    tied = logits[[text[length], plain[length]]].abs()
    gap = (logits[text[length]] - logits[plain[length]]).abs()
    return bool(gap <= NEAR_TIE * tied.max())


# ---- the tree


@torch.no_grad()
def rank_shares(target: TargetModel, head: DraftHead, texts: Sequence[Sequence[int]], depth: int) -> list[list[float]]:
    """Return shares[j][r]: how often the head ranks the right token r-th at position j of a chain of `depth` drafts.

    texts: token ids that the target wrote, of more than `depth` + 1 tokens. Drafts before position j are right.
    `best_paths` makes the tree that accepts most with these shares.
    """
    ranks = min(RANKS, head.config.draft_vocab_size)
    right = torch.zeros(depth, ranks, dtype=torch.float64)
    rows = torch.zeros(depth, 1, dtype=torch.float64)
    for text in texts:
        ids = torch.tensor(list(text), device=target.model.device)
        for position, logits in enumerate(_teacher_forced(target, head, ids, depth)):
            chosen = head.draft_ids()[logits.topk(ranks, dim=-1).indices]  # (M, ranks)
            hits = chosen == ids[position + 2 :, None]
            right[position] += hits.sum(0).cpu()
            rows[position] += len(hits)
    return (right / rows.clamp(min=1)).tolist()


def _teacher_forced(target: TargetModel, head: DraftHead, ids: Tensor, depth: int) -> list[Tensor]:
    """Return logits of each position of chains that start at every token (T,): position j has T - 2 - j rows."""
    with StateCapture(target.model, head.config.layer_ids) as capture:
        backbone_of(target.model)(input_ids=ids[None], use_cache=False)
        hidden = head.combine(capture.take()[0, :-1].to(head.fc.weight.dtype))
    rows = len(hidden)
    embedded = embedding_of(target.model).weight[ids].to(hidden.dtype)
    visible = torch.ones(rows, rows, dtype=torch.bool, device=ids.device).tril()
    diagonal = torch.eye(rows, dtype=torch.bool, device=ids.device)
    places = torch.arange(rows, device=ids.device)
    cache = DraftCache(head)
    found = []
    for position in range(depth):
        # rows whose token lies beyond the text read the last one; they are left out
        tokens = (places + 1 + position).clamp(max=rows)
        hidden = run_head(head, cache, hidden, embedded[tokens], places + position, visible)
        found.append(head.logits(head.norm(hidden[: rows - 1 - position])))
        visible = torch.cat([visible, diagonal], dim=1)
    return found
