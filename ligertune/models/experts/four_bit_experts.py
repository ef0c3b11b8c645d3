"""4-bit experts: load a mixture of experts with NF4 or FP4 weights, for QLoRA and for a teacher in 4 bits.

bitsandbytes quantises linear layers. transformers holds a mixture's experts in 3-D parameters, which are most of such a
model: they become `QuantisedWeight`s here. Checkpoint tensors are merged in host memory, and go to the device one
expert at a time; a checkpoint that holds 3-D tensors sends one weight of one layer.
"""

from __future__ import annotations

import copy
import re
import zlib
from collections.abc import Iterator
from typing import Any

import torch
from ligertune_kernels.ops.moe.quantised_weight import QuantisedWeight, to_nf4
from torch import nn
from transformers import BitsAndBytesConfig, PreTrainedConfig, PreTrainedModel
from transformers.core_model_loading import ConversionOps, WeightConverter
from transformers.integrations.bitsandbytes import Bnb4bitQuantize
from transformers.quantizers.auto import register_quantizer
from transformers.quantizers.quantizer_bnb_4bit import Bnb4BitHfQuantizer

from ligertune.files.model_files import ModelOrigin

METHOD = "ligertune_nf4"  # transformers' name of this quantisation


def expert_weights(model: nn.Module) -> Iterator[tuple[str, nn.Module, str]]:
    """Yield (name, module, attribute) of the 3-D weights of experts, in the order of the model."""
    for path, module in model.named_modules():
        if not (hasattr(module, "num_experts") or "Expert" in type(module).__name__):
            continue
        for name, parameter in module.named_parameters(recurse=False):
            if parameter.ndim == 3 and parameter.is_floating_point():
                yield f"{path}.{name}".lstrip("."), module, name


def four_bit_config(
    skeleton: PreTrainedModel, dtype: torch.dtype, *, quant_type: str, double_quant: bool, storage: str = "uint8"
) -> BitsAndBytesConfig:
    """Return the quantisation of a model for from_pretrained, experts included. storage: dtype of the bytes."""
    cls = Nf4ExpertsConfig if any(expert_weights(skeleton)) else BitsAndBytesConfig
    return cls(
        load_in_4bit=True,
        bnb_4bit_quant_type=quant_type,
        bnb_4bit_use_double_quant=double_quant,
        bnb_4bit_compute_dtype=dtype,
        bnb_4bit_quant_storage=storage,
    )


def refuse_quantised(name: str, config: PreTrainedConfig, skeleton: PreTrainedModel, origin: ModelOrigin) -> None:
    """Raise UserError for a mixture of experts whose checkpoint is quantised already."""
    found = getattr(config, "quantization_config", None) or {}
    if found and any(expert_weights(skeleton)):
        method = found.get("quant_method") if isinstance(found, dict) else found.quant_method
        raise origin.error(
            f"the weights of {name} are quantised already ({getattr(method, 'value', method)}), and experts are"
            " quantised to 4 bits only from weights in 16 or 32 bits.",
            hint="Give the checkpoint in bfloat16.",
        )


class Nf4ExpertsConfig(BitsAndBytesConfig):
    """bitsandbytes' 4 bits for linear layers, and the same format for experts."""

    def __init__(self, **options: Any) -> None:
        super().__init__(**options)
        self.quant_method = METHOD  # type: ignore[assignment]  # transformers' enum has its own methods only


