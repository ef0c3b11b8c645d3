"""Distillation as a feature: a frozen teacher next to the model, and a divergence as the loss."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from ligertune.any_types import AnyModule
from ligertune.data.prepare import PreparedData
from ligertune.features.distill.distill_task import DistillTask
from ligertune.features.distill.offline_task import OfflineDistillTask
from ligertune.features.distill.recipe import DistillSpec
from ligertune.features.distill.teacher import plan_teacher, with_attention
from ligertune.features.distill.teacher_files import teacher_file_notes
from ligertune.features.output_head import open_loss
from ligertune.files.storage import model_name
from ligertune.models.shape import read_shape
from ligertune.planning.feature_spec import FeatureSpec
from ligertune.planning.memory.activation_bytes import LOSS_CHUNK_ROWS
from ligertune.planning.options import BuildOptions
from ligertune.planning.plan import Plan
from ligertune.recipe.feature import TaskOptions


def _make_task(plan: Plan, model: AnyModule) -> DistillTask | OfflineDistillTask:
    """Return the task: with a teacher, or with its written log-probabilities."""
    open_loss(model, plan.build.task)
    kind = OfflineDistillTask if plan.build.section(DistillSpec).teacher_file else DistillTask
    return kind(read_shape(model), plan)


def _check_data(options: BuildOptions, data: PreparedData, vocab_size: int) -> tuple[str, ...]:
    """Return a note about distill.teacher_file. Raises UserError if it does not fit the data."""
    return teacher_file_notes(options.section(DistillSpec), data, vocab_size)


def _loss_chunk_rows(options: TaskOptions) -> int:
    """Return the rows whose logits are made at a time: written log-probabilities have no kernel."""
    return LOSS_CHUNK_ROWS if options.section(DistillSpec).teacher_file else 0


def _title(settings: Mapping[str, Any], words: str) -> str:
    """Return the words for the method in a title."""
    teacher = settings["distill"]["teacher"] or settings["distill"]["teacher_file"]
    return f"distilled from {model_name(teacher)}, {words}"


SPECS = {
    "distill": FeatureSpec(
        task=_make_task,
        check_data=_check_data,
        loss_kernel="linear_jsd",
        gives_predictions=False,
        forward_only=True,  # the teacher's forward
        loss_chunk_rows=_loss_chunk_rows,
        frozen_model=plan_teacher,
        frozen_attention=with_attention,
        title=_title,
    )
}
