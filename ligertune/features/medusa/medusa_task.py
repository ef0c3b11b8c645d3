"""The task medusa: its divisors of the loss, and the warm-up of the heads' weight."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import numpy as np

from ligertune.features.medusa.heads_loss import count_targets
from ligertune.features.task import Task
from ligertune.planning.memory.model_shape import ModelShape

if TYPE_CHECKING:
    from ligertune.data.examples import Examples
    from ligertune.data.stream import StreamedExamples


class MedusaTask(Task):
    """Train Medusa heads, which predict `label_shifts` tokens ahead.

    heads_coefficient rises linearly from 0 over warmup_steps: the first gradients of new heads would damage the model.
    """

    gives_predictions = False

    def __init__(
        self, shape: ModelShape, label_shifts: tuple[int, ...], *, heads_coefficient: float, warmup_steps: int
    ) -> None:
        super().__init__(shape)
        self.label_shifts = label_shifts
        self._heads_coefficient = heads_coefficient
        self._warmup_steps = warmup_steps

    def inputs(
        self, examples: Examples | StreamedExamples, indices: np.ndarray, *, step: int | None = None
    ) -> dict[str, Any]:
        """Return the number of targets of each part, which divide the parts, and the weight of the heads' losses."""
        warmed = 1.0 if step is None or step >= self._warmup_steps else (step + 1) / self._warmup_steps
        labels = [examples[int(i)].labels for i in indices]
        return {
            "num_items_in_batch": count_targets(labels, examples.trained[indices], self.label_shifts),
            "heads_coefficient": self._heads_coefficient * warmed,
        }
