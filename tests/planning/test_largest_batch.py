"""The largest micro-batch of a plan: that of the run's data order, collated."""

import numpy as np
import pytest
from support.data.collated_sizes import check_plan
from support.quickstart_runs import plan_run

from ligertune.data.batching.largest_batch import ExampleSizes, most_in_batch
from ligertune.data.batching.order import DataOrder
from ligertune.data.batching.packing import pack
from ligertune.planning.batch_layout import Batching, Rows
from ligertune.planning.memory.fit import largest_fits

LENGTHS = np.random.default_rng(0).integers(5, 200, 37)
MICRO = {"train.per_device_train_batch_size": 4, "train.gradient_accumulation_steps": 2, "data.max_length": 256}
LAYOUTS = {
    "packed": {"data.packing": True},
    "packed into one length": {"data.packing": True, "train.torch_compile": True},
    "padding-free": {"data.packing": False, "data.padding_free": True},
    "padded": {"data.packing": False, "data.padding_free": False},
    "grouped": {"data.packing": False, "data.padding_free": False, "train.group_by_length": True},
    "grouped, padding-free": {"data.packing": False, "data.padding_free": True, "train.group_by_length": True},
}


@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("run", [{"train.num_train_epochs": 2}, {"train.max_steps": 3}], ids=["epochs", "steps"])
def test_the_plan_has_the_largest_micro_batch_of_the_run(layout, run, tmp_path):
    changes = {**MICRO, **LAYOUTS[layout], **run, "data.datasets.0.max_samples": 101}
    if "one length" in layout:
        job = plan_run(tmp_path, **changes)
        assert job.plan.largest_batch.tokens == 4 * 256
    else:
        check_plan(plan_run(tmp_path, **changes))


@pytest.mark.parametrize("kind", ["shuffled", "grouped", "packed"])
@pytest.mark.parametrize("world", [1, 2])
@pytest.mark.parametrize("multiple_of", [1, 64])
def test_every_rank_is_counted(kind, world, multiple_of):
    """Sizes of a run of 2 1/2 epochs, which ends inside a step."""
    sizes = ExampleSizes(LENGTHS, LENGTHS // 3, LENGTHS, seed=5)
    rows = Rows(kind, 37, 200, multiple_of, None, padding_free=True)
    batching = Batching(3, 2, world, 1)
    found = sizes.largest_batch(rows, batching, 92)
    order = DataOrder(
        LENGTHS,
        total_rows=92,
        seed=5,
        batching=batching,
        packs=pack(LENGTHS, 200) if kind == "packed" else None,
        grouped=kind == "grouped",
    )
    steps = range(-(-92 // batching.global_batch_size))
    batches = [
        np.concatenate(batch)
        for step in steps
        for rank in range(world)
        for batch in order.micro_batches(step, rank)
        if batch
    ]
    tokens = max(LENGTHS[batch].sum() for batch in batches)
    assert (found.rows, found.row_length) == (1, -(-tokens // multiple_of) * multiple_of)
    assert found.labels == max((LENGTHS // 3)[batch].sum() for batch in batches)


@pytest.mark.parametrize("size", [1, 2, 7, 37, 38, 80])
def test_the_bound_holds_for_any_order(size):
    """Epochs one after another, shuffled; the largest values may lie at the end of one and the start of the next."""
    bound = most_in_batch(LENGTHS, size)
    sums = [_largest_window(np.random.default_rng(seed), size) for seed in range(300)]
    assert max(sums) <= bound
    falling = np.sort(LENGTHS)[::-1]
    worst = np.concatenate([falling[::-1], falling, falling[::-1], falling])
    assert _windows(worst, size).max() <= bound
    if size == 2:
        assert bound == 2 * LENGTHS.max()


def _windows(values: np.ndarray, size: int) -> np.ndarray:
    return np.convolve(values, np.ones(size, dtype=np.int64), mode="valid")


def _largest_window(rng: np.random.Generator, size: int) -> int:
    return int(_windows(np.concatenate([rng.permutation(LENGTHS) for _ in range(5)]), size).max())


@pytest.mark.parametrize("kind", ["shuffled", "packed"])
@pytest.mark.parametrize("padding_free", [True, False])
def test_a_very_long_run_gets_a_bound(kind, padding_free):
    sizes = ExampleSizes(LENGTHS, LENGTHS // 3, LENGTHS, seed=5)
    rows = Rows(kind, 37, 200, 1, None, padding_free=padding_free)
    exact = sizes.largest_batch(rows, Batching(3, 2, 1, 1), 37_000 if kind == "shuffled" else 5_000)
    bound = sizes.largest_batch(rows, Batching(3, 2, 1, 1), 10_000_000)
    assert exact.tokens <= bound.tokens <= 1.2 * exact.tokens
    assert exact.labels <= bound.labels


def test_fit_never_promises_more_than_the_longest_rows_allow(tmp_path):
    """The micro-batch that --fit prints fits if each of its rows is the longest one."""
    job = plan_run(tmp_path, **{**MICRO, **LAYOUTS["padding-free"]})
    plan = job.plan
    for fit, estimate in zip(
        largest_fits(plan), (plan.memory.without_checkpointing(), plan.memory.with_checkpointing()), strict=True
    ):
        longest = int(job.data.examples_in_memory.lengths.max())
        assert plan.row_length >= longest
        accumulates = plan.batching.accumulation > 1
        memory = plan.machine.memory_bytes
        labels = fit.micro_batch_size * int(job.data.examples_in_memory.trained.max())
        assert fit.micro_batch_size and estimate.fits(
            1, fit.micro_batch_size * longest, accumulates=accumulates, memory=memory, labels=labels
        )
