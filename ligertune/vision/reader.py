"""ImageReader: from an image file to the model's inputs, and the number of its tokens in the text.

Pixels come from transformers' image processors on Pillow, with or without torchvision installed, so a run does not
depend on other packages of the machine.
"""

from __future__ import annotations

import json
import math
import re
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
import transformers
from torch import Tensor

from ligertune.bad_rows import BadRow
from ligertune.errors import UserError
from ligertune.files.model_files import RECIPE_MODEL, ModelOrigin, loading, read_json
from ligertune.planning.options import VisionOptions
from ligertune.vision.families import Family, family_of
from ligertune.vision.image_files import ImageFile, import_pillow, read_image

if TYPE_CHECKING:
    from transformers import PreTrainedConfig, PreTrainedTokenizerBase

    from ligertune.planning.options import ModelOptions

MAX_ASPECT_RATIO = 200  # longer side over shorter side: Qwen's processors refuse more
# Outputs of the image processors that the models take. The number of tiles becomes the cross-attention mask.
_INPUTS: dict[str, tuple[str, ...]] = {
    "patches": ("pixel_values", "image_grid_thw"),
    "squares": ("pixel_values",),
    "tiles": ("pixel_values", "aspect_ratio_ids", "aspect_ratio_mask"),
}


@dataclass(frozen=True)
class ImageReader:
    """Image settings of a vision-language model. It holds no weights, so data workers can have a copy."""

    family: Family
    processor: Any  # transformers' image processor
    options: dict[str, Any]  # passed to it with every image: its defaults belong to the class and can change
    token_id: int  # of the token that is repeated for an image
    untrained: frozenset[int]  # ids of image tokens and of the tokens around them
    image_text: str
    template_text: str
    fixed_tokens: int | None  # tokens of every image; None if they depend on its size
    patch: int  # side of the tower's patches, in pixels
    merge: int = 1  # patches per side that become one token
    side: int = 0  # pixels, if all images are resized to a square
    saved_settings: dict[str, Any] = field(default_factory=dict)  # of processor_config.json

    def tokens(self, image: ImageFile) -> int:
        """Return the number of tokens of an image. Raises BadRow if it is too narrow for the model."""
        if self.fixed_tokens is not None:
            return self.fixed_tokens
        if max(image.width, image.height) > MAX_ASPECT_RATIO * min(image.width, image.height):
            raise BadRow("image cannot be read", f"{image.path}: {image.width} x {image.height} is too narrow")
        return math.prod(self.grid(image.width, image.height))

    def grid(self, width: int, height: int) -> tuple[int, int]:
        """Return (height, width) in tokens of an image in pixels; for models with patches."""
        from transformers.models.qwen2_vl.image_processing_pil_qwen2_vl import smart_resize

        unit = self.patch * self.merge
        limits = self.options["size"]
        resized = smart_resize(height, width, unit, limits["shortest_edge"], limits["longest_edge"])
        return resized[0] // unit, resized[1] // unit

    def pixels(self, path: str) -> dict[str, Tensor]:
        """Return the model inputs of one image; their first dimension is 1, or the number of patches."""
        image = read_image(path)
        nested = [[image]] if self.family.layout == "tiles" else [image]
        made = self.processor(images=nested, return_tensors="pt", **self.options)
        return {name: made[name] for name in _INPUTS[self.family.layout]}

    def blank(self) -> dict[str, Tensor]:
        """Return the inputs of a small blank image, for batches without images; for patches or squares."""
        if self.family.layout == "squares":
            return {"pixel_values": torch.zeros(1, 3, self.side, self.side)}
        frames = int(self.processor.temporal_patch_size)
        return {
            "pixel_values": torch.zeros(self.merge**2, 3 * frames * self.patch**2),
            "image_grid_thw": torch.tensor([[1, self.merge, self.merge]]),
        }

    def identity(self) -> dict[str, Any]:
        """Return all that an example's tokens depend on, for the key of the data cache."""
        return {
            "family": self.family.name,
            "options": self.options,
            "token": [self.token_id, sorted(self.untrained), self.image_text, self.template_text, self.fixed_tokens],
            "size": [self.patch, self.merge],
        }


def load_reader(
    model: ModelOptions,
    vision: VisionOptions | None,
    config: PreTrainedConfig,
    tokenizer: PreTrainedTokenizerBase,
    origin: ModelOrigin = RECIPE_MODEL,
) -> ImageReader | None:
    """Return the reader of a model with the recipe's size limits; None for a text model. Raises UserError.

    vision: None uses the limits in the model's own files, for generation.
    """
    family = family_of(config)
    if family is None:
        return None
    processor = _load_processor(model.model_name_or_path, model.revision, origin)
    if vision is None and family.layout == "patches":
        size = dict(processor.size)
        vision = VisionOptions(image_min_pixels=size["shortest_edge"], image_max_pixels=size["longest_edge"])
    token_id = getattr(config, "image_token_id", None)
    token_id = config.image_token_index if token_id is None else token_id
    around = {key: name for key, name in (("begin", family.begin), ("end", family.end)) if name}
    words = {"image": _token(tokenizer, token_id, "image_token_id")}
    words |= {key: _token(tokenizer, getattr(config, name), name) for key, name in around.items()}
    tower = config.vision_config
    return ImageReader(
        family=family,
        processor=processor,
        token_id=token_id,
        untrained=frozenset({token_id, *(getattr(config, name) for name in around.values())}),
        image_text=family.image_text.format(**words),
        template_text=family.template_text.format(**words),
        patch=int(tower.patch_size),
        merge=int(getattr(tower, "spatial_merge_size", 1)),
        **_size_settings(family, vision or VisionOptions(), config, processor),
    )


