"""Packing, collate and Batcher: which examples share a row, and the tensors of batches."""

import time

import numpy as np
import pytest
import torch

from ligertune.data.batching.collate import Batcher, StaticShapes, collate, collate_packed
from ligertune.data.batching.packing import pack
from ligertune.data.examples import Example, Examples

CAPACITY = 50


def lengths_of(seed: int) -> np.ndarray:
    """Return up to 60 lengths below CAPACITY: many are equal, and many rows nearly full."""
    rng = np.random.default_rng(seed)
    return rng.integers(1, CAPACITY, rng.integers(1, 60))


def one_by_one(lengths: np.ndarray) -> list[int]:
    """Return the tokens of each row by the definition of best fit decreasing."""
    rows: list[int] = []
    for length in sorted(lengths.tolist(), reverse=True):
        fitting = [(CAPACITY - held, row) for row, held in enumerate(rows) if CAPACITY - held >= length]
        if fitting:
            rows[min(fitting)[1]] += length
        else:
            rows.append(length)
    return sorted(rows)


@pytest.mark.parametrize("seed", range(12))
def test_packs_are_best_fit_decreasing(seed):
    lengths = lengths_of(seed)
    packs = pack(lengths, CAPACITY)
    assert sorted(packs.lengths.tolist()) == one_by_one(lengths)
    assert [int(lengths[row].sum()) for row in packs] == packs.lengths.tolist()
    assert sorted(np.concatenate(list(packs)).tolist()) == list(range(len(lengths)))


def test_shuffling_moves_examples_and_keeps_lengths_and_too_long_ones_are_refused():
    lengths = lengths_of(3)
    packs = pack(lengths, CAPACITY)
    shuffled = packs.shuffled(np.random.default_rng(0))
    assert [sorted(lengths[row]) for row in shuffled] == [sorted(lengths[row]) for row in packs]
    assert [sorted(row) for row in shuffled] != [sorted(row) for row in packs]
    again = packs.shuffled(np.random.default_rng(0))
    assert [row.tolist() for row in again] == [row.tolist() for row in shuffled]
    assert len(pack(np.zeros(0, dtype=np.int64), CAPACITY)) == 0
    with pytest.raises(ValueError, match="51"):
        pack(np.array([3, CAPACITY + 1]), CAPACITY)


def test_a_million_lengths_take_seconds():
    """Lengths like those of Alpaca: 0.2 s on an idle core."""
    rng = np.random.default_rng(0)
    lengths = np.clip(rng.lognormal(np.log(92), 0.5, 1_000_000), 10, 1000).astype(np.int64)
    start = time.process_time()
    assert pack(lengths, 2048).fill > 0.999
    assert time.process_time() - start < 5


def documents() -> Examples:
    """Return three documents; all their labels are trained, also the first."""
    tokens = (np.arange(3, 3 + length, dtype=np.int32) for length in (4, 1, 3))
    return Examples(Example(ids, ids + 10, "") for ids in tokens)


def test_packed_documents_are_concatenated():
    """The examples themselves keep their first labels."""
    examples = documents()
    batch = collate_packed(examples, pad_token_id=99, pad_to_multiple_of=6)
    assert all(example.labels[0] == 13 for example in examples)
    assert batch["input_ids"].tolist() == [[3, 4, 5, 6, 3, 3, 4, 5, 99, 99, 99, 99]]
    assert batch["position_ids"].tolist() == [[0, 1, 2, 3, 0, 0, 1, 2, 0, 1, 2, 3]]
    assert batch["labels"].tolist() == [[-100, 14, 15, 16, -100, -100, 14, 15, -100, -100, -100, -100]]
    assert batch["cu_seq_lens_q"].tolist() == batch["cu_seq_lens_k"].tolist() == [0, 4, 5, 8, 12]
    assert batch["cu_seq_lens_q"].dtype == torch.int32
    assert (batch["max_length_q"], batch["max_length_k"], batch["document_lengths"]) == (4, 4, (4, 1, 3, 4))
    assert batch["document_places"].tolist() == [[0] * 4 + [4] + [5] * 3 + [8] * 4, [4] * 4 + [5] + [8] * 3 + [12] * 4]
    assert batch["seq_idx"].tolist() == [[0] * 4 + [1] + [2] * 3 + [3] * 4]


def test_padded_rows_are_padded_on_the_right():
    batch = collate(list(documents())[:2], pad_token_id=99, pad_to_multiple_of=3)
    assert batch["input_ids"].tolist() == [[3, 4, 5, 6, 99, 99], [3, 99, 99, 99, 99, 99]]
    assert {str(tensor.dtype) for tensor in batch.values()} == {"torch.int64"}
    assert batch["labels"].tolist() == [[13, 14, 15, 16, -100, -100], [13, -100, -100, -100, -100, -100]]


def test_static_shapes_are_the_same_for_all_batches():
    """Padding is split into documents no longer than the longest, and the number of bounds is fixed."""
    static_shapes = StaticShapes(tokens=16, longest=5, documents=6)
    batch = collate_packed(documents(), pad_token_id=99, static_shapes=static_shapes)
    assert batch["input_ids"].tolist() == [[3, 4, 5, 6, 3, 3, 4, 5, *[99] * 8]]
    assert batch["position_ids"].tolist() == [[0, 1, 2, 3, 0, 0, 1, 2, 0, 1, 2, 3, 4, 0, 1, 2]]
    assert batch["document_lengths"] == (4, 1, 3, 5, 3)
    assert batch["cu_seq_lens_q"].tolist() == [0, 4, 5, 8, 13, 16, 16]
    assert (batch["max_length_q"], batch["max_length_k"]) == (5, 5)
    beyond = collate_packed(documents(), pad_token_id=99, static_shapes=StaticShapes(tokens=8, longest=2, documents=2))
    assert (beyond["max_length_q"], len(beyond["cu_seq_lens_q"])) == (4, 5)
    fewer = collate_packed(list(documents())[:1], pad_token_id=99, static_shapes=static_shapes)
    assert all(value.shape == batch[name].shape for name, value in fewer.items() if torch.is_tensor(value))


LENGTHS = (5, 9, 2, 30, 17)
ROWS = [np.array([1, 4]), np.array([0]), np.array([2, 3])]


def examples() -> Examples:
    """Return examples whose first two labels are not trained."""
    tokens = (np.arange(length, dtype=np.int32) + 3 for length in LENGTHS)
    return Examples(Example(ids, np.where(ids < 5, np.int32(-100), ids), "") for ids in tokens)


def batcher(*, packed: bool, index_labels: bool = False) -> Batcher:
    options = {"multiple_of": 16, "pad_token_id": 0, "device": torch.device("cpu")}
    return Batcher(examples(), packed=packed, index_labels=index_labels, **options)


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
    assert batch["input_ids"].shape == (2, 32) and one.padded_tokens(rows) == 64
    assert set(batch) == {"input_ids", "labels"}  # no attention mask, so that flash attention is available


@pytest.mark.parametrize("packed", [True, False])
def test_labelled_rows_of_a_batch_and_of_a_rank_without_rows(packed):
    one = batcher(packed=packed, index_labels=True)
    batch = one(ROWS if packed else [np.array([i]) for i in range(5)])
    labels = torch.nn.functional.pad(batch["labels"][:, 1:], (0, 1), value=-100).reshape(-1)
    assert set(torch.nonzero(labels != -100).flatten().tolist()) <= set(batch["labelled_rows"].tolist())
    empty = one([])
    assert (empty["labels"] == -100).all() and len(empty["labelled_rows"]) == 0
