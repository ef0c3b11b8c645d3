"""Supervised fine-tuning: predict the next token of each trained position."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from ligertune.any_types import AnyModule
from ligertune.features.output_head import open_loss
from ligertune.features.sft.token_loss import DynamicFineTuning, SmoothedLabels, TokenLossTask
from ligertune.features.task import AUX_LOSS, Measures, Task
from ligertune.models.experts.expert_load import auxiliary_losses
from ligertune.models.shape import base_of, read_shape
from ligertune.planning.feature_spec import FeatureSpec
from ligertune.planning.plan import Plan


def _make_task(plan: Plan, model: AnyModule) -> Task:
    """Return the task; it logs the auxiliary loss of a mixture's routers, if the model adds it to its loss."""
    config = base_of(model).config.get_text_config()
    measures = Measures((AUX_LOSS,), next(model.parameters()).device) if auxiliary_losses(config) else None
    shape = read_shape(model)
    execution = plan.build.execution
    if execution.loss_type == "nll" and not execution.label_smoothing_factor:
        return Task(shape, measures)
    open_loss(model, plan.build.task)
    smoothed = SmoothedLabels(execution.label_smoothing_factor)
    return TokenLossTask(shape, measures, DynamicFineTuning() if execution.loss_type == "dft" else smoothed)


def _loss_unit(settings: Mapping[str, Any]) -> str:
    """Return the unit of the loss."""
    train = settings.get("train", {})  # runs of earlier versions have no such keys
    if train.get("loss_type") == "dft":
        return "nats times probability, per trained token"
    return "nats per trained token" + (", labels smoothed" if train.get("label_smoothing_factor") else "")


SPECS = {"sft": FeatureSpec(task=_make_task, loss_unit=_loss_unit)}
