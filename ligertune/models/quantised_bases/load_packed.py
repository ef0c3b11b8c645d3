"""Load packed checkpoints: linear layers become `PackedLinear`s before transformers reads the weights.

transformers' loader then finds a parameter for each tensor of the checkpoint, in its own dtype, and does the rest as
for any model: shards, names, tied weights, devices.
"""

from __future__ import annotations

import json
from collections import defaultdict
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import nn
from transformers import PreTrainedConfig, PreTrainedModel
from transformers.quantizers.auto import register_quantizer
from transformers.quantizers.base import HfQuantizer
from transformers.utils.quantization_config import QuantizationConfigMixin

from ligertune.errors import UserError
from ligertune.models.quantised_bases.base_formats import PackedLayout, layout_of
from ligertune.models.quantised_bases.packed_linear import PackedLinear

METHOD = "ligertune_packed"  # transformers' name of this quantisation
DTYPES = {
    "I64": torch.int64,
    "I32": torch.int32,
    "I16": torch.int16,
    "I8": torch.int8,
    "U8": torch.uint8,
    "BOOL": torch.bool,
    "F64": torch.float64,
    "F32": torch.float32,
    "F16": torch.float16,
    "BF16": torch.bfloat16,
    "F8_E4M3": torch.float8_e4m3fn,
    "F8_E5M2": torch.float8_e5m2,
}


@dataclass(frozen=True)
class StoredPart:
    """A tensor of a layer in a checkpoint: its dtype as safetensors names it, shape, and size."""

    dtype: str
    shape: tuple[int, ...]
    n_bytes: int


StoredLayers = dict[str, dict[str, StoredPart]]  # name of a layer in the checkpoint -> name of a part -> the part


def stored_layers(files: list[Path], layout: PackedLayout) -> StoredLayers:
    """Return the packed layers of safetensors files with their parts, from the headers alone."""
    found: StoredLayers = defaultdict(dict)
    for file in files:
        for name, values in _header_of(file).items():
            layer, _, part = name.rpartition(".")
            begin, end = values["data_offsets"]
            found[layer][part] = StoredPart(values["dtype"], tuple(values["shape"]), end - begin)
    marker = layout.format.marker
    return {layer: parts for layer, parts in found.items() if any(name in parts for name in marker)}


def _header_of(file: Path) -> Mapping[str, Any]:
    if file.suffix != ".safetensors":
        raise UserError(
            f"{file} is no safetensors file, and packed weights are read from those only.",
            hint="Convert it to model.safetensors.",
        )
    with file.open("rb") as opened:
        length = int.from_bytes(opened.read(8), "little")
        header = json.loads(opened.read(length))
    header.pop("__metadata__", None)
    return header


# ---- loading


class PackedConfig(QuantizationConfigMixin):
    """The quantisation of a packed checkpoint for from_pretrained. dtype: of the products."""

    def __init__(self, layout: PackedLayout, dtype: torch.dtype) -> None:
        self.quant_method = METHOD  # type: ignore[assignment]  # transformers' enum has its own methods only
        self.layout = layout
        self.dtype = dtype


def packed_config(config: PreTrainedConfig, dtype: torch.dtype) -> PackedConfig:
    """Return the quantisation for from_pretrained, and remove the checkpoint's own from `config`, which is changed."""
    found = PackedConfig(layout_of(config), dtype)
    del config.quantization_config
    return found


@register_quantizer(METHOD)
class PackedQuantizer(HfQuantizer):
    """transformers' quantizer of `PackedConfig`: it replaces layers, and quantises nothing."""

    def _process_model_before_weight_loading(
        self, model: PreTrainedModel, checkpoint_files: list[str] | None = None, **kwargs: Any
    ) -> None:
        settings: Any = self.quantization_config
        stored = stored_layers([Path(file) for file in checkpoint_files or ()], settings.layout)
        replace_layers(model, stored, settings)

    def _process_model_after_weight_loading(self, model: PreTrainedModel, **kwargs: Any) -> None:
        finish_loading(model)
        self.remove_quantization_config(model)

    def is_serializable(self) -> bool:
        """Return False: weights are exported in 16 bits."""
        return False

    @property
    def is_trainable(self) -> bool:
        """Whether adapters train on it."""
        return True


def replace_layers(model: PreTrainedModel, stored: StoredLayers, settings: PackedConfig) -> None:
    """Replace the linear layers that a checkpoint stores packed. Raises UserError for packed weights of other modules.

    Layers and parts are on the meta device. Raises UserError for a layout that is not read.
    """
    names = packed_names(model, stored)
    with torch.device("meta"):
        for stored_name, name in names.items():
            linear: Any = model.get_submodule(name)
            model.set_submodule(name, _packed_layer(linear, stored[stored_name], settings, name))


def packed_names(model: PreTrainedModel, stored: StoredLayers) -> dict[str, str]:
    """Return name in the checkpoint -> name in the model, of packed layers. Raises UserError for other modules."""
    modules = dict(model.named_modules())
    prefix = f"{model.base_model_prefix}."
    found = {}
    for stored_name in stored:
        candidates = (stored_name, f"{prefix}{stored_name}", stored_name.removeprefix(prefix))
        name = next((one for one in candidates if isinstance(modules.get(one), nn.Linear)), None)
        if name is None:
            raise UserError(
                f"{stored_name} is packed in the checkpoint, and no linear layer of {type(model).__name__}: packed"
                " experts and embeddings are not read.",
                hint="Give the checkpoint in 16 bits.",
            )
        found[stored_name] = name
    return found


def _packed_layer(linear: nn.Linear, parts: dict[str, StoredPart], settings: PackedConfig, name: str) -> PackedLinear:
    layer = PackedLinear(linear.out_features, linear.in_features, linear.bias, settings.layout, settings.dtype)
    for part, stored in parts.items():
        if part == "bias":
            continue
        if stored.dtype not in DTYPES:
            raise UserError(f"{name}.{part} is stored as {stored.dtype}, which is not read.")
        tensor = torch.empty(stored.shape, dtype=DTYPES[stored.dtype], device="meta")
        layer.register_parameter(part, nn.Parameter(tensor, requires_grad=False))
    return layer


def finish_loading(model: PreTrainedModel) -> None:
    """Seal the packed layers of a loaded model. An output head becomes dense: losses read its weight."""
    head = model.get_output_embeddings()
    for name, module in list(model.named_modules()):
        if not isinstance(module, PackedLinear):
            continue
        module.seal()
        if module is head:
            model.set_submodule(name, module.dense())


def make_dense(model: PreTrainedModel) -> PreTrainedModel:
    """Replace packed layers by linear ones in the dtype of the model, one at a time; return the model."""
    for name, module in list(model.named_modules()):
        if isinstance(module, PackedLinear):
            model.set_submodule(name, module.dense())
    return model
