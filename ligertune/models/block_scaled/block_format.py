"""Block-scaled bases: which weights a checkpoint stores in MXFP4 or float8, read from its configuration.

mxfp4   gpt-oss: the 3-D weights of experts
fp8     DeepSeek-V3, Qwen3-FP8: linear layers and experts in e4m3, with a scale for each block (`weight_block_size`)

Both name the modules that they leave (`modules_to_not_convert`). Other float8 checkpoints (one scale per tensor,
experts in FP4) are dequantised while they are loaded.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Literal

import torch
from ligertune_kernels.ops.block_scaled.dequantize_float8_blocks import Float8Blocks, scales_shape
from ligertune_kernels.ops.block_scaled.dequantize_mxfp4 import MX_BLOCK, Mxfp4
from ligertune_kernels.ops.moe.quantised_weight import QuantisedWeight
from torch import nn
from transformers import PreTrainedConfig, PreTrainedModel
from transformers.conversion_mapping import get_model_conversion_mapping
from transformers.core_model_loading import (
    Concatenate,
    MergeModulelist,
    WeightConverter,
    WeightRenaming,
    rename_source_key,
)
from transformers.quantizers.base import HfQuantizer

from ligertune.files.base_model import HeldAs

if TYPE_CHECKING:
    from ligertune.planning.options import MethodOptions, ModelOptions

FormatName = Literal["mxfp4", "fp8"]


@dataclass(frozen=True)
class BlockFormat:
    """Format of a checkpoint's weights. block: rows and columns that share a scale. left: modules in 16 bits."""

    name: FormatName
    block: tuple[int, int]
    left: tuple[str, ...] | None  # None: transformers' own choice, the output head


@dataclass(frozen=True)
class StoredWeight:
    """A weight of the model that the checkpoint stores in few bits.

    transposed: the checkpoint has the last two dimensions in the other order. parts: tensors of the checkpoint, gate
    and up, that are one weight here.
    """

    name: str
    module: nn.Module
    attribute: str
    transposed: bool
    parts: int

    @property
    def parameter(self) -> nn.Parameter:
        """The weight as the module has it now."""
        return self.module._parameters[self.attribute]  # type: ignore[return-value]  # registered, so not None


def block_format(config: PreTrainedConfig) -> BlockFormat | None:
    """Return the block-scaled format of a checkpoint; None for any other one."""
    found: Any = getattr(config, "quantization_config", None) or {}
    values = found if isinstance(found, dict) else found.to_dict()
    method = values.get("quant_method")
    name = getattr(method, "value", method)
    left = values.get("modules_to_not_convert") or values.get("ignored_layers")
    kept = None if left is None else tuple(left)
    if name == "mxfp4":
        return BlockFormat("mxfp4", (1, MX_BLOCK), kept)
    block = values.get("weight_block_size")
    if name != "fp8" or not block or values.get("expert_dtype", "fp8") != "fp8" or values.get("modules_to_convert"):
        return None
    return BlockFormat("fp8", (int(block[0]), int(block[1])), kept)


def held_as(method: MethodOptions, spec: ModelOptions, config: PreTrainedConfig) -> HeldAs | None:
    """Return how a run holds the frozen weights of its base: an adapter trains on a block-scaled base as it is."""
    is_frozen = method.type == "lora" and method.stored_as is None and spec.init == "pretrained"
    return "as in the files" if is_frozen and block_format(config) is not None else method.stored_as


def stored_note(method: MethodOptions, spec: ModelOptions, config: PreTrainedConfig, model: nn.Module) -> str:
    """Return a sentence for the plan on how a run holds a block-scaled base; empty for other bases.

    config: as it was read. model: as the run builds it, without an adapter.
    """
    found = block_format(config)
    if found is None or spec.init == "random":
        return ""
    held = [parameter for parameter in model.parameters() if isinstance(parameter, QuantisedWeight)]
    if not held:
        is_adapter = method.type in ("lora", "qlora")
        why = "this model's class merges them" if is_adapter else "only adapters train on them as they are stored"
        return f"the weights of the base are stored in {found.name}, and are dequantised while they are loaded: {why}"
    gib = sum(parameter.stored_bytes for parameter in held) / 2**30
    return (
        f"the weights of the base stay in {found.name} ({gib:.2f} GiB), and are dequantised while a layer computes; "
        "activations are not quantised"
    )


def stored_weights(model: PreTrainedModel, found: BlockFormat) -> list[StoredWeight]:
    """Return the weights of a model that a checkpoint stores in this format, in the order of the model.

    There are none if transformers merges tensors of the checkpoint in a way that blocks do not survive. model: without
    an adapter; it may be on the meta device.
    """
    left = _left_modules(model, found)
    weights = list(_candidates(model, found, left))
    merges = expert_merges(model)
    for weight in weights:
        changed = any(target in weight.name for target in merges.other_targets)
        if changed and found.name == "fp8":
            return []
    return weights


