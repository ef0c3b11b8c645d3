"""Table of the vision-language model families that can be trained, by `config.model_type`.

A row holds what differs between families: how an image appears in the text, the layout of its pixels, and the module
names of vision tower, projector and language model. To support a new family, add a row.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Literal

from ligertune.errors import UserError

if TYPE_CHECKING:
    from transformers import PreTrainedConfig

# patches: concatenated patches of images of any size (Qwen). squares: images of one size. tiles: up to four squares per
# image, read by cross-attention, with one token in the text.
ImageLayout = Literal["patches", "squares", "tiles"]
ModelPart = Literal["vision_tower", "projector", "language_model"]


@dataclass(frozen=True)
class Family:
    """A kind of vision-language model. Parameters belong to the part with the longest matching name prefix.

    `image_text` represents one image in the text: `{image}` is the repeated token, `{begin}` and `{end}` surround it.
    Chat templates write `template_text`, which is replaced by `image_text`.
    """

    name: str
    processor: str  # transformers' class, named in saved files so that AutoProcessor finds it
    layout: ImageLayout
    vision_tower: tuple[str, ...]
    projector: tuple[str, ...]
    image_text: str = "{image}"
    template_text: str = "{image}"
    begin: str | None = None  # names of attributes of the configuration
    end: str | None = None
    packs: bool = False  # packed rows compute exactly what single rows do
    positions: Literal["sections", "plain"] = "plain"  # sections: time, height and width (M-RoPE)
    token_types: bool = False  # image tokens attend to each other in both directions


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
    "mllama": Family("Llama-3.2-Vision", "MllamaProcessor", "tiles", ("model.vision_model.",), _PROJECTOR),
    "llava": Family("LLaVA", "LlavaProcessor", "squares", ("model.vision_tower.",), _PROJECTOR, packs=True),
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
    """Return the family of a configuration; None for a text model. Raises UserError for an unsupported family."""
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
    """Return the part of the model that a parameter, named as in `named_parameters`, belongs to."""
    prefixes: list[tuple[str, ModelPart]] = [(prefix, "vision_tower") for prefix in family.vision_tower]
    prefixes += [(prefix, "projector") for prefix in family.projector]
    matches = [(len(prefix), part) for prefix, part in prefixes if parameter.startswith(prefix)]
    return max(matches)[1] if matches else "language_model"
