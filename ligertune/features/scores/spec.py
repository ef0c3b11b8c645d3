"""Sequence classification and reward models as features: a score head in place of the output head."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path

from transformers import PreTrainedConfig

from ligertune.any_types import AnyModule
from ligertune.data.prepare import PreparedData
from ligertune.features.scores.document_scores import check_scores, patch_scores
from ligertune.features.scores.labels import LabelSet
from ligertune.features.scores.recipe import ClassificationSpec, RewardSpec
from ligertune.features.scores.score_measures import CLASSIFICATION_MEASURES, REWARD_MEASURES_OF_PAIRS
from ligertune.features.scores.score_tasks import ClassificationTask, RewardTask
from ligertune.files.model_files import RECIPE_MODEL, ModelOrigin
from ligertune.models.score_head import gives_scores, make_scored
from ligertune.models.shape import read_shape
from ligertune.planning.feature_spec import FeatureSpec, MeasureChart
from ligertune.planning.options import BuildOptions
from ligertune.planning.plan import Plan
from ligertune.recipe.feature import TaskOptions


def _make_classification(plan: Plan, model: AnyModule) -> ClassificationTask:
    """Return the task: each text has one label, several, or numbers."""
    device = next(model.parameters()).device
    return ClassificationTask(read_shape(model), plan.build.section(ClassificationSpec), device)


def _make_reward(plan: Plan, model: AnyModule) -> RewardTask:
    """Return the task: the chosen answer of each pair scores higher."""
    device = next(model.parameters()).device
    return RewardTask(read_shape(model), plan.build.section(RewardSpec), device)


def _resolve_labels(options: TaskOptions, data: PreparedData) -> Mapping[str, ClassificationSpec]:
    """Return the section `classification` with the labels of the data."""
    if not isinstance(data.labels, LabelSet):
        return {}
    return {"classification": data.labels.resolved(options.section(ClassificationSpec))}


def _prepare_classifier(config: PreTrainedConfig, options: BuildOptions, origin: ModelOrigin = RECIPE_MODEL) -> None:
    """Make the configuration that of a classifier, in place. Its labels are known once the data are prepared."""
    values = options.section(ClassificationSpec)
    assert values.num_labels is not None  # `_resolve_labels` has completed the section
    make_scored(
        config,
        num_labels=values.num_labels,
        problem_type=values.problem_type,
        labels=values.labels or (),
        origin=origin,
    )


def _prepare_reward_model(config: PreTrainedConfig, options: BuildOptions, origin: ModelOrigin = RECIPE_MODEL) -> None:
    """Make the configuration that of a reward model, in place."""
    make_scored(config, num_labels=1, origin=origin)


def _head_notes(options: BuildOptions, config: PreTrainedConfig) -> tuple[str, ...]:
    """Return a note about the score head of a model that has none yet."""
    if gives_scores(config):
        return ()
    return ("the model writes text: its output head is left out, and a new score head starts random (train.seed)",)


def _check_model(model: AnyModule, plan: Plan) -> None:
    """Check the scores of a few texts. Raises UserError if they depend on the rows around them."""
    check_scores(model, multiple_of=plan.rows.multiple_of, packed=plan.rows.is_padding_free)


def _next_step(folder: Path, command: str) -> str:
    """Return how to load a model with a score head."""
    return f"Load it with transformers:  AutoModelForSequenceClassification.from_pretrained('{folder}')"


ACCURACY = MeasureChart("Accuracy", "share of texts or pairs", "accuracy")
CLASSIFICATION = FeatureSpec(
    task=_make_classification,
    resolve=_resolve_labels,
    loss_kernel="",
    scores_texts=True,
    own_loss=True,
    prepare_config=_prepare_classifier,
    head_notes=_head_notes,
    patch=patch_scores,
    check_model=_check_model,
    card_tag="classification",
    title=lambda settings, words: f"classification, {words}",
    loss_unit=lambda settings: "mean over texts",
    charts=(ACCURACY, MeasureChart("F1", "mean over labels", "f1_macro")),
    next_step=_next_step,
    evaluation=CLASSIFICATION_MEASURES,
)
REWARD = replace(
    CLASSIFICATION,
    task=_make_reward,
    resolve=lambda options, data: {},
    prepare_config=_prepare_reward_model,
    card_tag="reward",
    title=lambda settings, words: f"reward model, {words}",
    loss_unit=lambda settings: "mean over pairs",
    charts=(ACCURACY, MeasureChart("Margin", "reward of chosen minus rejected", "margin")),
    evaluation=REWARD_MEASURES_OF_PAIRS,
)
SPECS = {"classification": CLASSIFICATION, "reward": REWARD}
