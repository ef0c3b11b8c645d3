"""Load a block-scaled base as it is stored: its bytes go to the device, and no 16-bit weight is made.

transformers' own quantizers for these formats need a GPU and packages of the hub, and keep weights for inference only.
This quantizer reads the same tensors into `QuantisedWeight`s, on every device. Tensors that the files do not quantise
are loaded as usual.
"""

from __future__ import annotations

import contextlib
import os
from collections.abc import Iterator
from typing import Any

import torch
from ligertune_kernels.ops.block_scaled.dequantize_float8_blocks import Float8Blocks
from ligertune_kernels.ops.block_scaled.dequantize_mxfp4 import Mxfp4
from ligertune_kernels.ops.moe.quantised_weight import QuantisedWeight
from torch import nn
from transformers import PreTrainedModel
from transformers.core_model_loading import ConversionOps, WeightConverter, WeightRenaming
from transformers.quantizers.auto import register_quantizer
from transformers.quantizers.base import HfQuantizer
from transformers.utils.quantization_config import QuantizationConfigMixin

from ligertune.any_types import AnyModule
from ligertune.models.block_scaled.block_format import (
    BlockFormat,
    StoredWeight,
    held_weight,
    stacks_experts,
    stored_weights,
)

METHOD = "ligertune_block_scaled"  # transformers' name of this quantisation
SCALE = "weight_scale_inv"
_READS_IN_TURN = "HF_DEACTIVATE_ASYNC_LOAD"  # transformers' variable


class StoredWeightsConfig(QuantizationConfigMixin):
    """Keep the weights of a checkpoint in its own block-scaled format."""

    def __init__(self, found: BlockFormat) -> None:
        self.quant_method = METHOD  # type: ignore[assignment]  # transformers' enum has its own methods only
        self.found = found

    def to_dict(self) -> dict[str, Any]:
        """Return plain values for messages of transformers."""
        return {"quant_method": METHOD, "format": self.found.name}


@register_quantizer(METHOD)
class StoredWeightsQuantizer(HfQuantizer):
    """transformers' quantizer of `StoredWeightsConfig`."""

    quantization_config: Any

    def __init__(self, quantization_config: Any, **kwargs: Any) -> None:
        kwargs["pre_quantized"] = True  # transformers is not told, because the configuration is ours
        super().__init__(quantization_config, **kwargs)
        self.weights: dict[str, StoredWeight] = {}

    @property
    def found(self) -> BlockFormat:
        """Format of the checkpoint."""
        return self.quantization_config.found

    def _process_model_before_weight_loading(self, model: PreTrainedModel, **kwargs: Any) -> None:
        self.weights = {weight.name: weight for weight in stored_weights(model, self.found)}

    def param_element_size(self, model: PreTrainedModel, param_name: str, param: torch.Tensor) -> float:
        """Return the bytes per element that transformers reserves on the device before it loads."""
        if param_name not in self.weights:
            return param.element_size()
        return 17 / 32 if self.found.name == "mxfp4" else 1.0

    def update_weight_conversions(self, weight_conversions: list[Any], *model: PreTrainedModel) -> list[Any]:
        """Let the tensors of a weight and of its scales become one weight. transformers 5.17 passes no model."""
        if self.found.name == "mxfp4":
            names = sorted({weight.attribute for weight in self.weights.values()})
            held = [WeightConverter([f"{name}_blocks", f"{name}_scales"], name, [_HoldMxfp4(self)]) for name in names]
            return [*weight_conversions, *held]
        updated: list[Any] = [WeightRenaming(r"^(.+)\.scale$", rf"\1.{SCALE}")]
        for converter in weight_conversions:
            is_stack = isinstance(converter, WeightConverter) and stacks_experts(converter)
            updated.append(_with_scales(converter, self) if is_stack else converter)
        layer = WeightConverter([SCALE, "activation_scale", "weight$"], "weight", [_HoldFloat8(self)])
        return [*updated, layer]

    def is_serializable(self) -> bool:
        """Return that transformers can save the model: `export` writes such weights itself."""
        return True

    @property
    def is_trainable(self) -> bool:
        """Adapters train on it."""
        return True


@contextlib.contextmanager
def few_wide_weights(quantization: Any) -> Iterator[None]:
    """Let transformers 5.17 read one weight after the other, meanwhile: it would widen all of them on the device.

    It reads ahead in threads, and casts float8 to the dtype of the model before it calls the quantizer. Later versions
    let the quantizer decide (`get_new_dtype`).
    """
    widens = isinstance(quantization, StoredWeightsConfig) and not hasattr(HfQuantizer, "get_new_dtype")
    if not widens or _READS_IN_TURN in os.environ:
        yield
        return
    os.environ[_READS_IN_TURN] = "1"
    try:
        yield
    finally:
        del os.environ[_READS_IN_TURN]


def finish_held(model: AnyModule, *, dequantise: bool) -> None:
    """Make a loaded model one that transformers and PEFT take for any other. dequantise: its weights shall train."""
    model.hf_quantizer.remove_quantization_config(model)  # the parameters say how they are stored
    if hasattr(model, "_weight_conversions"):  # transformers 5.17 would save the model by the reverse of ours
        del model._weight_conversions
    if dequantise:
        dequantise_held(model)


def dequantise_held(model: nn.Module) -> None:
    """Replace each held weight by its values in the weight's dtype, one after the other; they can train."""
    for module in model.modules():
        for name, parameter in list(module.named_parameters(recurse=False)):
            if isinstance(parameter, QuantisedWeight):
                module._parameters[name] = nn.Parameter(dense_copy(parameter))


