"""Choose the next token of many answers: transformers' filters, and random numbers of the answer alone."""

from __future__ import annotations

import hashlib
import math
import struct
from dataclasses import dataclass

import torch
from ligertune_kernels import sample_tokens
from torch import Tensor

# An answer's key moves by these at each token. Two odd numbers, so that no two places have the same key.
_STRIDES = (0x85EBCA6B - 2**32, 0x27D4EB2F)


@dataclass(frozen=True)
class TokenFilters:
    """Which tokens may be drawn. temperature 0: the likeliest one. top_k 0: all. Applied in this order."""

    temperature: float
    top_k: int
    top_p: float
    min_p: float


def answer_key(seed: int, number: int) -> tuple[int, int]:
    """Return two 32-bit integers for an answer, from the seed of its prompt and its number."""
    words = struct.pack("<QQ", seed % 2**64, number)
    first, second = struct.unpack("<ii", hashlib.blake2b(words, digest_size=8).digest())
    return first, second


def penalised(logits: Tensor, texts: Tensor, penalty: float) -> Tensor:
    """Return logits (S, V) in float32, those of the tokens of texts (S, C) lowered as transformers does."""
    scores = logits.float()
    found = scores.gather(1, texts)
    return scores.scatter(1, texts, torch.where(found < 0, found * penalty, found / penalty))


def choose_tokens(
    logits: Tensor,  # (S, V)
    keys: Tensor,  # (S, 2) int32: of each answer
    places: Tensor,  # (S,) int32: tokens that the answer has before this one
    filters: TokenFilters,
) -> tuple[Tensor, Tensor]:  # (S,) int64, (S,) float32
    """Return a token for each row, and its log-probability in softmax(logits): before temperature and filters.

    The log-probability is NaN where a logit of the row is NaN.
    """
    least = None
    if filters.temperature:
        least = least_score(logits.float() * (1.0 / filters.temperature), filters) if _has_bounds(filters) else None
    moved = torch.stack([keys[:, word] + places * stride for word, stride in enumerate(_STRIDES)], 1)
    return sample_tokens(logits, moved, temperature=filters.temperature, least=least)


def _has_bounds(filters: TokenFilters) -> bool:
    return bool(filters.top_k or filters.top_p < 1 or filters.min_p)


def probabilities_of(logits: Tensor, filters: TokenFilters) -> Tensor:
    """Return the distributions (S, V) that tokens are drawn from, of logits (S, V). The temperature is above 0."""
    scores = logits.float() / filters.temperature
    if _has_bounds(filters):
        scores = scores.masked_fill(scores < least_score(scores, filters)[:, None], -torch.inf)
    return scores.softmax(-1)


def least_score(scores: Tensor, filters: TokenFilters) -> Tensor:
    """Return the lowest score (S,) that may be drawn from each row (S, V) of logits / temperature.

    Scores that are equal to it may be drawn too: of tied tokens transformers keeps some.
    """
    bounds = []
    ranked = None  # descending
    if filters.top_k:
        ranked = scores.topk(min(filters.top_k, scores.shape[1]), dim=1).values
        bounds.append(ranked[:, -1])
    if filters.top_p < 1:
        ranked = scores.sort(1, descending=True).values if ranked is None else ranked
        probabilities = ranked.softmax(1)
        likelier = probabilities.cumsum(1) - probabilities  # mass of the tokens before each one
        n_kept = (likelier < filters.top_p).sum(1, keepdim=True).clamp(min=1)
        bounds.append(ranked.gather(1, n_kept - 1)[:, 0])
    if filters.min_p:
        bounds.append(scores.amax(1) + math.log(filters.min_p))
    return torch.stack(bounds).amax(0)
