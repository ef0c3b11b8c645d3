"""The task of a run, chosen by the recipe's `task`."""

from __future__ import annotations

from torch import nn

from ligertune.models.experts.expert_load import auxiliary_losses
from ligertune.models.shape import read_shape
from ligertune.patching.fused_loss import KernelLossModel
from ligertune.patching.head_loss import let_head_losses_run
from ligertune.planning.plan import Plan
from ligertune.tasks.distill.distill_task import DistillTask
from ligertune.tasks.distill.offline_task import OfflineDistillTask
from ligertune.tasks.medusa.medusa_model import MedusaModel
from ligertune.tasks.medusa.medusa_shape import MedusaShape
from ligertune.tasks.medusa.medusa_task import MedusaTask
from ligertune.tasks.output_head import adapted_model
from ligertune.tasks.preference.kto_task import KtoTask
from ligertune.tasks.preference.preference_task import PreferenceTask
from ligertune.tasks.preference.reference import choose_reference
from ligertune.tasks.scores.classification_task import ClassificationTask
from ligertune.tasks.scores.reward_task import RewardTask
from ligertune.tasks.task import AUX_LOSS, Measures, Task


def choose_task(plan: Plan, model: nn.Module) -> Task:
    """Return the task of a plan. model: as `trained_model` returns it, not yet wrapped by DDP or FSDP."""
    if isinstance(model, MedusaModel):
        return _medusa(plan, model)
    shape = read_shape(model)
    device = next(model.parameters()).device
    if plan.build.task == "classification":
        return ClassificationTask(shape, plan.build.classification, device)
    if plan.build.task == "reward":
        return RewardTask(shape, plan.build.reward, device)
    if plan.build.task == "distill":
        _open_loss(model, plan.build.task)
        return (OfflineDistillTask if plan.build.distill.teacher_file else DistillTask)(shape, plan)
    if plan.build.task == "dpo":
        _open_loss(model, plan.build.task)
        if plan.build.preference.loss_type == "kto":
            return KtoTask(shape, plan, choose_reference(plan, model), device)
        return PreferenceTask(shape, plan.build.preference, choose_reference(plan, model), device)
    return Task(shape, _router_measures(model))


def _router_measures(model: nn.Module) -> Measures | None:
    """Return the measure of the routers' auxiliary loss, if the model adds it to its loss."""
    if not auxiliary_losses(adapted_model(model).config.get_text_config()):
        return None
    return Measures((AUX_LOSS,), next(model.parameters()).device)


def _open_loss(model: nn.Module, task: str) -> None:
    """Let a model without our loss kernels compute the loss of a task. Raises UserError if it cannot."""
    inner = adapted_model(model)
    if not isinstance(inner, KernelLossModel):
        let_head_losses_run(inner, task)


def _medusa(plan: Plan, model: MedusaModel) -> MedusaTask:
    medusa = plan.build.medusa
    return MedusaTask(
        MedusaShape.of_heads(model),
        model.shifts,
        heads_coefficient=medusa.heads_coefficient,
        warmup_steps=round(medusa.heads_warmup_ratio * plan.schedule.total_steps),
    )