def _candidates(model: PreTrainedModel, found: BlockFormat, left: list[str]) -> Iterator[StoredWeight]:
    for path, module in model.named_modules():
        if _is_left(path, left):
            continue
        if path.endswith(".experts"):
            for attribute, parameter in module.named_parameters(recurse=False):
                if parameter.ndim == 3:
                    parts = 2 if attribute == "gate_up_proj" and found.name == "fp8" else 1
                    name = f"{path}.{attribute}"
                    yield StoredWeight(name, module, attribute, found.name == "mxfp4", parts)
        elif type(module) is nn.Linear and found.name == "fp8":
            yield StoredWeight(f"{path}.weight", module, "weight", transposed=False, parts=1)


def _is_left(path: str, patterns: list[str]) -> bool:
    """Return whether a module stays in 16 bits: a pattern is its name, a part that contains it, or the name's end.

    transformers 5.17 takes `mlp.gate` for `mlp.gate_proj`, too.
    """
    return any(re.match(rf"(?:{pattern})(?:(?<=\.)|\.|$)", path) or path.endswith(pattern) for pattern in patterns)


def _left_modules(model: PreTrainedModel, found: BlockFormat) -> list[str]:
    """Return the modules that stay in 16 bits, under the names of the checkpoint and of the model."""
    given = None if found.left is None else list(found.left)
    left = HfQuantizer.get_modules_to_not_convert(model, given, [*(model._keep_in_fp32_modules or ())])
    renamings = [one for one in get_model_conversion_mapping(model) if isinstance(one, WeightRenaming)]
    renamed = [rename_source_key(f"{name}.", renamings, [])[0].removesuffix(".") for name in left]
    return [*left, *renamed]


@dataclass(frozen=True)
class ExpertMerges:
    """How transformers merges the tensors of a checkpoint. other_targets: ends of names of weights made otherwise."""

    converters: tuple[WeightConverter, ...]  # each stacks experts, and joins gate and up
    other_targets: tuple[str, ...]


def expert_merges(model: PreTrainedModel) -> ExpertMerges:
    """Return the merges of experts of a model, and the targets of other conversions of weights."""
    plain: list[WeightConverter] = []
    others: list[str] = []
    for converter in get_model_conversion_mapping(model):
        if isinstance(converter, WeightConverter):
            if stacks_experts(converter):
                plain.append(converter)
            else:
                others += converter.target_patterns
    return ExpertMerges(tuple(plain), tuple(others))


def stacks_experts(converter: WeightConverter) -> bool:
    """Return whether a conversion stacks weights `experts.*.x.weight`, and joins several of them by rows."""
    kinds = [type(operation) for operation in converter.operations]
    sources = converter.source_patterns
    named = all(".*." in source and source.removesuffix("$").endswith(".weight") for source in sources)
    whole = kinds in ([MergeModulelist], [MergeModulelist, Concatenate])
    dims = [getattr(operation, "dim", None) for operation in converter.operations]
    return named and whole and dims in ([0], [0, 1]) and len(converter.target_patterns) == 1


# ---- on the meta device


def hold_on_meta(model: PreTrainedModel, found: BlockFormat) -> None:
    """Replace the weights of a model on the meta device by what a run holds of them, for plans and rehearsals."""
    for weight in stored_weights(model, found):
        shape = tuple(weight.parameter.shape)
        held = held_weight(_on_meta(found, weight, shape), shape, weight.parameter.dtype, transposed=weight.transposed)
        weight.module._parameters[weight.attribute] = held


def _on_meta(found: BlockFormat, weight: StoredWeight, shape: tuple[int, ...]) -> Mxfp4 | Float8Blocks:
    stored = (*shape[:-2], shape[-1], shape[-2]) if weight.transposed else shape
    n_experts, n_rows, n_columns = stored if len(stored) == 3 else (1, *stored)
    if found.name == "mxfp4":
        groups = (n_experts, n_rows, -(-n_columns // MX_BLOCK))
        blocks = torch.empty(*groups, MX_BLOCK // 2, dtype=torch.uint8, device="meta")
        return Mxfp4(blocks, torch.empty(groups, dtype=torch.uint8, device="meta"))
    values = torch.empty(n_experts, n_rows, n_columns, dtype=torch.float8_e4m3fn, device="meta")
    scales = torch.empty(scales_shape(tuple(values.shape), found.block, weight.parts), device="meta")
    return Float8Blocks(values, scales, found.block, weight.parts)


def held_weight(
    stored: Mxfp4 | Float8Blocks, shape: tuple[int, ...], dtype: torch.dtype, *, transposed: bool
) -> nn.Parameter:
    """Return the frozen parameter of a module. shape: as the module shows it."""
    weight = QuantisedWeight(stored, shape, dtype, transposed=transposed)
    return nn.Parameter(weight, requires_grad=False)
