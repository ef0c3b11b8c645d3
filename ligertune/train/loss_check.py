"""A loss that is not a number stops the run before it reaches a checkpoint, and leaves the batch that it came from."""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path

import numpy as np
import torch

from ligertune.data.batching.batcher import Batcher
from ligertune.errors import UserError


class LossWatch:
    """Remembers the steps since the last look: their losses stay on the device, so nothing waits for it."""

    def __init__(self, output_dir: Path, batcher: Batcher, *, rank: int) -> None:
        self._output_dir, self._batcher, self._rank = output_dir, batcher, rank
        self._steps: list[tuple[int, torch.Tensor, Sequence[Sequence[np.ndarray]]]] = []

    def add(self, step: int, loss_sum: torch.Tensor, batches: Sequence[Sequence[np.ndarray]]) -> None:
        """loss_sum: of this rank's steps so far; once it is not finite, it stays so."""
        self._steps.append((step, loss_sum.clone(), batches))

    def is_finite(self, grad_norm: torch.Tensor | None) -> bool:
        """Whether the last step's loss and gradients were numbers. Waits for the device."""
        numbers = [self._steps[-1][1]] if self._steps else []
        numbers += [] if grad_norm is None else [grad_norm]
        return all(bool(torch.isfinite(number)) for number in numbers)

    def forget(self) -> None:
        """The losses were numbers so far; the last step's gradients may not have been."""
        del self._steps[:-1]

    def complaint(self) -> UserError:
        """The error that ends the run; the batch of the first bad step is written to output_dir."""
        bad = [(step, batches) for step, loss, batches in self._steps if not bool(torch.isfinite(loss))]
        step, batches = bad[0] if bad else (self._steps[-1][0], self._steps[-1][2])
        path = self._output_dir / f"bad_batch-step-{step}-rank-{self._rank}.json"
        path.write_text(json.dumps(self._contents(step, batches), indent=1) + "\n", encoding="utf-8")
        what = "The loss" if bad else "A gradient, or the loss of another rank,"
        what = f"{what} of step {step} is not a number. Its batch is in {path}."
        return UserError(
            f"{what} No checkpoint was written since.",
            hint="Look at the batch, lower train.learning_rate or raise train.warmup_steps, and go on with --resume.",
            exit_code=1,
        )

    def _contents(self, step: int, batches: Sequence[Sequence[np.ndarray]]) -> dict:
        """Micro batches of rows of examples: their numbers in the data set, token ids and labels."""
        return {
            "step": step,
            "micro_batches": [[[self._example(int(i)) for i in row] for row in rows] for rows in batches],
        }

    def _example(self, index: int) -> dict:
        example = self._batcher.examples[index]
        ids = {name: getattr(example, name).tolist() for name in ("input_ids", "labels")}
        return {"index": index, "source": example.source, **ids}
