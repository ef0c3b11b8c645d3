"""The draft vocabulary: the tokens of the target that a draft head can predict, chosen from the training data."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from ligertune.data.examples import Examples
from ligertune.data.templates.label_masking import IGNORE_INDEX

LOW_COVERAGE = 0.95  # a drafted token that is not in the vocabulary ends the accepted tokens, so each one costs a step


@dataclass(frozen=True)
class DraftVocabulary:
    """token_ids: of the target, rising. coverage: their share of the trained tokens."""

    token_ids: tuple[int, ...]
    coverage: float

    def note(self, vocab_size: int) -> str:
        """Return a sentence for plan and report; a warning if many trained tokens cannot be drafted."""
        share = f"{100 * self.coverage:.2f} % of the trained tokens"
        sizes = f"{len(self.token_ids):,} of {vocab_size:,} tokens"
        if self.coverage >= LOW_COVERAGE:
            return f"draft: the draft vocabulary has {sizes}, and covers {share}"
        return (
            f"draft: the draft vocabulary has {sizes}, and covers only {share}; the head cannot draft the others. "
            "Write a larger draft.draft_vocab_size, or null for all"
        )


def choose_vocabulary(counts: Sequence[int], size: int, vocab_size: int) -> DraftVocabulary:
    """Return the `size` most frequent of vocab_size tokens; of equally frequent ones those with the lowest ids.

    counts: of each token by id; those at its end that never occur may be missing.
    """
    frequencies = np.zeros(vocab_size, dtype=np.int64)
    frequencies[: len(counts)] = counts
    most_frequent = np.argsort(-frequencies, kind="stable")[:size]
    covered = int(frequencies[most_frequent].sum())
    return DraftVocabulary(tuple(np.sort(most_frequent).tolist()), covered / max(int(frequencies.sum()), 1))


def count_trained_tokens(examples: Examples) -> tuple[int, ...]:
    """Return how often each token is a trained label that a head predicts, which the first two of an example are not.

    By id, up to the largest token.
    """
    counts = np.zeros(0, dtype=np.int64)
    for example in examples:
        labels = example.labels[2:]
        found = np.bincount(labels[labels != IGNORE_INDEX], minlength=len(counts))
        found[: len(counts)] += counts
        counts = found
    return tuple(counts.tolist())
