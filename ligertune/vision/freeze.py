"""A vision-language model made ready to train: what of it is frozen, and what must not reach its tower."""

from __future__ import annotations

import re
from typing import TYPE_CHECKING, Any

from torch import nn
from transformers import PreTrainedConfig, PreTrainedModel

from ligertune.errors import UserError
from ligertune.vision.families import Family, family_of, part_of

if TYPE_CHECKING:
    from ligertune.planning.options import VisionOptions

# what our loop says of the tokens of a batch; models pass keywords on to their towers, which would take them for theirs
_OF_THE_TEXT = (
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
    """Freezes the parts that the recipe freezes, and shelters the tower. Nothing for a model of text."""
    family = family_of(model.config)
    if family is not None:
        freeze_parts(model, family, spec)
        hide_text_arguments(model, family)
        if family.layout == "tiles":
            model.register_forward_hook(_with_all_in_the_graph, with_kwargs=True)


def freeze_parts(model: PreTrainedModel, family: Family, spec: VisionOptions) -> None:
    """Parameters of frozen parts need no gradient; a part without any that does runs without autograd."""
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
        if frozen[part] or (part == "vision_tower" and _is_behind_the_features(name, model.config)):
            parameter.requires_grad_(False)


def _is_behind_the_features(name: str, config: PreTrainedConfig) -> bool:
    """Whether nothing that the tower gives depends on it: it would get no gradient, and ranks would wait for one.

    LLaVA takes what a layer before the tower's last gives; Gemma 3 takes the patches and not what the head pools.
    """
    if re.search(r"vision_tower\.(vision_model\.)?head\.", name):
        return True
    layer = getattr(config, "vision_feature_layer", None)
    if not isinstance(layer, int):
        return False
    used = layer if layer >= 0 else config.vision_config.num_hidden_layers + 1 + layer  # hidden states begin with 0
    found = _LAYER.search(name)
    return int(found[1]) >= used if found else "post_layernorm" in name


def _with_all_in_the_graph(model: PreTrainedModel, args: tuple, kwargs: dict[str, Any], output: Any) -> Any:
    """Without pictures this family skips its cross-attention and its tower: their gradients are zeros, not missing.

    Other families see a blank picture (`vision.batch`); here a row of text would look at it.
    """
    if kwargs.get("pixel_values") is None and output.loss is not None and output.loss.requires_grad:
        firsts = [p.view(-1)[0] for p in model.parameters() if p.requires_grad and p.numel()]
        output.loss = output.loss + 0 * sum(first.to(output.loss) for first in firsts)
    return output


def hide_text_arguments(model: PreTrainedModel, family: Family) -> None:
    """From now on the tower does not hear of the documents and the labels of the text beside its pictures."""
    for prefix in family.vision_tower:
        model.get_submodule(prefix.rstrip(".")).register_forward_pre_hook(_without_the_text, with_kwargs=True)


def _without_the_text(tower: nn.Module, args: tuple, kwargs: dict[str, Any]) -> tuple[tuple, dict[str, Any]]:
    return args, {name: value for name, value in kwargs.items() if name not in _OF_THE_TEXT}
