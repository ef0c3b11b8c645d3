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


def remember_initial(adapted: AnyModule) -> None:
    """Keep the present factors of all LoRA layers of a PEFT model as B0 and A0."""
    factors = {name: p for name, p in adapted.named_parameters() if ".lora_A." in name or ".lora_B." in name}
    adapted.initial_lora = {name: p.detach().cpu().clone() for name, p in factors.items()}


def initial_factors(model: nn.Module) -> dict[str, Tensor]:
    """Return B0 and A0 by their names in a checkpoint; empty for adapters that leave the weights alone."""
    owner = _owner(model)
    return {} if owner is None else {f"{PREFIX}{name}": t for name, t in owner.initial_lora.items()}


@torch.no_grad()
def restore_initial(model: nn.Module, saved: Mapping[str, Tensor]) -> None:
    """Let W' be that of a checkpoint, if its B0 and A0 differ from those computed here. No change if they are equal."""
    owner = _owner(model)
    if owner is None:
        return
    for path, layer in owner.named_modules():
        a = f"{path}.lora_A.default.weight"
        b = f"{path}.lora_B.default.weight"
        if a not in owner.initial_lora or f"{PREFIX}{a}" not in saved:
            continue
        before, after = ([t[name] for name in (b, a)] for t in (owner.initial_lora, _without_prefix(saved)))
        if all(map(torch.equal, before, after)):
            continue
        weight = layer.get_base_layer().weight
        scale = layer.scaling["default"]
        (b0, a0), (b1, a1) = ([t.to(weight.device) for t in pair] for pair in (before, after))
        weight.copy_(weight.float() + scale * (b0 @ a0 - b1 @ a1))
        owner.initial_lora |= {b: after[0], a: after[1]}


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


def _without_prefix(saved: Mapping[str, Tensor]) -> dict[str, Tensor]:
    return {name.removeprefix(PREFIX): t for name, t in saved.items() if name.startswith(PREFIX)}
