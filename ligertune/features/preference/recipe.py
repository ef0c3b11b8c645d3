"""Preference optimisation in a recipe: task dpo, the section `preference` and its rules."""

from __future__ import annotations

from functools import partial
from typing import TYPE_CHECKING, Annotated, Literal

from pydantic import Field, NonNegativeFloat, PositiveFloat

from ligertune.recipe.feature import RecipePart, TaskOptions
from ligertune.recipe.rules.rule import (
    ADAPTER,
    CHANGES_WEIGHTS,
    INIT_CHANGES_WEIGHTS,
    NO_CUDA_GRAPHS,
    NO_NOISE,
    Rule,
    each,
)
from ligertune.recipe.section import Section, Share, Switch

if TYPE_CHECKING:
    from ligertune.recipe.schema import MethodSpec, Recipe

# keys of `preference` that only some losses read
READ_BY_LOSSES = {
    "beta": "sigmoid|ipo|hinge|robust|simpo|kto",
    "label_smoothing": "sigmoid|robust",
    "simpo_gamma": "simpo",
    "orpo_alpha": "orpo",
    "sft_weight": "sigmoid|ipo|hinge|robust|simpo",
    "ld_alpha": "sigmoid|ipo|hinge|robust",
    "length_normalization": "sigmoid|hinge|robust",
    "desirable_weight": "kto",
    "undesirable_weight": "kto",
    "reference": "sigmoid|ipo|hinge|robust|kto",
}


class PreferenceSpec(Section):
    """Preference optimisation; read with task: dpo."""

    loss_type: Literal["sigmoid", "ipo", "hinge", "robust", "simpo", "orpo", "kto"] = "sigmoid"
    """sigmoid: DPO; ipo, hinge, robust: its variants; simpo, orpo: without a reference; kto: single answers."""
    beta: PositiveFloat = 0.1
    """Strength of the preference, and of the tie to the reference."""
    label_smoothing: Annotated[float, Field(ge=0.0, lt=0.5)] = 0.0
    """sigmoid, robust: probability that a pair is labelled the wrong way round."""
    simpo_gamma: NonNegativeFloat = 0.5
    """simpo: margin of the reward that the chosen answer should have."""
    orpo_alpha: PositiveFloat = 0.1
    """orpo: weight of the odds ratio next to the loss on the chosen answer."""
    sft_weight: NonNegativeFloat = 0.0
    """Weight of the cross-entropy of the chosen answer (RPO); 0: without."""
    ld_alpha: Share | None = None
    """LD-DPO: weight of tokens beyond the length of the shorter answer; null: 1."""
    length_normalization: Switch = False
    """Divide log-probabilities by the length of the answer; ipo and simpo always do."""
    desirable_weight: NonNegativeFloat = 1.0
    """kto: weight of the losses of desirable answers."""
    undesirable_weight: NonNegativeFloat = 1.0
    """kto: weight of the losses of undesirable answers."""
    reference: Literal["auto", "precompute", "adapter", "copy"] = "auto"
    """Where reference log-probabilities come from: precompute (before training), adapter (LoRA switched off), copy."""


def _differs(key: str, recipe: Recipe) -> bool:
    """Report whether a key of `preference` has another value than its default."""
    return getattr(recipe.section(PreferenceSpec), key) != PreferenceSpec.model_fields[key].default


def _listed(values: str) -> str:
    return " and ".join(values.replace("|", ", ").rsplit(", ", 1))


RULES = (
    *(
        Rule(f"preference.{key}: any, preference.loss_type: not {losses}, task: dpo",
             f"{{0}} has no effect on {{1}}: {{v[1]}}. It is read with {_listed(losses)}. Leave {{0}} out.",
             also=partial(_differs, key))
        for key, losses in READ_BY_LOSSES.items()
    ),
    Rule("preference.loss_type: not sigmoid, task: not dpo",
         "{0} is {v[0]}, which is read with task: dpo only, and {1} is {v[1]}. Write task: dpo, or leave {0} out."),
    Rule("preference.reference: adapter, method.type: not lora|qlora, task: dpo",
         "{0} is adapter, which switches a LoRA adapter off, and {1} is {v[1]}. "
         "Write preference.reference: precompute."),
    Rule(f"preference.reference: copy, {ADAPTER}, task: dpo",
         "{0} is copy, and {1} is {v[1]}, whose model without the adapter is that copy. "
         "Write preference.reference: adapter."),
    Rule("preference.reference: copy, parallel.strategy: fsdp, task: dpo",
         "{0} is copy, which needs a whole model on each process, and {1} is fsdp, which shards it. "
         "Write preference.reference: precompute."),
    *each(
        INIT_CHANGES_WEIGHTS,
        f"method.init_lora_weights: {CHANGES_WEIGHTS}",
        ("preference.reference: adapter",
         "{1}: adapter needs the weights without it. Write preference.reference: precompute."),
    ),
    Rule("eval.metric, task: dpo",
         "{0} compares with the answer of a row, and {1} is dpo, whose rows have two or a label. Leave {0} out."),
    Rule("train.neftune_noise_alpha: not null, task: dpo", NO_NOISE),
    *each(
        NO_CUDA_GRAPHS,
        "train.cuda_graphs: true",
        ("task: dpo", "{1}: dpo has another number of answers in each batch"),
    ),
)  # fmt: skip


def reference_of(preference: PreferenceSpec, method: MethodSpec) -> Literal["precompute", "adapter", "copy", "none"]:
    """Return where the reference log-probabilities of task: dpo come from."""
    if preference.loss_type in ("simpo", "orpo"):
        return "none"
    if preference.reference != "auto":
        return preference.reference
    adapts = method.type in ("lora", "qlora") and not method.lora_modules_to_save and not method.init_from_weights
    return "adapter" if adapts else "precompute"


def _rows(options: TaskOptions) -> str:
    """Return which rows the loss needs."""
    return "labelled" if options.section(PreferenceSpec).loss_type == "kto" else "pairs"


PART = RecipePart(
    order=2,
    tasks={"dpo": "preferences"},
    sections={"preference": PreferenceSpec},
    rules=RULES,
    rows=_rows,
    pair_tasks=("dpo",),
    brings_rows=True,
    loss_of_labels=False,
    run_files=("reference",),
    before_training=("reference",),
    learning_rate=5e-7,  # as in the bundled recipes
    adapter_learning_rate=5e-6,
    other_tasks={"task: dpo": "task: reward trains a reward model on the same pairs."},
)
