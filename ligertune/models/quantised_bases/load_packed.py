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
from transformers.conversion_mapping import get_model_conversion_mapping
from transformers.core_model_loading import WeightConverter, WeightRenaming, rename_source_key
from transformers.quantizers.auto import register_quantizer
from transformers.quantizers.base import HfQuantizer
from transformers.utils.quantization_config import QuantizationConfigMixin

from ligertune.any_types import AnyModule
from ligertune.models.quantised_bases.base_formats import PackedLayout, layout_of, listed
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
# parts without which a layer has no weight
NEEDED = {
    "gptq": ("qweight", "qzeros", "scales"),
    "awq": ("qweight", "qzeros", "scales"),
    "hqq": ("W_q", "scale", "zero"),
    "compressed-tensors": ("weight_scale",),
}
PADDING_BITS = 0.5  # of words that are not full, per weight: layers of less than 64 columns may have more


@dataclass(frozen=True)
class StoredPart:
    """A tensor of a layer in a checkpoint: its dtype as safetensors names it, shape, and size."""

    dtype: str
    shape: tuple[int, ...]
    n_bytes: int


StoredLayers = dict[str, dict[str, StoredPart]]  # name of a layer in the checkpoint -> name of a part -> the part


def stored_layers(files: list[Path], layout: PackedLayout) -> StoredLayers:
    """Return the packed layers of safetensors files with their parts, from the headers. Raises ValueError."""
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
        raise ValueError(f"{file.name} is no safetensors file, and packed weights are read from those only")
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
    for name in ("quantization_config", "compression_config"):
        if hasattr(config, name):
            delattr(config, name)
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
    """Replace the linear layers that a checkpoint stores packed. Layers and parts are on the meta device.

    Raises ValueError for layers that are not read.
    """
    names = packed_names(model, stored, settings.layout)
    with torch.device("meta"):
        for stored_name, name in names.items():
            linear: Any = model.get_submodule(name)
            model.set_submodule(name, _packed_layer(linear, stored[stored_name], settings))


def packed_names(model: PreTrainedModel, stored: StoredLayers, layout: PackedLayout) -> dict[str, str]:
    """Return name in the checkpoint -> name in the model, of packed layers.

    Raises ValueError for packed weights that are not those of a linear layer, and for parts that do not fit it.
    """
    transforms = get_model_conversion_mapping(model)
    expected = model.state_dict()
    renamings = [one for one in transforms if isinstance(one, WeightRenaming)]
    converters = [one for one in transforms if isinstance(one, WeightConverter)]
    found = {}
    for stored_name, parts in stored.items():
        weight = f"{stored_name}.weight"
        renamed, _ = rename_source_key(weight, renamings, converters, model.base_model_prefix, expected)
        name = renamed.removesuffix(".weight")
        linear = model.get_submodule(name) if renamed in expected and renamed.endswith(".weight") else None
        if not isinstance(linear, nn.Linear):
            raise ValueError(
                f"{stored_name} is packed, and no linear layer of {type(model).__name__}; packed experts and embeddings"
                " are not read"
            )
        _check_parts(stored_name, parts, linear, layout)
        found[stored_name] = name
    return found


def _check_parts(name: str, parts: dict[str, StoredPart], linear: nn.Linear, layout: PackedLayout) -> None:
    """Raise ValueError unless a layer has all parts, in sizes that fit it."""
    needed = NEEDED[layout.method]
    missing = [part for part in needed if part not in parts]
    if layout.method == "compressed-tensors" and not {"weight", "weight_packed"} & set(parts):
        missing.append("weight")
    if missing:
        raise ValueError(f"{name} lacks {', '.join(missing)}")
    unknown = next((part.dtype for part in parts.values() if part.dtype not in DTYPES), None)
    if unknown is not None:
        raise ValueError(f"{name} has a tensor of dtype {unknown}, which is not read")
    values = next((parts[part] for part in ("qweight", "W_q", "weight_packed") if part in parts), None)
    if values is None:  # one byte for each weight
        return
    weights = linear.in_features * linear.out_features
    bits = 8 * values.n_bytes / weights
    known = (layout.bits, *layout.other_bits)
    if not any(one <= bits < one + PADDING_BITS for one in known):
        raise ValueError(
            f"{name} has {weights:,} weights in {values.n_bytes:,} bytes, which is not {listed(known)} bits each"
        )


def _packed_layer(linear: nn.Linear, parts: dict[str, StoredPart], settings: PackedConfig) -> PackedLinear:
    layer = PackedLinear(linear.out_features, linear.in_features, linear.bias, settings.layout, settings.dtype)
    for part, stored in parts.items():
        if part == "bias" and linear.bias is not None:
            continue
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


def make_dense(model: AnyModule) -> AnyModule:
    """Replace packed layers by linear ones in the dtype of the model, one at a time; return the model."""
    for name, module in list(model.named_modules()):
        if isinstance(module, PackedLinear):
            model.set_submodule(name, module.dense())
    return model