def dense_copy(weight: QuantisedWeight) -> torch.Tensor:
    """Return the values of a weight in its dtype, contiguous, in new memory."""
    whole = weight.dequantize()
    dense = whole.contiguous()
    return dense.clone() if dense is whole else dense


def _with_scales(converter: WeightConverter, quantizer: StoredWeightsQuantizer) -> WeightConverter:
    """Return a merge of experts that reads the scales, too."""
    weights = [source.removesuffix("$") for source in converter.source_patterns]
    scales = [source.removesuffix("weight") + SCALE for source in weights]
    unused = [source.removesuffix("weight") + "activation_scale" for source in weights]
    sources = [f"{source}$" for source in (*weights, *scales, *unused)]
    targets = list(converter._original_target_patterns)
    stacked = WeightConverter(sources, targets, [_StackFloat8(quantizer, len(weights))])
    stacked.scope_prefix = converter.scope_prefix
    stacked.base_model_prefix = converter.base_model_prefix
    return stacked


class _Hold(ConversionOps):
    # transformers reads tensors in their own dtype for operations with this attribute
    def __init__(self, quantizer: StoredWeightsQuantizer) -> None:
        self.hf_quantizer = quantizer

    def _held(self, name: str, stored: Mxfp4 | Float8Blocks, model: PreTrainedModel) -> dict[str, torch.Tensor]:
        weight = self.hf_quantizer.weights[name]
        parameter = model.get_parameter(name)
        shape = tuple(parameter.shape)
        found = (*stored.shape[:-2], stored.shape[-1], stored.shape[-2]) if weight.transposed else stored.shape
        if found[-len(shape) :] != shape:
            raise ValueError(f"{name} has shape {tuple(found)} in the checkpoint, and {shape} in the model")
        return {name: held_weight(stored, shape, parameter.dtype, transposed=weight.transposed)}


class _HoldMxfp4(_Hold):
    def convert(  # type: ignore[override]  # transformers passes the rest by name
        self, input_dict: dict[str, Any], *, full_layer_name: str, model: PreTrainedModel, **kwargs: Any
    ) -> dict[str, torch.Tensor]:
        blocks = _only(input_dict, "_blocks")
        scales = _only(input_dict, "_scales")
        return self._held(full_layer_name, Mxfp4(blocks.contiguous(), scales.contiguous()), model)


class _HoldFloat8(_Hold):
    def convert(  # type: ignore[override]  # as above
        self, input_dict: dict[str, Any], *, full_layer_name: str, model: PreTrainedModel, **kwargs: Any
    ) -> dict[str, torch.Tensor]:
        weight = _only(input_dict, "weight", "weight$")
        if SCALE not in input_dict:
            return {full_layer_name: weight.to(model.get_parameter(full_layer_name).dtype)}
        scales = _as_float32(_only(input_dict, SCALE))
        values = weight.to(torch.float8_e4m3fn)  # transformers 5.17 widens them, which loses nothing
        stored = Float8Blocks(values.contiguous()[None], scales[None], self.hf_quantizer.found.block)
        return self._held(full_layer_name, stored, model)


class _StackFloat8(_Hold):
    def __init__(self, quantizer: StoredWeightsQuantizer, parts: int) -> None:
        super().__init__(quantizer)
        self.parts = parts

    def convert(  # type: ignore[override]  # as above
        self,
        input_dict: dict[str, Any],
        *,
        source_patterns: list[str],
        full_layer_name: str,
        model: PreTrainedModel,
        **kwargs: Any,
    ) -> dict[str, torch.Tensor]:
        weights = [input_dict[source] for source in source_patterns[: self.parts]]
        scales = [input_dict.get(source) for source in source_patterns[self.parts : 2 * self.parts]]
        if not any(scales):  # experts that the files hold in 16 bits
            dtype = model.get_parameter(full_layer_name).dtype
            return {full_layer_name: _joined(weights, dtype)}
        stored = Float8Blocks(
            _joined(weights, torch.float8_e4m3fn),
            _joined([[_as_float32(one) for one in part or ()] for part in scales], torch.float32),
            self.hf_quantizer.found.block,
            self.parts,
        )
        return self._held(full_layer_name, stored, model)


def _only(tensors: dict[str, Any], *ends: str) -> torch.Tensor:
    """Return the tensor whose pattern has one of these ends."""
    found = next(value for key, value in tensors.items() if key.endswith(ends))
    return found[0] if isinstance(found, list) else found


def _as_float32(scales: torch.Tensor) -> torch.Tensor:
    """Return scales in float32. Bytes are exponents of powers of two (ue8m0)."""
    return torch.exp2(scales.float() - 127) if scales.dtype == torch.uint8 else scales.float()


def _joined(parts: list[list[torch.Tensor]], dtype: torch.dtype) -> torch.Tensor:
    """Return (X, rows of all parts, columns) of each part's X tensors (rows, columns)."""
    rows = [part[0].shape[0] for part in parts]
    first = parts[0][0]
    joined = torch.empty(len(parts[0]), sum(rows), first.shape[1], dtype=dtype, device=first.device)
    for part, pieces in zip(parts, joined.split(rows, 1), strict=True):
        for piece, tensor in zip(pieces, part, strict=True):
            piece.copy_(tensor)
    return joined
