"""Sizes of all micro-batches of a run, by collating them."""

import torch

from ligertune.data.batching.collate import Batcher
from ligertune.data.templates.label_masking import IGNORE_INDEX
from ligertune.training.setup import Job, data_order


def collated(job: Job) -> tuple[list[tuple[int, ...]], list[int]]:
    """Return shape and labels of each micro-batch of the run."""
    plan = job.plan
    examples = job.data.examples_in_memory
    order = data_order(plan, examples, None)
    batcher = Batcher(examples, plan.rows.is_padding_free, plan.rows.multiple_of, 0, False, torch.device("cpu"))
    steps = range(plan.schedule.total_steps)
    batches = [batcher(rows) for step in steps for rows in order.micro_batches(step, 0) if rows]
    shapes = [tuple(batch["input_ids"].shape) for batch in batches]
    return shapes, [int((batch["labels"] != IGNORE_INDEX).sum()) for batch in batches]


def check_plan(job: Job) -> None:
    shapes, labels = collated(job)
    largest = job.plan.largest_batch
    assert largest.tokens == max(rows * length for rows, length in shapes)
    assert (largest.rows, largest.row_length) in shapes
    # the first label of a document that has no prompt is not trained: at most one of each
    assert max(labels) <= largest.labels <= max(labels) + job.plan.batching.micro_batch_size
