"""Draft heads as a feature: an EAGLE-3 head next to a frozen model, its loss, and what it measures and writes."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from ligertune.any_types import AnyModule
from ligertune.features.draft.files.draft_report import acceptance_tables
from ligertune.features.draft.recipe import DraftSpec
from ligertune.features.draft.training.draft_run import data_notes, resolve_vocabulary, save_draft_head, with_draft_head
from ligertune.features.draft.training.draft_target import check_not_quantised_twice, frozen_as, with_adapter
from ligertune.features.draft.training.draft_task import ACCEPTED_LENGTH, DraftShape, DraftTask
from ligertune.features.draft.training.state_cache import StateCache, check_cache
from ligertune.planning.feature_spec import FeatureSpec, MeasureChart
from ligertune.planning.plan import Plan


def _make_task(plan: Plan, model: AnyModule) -> DraftTask:
    """Return the task of a `DraftModel`."""
    return DraftTask(model, StateCache.of(plan, model.draft_head.config.layer_ids))


def _plan_rows(plan: Plan) -> list[tuple[str, str]]:
    """Return what the head is trained for."""
    spec = plan.build.section(DraftSpec)
    words = f"{spec.loss}, {spec.steps} steps, decay {spec.decay_coefficient:g}"
    return [("draft head", f"{words}; measured for {spec.num_speculative_tokens} drafted tokens")]


def _loss_unit(settings: Mapping[str, Any]) -> str:
    return "nats, weighted sum over the steps"


def _next_step(folder: Path, command: str) -> str:
    """Return where the commands of servers are."""
    return f"Serve it: the commands of vLLM, SGLang and llama.cpp are in {folder / 'eagle3' / 'README.md'}"


SPECS = {
    "draft": FeatureSpec(
        task=_make_task,
        resolve=resolve_vocabulary,
        check_data=data_notes,
        check_plan=check_cache,
        loss_kernel="",
        forward_only=True,  # of the frozen model
        own_loss=True,
        gives_predictions=False,
        uses_method=lambda options: False,
        prepare_config=check_not_quantised_twice,
        frozen_as=frozen_as,
        adapt=with_adapter,
        wrap=with_draft_head,
        shape=DraftShape.of_model,
        counts_experts=False,  # DraftModel calls the backbone without its router outputs
        save=save_draft_head,
        saves_base=lambda options: False,
        saves_adapter=False,
        card_tag="draft",
        title=lambda settings, words: "EAGLE-3 draft head",
        loss_unit=_loss_unit,
        charts=(MeasureChart("Expected accepted length", "tokens per step of the server", ACCEPTED_LENGTH),),
        plan_rows=_plan_rows,
        result_tables=acceptance_tables,
        best_measure=ACCEPTED_LENGTH,
        next_step=_next_step,
    )
}
