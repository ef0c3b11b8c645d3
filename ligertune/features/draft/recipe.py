"""Draft heads in a recipe."""

from __future__ import annotations

from ligertune.recipe.feature import RecipePart

PART = RecipePart(order=6)
