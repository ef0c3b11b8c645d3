"""The trial task in a recipe: the section `trial` and its rule."""

from __future__ import annotations

from ligertune.recipe.feature import RecipePart
from ligertune.recipe.rules.rule import Rule
from ligertune.recipe.section import Section, ShareBelowOne


class TrialSpec(Section):
    """The trial task; read with task: trial."""

    smoothing: ShareBelowOne = 0.1
    """Share of the probability that all tokens of the vocabulary have in common."""


PART = RecipePart(
    order=9,
    tasks={"trial": "a trial"},
    sections={"trial": TrialSpec},
    rules=(
        Rule(
            "trial.smoothing: any, task: trial",
            "{0} is 0, which is task: sft. Write a larger one.",
            also=lambda recipe: recipe.section(TrialSpec).smoothing == 0,
        ),
    ),
    rows=lambda options: "clean texts",
    brings_rows=True,
    loss_of_labels=False,
)
