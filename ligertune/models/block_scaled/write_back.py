"""Write a merged adapter back in the block-scaled format of its base: `ligertune export --format mxfp4 | fp8`.

The base's files are copied, and the tensors that the adapter changes are written over: names, sizes and places of all
tensors stay, and so do the bytes of the others. A changed weight is dequantised, the update s B A is added in float32,
and the sum is quantised once, by `quantize_mxfp4` with the better of two scales and by `quantize_float8_blocks`.
"""

from __future__ import annotations

import re
import shutil
from collections import defaultdict
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, BinaryIO

import torch
from ligertune_kernels.ops.block_scaled.dequantize_float8_blocks import quantize_float8_blocks
from ligertune_kernels.ops.block_scaled.dequantize_mxfp4 import quantize_mxfp4
from ligertune_kernels.ops.moe.quantised_weight import QuantisedWeight
from transformers.conversion_mapping import get_model_conversion_mapping
from transformers.core_model_loading import WeightConverter, WeightRenaming, rename_source_key

from ligertune.any_types import AnyModule
from ligertune.errors import UserError
from ligertune.models.block_scaled.block_format import BlockFormat, stacks_experts
from ligertune.models.carried_tensors import StoredTensor, tensors_in_safetensors

if TYPE_CHECKING:
    from transformers import PreTrainedModel

DTYPES = {"F32": torch.float32, "BF16": torch.bfloat16, "F16": torch.float16, "F8_E8M0": torch.float8_e8m0fnu}
INSTEAD = "Export without --format, which writes 16-bit weights."


@dataclass(frozen=True)
class ChangedWeight:
    """A weight of the base and the update of its adapter, s B A for each of X experts; X is 1 for a linear layer.

    transposed: the weight is (inputs, outputs), and the update is added transposed.
    """

    weight: torch.Tensor
    a: torch.Tensor  # (X, R, inputs)
    b: torch.Tensor  # (X, outputs, R)
    scale: float
    transposed: bool

    def parts(self, expert: int, device: torch.device) -> tuple[torch.Tensor, torch.Tensor]:
        """Return the weight of one expert and its update, in float32 on a device."""
        one = self.weight[expert] if self.weight.ndim == 3 else self.weight
        dense = one.detach().to(device=device, dtype=torch.float32)
        dense = dense.dequantize() if isinstance(dense, QuantisedWeight) else dense
        update = self.scale * (self.b[expert].to(device).float() @ self.a[expert].to(device).float())
        return dense, update.T if self.transposed else update


@dataclass
class Rounding:
    """Sums over the weights that were quantised again: what rounding has changed, and what it left of the updates."""

    tensors: int = 0  # written, those in 16 bits included
    weights: float = 0.0
    errors: float = 0.0
    updates: float = 0.0
    kept_updates: float = 0.0

    def add(self, weight: torch.Tensor, update: torch.Tensor, written: torch.Tensor) -> None:
        """Count one weight. written: its values after rounding weight + update."""
        change = (written - weight).double()
        wanted = update.double()
        self.weights += float((weight + update).double().square().sum())
        self.errors += float((wanted - change).square().sum())
        self.updates += float(wanted.square().sum())
        self.kept_updates += float((change * wanted).sum())

    def __str__(self) -> str:
        """Return a sentence on the rounding; empty if nothing was quantised."""
        if not self.weights:
            return ""
        error = (self.errors / self.weights) ** 0.5
        kept = self.kept_updates / self.updates if self.updates else 1.0
        return (
            f"rounding moves the quantised weights by {error:.2%} of their norm, and keeps {kept:.0%} of the adapter's"
            " update of them"
        )


