"""The frozen target of a draft head: the format of its weights, and the adapter that it was fine-tuned with."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING

from torch import nn
from transformers import PreTrainedConfig, PreTrainedModel

from ligertune.errors import UserError
from ligertune.features.draft.recipe import DraftSpec
from ligertune.files.base_model import StoredAs, four_bit_format
from ligertune.files.model_files import RECIPE_MODEL, ModelOrigin, loading
from ligertune.models.adapters.adapter_files import check_adapter, fitted_config
from ligertune.models.load import quantization_of
from ligertune.models.save import load_trained_adapter
from ligertune.models.score_head import embedding_of, lm_head_of
from ligertune.models.shape import base_of
from ligertune.planning.saved_model import trained_base

if TYPE_CHECKING:
    from ligertune.files.base_model import TrainedBase
    from ligertune.planning.options import BuildOptions

ADAPTER = ModelOrigin("draft.adapter_path", "use another adapter")


def check_not_quantised_twice(
    config: PreTrainedConfig, options: BuildOptions, origin: ModelOrigin = RECIPE_MODEL
) -> None:
    """Raise UserError if the layers shall be quantised, and their files are quantised already."""
    found = quantization_of(config)
    if found is not None and options.section(DraftSpec).load_in_4bit:
        raise UserError(
            f"draft.load_in_4bit: true quantises weights in 16 or 32 bits, and those of "
            f"{options.model.model_name_or_path} are quantised already ({found}).",
            hint="Leave draft.load_in_4bit out: the target stays as its files store it.",
        )


def frozen_as(options: BuildOptions) -> StoredAs | None:
    """Return the format of the target's layers: that which its adapter was trained on, or NF4 if the recipe says so."""
    spec = options.section(DraftSpec)
    base = _base_of_adapter(spec)
    trained = None if base is None else base.stored_as
    if spec.load_in_4bit and four_bit_format(trained) is None:
        return "nf4"
    return trained


def with_adapter(options: BuildOptions, model: PreTrainedModel) -> PreTrainedModel:
    """Return a loaded target with the adapter of draft.adapter_path: merged, or in its layers if those are quantised.

    On the meta device the files are checked, and quantised layers get the parameters of the adapter. Raises UserError.
    """
    spec = options.section(DraftSpec)
    if spec.adapter_path is None:
        return model
    folder = Path(spec.adapter_path).expanduser()
    is_merged = frozen_as(options) is None and quantization_of(model.config) is None
    on_meta = embedding_of(model).weight.device.type == "meta"
    if on_meta and is_merged:
        check_adapter(folder, ADAPTER)
        fitted_config(model, folder, ADAPTER)
        return model
    from ligertune.models.adapters.lora import adapter_on_meta, merged_model  # imports peft, which takes seconds

    if on_meta:
        return _with_plain_ends(base_of(adapter_on_meta(model, folder, ADAPTER)), folder)
    adapted = load_trained_adapter(model, folder, _base_of_adapter(spec))
    if is_merged:
        with loading(ADAPTER, f"the adapter in {folder} cannot be merged"):
            return merged_model(adapted)
    return _with_plain_ends(base_of(adapted), folder)


def _with_plain_ends(model: PreTrainedModel, folder: Path) -> PreTrainedModel:
    """Return the model. Raises UserError if an adapter that is not merged changes the embedding or the output head."""
    if type(embedding_of(model)) is nn.Embedding and type(lm_head_of(model)) is nn.Linear:
        return model
    raise UserError(
        f"draft.adapter_path: the adapter in {folder} changes the embedding or the output head, and on quantised "
        "layers it is not merged.",
        hint="Merge it, and name the merged model: ligertune export RUN --out FOLDER",
    )


def _base_of_adapter(spec: DraftSpec) -> TrainedBase | None:
    """Return the record of the base that the adapter was trained on. Raises UserError for one that is not loaded here.

    A base from which an initial adapter was subtracted before it was quantised is no longer in any file.
    """
    if spec.adapter_path is None:
        return None
    base = trained_base(Path(spec.adapter_path).expanduser())
    if base is not None and base.residual_of is not None:
        raise UserError(
            f"draft.adapter_path: the adapter in {spec.adapter_path} was trained with init_lora_weights: "
            f"{base.residual_of} on weights of 4 bits, which are in no file.",
            hint="Merge it, and name the merged model: ligertune export RUN --out FOLDER",
        )
    return base
