"""Images in a recipe: the section `vision` and its rules."""

from __future__ import annotations

from typing import Annotated

from pydantic import Field, PositiveInt

from ligertune.recipe.feature import RecipePart
from ligertune.recipe.rules.rule import ADAPTER, ONE_OUT, Rule
from ligertune.recipe.section import Section, Switch


class VisionSpec(Section):
    """Images of a vision-language model: their size, and which parts of the model train."""

    image_min_pixels: Annotated[int, Field(ge=1, le=2**24)] | None = None
    """Qwen models: enlarge smaller images to this many pixels; null: the model's default."""
    image_max_pixels: PositiveInt = 1_003_520
    """Qwen models: shrink larger images to this many pixels (1280 tokens in Qwen2-VL)."""
    freeze_vision_tower: Switch = True
    """Freeze the image encoder."""
    freeze_projector: Switch = True
    """Freeze the layers that project image features into the language model."""
    freeze_language_model: Switch = False
    """Freeze the language model, including its embeddings and output head."""


RULES = (
    # An adapter is added to the language model only (`find_targets`), and PEFT freezes the rest.
    *(
        Rule(f"no {key}, {ADAPTER}",
             "{0} is false, and {1} is {v[1]}, which trains only the adapter. "
             "Leave {0} out, and name other layers to train in method.lora_modules_to_save.")
        for key in ("vision.freeze_vision_tower", "vision.freeze_projector")
    ),
    Rule(f"vision.freeze_language_model, {ADAPTER}",
         f"{{0}} is true, and {{1}} is {{v[1]}}, whose adapter is part of the language model. {ONE_OUT}"),
    # In float8 multiply the linear layers of the language model; a tower keeps its dtype.
    Rule("train.fp8, vision.freeze_language_model",
         f"{{0}} applies to the language model's layers, and {{1}} freezes them. {ONE_OUT}"),
)  # fmt: skip

PART = RecipePart(sections={"vision": VisionSpec}, rules=RULES)
