"""ImageSettings: from an image file to the model's inputs, and the number of its tokens in the text.

Pixels come from transformers' image processors on Pillow, with or without torchvision installed, so a run does not
depend on other packages of the machine.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, field
from typing import Any

import torch

from ligertune.data.bad_rows import BadRow
from ligertune.data.modalities.image.families import Family
from ligertune.data.modalities.image.image_files import ImageFile, read_image
from ligertune.data.modalities.modality import FileInputs

MAX_ASPECT_RATIO = 200  # longer side over shorter side: Qwen's processors refuse more
# Outputs of the image processors that the models take. The number of tiles becomes the cross-attention mask.
_INPUTS: dict[str, tuple[str, ...]] = {
    "patches": ("pixel_values", "image_grid_thw"),
    "squares": ("pixel_values",),
    "tiles": ("pixel_values", "aspect_ratio_ids", "aspect_ratio_mask"),
}


@dataclass(frozen=True)
class ImageSettings:
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

    def read(self, path: str) -> FileInputs:
        """Return the model inputs of one image; their first dimension is 1, or the number of patches."""
        image = read_image(path)
        nested = [[image]] if self.family.layout == "tiles" else [image]
        made = self.processor(images=nested, return_tensors="pt", **self.options)
        return {name: made[name] for name in _INPUTS[self.family.layout]}

    def blank(self) -> FileInputs:
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
