"""From a picture's file to a model's inputs: how many tokens it takes, and its pixels as the model's tower wants them.

Pixels are made by transformers' image processors on Pillow, which need no torchvision; with it installed they are the
same, so a run does not depend on what else is on a machine.
"""

from __future__ import annotations

import json
import math
import re
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
import transformers
from torch import Tensor

from ligertune.errors import UserError
from ligertune.planning.options import VisionOptions
from ligertune.vision.families import Family, family_of
from ligertune.vision.image_files import ImageError, ImageFile, read_image

if TYPE_CHECKING:
    from transformers import PreTrainedConfig, PreTrainedTokenizerBase

    from ligertune.data.examples import Examples
    from ligertune.planning.options import ModelOptions

MAX_ASPECT_RATIO = 200  # the longer side over the shorter one: Qwen's processors refuse more


@dataclass(frozen=True)
class ImageReader:
    """What data and batches know of a model that sees. It holds no weights, and workers get a copy of it."""

    family: Family
    processor: Any  # transformers' image processor
    options: dict[str, Any]  # given to it with every picture: its own defaults are a class's, and others change them
    token_id: int  # repeated for a picture
    untrained: frozenset[int]  # ids that stand for pictures, or around them
    image_text: str
    template_text: str
    fixed_tokens: int | None  # of every picture; None where its size decides
    patch: int  # pixels a side of the tower's patches
    merge: int = 1  # patches a side that become one token
    side: int = 0  # pixels a side, where all pictures are resized to a square
    facts: dict[str, Any] = field(default_factory=dict)  # what the saved processor's file says beside its class

    def tokens(self, picture: ImageFile) -> int:
        """Tokens that stand for it in the text; a PictureError if it is too lopsided for the model."""
        if self.fixed_tokens is not None:
            return self.fixed_tokens
        if max(picture.width, picture.height) > MAX_ASPECT_RATIO * min(picture.width, picture.height):
            raise ImageError(
                "image cannot be read", f"{picture.path}: {picture.width} x {picture.height} is too narrow"
            )
        return math.prod(self.grid(picture.width, picture.height))

    def grid(self, width: int, height: int) -> tuple[int, int]:
        """(height, width) in tokens of a picture of this size in pixels; of models with patches."""
        from transformers.models.qwen2_vl.image_processing_pil_qwen2_vl import smart_resize

        unit, limits = self.patch * self.merge, self.options["size"]
        resized = smart_resize(height, width, unit, limits["shortest_edge"], limits["longest_edge"])
        return resized[0] // unit, resized[1] // unit

    def pixels(self, path: str) -> dict[str, Tensor]:
        """One picture's inputs, with a first dimension of 1 (of the patches' number, where there are patches)."""
        image = read_image(path)
        nested = [[image]] if self.family.layout == "tiles" else [image]
        made = self.processor(images=nested, return_tensors="pt", **self.options)
        return {name: made[name] for name in _INPUTS[self.family.layout]}

    def blank(self) -> dict[str, Tensor]:
        """The inputs of a small picture of nothing, for batches without one; of models with patches or squares."""
        if self.family.layout == "squares":
            return {"pixel_values": torch.zeros(1, 3, self.side, self.side)}
        frames = int(self.processor.temporal_patch_size)
        return {
            "pixel_values": torch.zeros(self.merge**2, 3 * frames * self.patch**2),
            "image_grid_thw": torch.tensor([[1, self.merge, self.merge]]),
        }

    @property
    def blank_tokens(self) -> int:
        """Tokens that stand for it."""
        return self.fixed_tokens or 1

    def largest_share(self, examples: Examples, *, looked_at: int = 1000) -> float:
        """Of an example's tokens, at most, those that stand for pictures; as many examples with one are looked at."""
        seeing = np.flatnonzero(examples.n_images)
        chosen = seeing[:: -(-len(seeing) // looked_at) or 1].tolist()
        return max((float((examples[i].input_ids == self.token_id).mean()) for i in chosen), default=0.0)

    def identity(self) -> dict[str, Any]:
        """All that an example's tokens depend on, for the cache's key."""
        return {
            "family": self.family.name,
            "options": self.options,
            "token": [self.token_id, sorted(self.untrained), self.image_text, self.template_text, self.fixed_tokens],
            "size": [self.patch, self.merge],
        }

    def joined(self, pictures: Sequence[dict[str, Tensor]]) -> dict[str, Tensor]:
        """Pictures of several examples, one behind the other; of models with patches or squares."""
        return {name: torch.cat([picture[name] for picture in pictures]) for name in _INPUTS[self.family.layout]}


# what the image processors give that the models take; the number of tiles becomes the mask of the cross-attention
_INPUTS: dict[str, tuple[str, ...]] = {
    "patches": ("pixel_values", "image_grid_thw"),
    "squares": ("pixel_values",),
    "tiles": ("pixel_values", "aspect_ratio_ids", "aspect_ratio_mask"),
}


def load_reader(
    model: ModelOptions, vision: VisionOptions, config: PreTrainedConfig, tokenizer: PreTrainedTokenizerBase
) -> ImageReader | None:
    """The reader for a model's configuration; None for a model of text."""
    family = family_of(config)
    if family is None:
        return None
    return make_reader(family, vision, config, tokenizer, _load_processor(model.model_name_or_path, model.revision))


def saved_reader(name: str, config: PreTrainedConfig, tokenizer: PreTrainedTokenizerBase) -> ImageReader | None:
    """As `load_reader`, with the limits of size that the model's own files name; to generate with it."""
    family = family_of(config)
    if family is None:
        return None
    processor = _load_processor(name, "main")
    size, limits = dict(processor.size or {}), {}
    if family.layout == "patches":
        limits = {"image_min_pixels": size["shortest_edge"], "image_max_pixels": size["longest_edge"]}
    return make_reader(family, VisionOptions(**limits), config, tokenizer, processor)


def make_reader(
    family: Family, vision: VisionOptions, config: PreTrainedConfig, tokenizer: PreTrainedTokenizerBase, processor: Any
) -> ImageReader:
    """The reader of a family with this image processor."""
    token_id = getattr(config, "image_token_id", None)
    token_id = config.image_token_index if token_id is None else token_id
    beside = {name: getattr(config, name) for name in (family.begin, family.end) if name}
    names = {"image": _token(tokenizer, token_id, "image_token_id")}
    names |= {key: _token(tokenizer, beside[name], name) for key, name in _around(family) if name}
    options, fixed, facts, side = _sizes(family, vision, config, processor)
    return ImageReader(
        family=family,
        processor=processor,
        options=options,
        token_id=token_id,
        untrained=frozenset({token_id, *beside.values()}),
        image_text=family.image_text.format(**names),
        template_text=family.template_text.format(**names),
        fixed_tokens=fixed,
        patch=int(config.vision_config.patch_size),
        merge=int(getattr(config.vision_config, "spatial_merge_size", 1)),
        side=side,
        facts=facts,
    )


def _around(family: Family) -> tuple[tuple[str, str | None], ...]:
    return ("begin", family.begin), ("end", family.end)


def _token(tokenizer: PreTrainedTokenizerBase, number: int, name: str) -> str:
    token = tokenizer.convert_ids_to_tokens(number) if number < len(tokenizer) else None
    if token is None:
        raise UserError(
            f"model.tokenizer: the model's {name} is {number}, and the tokenizer has no token of that id.",
            hint="Use the tokenizer the model was trained with.",
        )
    return token


def _sizes(
    family: Family, vision: VisionOptions, config: PreTrainedConfig, processor: Any
) -> tuple[dict[str, Any], int | None, dict[str, Any], int]:
    """(options of the image processor, tokens of every picture, facts of the saved processor, pixels a side)."""
    if family.layout == "patches":
        unit = (int(config.vision_config.patch_size) * int(config.vision_config.spatial_merge_size)) ** 2
        most = vision.image_max_pixels
        least = min(dict(processor.size)["shortest_edge"], most)
        least = vision.image_min_pixels if vision.image_min_pixels is not None else least
        if most < unit:
            raise UserError(
                f"vision.image_max_pixels: {most} is less than one token of {family.name}, {unit} pixels.",
                hint=f"Write a multiple of {unit}.",
            )
        if least > most:
            raise UserError(f"vision.image_min_pixels: {least} is more than vision.image_max_pixels: {most}.")
        return {"size": {"shortest_edge": least, "longest_edge": most}}, None, {}, 0
    limits = ("image_max_pixels", "image_min_pixels")
    changed = [name for name in limits if getattr(vision, name) != getattr(VisionOptions(), name)]
    if changed:
        raise UserError(
            f"vision.{changed[0]}: {family.name} resizes every picture to the size that it was trained with.",
            hint="Leave the key out.",
        )
    if family.layout == "tiles":
        return {"max_image_tiles": int(config.vision_config.max_num_tiles)}, 1, {}, 0
    side, patch = int(config.vision_config.image_size), int(config.vision_config.patch_size)
    if family.token_types:
        return (
            {"do_pan_and_scan": False},
            int(config.mm_tokens_per_image),
            {"image_seq_length": int(config.mm_tokens_per_image)},
            side,
        )
    strategy = config.vision_feature_select_strategy
    facts = {"patch_size": patch, "num_additional_image_tokens": 1, "vision_feature_select_strategy": strategy}
    return {}, (side // patch) ** 2 + (strategy != "default"), facts, side


def _load_processor(name: str, revision: str) -> Any:
    """transformers' image processor of a model's files, in the form that runs on Pillow."""
    from transformers.image_processing_utils import BaseImageProcessor

    _need_pillow()
    try:
        written, _ = BaseImageProcessor.get_image_processor_dict(name, revision=revision)
        kind = re.sub("(Fast|Pil)$", "", written.get("image_processor_type") or written["feature_extractor_type"])
        return getattr(transformers, f"{kind}Pil").from_pretrained(name, revision=revision)
    except (OSError, KeyError, AttributeError, ValueError) as error:
        found = f"no image processor could be loaded from {name}: {str(error).partition(chr(10))[0]}"
        raise UserError(
            f"model.model_name_or_path: {found}",
            hint="A vision-language model's folder needs preprocessor_config.json beside config.json.",
        ) from error


def _need_pillow() -> None:
    from ligertune.vision.image_files import _pil

    _pil()


def save_processor(reader: ImageReader, folder: Path) -> None:
    """Beside a saved model: what `AutoProcessor` needs, with the limits of size that the model was trained with."""
    reader.processor.save_pretrained(folder)
    for file, facts in (
        ("preprocessor_config.json", {"size": reader.options["size"]} if "size" in reader.options else {}),
        ("processor_config.json", reader.facts),
    ):
        path = folder / file
        written = json.loads(path.read_text(encoding="utf-8")) if path.is_file() else {}
        written |= {**facts, "processor_class": reader.family.processor}
        path.write_text(json.dumps(written, indent=2) + "\n", encoding="utf-8")
