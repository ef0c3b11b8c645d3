"""Read the sizes of a vision tower for memory estimates."""

from __future__ import annotations

import re
from typing import TYPE_CHECKING

from torch import nn

from ligertune.data.modalities.image.families import Family, family_of, part_of
from ligertune.planning.memory.model_shape import TowerShape

if TYPE_CHECKING:
    from transformers import PreTrainedConfig, PreTrainedModel


def read_tower(model: PreTrainedModel) -> TowerShape | None:
    """Return the sizes of the vision tower; None for tiles, whose number tokens do not tell."""
    family = family_of(model.config)
    if family.layout == "tiles":
        return None
    trains = {part_of(family, name) for name, p in model.named_parameters() if p.requires_grad}
    prefix = family.vision_tower[0]
    lists = [m for name, m in model.named_modules() if name.startswith(prefix) and isinstance(m, nn.ModuleList)]
    layers = max(lists, key=len, default=None)
    if not layers:
        return None
    weights = [(name, p.shape) for name, p in layers[0].named_parameters() if p.ndim == 2]
    hidden = min(min(shape) for _, shape in weights)
    mlp = max(shape[1] for _, shape in weights)
    gated = any("gate" in name for name, _ in weights)
    # Attention saves v as a view of the packed projection's output, which holds q and k too.
    packed = any(sorted(shape) == [hidden, 3 * hidden] for _, shape in weights)
    per_token = _patches_per_token(model.config, family)
    merged = round(per_token) if family.layout == "patches" else 1  # patches that the projector reads as one
    # quick_gelu saves input, sigmoid and product; a gated MLP saves gate, up and product
    in_mlp = 3 if gated or getattr(model.config.vision_config, "hidden_act", "") == "quick_gelu" else 2
    return TowerShape(
        layers=len(layers),
        hidden=hidden,
        # two norms' inputs and outputs, queries, keys, values, attention's output
        kept=(8 + 2 * packed) * hidden + in_mlp * mlp,
        patches_per_token=per_token,
        trains="vision_tower" in trains,
        projector=_saved_by_projector(model, family, hidden * merged) if trains & {"vision_tower", "projector"} else 0,
    )


def _saved_by_projector(model: PreTrainedModel, family: Family, width_in: int) -> int:
    """Return the elements per token that the projectors save. Each projector's first input has `width_in` elements."""
    saved = width = 0
    for name, parameter in model.named_parameters():
        if part_of(family, name) != "projector":
            continue
        if parameter.ndim == 2:
            is_first = width not in parameter.shape
            saved += width_in if is_first else 2 * width  # an activation's input and output
            width = sum(parameter.shape) - (width_in if is_first else width)
        elif re.search(r"(norm|ln_)\w*\.weight$", name):
            saved += width_in
    return saved


def _patches_per_token(config: PreTrainedConfig, family: Family) -> float:
    """Return the patches that the tower reads per image token of the language model."""
    vision = config.vision_config
    if family.layout == "patches":
        return float(getattr(vision, "spatial_merge_size", 2) ** 2)
    patches = (vision.image_size // vision.patch_size) ** 2
    return patches / (getattr(config, "mm_tokens_per_image", None) or patches)
