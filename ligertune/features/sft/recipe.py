"""Supervised fine-tuning in a recipe: the default task, without a section."""

from __future__ import annotations

from ligertune.recipe.feature import RecipePart

PART = RecipePart(order=0, tasks={"sft": "fine-tuning"}, why_whole_rows="")