def _token(tokenizer: PreTrainedTokenizerBase, number: int, name: str) -> str:
    token = tokenizer.convert_ids_to_tokens(number) if number < len(tokenizer) else None
    if token is None:
        raise UserError(
            f"model.tokenizer: the model's {name} is {number}, and the tokenizer has no token of that id.",
            hint="Use the tokenizer the model was trained with.",
        )
    return token


def _size_settings(family: Family, vision: VisionOptions, config: PreTrainedConfig, processor: Any) -> dict[str, Any]:
    """Return the fields of ImageReader that depend on image sizes."""
    tower = config.vision_config
    if family.layout == "patches":
        unit = (int(tower.patch_size) * int(tower.spatial_merge_size)) ** 2
        most = vision.image_max_pixels
        least = vision.image_min_pixels
        least = min(dict(processor.size)["shortest_edge"], most) if least is None else least
        if most < unit:
            raise UserError(
                f"vision.image_max_pixels: {most} is less than one token of {family.name}, {unit} pixels.",
                hint=f"Write a multiple of {unit}.",
            )
        if least > most:
            raise UserError(f"vision.image_min_pixels: {least} is more than vision.image_max_pixels: {most}.")
        return {"options": {"size": {"shortest_edge": least, "longest_edge": most}}, "fixed_tokens": None}
    for name in ("image_max_pixels", "image_min_pixels"):
        if getattr(vision, name) != getattr(VisionOptions(), name):
            raise UserError(
                f"vision.{name}: {family.name} resizes every image to the size that it was trained with.",
                hint="Leave the key out.",
            )
    if family.layout == "tiles":
        return {"options": {"max_image_tiles": int(tower.max_num_tiles)}, "fixed_tokens": 1}
    side = int(tower.image_size)
    patch = int(tower.patch_size)
    if family.token_types:
        tokens = int(config.mm_tokens_per_image)
        options = {"do_pan_and_scan": False}
        settings = {"image_seq_length": tokens}
    else:
        strategy = config.vision_feature_select_strategy
        # "full" keeps the class token
        tokens = (side // patch) ** 2 + (strategy != "default")
        options = {}
        settings = {"patch_size": patch, "num_additional_image_tokens": 1, "vision_feature_select_strategy": strategy}
    return {"options": options, "fixed_tokens": tokens, "saved_settings": settings, "side": side}


def _load_processor(name: str, revision: str, origin: ModelOrigin) -> Any:
    """Load transformers' image processor of a model in its Pillow version (class names ending in Pil).

    Only transformers' own classes are looked up: a processor with code of its own (auto_map) is never run.
    """
    from transformers.image_processing_utils import BaseImageProcessor

    import_pillow()
    hint = "The folder of a vision-language model needs preprocessor_config.json."
    for file in ("preprocessor_config.json", "processor_config.json"):
        path = Path(name).expanduser() / file
        if path.is_file():
            read_json(path, origin)
    with loading(origin, f"no image processor could be loaded from {name}", hint):
        written, _ = BaseImageProcessor.get_image_processor_dict(name, revision=revision)
        kind = re.sub("(Fast|Pil)$", "", written.get("image_processor_type") or written["feature_extractor_type"])
        processor = getattr(transformers, f"{kind}Pil", None)
        if processor is None:
            own = " and its own code (auto_map) is not run" if written.get("auto_map") else ""
            raise origin.error(
                f"no image processor could be loaded from {name}: transformers has no {kind[:80]}Pil{own}.", hint
            )
        return processor.from_pretrained(name, revision=revision)


def save_processor(reader: ImageReader, folder: Path) -> None:
    """Write what AutoProcessor needs into a saved model's folder, with the size limits of training."""
    reader.processor.save_pretrained(folder)
    sizes = {"size": reader.options["size"]} if "size" in reader.options else {}
    for file, settings in (("preprocessor_config.json", sizes), ("processor_config.json", reader.saved_settings)):
        path = folder / file
        written = json.loads(path.read_text(encoding="utf-8")) if path.is_file() else {}
        written |= {**settings, "processor_class": reader.family.processor}
        path.write_text(json.dumps(written, indent=2) + "\n", encoding="utf-8")
