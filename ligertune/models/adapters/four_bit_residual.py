"""PiSSA and OLoRA under QLoRA: what the initial adapter leaves of each weight is stored in 4 bits.

    W ≈ Q + s B A        Q: W - s B0 A0 in 4 bits, dequantised; B = B0 and A = A0 at the start

PEFT computes B0 and A0 from the weight before quantisation. They take its largest singular values, so the rest has
smaller numbers, and 4 bits lose less of it. The saved adapter is that of `as_plain_lora`: its second half is B0 and A0,
so that Q follows from the base and the adapter alone.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

import peft
import torch
from peft.tuners.lora.layer import LoraLayer
from torch import Tensor, nn
from transformers.pytorch_utils import Conv1D

from ligertune.any_types import AnyModule
from ligertune.files.model_files import ModelOrigin
from ligertune.models.adapters.initial_lora import initial_names, remember_initial
from ligertune.patching.lora.fused_lora import adapted_layers

if TYPE_CHECKING:
    from peft import PeftModel

_PEFT_PREFIX = "base_model.model."  # of the names of PEFT's parameters


@dataclass(frozen=True)
class InitialLora:
    """The initial adapter of a layer: B0 (F, R) and A0 (R, E) in float32, and the scale s."""

    b: Tensor
    a: Tensor
    scale: float

    def residual(self, weight: Tensor) -> Tensor:
        """Return W - s B0 A0 in the dtype of a weight (F, E); in float64, so that all devices round it alike."""
        b, a = (factor.to(weight.device, torch.float64) for factor in (self.b, self.a))
        return weight.double().addmm_(b, a, alpha=-self.scale).to(weight.dtype)

    def added_to(self, weight: Tensor) -> Tensor:
        """Return W + s B0 A0, as `residual`."""
        return InitialLora(-self.b, self.a, self.scale).residual(weight)


@torch.no_grad()
def start_from_original(adapted: PeftModel, original: Callable[[], nn.Module], *, init: str) -> None:
    """Set each adapter to PEFT's initial one of the 16-bit weight, and store the rest of the weight in 4 bits.

    original: loads the model before quantisation. A resumed run loads it again if its checkpoint has other factors.
    init: name of `init_lora_weights`. Layers that are not quantised, such as the output head, keep the rest as it is.
    """
    before = original()
    for path, layer in _named_layers(adapted).items():
        base: AnyModule = layer.get_base_layer()
        weight = weight_of(before, path).to(base.weight.device)
        frozen = base.weight
        base.weight = nn.Parameter(weight.clone(), requires_grad=False)  # PEFT changes it
        if init == "olora":
            layer.olora_init("default")
        else:
            layer.pissa_init("default", init)
        base.weight = frozen
        b: AnyModule = layer.lora_B["default"]
        a: AnyModule = layer.lora_A["default"]
        store_residual(base, weight, InitialLora(b.weight, a.weight, layer.scaling["default"]))
    remember_initial(adapted)
    owner: AnyModule = adapted
    owner.store_residuals = partial(_store_again, adapted, original)


def _store_again(
    adapted: PeftModel, original: Callable[[], nn.Module], factors: Mapping[str, tuple[Tensor, Tensor]]
) -> None:
    """Store the residuals of other initial adapters (B0, A0), by the path of the layer in the PEFT model."""
    before = original()
    for path, (b, a) in factors.items():
        layer: AnyModule = adapted.get_submodule(path)
        weight = weight_of(before, path.removeprefix(_PEFT_PREFIX))
        store_residual(layer.get_base_layer(), weight, InitialLora(b, a, layer.scaling["default"]))


@torch.no_grad()
def store_residual(layer: AnyModule, weight: Tensor, initial: InitialLora) -> None:
    """Replace the weight of a layer by what the initial adapter leaves of `weight`, in the format of the layer."""
    stored = layer.weight
    residual = initial.residual(weight.to(stored.device))
    if not hasattr(stored, "quant_state"):
        stored.copy_(residual)
        return
    packed = type(stored)(
        residual,
        requires_grad=False,
        blocksize=stored.blocksize,
        compress_statistics=stored.compress_statistics,
        quant_type=stored.quant_type,
        quant_storage=stored.quant_storage,
        module=layer,
    ).to(stored.device)  # which quantises it
    packed.quant_state.dtype = stored.quant_state.dtype
    layer.weight = packed


def weight_of(original: nn.Module, path: str) -> Tensor:
    """Return the weight (F, E) of a layer of the model before quantisation. That of a Conv1D is stored as (E, F)."""
    layer = original.get_submodule(path)
    weight = layer.get_parameter("weight").detach()
    return weight.T.contiguous() if isinstance(layer, Conv1D) else weight


def store_residuals(model: nn.Module, original: nn.Module, initial: Mapping[str, InitialLora]) -> None:
    """Store the residuals of the layers that have an initial adapter. initial: by the path of the layer."""
    for path, factors in initial.items():
        store_residual(model.get_submodule(path), weight_of(original, path), factors)


@torch.no_grad()
def add_initial(model: nn.Module, initial: Mapping[str, InitialLora]) -> None:
    """Add the initial adapters to dense residuals: the weights that a saved adapter, of twice the rank, works on."""
    for path, factors in initial.items():
        weight = model.get_submodule(path).get_parameter("weight")
        weight.copy_(factors.added_to(weight))


# ---- the initial adapter in the files of a run


def initial_of_adapter(folder: Path, origin: ModelOrigin) -> dict[str, InitialLora]:
    """Return the initial adapters in the second half of a saved adapter, by the path of the layer. Raises UserError."""
    config: Any = peft.PeftConfig.from_pretrained(str(folder))
    weights = peft.load_peft_weights(str(folder), device="cpu")
    rank, odd = divmod(config.r, 2)
    if odd:
        raise origin.error(
            f"the adapter in {folder} has rank {config.r}, and one that holds its initial values has an even rank.",
            hint="Restore the files that the run has saved.",
        )
    scale = config.lora_alpha / (config.r**0.5 if config.use_rslora else config.r)
    ends = (".lora_A.weight", ".lora_B.weight")
    paths = [name.removesuffix(ends[0]) for name in weights if name.endswith(ends[0])]
    found = {}
    for path in paths:
        a, b = (weights[f"{path}{end}"] for end in ends)
        found[path.removeprefix(_PEFT_PREFIX)] = InitialLora(-b[:, rank:].float(), a[rank:].float(), scale)
    return found


def initial_of_checkpoint(saved: Mapping[str, Tensor], *, alpha: float, rslora: bool) -> dict[str, InitialLora]:
    """Return the initial adapters of a checkpoint, by the path of the layer. saved: tensors of its file, by name."""
    found = {}
    for path, (a, b) in initial_names(saved).items():
        rank = len(saved[a])
        scale = alpha / (rank**0.5 if rslora else rank)
        found[path.removeprefix(_PEFT_PREFIX)] = InitialLora(saved[b].float(), saved[a].float(), scale)
    return found


@torch.no_grad()
def leave_initial_out(adapted: PeftModel) -> None:
    """Cut a loaded adapter of twice the rank to its first half, which was trained on the residuals."""
    config: Any = adapted.peft_config["default"]
    config.lora_alpha /= 2**0.5 if config.use_rslora else 2
    config.r //= 2
    for layer in adapted_layers(adapted):
        rank = config.r
        layer.r["default"] = rank
        a: AnyModule = layer.lora_A["default"]
        a.weight = nn.Parameter(a.weight[:rank].clone())
        a.out_features = rank
        b: AnyModule = layer.lora_B["default"]
        b.weight = nn.Parameter(b.weight[:, :rank].clone())
        b.in_features = rank


def _named_layers(adapted: PeftModel) -> dict[str, LoraLayer]:
    """Return the adapted layers by their paths in the base model."""
    base = adapted.get_base_model()
    names = {id(module): name for name, module in base.named_modules()}
    return {names[id(layer)]: layer for layer in adapted_layers(adapted)}
