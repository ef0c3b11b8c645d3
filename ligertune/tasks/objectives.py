"""What the loop tells a model beside its batch: what the sums of its loss are divided by, and how heads are weighed."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import numpy as np
from torch import nn

from ligertune.models.shape import read_shape
from ligertune.planning.memory.model_shape import ModelShape
from ligertune.planning.plan import Plan
from ligertune.tasks.medusa.head_targets import count_targets
from ligertune.tasks.medusa.medusa_model import MedusaModel
from ligertune.tasks.medusa.medusa_shape import MedusaShape

if TYPE_CHECKING:
    from ligertune.data.examples import Examples
    from ligertune.data.stream import StreamedExamples


@dataclass(frozen=True)
class NextToken:
    """The next token of every position that is trained."""

    shape: ModelShape
    label_shifts: tuple[int, ...] = (1,)

    def inputs(
        self, examples: Examples | StreamedExamples, indices: np.ndarray, *, step: int | None = None
    ) -> dict[str, Any]:
        """Keywords of the forward over a part of the examples at `indices`, which are one global batch."""
        return {"num_items_in_batch": max(int(examples.trained[indices].sum()), 1)}


@dataclass(frozen=True)
class SeveralTokens:
    """The tokens that Medusa heads predict, each head divided by its own targets in the global batch.

    heads_coefficient rises from 0 over warmup_steps, and stays: the heads' first gradients would spoil the model.
    """

    shape: ModelShape
    label_shifts: tuple[int, ...]
    heads_coefficient: float
    warmup_steps: int

    def inputs(
        self, examples: Examples | StreamedExamples, indices: np.ndarray, *, step: int | None = None
    ) -> dict[str, Any]:
        """As above; without a step the heads weigh as after the warm-up."""
        warmed = 1.0 if step is None or step >= self.warmup_steps else (step + 1) / self.warmup_steps
        labels = [examples[int(i)].labels for i in indices]
        return {
            "num_items_in_batch": count_targets(labels, examples.trained[indices], self.label_shifts),
            "heads_coefficient": self.heads_coefficient * warmed,
        }


Objective = NextToken | SeveralTokens


def objective_of(plan: Plan, model: nn.Module) -> Objective:
    """What `model` is trained for; asked before it is wrapped."""
    if not isinstance(model, MedusaModel):
        return NextToken(read_shape(model))
    medusa = plan.build.medusa
    return SeveralTokens(
        shape=MedusaShape.of_heads(model),
        label_shifts=model.shifts,
        heads_coefficient=medusa.heads_coefficient,
        warmup_steps=round(medusa.heads_warmup_ratio * plan.schedule.total_steps),
    )
