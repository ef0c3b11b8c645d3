"""The vision-language models that can be trained, one row each, recognised by `config.model_type`.

A family is described by what differs between them: how a picture stands in the text, what layout its pixels have, and
which modules see (tower), translate (projector) and write (language model). A new family is a new row.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Literal

from ligertune.errors import UserError

if TYPE_CHECKING:
    from transformers import PreTrainedConfig

# patches: pictures of any size, one behind the other (Qwen). squares: one size for all. tiles: up to four squares each,
# which the text does not hold but looks at (cross-attention).
ImageLayout = Literal["patches", "squares", "tiles"]
ModelPart = Literal["vision_tower", "projector", "language_model"]


@dataclass(frozen=True)
class Family:
    """One kind of vision-language model. Module names are prefixes of parameter names; the longest that fits decides.

    `image_text` is what stands in the text for one picture, where `{image}` is the token that is repeated and
    `{begin}` and `{end}` those around it; a chat template writes `template_text`, which becomes `image_text`.
    """

    name: str
    processor: str  # transformers' class, named in the saved files so that others load it
    layout: ImageLayout
    vision_tower: tuple[str, ...]
    projector: tuple[str, ...]
    image_text: str
    template_text: str
    begin: str | None = None  # attributes of the configuration
    end: str | None = None
    packs: bool = False  # rows of several documents are exact
    positions: Literal["sections", "plain"] = "plain"  # sections: time, height and width (M-RoPE)
    token_types: bool = False  # pictures' tokens see each other in both directions


def _qwen(name: str, processor: str, *projector: str) -> Family:
    return Family(
        name,
        processor,
        layout="patches",
        vision_tower=("model.visual.",),
        projector=("model.visual.merger.", *projector),
        image_text="{begin}{image}{end}",
        template_text="{begin}{image}{end}",
        begin="vision_start_token_id",
        end="vision_end_token_id",
        packs=True,
        positions="sections",
    )


_PROJECTOR = ("model.multi_modal_projector.",)
FAMILIES: dict[str, Family] = {
    "qwen2_vl": _qwen("Qwen2-VL", "Qwen2VLProcessor"),
    "qwen2_5_vl": _qwen("Qwen2.5-VL", "Qwen2_5_VLProcessor"),
    "qwen3_vl": _qwen("Qwen3-VL", "Qwen3VLProcessor", "model.visual.deepstack_merger_list."),
    "mllama": Family(
        "Llama-3.2-Vision", "MllamaProcessor", "tiles", ("model.vision_model.",), _PROJECTOR, "{image}", "{image}"
    ),
    "llava": Family(
        "LLaVA", "LlavaProcessor", "squares", ("model.vision_tower.",), _PROJECTOR, "{image}", "{image}", packs=True
    ),
    "gemma3": Family(
        "Gemma 3",
        "Gemma3Processor",
        "squares",
        ("model.vision_tower.",),
        _PROJECTOR,
        image_text="\n\n{begin}{image}{end}\n\n",
        template_text="{begin}",
        begin="boi_token_index",
        end="eoi_token_index",
        token_types=True,
    ),
}


def has_vision(config: PreTrainedConfig) -> bool:
    """Return whether a configuration describes a vision-language model."""
    return getattr(config, "vision_config", None) is not None


def family_of(config: PreTrainedConfig) -> Family | None:
    """The row of a configuration; None for a text model, a UserError for a family that has no row."""
    if not has_vision(config):
        return None
    family = FAMILIES.get(config.model_type)
    if family is None:
        known = ", ".join(row.name for row in FAMILIES.values())
        raise UserError(
            f"model.model_name_or_path: a vision-language model of kind {config.model_type} cannot be trained here.",
            hint=f"These can: {known}.",
        )
    return family


def exact_packing(config: PreTrainedConfig) -> dict[str, str | bool | None]:
    """Return the family's name (None for a text model) and whether packed rows compute exactly what single ones do."""
    family = family_of(config)
    return {"family": family and family.name, "packs_exactly": family is None or family.packs}


def part_of(family: Family, parameter: str) -> ModelPart:
    """Which part of the model a parameter belongs to, by its name as `named_parameters` gives it."""
    prefixes: list[tuple[str, ModelPart]] = [(prefix, "vision_tower") for prefix in family.vision_tower]
    prefixes += [(prefix, "projector") for prefix in family.projector]
    fitting = [(len(prefix), part) for prefix, part in prefixes if parameter.startswith(prefix)]
    return max(fitting)[1] if fitting else "language_model"
