"""Prepare a vision-language model for training: freeze its parts, and keep text arguments out of its vision tower."""

from __future__ import annotations

import re
from typing import TYPE_CHECKING, Any

from torch import nn
from transformers import PreTrainedConfig, PreTrainedModel

from ligertune.errors import UserError
from ligertune.vision.families import Family, family_of, part_of

if TYPE_CHECKING:
    from ligertune.planning.options import VisionOptions

# Batch keywords that describe text tokens. Models forward keywords to their towers, which would misread them.
_TEXT_ARGUMENTS = (
    "document_lengths",
    "document_places",
    "cu_seq_lens_q",
    "cu_seq_lens_k",
    "max_length_q",
    "max_length_k",
    "num_items_in_batch",
    "labelled_rows",
)
_LAYER = re.compile(r"encoder\.layers\.(\d+)\.")


def prepare_vision(model: PreTrainedModel, spec: VisionOptions) -> None:
    """Freeze the parts that the recipe freezes and register the hooks the family needs. Text models stay unchanged."""
    family = family_of(model.config)
    if family is None:
        return
    freeze_parts(model, family, spec)
    for prefix in family.vision_tower:
        model.get_submodule(prefix.rstrip(".")).register_forward_pre_hook(_drop_text_arguments, with_kwargs=True)
    if family.layout == "tiles":
        model.register_forward_hook(_give_all_zero_gradients, with_kwargs=True)


def freeze_parts(model: PreTrainedModel, family: Family, spec: VisionOptions) -> None:
    """Freeze parameters by part. Raises UserError if nothing would train."""
    frozen = {
        "vision_tower": spec.freeze_vision_tower,
        "projector": spec.freeze_projector,
        "language_model": spec.freeze_language_model,
    }
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
    found = _LAYER.search(name)
    return int(found[1]) >= used if found else "post_layernorm" in name


def _give_all_zero_gradients(model: PreTrainedModel, args: tuple, kwargs: dict[str, Any], output: Any) -> Any:
    """Forward hook: without images, add 0 times every parameter to the loss, so that no gradient is missing.

    Llama-3.2-Vision then skips tower and cross-attention, and other ranks would wait for their gradients. Other
    families get a blank image (`vision.inputs`); in this one, text would attend to it.
    """
    if kwargs.get("pixel_values") is None and output.loss is not None and output.loss.requires_grad:
        firsts = [p.view(-1)[0] for p in model.parameters() if p.requires_grad and p.numel()]
        output.loss = output.loss + 0 * sum(first.to(output.loss) for first in firsts)
    return output


def _drop_text_arguments(tower: nn.Module, args: tuple, kwargs: dict[str, Any]) -> tuple[tuple, dict[str, Any]]:
    return args, {name: value for name, value in kwargs.items() if name not in _TEXT_ARGUMENTS}
