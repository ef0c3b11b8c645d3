"""The layers at both ends of a model: embedding, output head, and the score head of *ForSequenceClassification models.

A model for sequence classification is a causal language model with a linear layer, the score head, in place of the
output head; the scores of a text are read at its last token. `config.architectures` says that a configuration is one of
these, as in saved models.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Literal

from torch import nn
from transformers import (
    MODEL_FOR_SEQUENCE_CLASSIFICATION_MAPPING,
    AutoModelForSequenceClassification,
    PreTrainedConfig,
    PreTrainedModel,
)

from ligertune.any_types import AnyModule
from ligertune.data.modalities.modality import modality_of
from ligertune.errors import UserError
from ligertune.files.model_files import RECIPE_MODEL, ModelOrigin
from ligertune.planning.feature_spec import feature_of

HEADS = ("score", "classifier")  # names of the head, which PEFT trains and saves with an adapter
SEQ_CLS = "SEQ_CLS"  # task_type of such an adapter
_SUFFIX = "ForSequenceClassification"
ProblemType = Literal["regression", "single_label_classification", "multi_label_classification"]
SCORE_AUTO_CLASS = AutoModelForSequenceClassification
PIPELINE_TAG = "text-classification"  # the hub's name of what these models do


def embedding_of(model: PreTrainedModel) -> AnyModule:
    """Return the input embedding."""
    return model.get_input_embeddings()


def embedding_rows(model: PreTrainedModel) -> int:
    """Return the rows of the input embedding; more than the vocabulary has tokens if some are spare."""
    return embedding_of(model).weight.shape[0]


def lm_head_of(model: PreTrainedModel) -> AnyModule:
    """Return the output head; None for a model without one."""
    return model.get_output_embeddings()


def is_tied(model: PreTrainedModel) -> bool:
    """Return whether the output head has the embedding's weight (tie_word_embeddings)."""
    head = lm_head_of(model)
    return head is not None and head.weight is embedding_of(model).weight


def gives_scores(config: PreTrainedConfig) -> bool:
    """Return whether a configuration is that of a model with a score head."""
    return any(map(is_scored_class, config.architectures or ()))


def is_scored_class(name: str) -> bool:
    """Return whether a name in `architectures` is that of a model class with a score head."""
    return str(name).endswith(_SUFFIX)


def make_scored(
    config: PreTrainedConfig,
    *,
    num_labels: int,
    problem_type: ProblemType | None = None,
    labels: Sequence[str] = (),
    origin: ModelOrigin = RECIPE_MODEL,
) -> None:
    """Turn a configuration into that of the family's *ForSequenceClassification model, in place.

    labels: names by id. Raises UserError if transformers has no such model, and for a model whose labels have the same
    names in another order, which training would exchange.
    """
    known_classes = MODEL_FOR_SEQUENCE_CLASSIFICATION_MAPPING if modality_of(config).is_text else {}
    cls: Any = known_classes.get(type(config), None)
    if cls is None:
        raise origin.error(
            f"transformers has no sequence classification with a {config.model_type} model.",
            hint="Give a language model such as Qwen/Qwen2.5-0.5B.",
        )
    names: dict[Any, str] = config.id2label or {}
    known = [names[i] for i in sorted(names)] if gives_scores(config) else []
    if labels and set(known) == set(labels) and known != list(labels):
        raise UserError(
            f"classification.labels: the model has the labels {', '.join(known)} in this order, and the run "
            f"{', '.join(labels)}.",
            hint=f"Write classification.labels: [{', '.join(known)}].",
        )
    config.architectures = [cls.__name__]
    config.num_labels = num_labels
    if labels:
        config.id2label = dict(enumerate(labels))
        config.label2id = {name: number for number, name in enumerate(labels)}
    config.problem_type = problem_type


def check_task(config: PreTrainedConfig, task: str) -> None:
    """Raise UserError for a model with a score head, if the task is to write text."""
    if not gives_scores(config) or feature_of(task).scores_texts:
        return
    assert config.architectures  # `gives_scores` has found a class there
    raise RECIPE_MODEL.error(
        f"it is a {config.architectures[0]}, which scores texts and writes none, and task is {task}.",
        hint="Write task: classification or task: reward, or name a model that generates text.",
    )


def score_module(model: PreTrainedModel) -> nn.Module | None:
    """Return the module that computes scores from hidden states: the score head, bare or in PEFT's wrapper, or None."""
    heads = (getattr(model, name, None) for name in HEADS)
    return next((head for head in heads if head is not None), None)


def score_head(model: PreTrainedModel) -> nn.Linear | None:
    """Return the score head of a model, the one that trains; None without one, and for one that is not linear."""
    head: AnyModule = score_module(model)
    head = head.modules_to_save["default"] if hasattr(head, "modules_to_save") else head
    return head if isinstance(head, nn.Linear) and model.base_model is not model else None


def is_outside_backbone(name: str, model: PreTrainedModel) -> bool:
    """Return whether a weight of this name is not part of the model that computes hidden states."""
    return not name.startswith(f"{model.base_model_prefix}.")
