"""Whether rows of several documents are exact for a model that sees."""

from __future__ import annotations

from typing import TYPE_CHECKING

from ligertune.errors import UserError
from ligertune.vision.families import family_of

if TYPE_CHECKING:
    from transformers import PreTrainedConfig

    from ligertune.recipe import Recipe


def without_packing(recipe: Recipe, config: PreTrainedConfig) -> tuple[Recipe, tuple[str, ...]]:
    """The recipe without packing where its model cannot be packed exactly, and a note that says so.

    It is on by default; a recipe that asks for it in so many words gets a UserError.
    """
    family = family_of(config)
    if family is None or family.packs or not recipe.data.packing:
        return recipe, ()
    if "packing" in recipe.data.model_fields_set:
        raise UserError(
            f"data.packing: documents of a row would see each other's images in {family.name}.",
            hint="Write data.packing: false, or leave it out.",
        )
    data = recipe.data.model_copy(update={"packing": False})
    return recipe.model_copy(update={"data": data}), (f"packing is off: it is not exact for {family.name}",)
