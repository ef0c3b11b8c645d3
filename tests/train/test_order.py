"""Which examples are trained at which step."""

from __future__ import annotations

import numpy as np
import pytest

from ligertune.plan import Batching
from ligertune.train.order import DataOrder


def order(micro: int, accumulation: int, world: int, *, examples: int = 21, epochs: int = 2) -> DataOrder:
    return DataOrder(
        examples=examples,
        total_examples=examples * epochs,
        seed=3,
        batching=Batching(micro_batch_size=micro, accumulation=accumulation, world_size=world, eval_batch_size=1),
    )


# 21 examples twice in batches of 8: an epoch ends inside a step, and the last step is short
STEPS = 6
SPLITS = [(8, 1, 1), (1, 8, 1), (4, 1, 2), (1, 4, 2), (2, 2, 2), (1, 2, 4)]


def test_every_example_comes_once_an_epoch():
    seen = np.concatenate([order(8, 1, 1).step(step) for step in range(STEPS)])
    assert sorted(seen[:21]) == sorted(seen[21:]) == list(range(21))
    assert list(seen[:21]) != list(seen[21:])


@pytest.mark.parametrize("split", SPLITS, ids=str)
def test_any_split_trains_the_same_examples_at_each_step(split):
    whole, split_order = order(8, 1, 1), order(*split)
    for step in range(STEPS):
        ranks = [split_order.micro_batches(step, rank) for rank in range(split[2])]
        assert len({len(micros) for micros in ranks}) == 1  # collective calls match
        assert sorted(np.concatenate([m for micros in ranks for m in micros])) == sorted(whole.step(step))


def test_the_last_step_holds_what_is_left():
    assert [len(order(8, 1, 1).step(step)) for step in range(STEPS)] == [8, 8, 8, 8, 8, 2]
    assert [len(m) for m in order(1, 4, 2).micro_batches(5, 1)] == [1]


def test_the_seed_decides():
    other = DataOrder(examples=21, total_examples=21, seed=4, batching=order(8, 1, 1).batching)
    assert list(other.step(0)) != list(order(8, 1, 1).step(0))
