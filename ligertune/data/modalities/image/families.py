"""Vision-language model families that can be trained: table by `config.model_type`, freezing, and training hooks.

A row holds what differs between families: how an image appears in the text, the layout of its pixels, and the module
names of vision tower, projector and language model. To support a new family, add a row.
"""

from __future__ import annotations

import re
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Literal, get_args

from ligertune.errors import UserError

if TYPE_CHECKING:
    from torch import nn
    from transformers import PreTrainedConfig, PreTrainedModel

    from ligertune.data.modalities.image.recipe import VisionSpec

# for messages
MODEL_KIND = "vision-language model"
INPUTS = "images"

ModelPart = Literal["vision_tower", "projector", "language_model"]


@dataclass(frozen=True)
class Family:
    """A kind of vision-language model. Parameters belong to the part with the longest matching name prefix.

    `image_text` represents one image in the text: `{image}` is the repeated token, `{begin}` and `{end}` surround it.
    Chat templates write `template_text`, which is replaced by `image_text`.
    """

    name: str
    processor: str  # transformers' class, named in saved files so that AutoProcessor finds it
    # patches: concatenated patches of images of any size (Qwen). squares: images of one size. tiles: up to four squares
    # per image, read by cross-attention, with one token in the text.
    layout: Literal["patches", "squares", "tiles"]
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
    "qwen3_5": _qwen("Qwen3.5", "Qwen3VLProcessor"),
    "qwen3_5_moe": _qwen("Qwen3.5-MoE", "Qwen3VLProcessor"),
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

# Batch keywords that describe text tokens. Models forward keywords to their towers, which would misread them.
_TEXT_ARGUMENTS = (
    "document_lengths",
    "document_places",
    "seq_idx",
    "cu_seq_lens_q",
    "cu_seq_lens_k",
    "max_length_q",
    "max_length_k",
    "num_items_in_batch",
    "labelled_rows",
)


def has_vision(config: PreTrainedConfig) -> bool:
    """Return whether a configuration describes a vision-language model."""
    return getattr(config, "vision_config", None) is not None


def family_of(config: PreTrainedConfig) -> Family:
    """Return the family of a vision-language model's configuration. Raises UserError for an unsupported family."""
    family = FAMILIES.get(config.model_type)
    if family is None:
        known = ", ".join(row.name for row in FAMILIES.values())
        raise UserError(
            f"model.model_name_or_path: a vision-language model of kind {config.model_type} cannot be trained here.",
            hint=f"These can: {known}.",
        )
    return family


def part_of(family: Family, parameter: str) -> ModelPart:
    """Return the part of the model that a parameter, named as in `named_parameters`, belongs to."""
    prefixes: list[tuple[str, ModelPart]] = [(prefix, "vision_tower") for prefix in family.vision_tower]
    prefixes += [(prefix, "projector") for prefix in family.projector]
    # The longest prefix wins: Qwen's projector is a module of its tower, model.visual.merger.
    matches = [(len(prefix), part) for prefix, part in prefixes if parameter.startswith(prefix)]
    return max(matches)[1] if matches else "language_model"


def prepare_vision(model: PreTrainedModel, spec: VisionSpec) -> None:
    """Freeze the parts that the recipe freezes and register the hooks the family needs."""
    family = family_of(model.config)
    freeze_parts(model, family, spec)
    for prefix in family.vision_tower:
        model.get_submodule(prefix.rstrip(".")).register_forward_pre_hook(_drop_text_arguments, with_kwargs=True)
    if family.layout == "tiles":
        model.register_forward_hook(_give_all_zero_gradients, with_kwargs=True)


def freeze_parts(model: PreTrainedModel, family: Family, spec: VisionSpec) -> None:
    """Freeze parameters by part. Raises UserError if nothing would train."""
    frozen = {part: getattr(spec, f"freeze_{part}") for part in get_args(ModelPart)}
    if all(frozen.values()):
        raise UserError(
            "vision.freeze_vision_tower, vision.freeze_projector and vision.freeze_language_model are all true: "
            "nothing would be trained.",
            hint="Set one of them to false.",
        )
    for name, parameter in model.named_parameters():
        part = part_of(family, name)
        if frozen[part] or (part == "vision_tower" and _is_unused(name, model.config)):
            parameter.requires_grad_(False)


def _is_unused(name: str, config: PreTrainedConfig) -> bool:
    """Return whether a tower parameter does not influence the image features; it would never get a gradient.

    LLaVA reads the features of a layer before the last one; Gemma 3 reads patches, not the pooling head's output.
    """
    if re.search(r"vision_tower\.(vision_model\.)?head\.", name):
        return True
    layer = getattr(config, "vision_feature_layer", None)
    if not isinstance(layer, int):
        return False
    used = layer if layer >= 0 else config.vision_config.num_hidden_layers + 1 + layer  # hidden state 0: embeddings
    found = re.search(r"encoder\.layers\.(\d+)\.", name)
    return int(found[1]) >= used if found else "post_layernorm" in name


def _give_all_zero_gradients(model: PreTrainedModel, args: tuple[Any, ...], kwargs: dict[str, Any], output: Any) -> Any:
    """Forward hook: without images, add 0 times every parameter to the loss, so that no gradient is missing.

    Llama-3.2-Vision then skips tower and cross-attention, and other ranks would wait for their gradients. Other
    families get a blank image (`image_inputs`); in this one, text would attend to it.
    """
    # One element of each parameter is enough for a gradient, and costs no memory.
    if kwargs.get("pixel_values") is None and output.loss is not None and output.loss.requires_grad:
        firsts = [p.view(-1)[0] for p in model.parameters() if p.requires_grad and p.numel()]
        output.loss = output.loss + 0 * sum(first.to(output.loss) for first in firsts)
    return output


def _drop_text_arguments(
    tower: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]
) -> tuple[tuple[Any, ...], dict[str, Any]]:
    return args, {name: value for name, value in kwargs.items() if name not in _TEXT_ARGUMENTS}
