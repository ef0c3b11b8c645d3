"""Supervised fine-tuning: predict the next token of each trained position."""

from __future__ import annotations

from ligertune.any_types import AnyModule
from ligertune.features.task import AUX_LOSS, Measures, Task
from ligertune.models.experts.expert_load import auxiliary_losses
from ligertune.models.shape import base_of, read_shape
from ligertune.planning.feature_spec import FeatureSpec
from ligertune.planning.plan import Plan


def _make_task(plan: Plan, model: AnyModule) -> Task:
    """Return the task; it logs the auxiliary loss of a mixture's routers, if the model adds it to its loss."""
    config = base_of(model).config.get_text_config()
    measures = Measures((AUX_LOSS,), next(model.parameters()).device) if auxiliary_losses(config) else None
    return Task(read_shape(model), measures)


SPECS = {"sft": FeatureSpec(task=_make_task)}
