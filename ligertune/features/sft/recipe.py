"""Supervised fine-tuning in a recipe: the default task, without a section."""

from __future__ import annotations

from ligertune.recipe.feature import RecipePart
from ligertune.recipe.rules.rule import ONE_OUT, Rule

RULES = (
    *(
        Rule(f"{key}, task: not sft", "{0} is read with task: sft only, and {1} is {v[1]}. Leave {0} out.")
        for key in ("train.loss_type: not nll", "train.label_smoothing_factor")
    ),
    Rule("train.loss_type: dft, train.label_smoothing_factor",
         f"{{0}} is dft, which weighs the label alone, and {{1}} gives other classes a share. {ONE_OUT}"),
)  # fmt: skip

PART = RecipePart(order=0, tasks={"sft": "fine-tuning"}, rules=RULES, why_whole_rows="")
