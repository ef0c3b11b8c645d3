"""The task of a run, chosen by the recipe's `task`."""

from __future__ import annotations

from torch import nn

from ligertune.models.shape import read_shape
from ligertune.planning.plan import Plan
from ligertune.tasks.medusa.medusa_model import MedusaModel
from ligertune.tasks.medusa.medusa_shape import MedusaShape
from ligertune.tasks.medusa.medusa_task import MedusaTask
from ligertune.tasks.task import Task


def choose_task(plan: Plan, model: nn.Module) -> Task:
    """Return the task of a plan. model: as `trained_model` returns it, not yet wrapped by DDP or FSDP."""
    if isinstance(model, MedusaModel):
        return _medusa(plan, model)
    return Task(read_shape(model))


def _medusa(plan: Plan, model: MedusaModel) -> MedusaTask:
    medusa = plan.build.medusa
    return MedusaTask(
        MedusaShape.of_heads(model),
        model.shifts,
        heads_coefficient=medusa.heads_coefficient,
        warmup_steps=round(medusa.heads_warmup_ratio * plan.schedule.total_steps),
    )
