"""Batcher: rows of example indices to batches."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from ligertune.data.batching.collate import Batcher
from ligertune.data.examples import Example, Examples

LENGTHS = (5, 9, 2, 30, 17)
ROWS = [np.array([1, 4]), np.array([0]), np.array([2, 3])]


def examples() -> Examples:
    """Return examples whose first two labels are not trained."""
    made = []
    for length in LENGTHS:
        ids = np.arange(length, dtype=np.int32) + 3
        made.append(Example(ids, np.where(np.arange(length) < 2, -100, ids).astype(np.int32), ""))
    return Examples(made)


def batcher(*, packed: bool, index_labels: bool = False) -> Batcher:
    return Batcher(
        examples(), packed=packed, multiple_of=16, pad_token_id=0, index_labels=index_labels, device=torch.device("cpu")
    )


def test_a_packed_batch_is_one_row_of_all_documents():
    one = batcher(packed=True)
    for rows in (ROWS, ROWS[:1], ROWS[1:2]):
        batch = one(rows)
        lengths = [LENGTHS[i] for row in rows for i in row]
        assert batch["document_lengths"][: len(lengths)] == tuple(lengths)
        assert batch["input_ids"].shape == (1, one.padded_tokens(rows))
        assert one.padded_tokens(rows) == -(-sum(lengths) // 16) * 16
        assert int((batch["labels"] != -100).sum()) == sum(examples().trained[i] for row in rows for i in row)


def test_a_padded_batch_has_a_row_for_each_example():
    one, rows = batcher(packed=False), [np.array([i]) for i in (3, 0)]
    batch = one(rows)
    assert batch["input_ids"].shape == (2, 32)
    assert one.padded_tokens(rows) == 64
    assert set(batch) == {"input_ids", "labels"}


@pytest.mark.parametrize("packed", [True, False])
def test_labelled_rows_of_a_batch_and_of_a_rank_without_rows(packed):
    one = batcher(packed=packed, index_labels=True)
    batch = one(ROWS if packed else [np.array([i]) for i in range(5)])
    labels = torch.nn.functional.pad(batch["labels"][:, 1:], (0, 1), value=-100).reshape(-1)
    assert set(torch.nonzero(labels != -100).flatten().tolist()) <= set(batch["labelled_rows"].tolist())
    empty = one([])
    assert (empty["labels"] == -100).all() and len(empty["labelled_rows"]) == 0
