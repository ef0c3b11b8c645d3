"""Evaluation: the mean loss over an evaluation set, early stopping, and the best model's weights.

All decisions follow from the evaluation losses in metrics.jsonl, so a resumed run decides as an uninterrupted one.
"""

from __future__ import annotations

import json
import math
from collections.abc import Sequence
from pathlib import Path

import numpy as np
import torch
from accelerate import Accelerator
from safetensors.torch import load_file
from torch import Tensor, nn

from ligertune.data.batching.collate import Batcher
from ligertune.data.batching.packing import pack
from ligertune.launcher.signals import StopRequest
from ligertune.patching.deferred_logits import loss_only
from ligertune.planning.plan import Plan
from ligertune.storage import put_in_place, remove
from ligertune.tasks.objectives import Objective
from ligertune.train.checkpoint.trained_weights import FILE, load_trained, save_weights, trained
from ligertune.train.distributed import full_state_dict, is_sharded, reduce_sum, reshard
from ligertune.train.step import HostThrottle


def evaluate(
    plan: Plan, accelerator: Accelerator, model: nn.Module, batcher: Batcher, objective: Objective, stop: StopRequest
) -> float | None:
    """Return the mean loss over all trained tokens of the batcher's examples; None if a signal interrupts it.

    All ranks call it, and each evaluates its share. The result depends neither on the batch size nor on the number of
    ranks. No logits are made.
    """
    loss_inputs = objective.inputs(batcher.examples, np.arange(len(batcher.examples)))
    rank, world = accelerator.process_index // plan.batching.cp_size, plan.batching.row_ranks
    lengths, size = batcher.examples.lengths, plan.batching.eval_batch_size
    # Packs as in training, or single examples, longest first: little padding, and an early out-of-memory.
    rows = pack(lengths, plan.rows.length) if plan.rows.packed else np.argsort(-lengths, kind="stable")[:, None]
    if batcher.images is not None and batcher.images.family.layout == "tiles":
        size = 1  # a batch must hold equally many images in each row
    loss_sum, throttle = torch.zeros((), device=accelerator.device, dtype=torch.float32), HostThrottle(accelerator)
    mean = None
    model.eval()
    with torch.no_grad(), loss_only():
        for start in range(0, len(rows), size * world):
            if throttle(stop.received is not None):
                break
            mine = range(start + rank * size, min(start + (rank + 1) * size, len(rows)))
            batcher.prefetch([[rows[i] for i in mine]])
            batch = batcher([rows[i] for i in mine])
            loss_sum += model(**batch, **loss_inputs, use_cache=False).loss.float()
        else:
            mean = float(reduce_sum(accelerator, loss_sum))
    model.train()
    reshard(model)
    return mean


class EarlyStopping:
    """Track the lowest evaluation loss and stop after `patience` evaluations without a lower one (None: never)."""

    def __init__(self, patience: int | None = None, losses: Sequence[float] = ()) -> None:
        self.patience, self.best, self.since_best = patience, math.inf, 0
        for loss in losses:
            self.add(loss)

    def add(self, loss: float) -> bool:
        """Add an evaluation loss; return whether it is the lowest so far."""
        if loss < self.best:
            self.best, self.since_best = loss, 0
            return True
        self.since_best += 1
        return False

    @property
    def should_stop(self) -> bool:
        return self.patience is not None and self.since_best >= self.patience


def save_best(accelerator: Accelerator, model: nn.Module, output_dir: Path, *, step: int, loss: float) -> None:
    """Replace the trainable weights in `output_dir/best`, atomically. All ranks call it."""
    folder, aside = output_dir / "best", output_dir / ".best.partial"
    weights = full_state_dict(accelerator, model)
    if accelerator.is_main_process:
        remove(aside)
        aside.mkdir(parents=True)
        if weights is None:
            save_weights(trained(accelerator.unwrap_model(model)), aside / FILE)
        else:
            # Save tied weights once: they may share memory, which safetensors refuses under two names.
            once = {t.data_ptr(): name for name, t in reversed(weights.items())}
            save_weights({name: weights[name] for name in once.values()}, aside / FILE)
        (aside / "best.json").write_text(json.dumps({"step": step, "eval_loss": loss}) + "\n", encoding="utf-8")
        put_in_place(aside, folder)
    accelerator.wait_for_everyone()


def load_best(accelerator: Accelerator, model: nn.Module, output_dir: Path) -> tuple[int, dict[str, Tensor] | None]:
    """Load the best weights into `model`; return (their step, the weights instead if the model is sharded)."""
    folder = output_dir / "best"
    step = json.loads((folder / "best.json").read_text(encoding="utf-8"))["step"]
    if is_sharded(accelerator):
        return step, load_file(folder / FILE)
    load_trained(accelerator.unwrap_model(model), folder / FILE)
    return step, None
