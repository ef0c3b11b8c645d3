"""How quantised weights are loaded, and made dense again.

Weights that bitsandbytes has stored load as those that QLoRA and 8-bit LoRA quantise themselves, with the scales of the
files, double quantisation included. Products are in the dtype of training, which need not be the one in which the
checkpoint was quantised.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import torch
from transformers import BitsAndBytesConfig, PreTrainedConfig, PreTrainedModel

from ligertune.any_types import AnyModule
from ligertune.models.quantised_bases.base_formats import BaseFormat, quantization_settings
from ligertune.models.quantised_bases.load_packed import make_dense, packed_config


def stored_quantization(found: BaseFormat | None, config: PreTrainedConfig, dtype: torch.dtype) -> Any:
    """Return the quantisation of a checkpoint for `from_pretrained`, or None. `config` is changed."""
    if found is None or found.training == "loader":
        return None
    if found.training == "packed":
        return packed_config(config, dtype)
    return _stored_by_bitsandbytes(config, dtype)


def _stored_by_bitsandbytes(config: PreTrainedConfig, dtype: torch.dtype) -> BitsAndBytesConfig:
    """Return the quantisation of a checkpoint with products in `dtype`, and set it in `config`, which is changed."""
    settings = quantization_settings(config)
    known = {name: value for name, value in settings.items() if not name.startswith("_")}
    found = BitsAndBytesConfig.from_dict(known)
    if found.load_in_4bit:
        found.bnb_4bit_compute_dtype = dtype
    config.quantization_config = found.to_dict()
    return found


def dequantised_model(model: PreTrainedModel) -> PreTrainedModel:
    """Replace quantised weights of a model, if there are any, by dense ones in its dtype; return the model."""
    if getattr(model, "hf_quantizer", None) is not None:  # bitsandbytes
        model = model.dequantize()
        if hasattr(model, "_weight_conversions"):
            del model._weight_conversions  # transformers 5.17 would save weights as it has read them
    return make_dense(model)


def compute_in(model: PreTrainedModel, dtype: torch.dtype) -> None:
    """Dequantise 4-bit weights to `dtype` instead of the dtype that the files name."""
    layers: Iterable[AnyModule] = model.modules()
    for layer in layers:
        state = getattr(getattr(layer, "weight", None), "quant_state", None)
        if state is not None:
            state.dtype = dtype
