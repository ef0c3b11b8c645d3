"""The draft vocabulary is chosen from counts of trained tokens; plans and reports say what it covers."""

import numpy as np
import pytest

from ligertune.data.examples import Example, Examples
from ligertune.features.draft.draft_vocabulary import choose_vocabulary, count_trained_tokens


def test_the_most_frequent_tokens_are_taken_and_of_equal_ones_the_lowest_ids() -> None:
    counts = (0, 3, 1, 0, 7, 3, 3)
    assert choose_vocabulary(counts, 3, 9).token_ids == (1, 4, 5)
    assert choose_vocabulary(counts, 4, 9).token_ids == (1, 4, 5, 6)


def test_a_vocabulary_with_room_is_filled_with_the_lowest_ids() -> None:
    assert choose_vocabulary((0, 0, 0, 5), 3, 9).token_ids == (0, 1, 3)


def test_coverage_is_the_share_of_trained_tokens() -> None:
    found = choose_vocabulary((6, 0, 3, 1), 2, 9)
    assert found.coverage == pytest.approx(0.9)
    assert "only 90.00 % of the trained tokens" in found.note(9) and "larger draft.draft_vocab_size" in found.note(9)
    enough = choose_vocabulary((96, 0, 3, 1), 1, 9).note(9)
    assert "1 of 9 tokens" in enough and "96.00 %" in enough and "only" not in enough


def test_labels_that_no_row_predicts_are_not_counted() -> None:
    """Row i predicts token i + 2, so the first two tokens of an example are never drafted."""
    rows = [([5, 6, 7, 8, 8], [5, 6, 7, -100, 8]), ([1, 2], [1, 2])]
    examples = Examples(Example(np.array(ids), np.array(labels), "a:1") for ids, labels in rows)
    assert count_trained_tokens(examples) == (0, 0, 0, 0, 0, 0, 0, 1, 1)