@register_quantizer(METHOD)
class Nf4ExpertsQuantizer(Bnb4BitHfQuantizer):
    """transformers' quantizer of `Nf4ExpertsConfig`."""

    def update_device_map(self, device_map: dict[str, Any] | None) -> dict[str, Any] | None:
        """Take the device on which experts are quantised from the device map, which has one entry."""
        self.device = torch.device((device_map or {"": "cpu"})[""])
        return super().update_device_map(device_map)

    def _process_model_before_weight_loading(
        self, model: PreTrainedModel, device_map: Any = None, **kwargs: Any
    ) -> None:
        self.experts = {name for name, *_ in expert_weights(model)}
        super()._process_model_before_weight_loading(model, device_map, **kwargs)

    def param_needs_quantization(self, model: PreTrainedModel, param_name: str, **kwargs: Any) -> bool:
        """Return whether a parameter is stored in 4 bits."""
        return param_name in self.experts or super().param_needs_quantization(model, param_name, **kwargs)

    def update_weight_conversions(self, weight_conversions: list[Any], *model: PreTrainedModel) -> list[Any]:
        """Merge the experts of a checkpoint in host memory: the copies take three times the memory of a weight.

        transformers 5.17 passes no model. 5.10 always merges on the device.
        """
        names = "\n".join(self.experts)
        updated = super().update_weight_conversions(weight_conversions, *model)
        for converter in updated:
            if isinstance(converter, WeightConverter) and hasattr(converter, "force_cpu"):
                targets = (re.search(f"{target}$", names, re.MULTILINE) for target in converter.target_patterns)
                converter.force_cpu = converter.force_cpu or any(targets)
        return updated

    def get_quantize_ops(self) -> ConversionOps:
        """Return the operation that quantises a loaded parameter."""
        return _Quantize(self)

    def _dequantize(self, model: PreTrainedModel, dtype: torch.dtype | None = None) -> PreTrainedModel:
        model = super()._dequantize(model, dtype=dtype)
        for _, module, name in list(expert_weights(model)):
            weight = getattr(module, name)
            if isinstance(weight, QuantisedWeight):
                setattr(module, name, nn.Parameter(weight.dequantize().to(dtype, copy=True), requires_grad=False))
        return model


class _Quantize(ConversionOps):
    def __init__(self, quantizer: Nf4ExpertsQuantizer) -> None:
        self.quantizer = quantizer
        self.linear = Bnb4bitQuantize(quantizer)

    # transformers passes the patterns by name, and takes tensors as well as lists of them, as Bnb4bitQuantize returns
    def convert(self, input_dict: dict[str, Any], **kwargs: Any) -> dict[str, torch.Tensor]:  # type: ignore[override]
        result: dict[str, torch.Tensor] = {}
        for name, found in input_dict.items():
            if name in self.quantizer.experts:
                weight = found[0] if isinstance(found, list) else found
                result[name] = nn.Parameter(self._quantised(weight), requires_grad=False)
            else:
                result |= self.linear.convert({name: found}, **kwargs)
        return result

    def _quantised(self, weight: torch.Tensor) -> QuantisedWeight:
        config = self.quantizer.quantization_config
        return to_nf4(
            weight,
            self.quantizer.device,
            quant_type=config.bnb_4bit_quant_type,
            double_quant=config.bnb_4bit_use_double_quant,
        )


# ---- random weights


class _RandomWeight:
    """A parameter of a checkpoint that is initialised when transformers reads it, as `tensor[...]`."""

    def __init__(self, skeleton: PreTrainedModel, name: str, device: torch.device, seed: int) -> None:
        self.skeleton = skeleton
        self.name = name
        self.device = device
        self.seed = seed + zlib.crc32(name.encode())  # `hash` of a text differs between processes

    @torch.no_grad()
    def __getitem__(self, everything: object) -> torch.Tensor:
        path, _, name = self.name.rpartition(".")
        module = copy.copy(self.skeleton.get_submodule(path))
        module._parameters = dict(module._parameters)
        value = torch.empty_like(module.get_parameter(name), device=self.device)
        module._parameters[name] = nn.Parameter(value, requires_grad=False)
        # only this parameter is in memory; the module's others stay on the meta device
        with torch.random.fork_rng(devices=[self.device] if self.device.type == "cuda" else []):
            torch.manual_seed(self.seed)
            self._owner(path)._init_weights(module)
        return value

    def _owner(self, path: str) -> PreTrainedModel:
        """Return the innermost transformers model that holds a module: it knows how to initialise it."""
        parts = path.split(".")
        modules = (self.skeleton.get_submodule(".".join(parts[:count])) for count in range(len(parts), 0, -1))
        return next((module for module in modules if isinstance(module, PreTrainedModel)), self.skeleton)


def random_in_four_bits(
    skeleton: PreTrainedModel,
    config: PreTrainedConfig,
    *,
    seed: int,
    device_map: dict[str, torch.device],
    **options: Any,
) -> PreTrainedModel:
    """Return a model with random weights in 4 bits. One parameter at a time is in full precision.

    skeleton: the model on the meta device. options: of from_pretrained.
    """
    config = copy.deepcopy(config)
    if hasattr(config, "quantization_config"):  # of the published weights, which are not read
        del config.quantization_config
    names = (name for name, _ in skeleton.named_parameters())  # tied weights once
    state = {name: _RandomWeight(skeleton, name, device_map[""], seed) for name in names}
    return type(skeleton).from_pretrained(None, config=config, state_dict=state, device_map=device_map, **options)