def changed_weights(adapted: AnyModule) -> dict[str, ChangedWeight]:
    """Return the weights that a plain LoRA adapter changes, by their names in the base model.

    adapted: PEFT's model, not merged. Raises UserError for adapters that change more than that.
    """
    from peft.tuners.lora.layer import Linear, LoraLayer, ParamWrapper  # takes seconds
    from peft.tuners.tuners_utils import BaseTunerLayer
    from peft.utils.other import AuxiliaryTrainingWrapper

    from ligertune.patching.experts.expert_lora import expert_lora

    found: dict[str, ChangedWeight] = {}
    for path, module in adapted.get_base_model().named_modules():
        layer: AnyModule = module
        name = re.sub(r"(\.base_layer)+$", "", path)
        if isinstance(module, AuxiliaryTrainingWrapper):
            raise _more_than_lora(f"trains all of {name}")
        if not isinstance(module, BaseTunerLayer):
            continue
        is_plain = isinstance(module, LoraLayer) and not layer.lora_variant and not any(layer.lora_bias.values())
        if not is_plain or not isinstance(module, Linear | ParamWrapper):
            raise _more_than_lora(f"is more than s B A on {name}")
        if isinstance(module, ParamWrapper):
            transposed = getattr(layer.get_base_layer(), "is_transposed", False)
            a, b, scale = expert_lora(layer, "default", transposed=transposed)
            weight = ChangedWeight(layer.get_param(), a, b, scale, transposed)
            found[f"{name}.{layer.parameter_name}"] = weight
        else:
            a = layer.lora_A["default"].weight[None]
            b = layer.lora_B["default"].weight[None]
            found[f"{name}.weight"] = ChangedWeight(
                layer.base_layer.weight, a, b, layer.scaling["default"], bool(layer.fan_in_fan_out)
            )
    return found


def _more_than_lora(what: str) -> UserError:
    return UserError(f"--format: the adapter {what}, and only plain LoRA is written back.", hint=INSTEAD)


# ---- places in the base's files


@dataclass
class _Slot:
    """A tensor of the checkpoint and its scales, which hold all of a weight, or a part of one expert's."""

    part: int = 0
    expert: int | None = None
    places: dict[str, StoredTensor] = field(default_factory=dict)  # by "values" and "scales"


def _slots(
    model: PreTrainedModel, stored: dict[str, StoredTensor], changed: dict[str, ChangedWeight]
) -> dict[str, list[_Slot]]:
    """Return the places of each changed weight in the checkpoint. Raises UserError if one has none."""
    transforms = get_model_conversion_mapping(model)
    renamings = [one for one in transforms if isinstance(one, WeightRenaming)]
    converters = [one for one in transforms if isinstance(one, WeightConverter)]
    expected = dict.fromkeys(changed, True)
    slots: dict[tuple[str, int, int | None], _Slot] = defaultdict(_Slot)
    for name, place in stored.items():
        weight, role = _weight_of(name, stored)
        renamed, pattern = rename_source_key(weight, renamings, converters, model.base_model_prefix, expected)
        if renamed not in changed:
            renamed, pattern = rename_source_key(weight, [], [], model.base_model_prefix, expected)
        if renamed not in changed:
            continue
        part = 0
        expert = None
        if pattern is not None:
            converter = next(one for one in converters if pattern in one.source_patterns)
            number = re.search(r"\.experts\.(\d+)\.", weight)
            if not stacks_experts(converter) or number is None:
                raise UserError(f"--format: {name} is no part of a weight that can be written back.", hint=INSTEAD)
            part = converter.source_patterns.index(pattern)
            expert = int(number[1])
        slot = slots[renamed, part, expert]
        slot.part = part
        slot.expert = expert
        slot.places[role] = place
    by_weight: dict[str, list[_Slot]] = defaultdict(list)
    for (renamed, _, _), slot in slots.items():
        by_weight[renamed].append(slot)
    missing = sorted(set(changed) - set(by_weight))
    if missing:
        raise UserError(f"--format: the base's files hold no {missing[0]}, which the adapter changes.", hint=INSTEAD)
    return by_weight


def _weight_of(name: str, stored: dict[str, StoredTensor]) -> tuple[str, str]:
    """Return the weight that a tensor of a checkpoint belongs to, and whether it is its values or its scales."""
    for end, weight_end, role in (
        ("_blocks", "", "values"), ("_scales", "", "scales"), (".weight_scale_inv", ".weight", "scales"),
        (".scale", ".weight", "scales"),
    ):  # fmt: skip
        weight = name.removesuffix(end) + weight_end
        is_part = role == "values" or weight in stored or weight + "_blocks" in stored
        if name.endswith(end) and is_part:
            return weight, role
    return name, "values"


