"""Training objectives: the keywords that the loop adds to a batch, such as the number of trained tokens."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import numpy as np
from torch import nn

from ligertune.models.shape import read_shape
from ligertune.planning.memory.model_shape import ModelShape
from ligertune.planning.plan import Plan
from ligertune.tasks.medusa.heads_loss import count_targets
from ligertune.tasks.medusa.medusa_model import MedusaModel
from ligertune.tasks.medusa.medusa_shape import MedusaShape

if TYPE_CHECKING:
    from ligertune.data.examples import Examples
    from ligertune.data.stream import StreamedExamples


@dataclass(frozen=True)
class Objective:
    """How many tokens ahead a model predicts, and the forward keywords that depend on the whole global batch.

    heads_coefficient (only with Medusa heads) rises linearly from 0 over warmup_steps: the first gradients of new heads
    would damage the model.
    """

    shape: ModelShape
    label_shifts: tuple[int, ...] = (1,)
    heads_coefficient: float | None = None
    warmup_steps: int = 0

    def inputs(
        self, examples: Examples | StreamedExamples, indices: np.ndarray, *, step: int | None = None
    ) -> dict[str, Any]:
        """Return forward keywords for any part of the global batch, which are the examples at `indices`.

        num_items_in_batch divides the loss: the number of trained tokens, or with Medusa heads the number of targets of
        each part. Evaluation passes no step: the warm-up is over.
        """
        if self.heads_coefficient is None:
            return {"num_items_in_batch": max(int(examples.trained[indices].sum()), 1)}
        warmed = 1.0 if step is None or step >= self.warmup_steps else (step + 1) / self.warmup_steps
        labels = [examples[int(i)].labels for i in indices]
        return {
            "num_items_in_batch": count_targets(labels, examples.trained[indices], self.label_shifts),
            "heads_coefficient": self.heads_coefficient * warmed,
        }


def objective_of(plan: Plan, model: nn.Module) -> Objective:
    """Return the objective of a model that is not yet wrapped by DDP or FSDP."""
    if not isinstance(model, MedusaModel):
        return Objective(read_shape(model))
    medusa = plan.build.medusa
    return Objective(
        shape=MedusaShape.of_heads(model),
        label_shifts=model.shifts,
        heads_coefficient=medusa.heads_coefficient,
        warmup_steps=round(medusa.heads_warmup_ratio * plan.schedule.total_steps),
    )
