"""ImageReader: load the image settings of a model, and save them with it."""

from __future__ import annotations

import json
import re
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
import transformers
from torch import Tensor

from ligertune.data.modalities.image.families import INPUTS, MODEL_KIND, Family, family_of
from ligertune.data.modalities.image.image_files import ImageFile, import_pillow
from ligertune.data.modalities.image.image_inputs import image_inputs
from ligertune.data.modalities.image.image_rows import ImageTokens
from ligertune.data.modalities.image.image_settings import ImageSettings
from ligertune.data.modalities.image.recipe import VisionSpec
from ligertune.data.modalities.modality import FileInputs
from ligertune.errors import UserError
from ligertune.files.model_files import RECIPE_MODEL, ModelOrigin, loading, read_json

if TYPE_CHECKING:
    from transformers import PreTrainedConfig, PreTrainedTokenizerBase

    from ligertune.planning.options import ModelOptions


@dataclass(frozen=True)
class ImageReader(ImageSettings):
    """The `ModalityReader` of images."""

    part_type = "image"
    model_kind = MODEL_KIND
    inputs = INPUTS

    @property
    def family_name(self) -> str:
        return self.family.name

    @property
    def takes_blank(self) -> bool:
        # In a family with tiles, text would attend to the blank image (`_give_all_zero_gradients` in families.py).
        return self.family.layout != "tiles"

    @property
    def needs_equal_counts(self) -> bool:
        # Tiles of a batch are one tensor, (B, images, tiles, ...).
        return self.family.layout == "tiles"

    def row_files(self, folder: str | None) -> ImageTokens:
        """Return what finds the images of rows. folder: of relative paths; None: that of the data file."""
        return ImageTokens(self, folder)

    def batch_inputs(
        self, input_ids: Tensor, files: Sequence[Sequence[FileInputs]], document_lengths: Sequence[int] | None = None
    ) -> dict[str, Tensor]:
        """Return the pixels of a batch and what the model needs to place them, as of `image_inputs`."""
        return image_inputs(self, input_ids, files, document_lengths)

    def prompt_inputs(self, input_ids: Tensor, files: Sequence[ImageFile]) -> dict[str, Tensor]:
        """Repeat each image token of input_ids (1, T) as often as its image needs, and add the pixels."""
        # The files are in the order of their tokens: `RowFiles.find` sorts them so.
        repeats = torch.ones(input_ids.shape[1], dtype=torch.long)
        repeats[input_ids[0] == self.token_id] = torch.tensor([self.tokens(file) for file in files], dtype=torch.long)
        input_ids = input_ids[0].repeat_interleave(repeats)[None]
        inputs = self.batch_inputs(input_ids, [[self.read(file.path) for file in files]])
        if self.family.positions == "sections":  # `generate` computes position ids from the token types
            del inputs["position_ids"]
            inputs["mm_token_type_ids"] = (input_ids == self.token_id).long()
        return {"input_ids": input_ids, "attention_mask": torch.ones_like(input_ids), **inputs}

    def save(self, folder: Path) -> None:
        """Write what AutoProcessor needs into a saved model's folder, with the size limits of training."""
        self.processor.save_pretrained(folder)
        sizes = {"size": self.options["size"]} if "size" in self.options else {}
        for file, settings in (("preprocessor_config.json", sizes), ("processor_config.json", self.saved_settings)):
            path = folder / file
            written = json.loads(path.read_text(encoding="utf-8")) if path.is_file() else {}
            # AutoProcessor finds the family's processor by this name.
            written |= {**settings, "processor_class": self.family.processor}
            path.write_text(json.dumps(written, indent=2) + "\n", encoding="utf-8")


def load_reader(
    model: ModelOptions,
    vision: VisionSpec | None,
    config: PreTrainedConfig,
    tokenizer: PreTrainedTokenizerBase,
    origin: ModelOrigin = RECIPE_MODEL,
) -> ImageReader:
    """Return the reader of a model with the recipe's size limits. Raises UserError.

    vision: None uses the limits in the model's own files, for generation.
    """
    family = family_of(config)
    processor = _load_processor(model.model_name_or_path, model.revision, origin)
    # An answer is generated with the limits of training, which were saved with the model.
    if vision is None and family.layout == "patches":
        size = dict(processor.size)
        vision = VisionSpec(image_min_pixels=size["shortest_edge"], image_max_pixels=size["longest_edge"])
    # LLaVA, Gemma 3 and Llama-3.2-Vision store image_token_index, of which image_token_id is an alias.
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
        **_size_settings(family, vision or VisionSpec(), config, processor),
    )


def _token(tokenizer: PreTrainedTokenizerBase, number: int, name: str) -> str:
    token = tokenizer.convert_ids_to_tokens(number) if number < len(tokenizer) else None
    if not isinstance(token, str):
        raise UserError(
            f"model.tokenizer: the model's {name} is {number}, and the tokenizer has no token of that id.",
            hint="Use the tokenizer the model was trained with.",
        )
    return token


def _size_settings(family: Family, vision: VisionSpec, config: PreTrainedConfig, processor: Any) -> dict[str, Any]:
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
    # A key without an effect is refused: the images would not have the size that the recipe says.
    for name in ("image_max_pixels", "image_min_pixels"):
        if getattr(vision, name) != getattr(VisionSpec(), name):
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
        # Pan and scan adds crops, and the number of tokens would depend on the image.
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
    # Read first, because `read_json` names a damaged file, and refuses one too large to hold settings.
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
