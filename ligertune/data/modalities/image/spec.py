"""ImageModality: vision-language models, as other code sees them."""

from __future__ import annotations

from typing import TYPE_CHECKING

from ligertune.data.modalities.image.families import INPUTS, MODEL_KIND, family_of, has_vision, part_of, prepare_vision
from ligertune.data.modalities.image.reader import ImageReader, load_reader
from ligertune.data.modalities.image.recipe import VisionSpec
from ligertune.data.modalities.image.tower_shape import read_tower
from ligertune.data.modalities.modality import Modality
from ligertune.errors import UserError
from ligertune.files.model_files import RECIPE_MODEL, ModelOrigin
from ligertune.planning.memory.model_shape import ModalityFacts

if TYPE_CHECKING:
    from torch import Tensor
    from transformers import PreTrainedConfig, PreTrainedModel, PreTrainedTokenizerBase

    from ligertune.planning.memory.model_shape import TowerShape
    from ligertune.planning.options import ModelOptions
    from ligertune.recipe.feature import TaskOptions


class ImageModality(Modality):
    """A vision-language model. Most methods raise UserError if its family cannot be trained."""

    is_text = False
    inputs = INPUTS
    # AutoModelForCausalLM drops or refuses the vision tower.
    auto_class = "AutoModelForImageTextToText"

    @classmethod
    def reads(cls, config: PreTrainedConfig) -> bool:
        """Return whether a configuration describes a vision-language model."""
        return has_vision(config)

    @property
    def facts(self) -> ModalityFacts:
        """What planning needs to know."""
        # The first question about a configuration: an unsupported family is refused before anything is loaded.
        family = family_of(self.config)
        return ModalityFacts(inputs=self.inputs, model_kind=MODEL_KIND, family=family.name, packs_exactly=family.packs)

    @property
    def tokens_without_embedding(self) -> frozenset[int]:
        """Id of the image token. Llama-3.2-Vision's has no row in the embedding, by design."""
        token_id = getattr(self.config, "image_token_id", None)
        return frozenset() if token_id is None else frozenset({token_id})

    def check_shared_rows(self) -> None:
        """Raise UserError: rows with images are not split."""
        raise UserError(
            f"parallel.cp_size: {self.config.model_type} is a vision-language model, and rows with images are not "
            "shared.",
            hint="Leave it out.",
        )

    def in_language_model(self, name: str) -> bool:
        """Return whether a parameter belongs neither to the vision tower nor to the projector."""
        return part_of(family_of(self.config), name) == "language_model"

    def attn_implementation(self, name: str) -> dict[str, str]:
        """Return the attention of each part: the vision tower has no documents."""
        # sdpa, because attention of documents needs their bounds, which a tower does not get.
        return {"": name, "text_config": name, "vision_config": "sdpa"}

    def text_positions(self, position_ids: Tensor) -> Tensor:
        """Return positions (4, 1, T), those of the text and of time, height and width, if the family has them."""
        # expanded, not computed: without images time, height and width count as the text does
        return position_ids.expand(4, 1, -1) if family_of(self.config).positions == "sections" else position_ids

    def prepare(self, model: PreTrainedModel, recipe: TaskOptions) -> None:
        """Freeze the parts that the recipe freezes and register the hooks the family needs."""
        prepare_vision(model, recipe.section(VisionSpec))

    def tower_shape(self, model: PreTrainedModel) -> TowerShape | None:
        """Return the sizes of the vision tower; None for tiles, whose number tokens do not tell."""
        return read_tower(model)

    def load_reader(
        self,
        model: ModelOptions,
        recipe: TaskOptions | None,
        tokenizer: PreTrainedTokenizerBase,
        origin: ModelOrigin = RECIPE_MODEL,
    ) -> ImageReader:
        """Return the reader of images, with the recipe's size limits or, without a recipe, the model's own."""
        spec = None if recipe is None else recipe.section(VisionSpec)
        return load_reader(model, spec, self.config, tokenizer, origin)


MODALITY = ImageModality
