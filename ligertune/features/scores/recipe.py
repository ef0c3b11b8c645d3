"""Sequence classification and reward models in a recipe: their sections and rules."""

from __future__ import annotations

from typing import TYPE_CHECKING, Annotated, Literal

from pydantic import Field, NonNegativeFloat, PositiveInt

from ligertune.recipe.feature import RecipePart, TaskOptions
from ligertune.recipe.rules.rule import NO_CUDA_GRAPHS, Rule, each
from ligertune.recipe.section import NameList, Section

if TYPE_CHECKING:
    from ligertune.recipe.schema import Recipe

# keys that only one of the tasks with a score head reads
SCORE_KEYS = {
    "classification": tuple(f"classification.{key}" for key in ("num_labels", "problem_type", "labels")),
    "reward": ("reward.center_rewards_coefficient",),
}


class ClassificationSpec(Section):
    """Sequence classification; read with task: classification."""

    num_labels: Annotated[PositiveInt, Field(le=2**20)] | None = None  # transformers writes a name for each
    """Number of labels, or of numbers to predict; null: from the data."""
    problem_type: Literal["single_label_classification", "multi_label_classification", "regression"] | None = None
    """Loss: cross-entropy, one binary cross-entropy per label, or squared error; null: from the labels."""
    labels: NameList | None = None
    """Names of the labels in the order of their ids; null: from the data, sorted."""


class RewardSpec(Section):
    """Reward model; read with task: reward."""

    center_rewards_coefficient: NonNegativeFloat | None = None
    """Weight of the squared sum of a pair's rewards, which keeps rewards near 0; null: without."""


def _counts_other_names(recipe: Recipe) -> bool:
    options = recipe.section(ClassificationSpec)
    return options.num_labels != len(options.labels or ())


def _names_a_label_twice(recipe: Recipe) -> bool:
    labels = recipe.section(ClassificationSpec).labels or ()
    return len(set(labels)) < len(labels)


RULES = (
    *(
        Rule(f"{key}: not null, task: not {task}",
             f"{{0}} is read with task: {task} only, and {{1}} is {{v[1]}}. Write task: {task}, or leave {{0}} out.")
        for task, keys in SCORE_KEYS.items() for key in keys
    ),
    Rule("classification.num_labels: not null, classification.labels: not null",
         "{0} is {v[0]}, and {1} has another number of names. Leave {0} out.",
         also=_counts_other_names),
    Rule("classification.labels: not null",
         "{0} has a name twice. Give each label another name.",
         also=_names_a_label_twice),
    *(
        Rule(f"{key}, task: classification|reward",
             "{0} needs a model that writes text, and {1} is {v[1]}. Leave {0} out.")
        for key in ("eval.sample_prompts", "eval.metric", "eval.tasks")
    ),
    Rule("data.streaming, task: classification|reward",
         "{0} reads the data during training, and {1}: {v[1]} needs all of it before. Write data.streaming: false."),
    *each(
        NO_CUDA_GRAPHS,
        "train.cuda_graphs: true",
        ("task: classification|reward", "{1}: {v[1]} has another number of texts in each batch"),
    ),
)  # fmt: skip


def _rows(options: TaskOptions) -> str:
    """Return which rows the task needs."""
    return "texts" if options.task == "classification" else "reward_pairs"


def _labels(options: TaskOptions) -> ClassificationSpec | None:
    """Return the section that says which labels the texts have; pairs have none."""
    return options.section(ClassificationSpec) if options.task == "classification" else None


PART = RecipePart(
    order=4,
    tasks={"classification": "", "reward": ""},
    sections={"classification": ClassificationSpec, "reward": RewardSpec},
    rules=RULES,
    rows=_rows,
    pair_tasks=("reward",),
    brings_rows=True,
    labels=_labels,
    loss_of_labels=False,
    other_tasks={"task: classification": "task: sft trains a language model on the text instead, without the labels."},
)
