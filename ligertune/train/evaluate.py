"""The loss over an evaluation set: mean over its trained tokens, whatever the batch size or the ranks."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

import numpy as np
import torch
from accelerate import Accelerator

from ligertune.data.batching.batcher import Batcher
from ligertune.data.batching.packing import pack
from ligertune.patching.deferred_logits import loss_only
from ligertune.tasks.objectives import Objective
from ligertune.train.distributed import after_evaluation, reduce_sum
from ligertune.train.host_throttle import Pace
from ligertune.train.signals import StopRequest

if TYPE_CHECKING:
    from torch import nn

    from ligertune.planning.plan import Plan


def evaluate(
    plan: Plan, accelerator: Accelerator, model: nn.Module, batcher: Batcher, objective: Objective, stop: StopRequest
) -> float | None:
    """Mean loss of the batcher's examples. All ranks call it; each does its slices, and none makes logits.

    None where a signal came in between: a stopping run has no time for the rest.
    """
    targets = objective.inputs(batcher.examples, np.arange(len(batcher.examples)))
    rank, world = accelerator.process_index // plan.batching.cp_size, plan.batching.row_ranks
    rows, size = _rows(plan, batcher), plan.batching.eval_batch_size
    if batcher.images is not None and batcher.images.family.layout == "tiles":
        size = 1  # a batch holds equally many images in each row
    total, pace = torch.zeros((), device=accelerator.device, dtype=torch.float32), Pace(accelerator)
    whole = None
    model.eval()
    with torch.no_grad(), loss_only():
        for start in range(0, len(rows), size * world):
            if pace(stop.received is not None):
                break
            mine = range(start + rank * size, min(start + (rank + 1) * size, len(rows)))
            batcher.expect([[rows[i] for i in mine]])
            batch = batcher([rows[i] for i in mine])
            total += model(**batch, **targets, use_cache=False).loss.float()
        else:
            whole = float(reduce_sum(accelerator, total))
    model.train()
    after_evaluation(model)
    return whole


def _rows(plan: Plan, batcher: Batcher) -> Sequence[np.ndarray]:
    """Packs as in training, or single examples with the longest first: little padding, and a lack of memory at once."""
    lengths = batcher.examples.lengths
    return pack(lengths, plan.rows.length) if plan.rows.packed else np.argsort(-lengths, kind="stable")[:, None]
