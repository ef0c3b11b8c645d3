"""Memory of packed weights, for a plan: the bytes that the checkpoint stores, read from the headers of its files."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING

from transformers import PreTrainedConfig

from ligertune.files.model_files import RECIPE_MODEL, hub_snapshot, weight_files
from ligertune.models.quantised_bases.base_formats import PackedLayout, is_packed, layout_of
from ligertune.models.quantised_bases.load_packed import stored_layers

if TYPE_CHECKING:
    from ligertune.planning.memory.model_shape import ModelShape
    from ligertune.planning.options import ModelOptions

SCALE_BYTES = 2  # of a group


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
    packed = {kind: replace(kind, stored_size=size) for kind, _ in linear}
    parameters = tuple((packed.get(kind, kind), count) for kind, count in shape.parameters)
    return replace(shape, parameters=parameters)


def _bytes_per_element(layout: PackedLayout) -> float:
    groups = (SCALE_BYTES + layout.bits / 8) / layout.group_size if layout.group_size > 0 else 0.0
    return layout.bits / 8 + groups


def _stored_bytes(spec: ModelOptions, config: PreTrainedConfig, layout: PackedLayout) -> int | None:
    """Return the bytes of all packed layers; None if the files are not here."""
    path = Path(spec.model_name_or_path).expanduser()
    folder = path if path.is_dir() else hub_snapshot(spec.model_name_or_path, spec.revision)
    if folder is None:
        return None
    files = weight_files(folder, RECIPE_MODEL, explicit=getattr(config, "transformers_weights", None))
    layers = stored_layers(files, layout)
    return sum(part.n_bytes for parts in layers.values() for part in parts.values()) or None
