"""DataOrder and StreamOrder: which examples are trained at which step."""

from pathlib import Path

import numpy as np
import pytest
from support.data.row_files import write_rows
from transformers import AutoTokenizer

from ligertune.data.batching.order import WINDOW, ByFileCount, DataOrder, StreamOrder
from ligertune.data.batching.packing import pack
from ligertune.data.examples import Preparation
from ligertune.data.stream import ExampleStream, StreamedExamples
from ligertune.planning.batch_layout import Batching
from ligertune.planning.options import DataOptions, DatasetOptions

LENGTHS = np.random.default_rng(0).integers(5, 30, 21)
PACKS = pack(LENGTHS, 40)  # 11 rows of one to four examples
# kind -> (its arguments, rows of an epoch)
KINDS = {"shuffled": ({}, 21), "grouped": ({"grouped": True}, 21), "packed": ({"packs": PACKS}, len(PACKS))}


def order(micro: int, accumulation: int, world: int, *, kind: str = "shuffled", seed: int = 3) -> DataOrder:
    """Return an order of two epochs."""
    settings, rows = KINDS[kind]
    batching = Batching(micro_batch_size=micro, accumulation=accumulation, world_size=world, eval_batch_size=1)
    return DataOrder(LENGTHS, total_rows=2 * rows, seed=seed, batching=batching, **settings)


def examples(rows: list[np.ndarray]) -> list[int]:
    return np.concatenate(rows).tolist() if rows else []


# 21 examples twice in batches of 8: an epoch ends inside a step, and the last step is short
STEPS = 6
SPLITS = [(8, 1, 1), (1, 8, 1), (4, 1, 2), (1, 4, 2), (2, 2, 2), (1, 2, 4)]


@pytest.mark.parametrize("kind", KINDS)
def test_every_example_comes_once_an_epoch(kind):
    one = order(8, 1, 1, kind=kind)
    rows = [row for step in range(STEPS) for row in one.step(step)]
    epochs = [examples(rows[: one.rows_per_epoch]), examples(rows[one.rows_per_epoch :])]
    if kind == "grouped":  # within the step that two epochs share, rows are sorted by length
        assert sorted(epochs[0] + epochs[1]) == sorted([*range(21), *range(21)])
        assert sorted(examples([row for step in (0, 1) for row in one.step(step)])) == sorted(set(epochs[0][:16]))
    else:
        assert sorted(epochs[0]) == sorted(epochs[1]) == list(range(21))
    assert epochs[0] != epochs[1]


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("split", SPLITS, ids=str)
def test_any_split_trains_the_same_examples_at_each_step(split, kind):
    whole, split_order = order(8, 1, 1, kind=kind), order(*split, kind=kind)
    for step in range(STEPS):
        ranks = [split_order.micro_batches(step, rank) for rank in range(split[2])]
        assert len({len(micros) for micros in ranks}) == 1  # collective calls match
        found = [row for micros in ranks for micro in micros for row in micro]
        assert sorted(examples(found)) == sorted(examples(whole.step(step)))


@pytest.mark.parametrize("kind", KINDS)
def test_steps_depend_on_the_seed_and_not_on_the_steps_before(kind):
    forwards = [examples(order(8, 1, 1, kind=kind).step(step)) for step in range(STEPS)]
    resumed = order(8, 1, 1, kind=kind)
    assert [examples(resumed.step(step)) for step in (5, 1, 3)] == [forwards[step] for step in (5, 1, 3)]
    assert examples(order(8, 1, 1, kind=kind, seed=4).step(0)) != forwards[0]


def test_the_last_step_has_the_remaining_rows_and_examples_of_equal_length_change_packs_in_each_epoch():
    assert [len(order(8, 1, 1).step(step)) for step in range(STEPS)] == [8, 8, 8, 8, 8, 2]
    assert [len(m) for m in order(1, 4, 2).micro_batches(5, 1)] == [1]
    lengths = np.full(40, 10)
    batching = Batching(micro_batch_size=10, accumulation=1, world_size=1, eval_batch_size=1)
    one = DataOrder(lengths, total_rows=20, seed=0, batching=batching, packs=pack(lengths, 40))
    epochs = [{tuple(sorted(row)) for row in one.step(step)} for step in (0, 1)]
    assert sorted(examples(one.step(0))) == sorted(examples(one.step(1))) and epochs[0] != epochs[1]