# ---- writing


def write_back(
    adapted: AnyModule,  # PEFT's model on a base that is held as it is stored
    files: list[Path],  # weight files of the base
    folder: Path,
    found: BlockFormat,
) -> Rounding:
    """Copy the weight files of a base into `folder`, with the adapter merged into them. Raises UserError."""
    changed = changed_weights(adapted)
    if any(file.suffix != ".safetensors" for file in files):
        raise UserError(f"--format: {files[0]} is no safetensors file.", hint=INSTEAD)
    stored: dict[str, StoredTensor] = {}
    for file in files:
        stored |= tensors_in_safetensors(file)
    slots = _slots(adapted.get_base_model(), stored, changed)
    for file in files:
        shutil.copyfile(file, folder / file.name)
    rounding = Rounding()
    opened = {file: (folder / file.name).open("r+b") for file in files}
    try:
        for name, weight in changed.items():
            for slot in slots[name]:
                _write_slot(weight, slot, opened, found, rounding)
    finally:
        for written in opened.values():
            written.close()
    return rounding


def _write_slot(
    weight: ChangedWeight, slot: _Slot, opened: Mapping[Path, BinaryIO], found: BlockFormat, rounding: Rounding
) -> None:
    rounding.tensors += len(slot.places)
    positions = {role: place.begin for role, place in slot.places.items()}
    for dense, update in _pieces(weight, slot, found):
        for role, tensor in _encoded(dense, update, slot.places, found, rounding).items():
            data = tensor.contiguous().view(torch.uint8).cpu().numpy().tobytes()
            file = opened[slot.places[role].file]
            file.seek(positions[role])
            file.write(data)
            positions[role] += len(data)
    for role, place in slot.places.items():
        if positions[role] != place.end:
            raise UserError(f"--format: a tensor of {place.file} has another size than the model says.", hint=INSTEAD)


def _pieces(weight: ChangedWeight, slot: _Slot, found: BlockFormat) -> Iterator[tuple[torch.Tensor, torch.Tensor]]:
    """Yield rows of a slot and their update, as the checkpoint has them (rows, columns), one expert after the other."""
    is_transposed = found.name == "mxfp4" and "scales" in slot.places
    experts = range(len(weight.a)) if slot.expert is None else (slot.expert,)
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")  # one expert at a time
    for expert in experts:
        dense, update = weight.parts(expert, device)
        if is_transposed:
            dense = dense.T
            update = update.T
        if slot.expert is None:
            yield dense, update
        else:  # gate or up, in the model's order
            rows = slot.places["values"].shape[0]
            part = slice(slot.part * rows, (slot.part + 1) * rows)
            yield dense[part], update[part]


def _encoded(
    dense: torch.Tensor, update: torch.Tensor, places: dict[str, StoredTensor], found: BlockFormat, rounding: Rounding
) -> dict[str, torch.Tensor]:
    """Return the values and scales of dense + update (rows, columns) as the checkpoint stores them."""
    merged = dense + update
    if "scales" not in places:
        return {"values": merged.to(DTYPES[places["values"].dtype])}
    if found.name == "mxfp4":
        packed = quantize_mxfp4(merged[None], best_scale=True)
        rounding.add(dense, update, packed.dequantize(packed.shape, torch.float32)[0])
        return {"values": packed.blocks, "scales": packed.scales}
    stored_dtype = places["scales"].dtype
    dtype = torch.float8_e8m0fnu if stored_dtype == "U8" else DTYPES[stored_dtype]  # U8: exponents of two
    blocks = quantize_float8_blocks(merged[None], block=found.block, scale_dtype=dtype)
    rounding.add(dense, update, blocks.dequantize(blocks.shape, torch.float32)[0])
    return {"values": blocks.values, "scales": blocks.scales.to(dtype)}
