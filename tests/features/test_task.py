"""Divisors of the loss and weights of Medusa heads, by hand."""

import numpy as np
import pytest
import torch

from ligertune.data.examples import Example, Examples
from ligertune.features.medusa.heads_loss import part_weights
from ligertune.features.medusa.medusa_task import MedusaTask
from ligertune.features.task import Measures, Task

X = -100


def examples(*labels: list[int]) -> Examples:
    return Examples(
        Example(np.arange(len(row), dtype=np.int32), np.array(row, dtype=np.int32), "a:1") for row in labels
    )


# trained: 3, 1 and 4 tokens
EXAMPLES = examples([X, X, 7, 8, 9], [X, 5], [X, 1, 2, 3, 4])


def test_the_loss_is_divided_by_the_trained_tokens_of_the_global_batch():
    task = Task(shape=None)
    assert task.inputs(EXAMPLES, np.array([0, 2])) == {"num_items_in_batch": 7}
    assert task.inputs(examples([X, X]), np.array([0])) == {"num_items_in_batch": 1}  # never 0


def test_each_head_is_divided_by_its_own_targets():
    """A label at position p is a target of shift s if p >= s. Labels are at 2, 3, 4; 1; 1, 2, 3, 4."""
    task = MedusaTask(None, (1, 2, 3, 4), heads_coefficient=0.2, warmup_steps=0)
    found = task.inputs(EXAMPLES, np.arange(3), step=0)
    assert found["num_items_in_batch"] == [8, 3 + 0 + 3, 2 + 0 + 2, 1 + 0 + 1]


def test_the_heads_coefficient_warms_up_linearly():
    task = MedusaTask(None, (1, 2), heads_coefficient=0.2, warmup_steps=4)
    found = [task.inputs(EXAMPLES, np.arange(3), step=step)["heads_coefficient"] for step in (0, 1, 2, 3, 4, 99)]
    assert found == pytest.approx([0.05, 0.1, 0.15, 0.2, 0.2, 0.2])
    assert task.inputs(EXAMPLES, np.arange(3))["heads_coefficient"] == 0.2  # an evaluation


def test_parts_of_the_loss_are_weighted_by_powers_of_the_decay():
    assert part_weights(3, 0.8, 0.2, with_model=False) == pytest.approx([0.8, 0.64, 0.512])
    assert part_weights(3, 0.8, 0.2, with_model=True) == pytest.approx([1.0, 0.16, 0.128, 0.1024])


def test_measures_are_means_over_what_was_added_since_the_last_line():
    measures = Measures(("accuracy", "entropy", "unused"))
    measures.add("accuracy", torch.tensor([1.0, 0.0, 1.0]))
    measures.add("entropy", torch.tensor(6.0), count=4)
    taken = measures.take()
    measures.add("accuracy", torch.tensor([0.0]))
    assert measures.means(taken) == pytest.approx({"accuracy": 2 / 3, "entropy": 1.5})
    measures.put_back(taken)
    assert measures.means(measures.take()) == pytest.approx({"accuracy": 0.5, "entropy": 1.5})
    assert measures.means(measures.take()) == {}