@pytest.mark.parametrize("epoch", [0, 1])
def test_grouped_batches_have_similar_lengths(epoch):
    """20,003 lengths like Alpaca's, 8 micro batches of 4: padding to the longest costs 2 %, not 35 %.

    A global batch of 32 spans the epochs, and the batches of the second epoch begin after it.
    """
    lengths = np.clip(np.random.default_rng(0).lognormal(np.log(92), 0.5, 20_003), 10, 1000).astype(int)
    batching = Batching(micro_batch_size=4, accumulation=8, world_size=1, eval_batch_size=1)
    first = -(-epoch * len(lengths) // 32)
    shares = []
    for grouped in (False, True):
        one = DataOrder(lengths, total_rows=2 * len(lengths), seed=0, batching=batching, grouped=grouped)
        micros = [lengths[np.concatenate(micro)] for i in range(600) for micro in one.micro_batches(first + i, 0)]
        shares.append(1 - sum(micro.sum() for micro in micros) / sum(4 * micro.max() for micro in micros))
    assert shares[0] > 0.3 and shares[1] < 0.02


def test_grouped_steps_begin_with_the_longest_and_are_not_sorted_through_the_epoch():
    for step in range(STEPS):  # also step 3, in which an epoch ends
        found = LENGTHS[examples(order(8, 1, 1, kind="grouped").step(step))].tolist()
        assert found == sorted(found, reverse=True)
    lengths = np.arange(1, 8 * WINDOW + 1)
    batching = Batching(micro_batch_size=8, accumulation=1, world_size=1, eval_batch_size=1)
    one = DataOrder(lengths, total_rows=len(lengths), seed=0, batching=batching, grouped=True)
    means = [lengths[examples(one.step(step))].mean() for step in range(WINDOW)]
    assert means != sorted(means) and means != sorted(means, reverse=True)


def test_ranks_have_equally_many_micro_batches_of_equal_numbers_of_images():
    whole, n_images = order(4, 1, 2), np.arange(21) % 3
    for step in range(STEPS):
        ranks = [ByFileCount(whole, n_images).micro_batches(step, rank) for rank in (0, 1)]
        assert len(ranks[0]) == len(ranks[1])
        assert all(len(set(n_images[examples(rows)])) == 1 for batches in ranks for rows in batches if rows)
        assert sorted(examples([row for batches in ranks for rows in batches for row in rows])) == sorted(
            examples(whole.step(step))
        )


MAX_LENGTH = 200
SIZE = 40  # of 150 examples: one window spans the end of an epoch
STREAM_STEPS = 12


@pytest.fixture(scope="module")
def path(tmp_path_factory) -> Path:
    rows = [{"prompt": f"Say {number}.", "completion": " o" * (number % 37 + 1)} for number in range(150)]
    return write_rows(tmp_path_factory.mktemp("stream") / "a.jsonl", rows)


@pytest.fixture
def order_of(path, quickstart, monkeypatch):
    monkeypatch.setattr("ligertune.data.batching.order.STREAM_WINDOW", SIZE)
    tokenizer = AutoTokenizer.from_pretrained(quickstart / "stories260K")

    def of(micro: int = 4, accumulation: int = 1, world: int = 1, *, packed: bool = True) -> StreamOrder:
        data = DataOptions(datasets=[DatasetOptions(path=str(path))], streaming=True, max_length=MAX_LENGTH)
        examples = StreamedExamples(ExampleStream(Preparation(data, tokenizer), seed=0, buffer=20))
        batching = Batching(micro_batch_size=micro, accumulation=accumulation, world_size=world, eval_batch_size=1)
        order = StreamOrder(examples, seed=5, batching=batching, max_length=MAX_LENGTH if packed else None)
        order.examples = examples
        return order

    return of


@pytest.mark.parametrize("packed", [True, False])
def test_every_example_of_a_window_comes_once_in_a_new_order(order_of, packed):
    order = order_of(packed=packed)
    found = np.concatenate([row for step in range(30) for row in order.step(step)])
    windows = [found[found // SIZE == window] - window * SIZE for window in range(found.max() // SIZE)]
    assert len(windows) >= 2 and all(sorted(window) == list(range(SIZE)) for window in windows)
    assert windows[0].tolist() != windows[1].tolist() != list(range(SIZE)) != windows[0].tolist()
    order = order_of()
    lengths = np.array([order.examples.lengths[row].sum() for step in range(STREAM_STEPS) for row in order.step(step)])
    # packs are full; in such small windows one row in five holds what is left
    assert lengths.max() <= MAX_LENGTH and (lengths > 0.97 * MAX_LENGTH).mean() > 0.6


@pytest.mark.parametrize("step", [1, 11])
def test_a_resumed_order_gives_the_rows_of_its_step(order_of, step):
    before, fresh = order_of(), order_of()
    for earlier in range(step):
        before.step(earlier)
    rows = fresh.step(step)
    assert [row.tolist() for row in rows] == [row.tolist() for row in before.step(step)]
    assert all(fresh.examples[place].source == before.examples[place].source for row in rows for place in row)


def test_examples_that_no_later_step_needs_are_forgotten(order_of):
    order = order_of()
    held = []
    for step in range(60):
        order.step(step)
        order.step(step)  # the loop asks twice
        held.append(len(order.examples._held))
    assert max(held) <= 3 * SIZE
