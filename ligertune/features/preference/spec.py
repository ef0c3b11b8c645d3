"""Preference optimisation as a feature: pairs or labelled answers, and a reference model."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from ligertune.any_types import AnyModule
from ligertune.features.output_head import open_loss
from ligertune.features.preference.kto_task import KtoTask
from ligertune.features.preference.pair_measures import PAIR_MEASURES
from ligertune.features.preference.preference_task import PreferenceTask
from ligertune.features.preference.recipe import PreferenceSpec, reference_of
from ligertune.features.preference.reference import choose_reference
from ligertune.models.shape import copied_shape, read_shape
from ligertune.planning.feature_spec import FeatureSpec, MeasureChart
from ligertune.planning.memory.model_shape import FrozenModelShape, ModelShape
from ligertune.planning.options import BuildOptions
from ligertune.planning.plan import Plan
from ligertune.planning.precision import Precision

REFERENCE_WORDS = {
    "precompute": "log-probabilities of the reference computed before training",
    "adapter": "reference: the model without its adapter",
    "copy": "reference: a copy of the model",
    "none": "no reference",
}


def _make_task(plan: Plan, model: AnyModule) -> PreferenceTask | KtoTask:
    """Return the task for pairs, or for single answers that are good or bad (KTO)."""
    open_loss(model, plan.build.task)
    options = plan.build.section(PreferenceSpec)
    shape = read_shape(model)
    reference = choose_reference(plan, model)
    device = next(model.parameters()).device
    if options.loss_type == "kto":
        assert reference is not None  # only simpo and orpo have none
        return KtoTask(shape, plan, reference, device)
    return PreferenceTask(shape, options, reference, device)


def _frozen_copy(options: BuildOptions, shape: ModelShape, precision: Precision) -> FrozenModelShape | None:
    """Return the sizes of the reference, if it is a copy of the model."""
    if options.section(PreferenceSpec).reference != "copy":
        return None
    return copied_shape(shape, precision.weights)


def _title(settings: Mapping[str, Any], words: str) -> str:
    """Return the words for the method in a title."""
    return f"preferences ({settings['preference']['loss_type']}), {words}"


def _loss_unit(settings: Mapping[str, Any]) -> str:
    """Return the unit of the loss."""
    return "mean over answers" if settings["preference"]["loss_type"] == "kto" else "mean over pairs"


def _plan_rows(plan: Plan) -> list[tuple[str, str]]:
    """Return the loss and where its reference comes from."""
    options = plan.build.section(PreferenceSpec)
    reference = reference_of(options, plan.build.method)
    return [("preference", f"{options.loss_type}, {REFERENCE_WORDS[reference]}")]


SPECS = {
    "dpo": FeatureSpec(
        task=_make_task,
        loss_kernel="linear_log_probs",
        gives_predictions=False,
        frozen_copy=_frozen_copy,
        title=_title,
        loss_unit=_loss_unit,
        charts=(
            MeasureChart("Reward accuracy", "share of pairs", "rewards/accuracies"),
            MeasureChart("Reward margin", "chosen minus rejected", "rewards/margins"),
        ),
        plan_rows=_plan_rows,
        evaluation=PAIR_MEASURES,
    )
}
