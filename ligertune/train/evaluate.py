"""Evaluation: the mean loss and the task's measures over an evaluation set, and early stopping.

All decisions follow from the evaluation losses in metrics.jsonl, so a resumed run decides as an uninterrupted one.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import NamedTuple

import numpy as np
import torch
from accelerate import Accelerator
from torch import nn

from ligertune.data.batching.collate import Batcher
from ligertune.data.batching.packing import pack
from ligertune.features.task import Task
from ligertune.launcher.signals import StopRequest
from ligertune.patching.deferred_logits import loss_only
from ligertune.planning.plan import Plan
from ligertune.train.distributed import reduce_sum, reshard
from ligertune.train.step import HostThrottle


class Evaluation(NamedTuple):
    """The loss over an evaluation set, and the means of the task's measures."""

    loss: float
    measures: dict[str, float]


def evaluate(
    plan: Plan, accelerator: Accelerator, model: nn.Module, batcher: Batcher, task: Task, stop: StopRequest
) -> Evaluation | None:
    """Return the loss of the batcher's examples as one global batch; None if a signal interrupts it.

    All ranks call it, and each evaluates its share. The result depends neither on the batch size nor on the number of
    ranks. Where kernels compute the loss in the output head, no logits are made.
    """
    loss_inputs = task.inputs(batcher.examples, np.arange(len(batcher.examples)))
    rank = accelerator.process_index // plan.batching.cp_size
    world = plan.batching.row_ranks
    lengths = batcher.examples.lengths
    size = plan.batching.eval_batch_size
    # Packs as in training, or single examples, longest first: little padding, and an early out-of-memory.
    rows = pack(lengths, plan.rows.length) if plan.rows.packed else np.argsort(-lengths, kind="stable")[:, None]
    if batcher.reader is not None and batcher.reader.needs_equal_counts:
        size = 1  # a batch must hold equally many files in each row
    loss_sum = torch.zeros((), device=accelerator.device, dtype=torch.float32)
    throttle = HostThrottle(accelerator)
    found = None
    of_training = task.measures.take()
    model.eval()
    with torch.no_grad(), loss_only():
        for start in range(0, len(rows), size * world):
            if throttle(stop.received is not None):
                break
            mine = range(start + rank * size, min(start + (rank + 1) * size, len(rows)))
            batcher.prefetch([[rows[i] for i in mine]])
            batch = batcher([rows[i] for i in mine])
            loss_sum += task.loss(model, {**batch, **loss_inputs}).float()
        else:
            measured = task.measures.take()
            sums = reduce_sum(accelerator, torch.cat([loss_sum[None], measured.flatten().to(loss_sum)]))
            found = Evaluation(float(sums[0]), task.measures.means(sums[1:].view_as(measured)))
    task.measures.take()  # of an interrupted evaluation
    task.measures.put_back(of_training)
    model.train()
    reshard(model)
    return found


class EarlyStopping:
    """Track the lowest evaluation loss and stop after `patience` evaluations without a lower one (None: never).

    A loss that is lower by at most `threshold` is the lowest from then on, and counts as none, as in transformers.
    """

    def __init__(self, patience: int | None = None, losses: Sequence[float] = (), *, threshold: float = 0.0) -> None:
        self.patience = patience
        self.threshold = threshold
        self.best = math.inf
        self.since_best = 0
        for loss in losses:
            self.add(loss)

    def add(self, loss: float) -> bool:
        """Add an evaluation loss; return whether it is the lowest so far."""
        lowest = loss < self.best
        self.since_best = 0 if lowest and self.best - loss > self.threshold else self.since_best + 1
        self.best = loss if lowest else self.best
        return lowest

    @property
    def should_stop(self) -> bool:
        return self.patience is not None and self.since_best >= self.patience
