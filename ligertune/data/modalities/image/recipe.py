"""Recipe section of images, `vision`, and its rules."""

from __future__ import annotations

from ligertune.recipe.schema import VisionSpec

__all__ = ["VisionSpec"]
