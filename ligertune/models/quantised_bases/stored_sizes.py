"""Packed weights in a plan: whether each layer can be read, and the bytes that the files store, from their headers."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING

from transformers import PreTrainedConfig, PreTrainedModel

from ligertune.errors import UserError
from ligertune.files.base_model import StoredAs, four_bit_format
from ligertune.files.model_files import RECIPE_MODEL, hub_snapshot, stored_shapes, weight_files
from ligertune.models.quantised_bases.base_formats import (
    PackedLayout,
    is_packed,
    layout_of,
    quant_method_of,
    quantization_settings,
)
from ligertune.models.quantised_bases.load_packed import StoredLayers, packed_names, stored_layers
from ligertune.planning.memory.states import NF4_BYTES, SINGLE_4BIT_BYTES

if TYPE_CHECKING:
    from ligertune.planning.memory.model_shape import ModelShape
    from ligertune.planning.options import MethodOptions, ModelOptions

SCALE_BYTES = 2  # of a group


# values of 8 bits, and their products with the scales in float32 (HQQ)
UNPACKED_SIZE = 5


def with_stored_sizes(shape: ModelShape, spec: ModelOptions, config: PreTrainedConfig) -> ModelShape:
    """Return the sizes of a model with the bytes per element of its packed layers; unchanged for other checkpoints.

    All linear layers count as packed, with the mean size of those that are. Without the files, as before a download,
    the size follows from the bits and groups of config.json.
    """
    if spec.init == "random" or not is_packed(config):
        return shape
    layout = layout_of(config)
    linear = [(kind, count) for kind, count in shape.parameters if kind.linear and kind.inside and not kind.adapter]
    elements = sum(kind.elements * count for kind, count in linear)
    stored = _stored_bytes(spec, config, layout) or round(elements * _bytes_per_element(layout))
    size = stored / max(elements, 1)
    packed = {kind: replace(kind, stored_size=size, unpacked_size=UNPACKED_SIZE) for kind, _ in linear}
    parameters = tuple((packed.get(kind, kind), count) for kind, count in shape.parameters)
    return replace(shape, parameters=parameters)


def with_quantised_sizes(shape: ModelShape, stored_as: StoredAs | None) -> ModelShape:
    """Return the sizes of a frozen model whose layers bitsandbytes has quantised, experts included in 4 bits.

    stored_as: None returns the sizes unchanged. Parameters that train are none of the frozen model's.
    """
    if stored_as is None:
        return shape
    four_bits = four_bit_format(stored_as)
    parameters = []
    for kind, count in shape.parameters:
        if not kind.trains and four_bits is not None and kind.quantised("qlora"):
            kind = replace(kind, stored_size=NF4_BYTES if four_bits[1] else SINGLE_4BIT_BYTES)
        elif not kind.trains and kind.in_eight_bits(stored_as):
            kind = replace(kind, stored_size=1 + 4 / kind.shape[-1])  # a float32 scale for each row
        parameters.append((kind, count))
    return replace(shape, parameters=tuple(parameters))


def stored_as_in_files(config: PreTrainedConfig) -> StoredAs | None:
    """Return the format in which a checkpoint of bitsandbytes stores its layers; None for other checkpoints."""
    settings = quantization_settings(config)
    method = quant_method_of(settings)
    if method == "bitsandbytes_8bit":
        return "int8"
    if method != "bitsandbytes_4bit":
        return None
    is_double = bool(settings.get("bnb_4bit_use_double_quant", False))
    if settings.get("bnb_4bit_quant_type", "fp4") == "nf4":  # transformers' default is fp4
        return "nf4" if is_double else "nf4_single"
    return "fp4" if is_double else "fp4_single"


def _bytes_per_element(layout: PackedLayout) -> float:
    groups = (SCALE_BYTES + layout.bits / 8) / layout.group_size if layout.group_size > 0 else 0.0
    return layout.bits / 8 + groups


def _stored_bytes(spec: ModelOptions, config: PreTrainedConfig, layout: PackedLayout) -> int | None:
    """Return the bytes of all packed layers; None if the files are not here."""
    layers = _layers_of_files(spec, config, layout)
    return sum(part.n_bytes for parts in layers.values() for part in parts.values()) or None


def _layers_of_files(spec: ModelOptions, config: PreTrainedConfig, layout: PackedLayout) -> StoredLayers:
    """Return the packed layers of a base; none if its files are not here, as before a download, or damaged."""
    path = Path(spec.model_name_or_path).expanduser()
    folder = path if path.is_dir() else hub_snapshot(spec.model_name_or_path, spec.revision)
    if folder is None:
        return {}
    explicit = getattr(config, "transformers_weights", None)
    try:
        stored_shapes(folder, RECIPE_MODEL, explicit=explicit)  # checks that safetensors files are complete
        files = weight_files(folder, RECIPE_MODEL, explicit=explicit)
    except UserError:
        return {}  # loading downloads them, or says what is wrong with them
    return stored_layers(files, layout)


def check_packed_layers(
    model: PreTrainedModel, spec: ModelOptions, config: PreTrainedConfig, method: MethodOptions
) -> None:
    """Raise UserError for packed weights that are not read, and for packed layers that would train in full.

    model: without weights. Checks nothing for other checkpoints, and for files that are not here.
    """
    if spec.init == "random" or not is_packed(config):
        return
    layout = layout_of(config)
    try:
        names = packed_names(model, _layers_of_files(spec, config, layout), layout)
    except ValueError as problem:
        raise RECIPE_MODEL.error(
            f"{spec.model_name_or_path}: {problem}.", hint="Give another checkpoint of it, or one in 16 bits."
        ) from None
    for wanted in method.lora_modules_to_save:
        name = next((name for name in names.values() if f".{wanted}." in f".{name}."), None)
        if name is not None:
            raise UserError(
                f"method.lora_modules_to_save: {wanted} is stored packed ({layout.format.title}), and cannot train in"
                " full.",
                hint=f"Leave {wanted} out, or give the checkpoint in 16 bits.",
            )
