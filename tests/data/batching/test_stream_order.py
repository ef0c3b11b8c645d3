"""StreamOrder: windows of a stream are packed and shuffled, and any split trains the same rows."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
from row_files import write_rows
from transformers import AutoTokenizer

from ligertune.data.batching.order import StreamOrder
from ligertune.data.stream import ExampleStream, StreamedExamples
from ligertune.planning.micro_batch import Batching
from ligertune.planning.options import DataOptions, DatasetOptions

MAX_LENGTH = 200
WINDOW = 40  # of 150 examples: one window spans the end of an epoch
STEPS = 12


@pytest.fixture(scope="module")
def path(tmp_path_factory) -> Path:
    rows = [{"prompt": f"Say {number}.", "completion": " o" * (number % 37 + 1)} for number in range(150)]
    return write_rows(tmp_path_factory.mktemp("stream") / "a.jsonl", rows)


@pytest.fixture
def order_of(path, quickstart):
    tokenizer = AutoTokenizer.from_pretrained(quickstart / "stories260K")

    def of(micro: int = 4, accumulation: int = 1, world: int = 1, *, packed: bool = True) -> StreamOrder:
        data = DataOptions(datasets=[DatasetOptions(path=str(path))], streaming=True, max_length=MAX_LENGTH)
        examples = StreamedExamples(ExampleStream(data, tokenizer, seed=0, buffer=20))
        batching = Batching(micro_batch_size=micro, accumulation=accumulation, world_size=world, eval_batch_size=1)
        length = MAX_LENGTH if packed else None
        order = StreamOrder(examples, seed=5, batching=batching, max_length=length, window=WINDOW)
        order.examples = examples
        return order

    return of


@pytest.mark.parametrize("packed", [True, False])
def test_every_example_of_a_window_comes_once_in_a_new_order(order_of, packed):
    order = order_of(packed=packed)
    found = np.concatenate([row for step in range(20) for row in order.step(step)])
    windows = [found[found // WINDOW == window] - window * WINDOW for window in range(found.max() // WINDOW)]
    assert len(windows) >= 2 and all(sorted(window) == list(range(WINDOW)) for window in windows)
    assert windows[0].tolist() != windows[1].tolist() != list(range(WINDOW)) != windows[0].tolist()


def test_packs_are_full_and_within_max_length(order_of):
    order = order_of()
    lengths = np.array([order.examples.lengths[row].sum() for step in range(STEPS) for row in order.step(step)])
    # in such small windows one row in five holds what is left
    assert lengths.max() <= MAX_LENGTH and (lengths > 0.97 * MAX_LENGTH).mean() > 0.6


@pytest.mark.parametrize("split", [(1, 4, 1), (2, 1, 2), (1, 2, 2), (1, 1, 4)], ids=str)
def test_any_split_trains_the_same_rows_at_each_step(order_of, split):
    whole, ranks = order_of(), [order_of(*split) for _ in range(split[2])]
    for step in range(STEPS):
        micros = [order.micro_batches(step, rank) for rank, order in enumerate(ranks)]
        assert len({len(batches) for batches in micros}) == 1
        found = [row.tolist() for batches in micros for batch in batches for row in batch]
        assert sorted(found) == sorted(row.tolist() for row in whole.step(step))


@pytest.mark.parametrize("step", [1, 11])
def test_a_resumed_order_gives_the_rows_of_its_step(order_of, step):
    before, fresh = order_of(), order_of()
    for earlier in range(step):
        before.step(earlier)
    rows = fresh.step(step)
    assert [row.tolist() for row in rows] == [row.tolist() for row in before.step(step)]
    for row in rows:
        for place in row:
            assert fresh.examples[place].source == before.examples[place].source


def test_examples_that_no_later_step_needs_are_forgotten(order_of):
    order = order_of()
    held = []
    for step in range(60):
        order.step(step)
        order.step(step)  # the loop asks twice
        held.append(len(order.examples._held))
    assert max(held) <= 3 * WINDOW
