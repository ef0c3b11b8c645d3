"""Initial values of adapters that change the model's weights: PiSSA (Meng et al. 2024) and OLoRA (Büyükakyüz 2024).

    W' = W - s B0 A0        the forward computes W' x + s B A x, which is W x at the start

A saved adapter must work on W, which users have. It is W + s B A - s B0 A0, a LoRA adapter of twice the rank with the
factors [A; A0] and [B, -B0]. So B0 and A0 are kept in host memory, and in checkpoints: another device may compute other
ones.
"""

from __future__ import annotations

import copy
import math
from collections.abc import Mapping
from typing import TYPE_CHECKING

import torch
from torch import Tensor, nn

from ligertune.any_types import AnyModule

if TYPE_CHECKING:
    import peft

PREFIX = "initial."  # of names in a checkpoint
_ENDS = (".lora_A.default.weight", ".lora_B.default.weight")  # of the factors' names


def remember_initial(adapted: AnyModule) -> None:
    """Keep the present factors of all LoRA layers of a PEFT model as B0 and A0, in host memory."""
    factors = {name: p for name, p in adapted.named_parameters() if ".lora_A." in name or ".lora_B." in name}
    adapted.initial_lora = {name: p.detach().cpu().clone() for name, p in factors.items()}


def keep_initial(adapted: AnyModule, saved: Mapping[str, Tensor]) -> None:
    """Keep B0 and A0 of a checkpoint, on whose weights the model works."""
    adapted.initial_lora = {name.removeprefix(PREFIX): t for name, t in saved.items() if name.startswith(PREFIX)}


def initial_factors(model: nn.Module) -> dict[str, Tensor]:
    """Return B0 and A0 by their names in a checkpoint; empty for adapters that leave the weights alone."""
    owner = _owner(model)
    return {} if owner is None else {f"{PREFIX}{name}": t for name, t in owner.initial_lora.items()}


@torch.no_grad()
def restore_initial(model: nn.Module, saved: Mapping[str, Tensor]) -> None:
    """Let W' be that of a checkpoint, if its B0 and A0 differ from those computed here. No change if they are equal.

    Weights in 4 bits are quantised again, from the original ones.
    """
    owner = _owner(model)
    if owner is None:
        return
    changed: dict[str, tuple[Tensor, Tensor]] = {}
    for path, names in initial_names(saved).items():
        before = [owner.initial_lora.get(name.removeprefix(PREFIX)) for name in names]
        a, b = (saved[name] for name in names)
        if before[0] is not None and not all(map(torch.equal, before, (a, b))):
            changed[path] = (b, a)
    if changed and hasattr(owner, "store_residuals"):
        owner.store_residuals(changed)
    else:
        _change_weights(owner, changed)
    for path, (b, a) in changed.items():
        owner.initial_lora |= {f"{path}{_ENDS[0]}": a, f"{path}{_ENDS[1]}": b}


def _change_weights(owner: AnyModule, changed: Mapping[str, tuple[Tensor, Tensor]]) -> None:
    """Subtract other initial adapters (B0, A0) from the weights than those that were."""
    for path, after in changed.items():
        layer: AnyModule = owner.get_submodule(path)
        weight = layer.get_base_layer().weight
        scale = layer.scaling["default"]
        before = [owner.initial_lora[f"{path}{end}"] for end in reversed(_ENDS)]
        (b0, a0), (b1, a1) = ([t.to(weight.device) for t in pair] for pair in (before, after))
        weight.copy_(weight.float() + scale * (b0 @ a0 - b1 @ a1))


def initial_names(saved: Mapping[str, Tensor]) -> dict[str, tuple[str, str]]:
    """Return the names of A0 and B0 in a checkpoint, by the path of their layer."""
    paths = [n.removesuffix(_ENDS[0]) for n in saved if n.startswith(PREFIX) and n.endswith(_ENDS[0])]
    return {path.removeprefix(PREFIX): (f"{path}{_ENDS[0]}", f"{path}{_ENDS[1]}") for path in paths}


def as_plain_lora(
    adapted: AnyModule, state_dict: Mapping[str, Tensor] | None
) -> tuple[dict[str, Tensor], peft.LoraConfig]:
    """Return weights and configuration of the LoRA adapter that has the same effect on the original weights.

    adapted: a PEFT model with initial factors. state_dict: the gathered weights if the model's own are sharded.
    """
    weights = dict(state_dict or adapted.state_dict())
    for name, initial in adapted.initial_lora.items():
        trained = weights[name]
        is_a = ".lora_A." in name
        initial = initial.to(trained)
        weights[name] = torch.cat((trained, initial if is_a else -initial), dim=0 if is_a else 1)
    config = copy.deepcopy(adapted.peft_config["default"])
    config.lora_alpha *= math.sqrt(2.0) if config.use_rslora else 2
    config.r = 2 * config.r
    config.init_lora_weights = True
    return weights, config


def _owner(model: nn.Module) -> AnyModule | None:
    """Return the PEFT model that keeps B0 and A0."""
    return next((module for module in model.modules() if getattr(module, "initial_lora", None)), None)
