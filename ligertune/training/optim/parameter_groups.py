"""Parameter groups: learning rate and weight decay of each trainable parameter.

In this order, the first that applies: an entry of train.lr_groups, added heads, LoRA+, all others. LoRA+ is PEFT's
(`create_loraplus_optimizer`): the factor B of each adapter and parameters of one dimension have a higher rate, adapters
of embeddings their own.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from torch import nn

from ligertune.models.mixers.decays import NAMES as DECAYS
from ligertune.models.trainable import named_parameters
from ligertune.planning.optimization import Optimizer


@dataclass(frozen=True)
class GroupSettings:
    """Settings of a group; `place` orders the groups. weight_decay: None for the run's, without norms and biases."""

    place: int
    lr_multiplier: float = 1.0
    weight_decay: float | None = None


Settings = dict[nn.Parameter, GroupSettings]
ParameterGroup = dict[str, Any]  # of a torch optimizer: its parameters and hyperparameters by name


def group_settings_of(model: nn.Module, plan: Optimizer) -> Settings:
    """Return the settings of every trainable parameter. Raises UserError for an entry that matches none."""
    named = {name: p for name, p in model.named_parameters() if p.requires_grad}
    matched = check_lr_groups(model, [group.parameters for group in plan.lr_groups])
    heads = getattr(model, "heads_prefix", None)  # a feature's model says which of its parameters are added heads
    settings = {p: _usual_settings(name, p, plan, heads) for name, p in named.items()}
    # Reversed, so that the first entry that matches a parameter is set last and stays.
    # Places from 10 on are behind those of `_usual_settings`.
    for place, (group, names) in reversed(list(enumerate(zip(plan.lr_groups, matched, strict=True), start=10))):
        settings |= {named[name]: GroupSettings(place, group.lr_multiplier, group.weight_decay) for name in names}
    return settings


def check_lr_groups(model: nn.Module, expressions: Sequence[str]) -> list[set[str]]:
    """Return the names of the trainable parameters that each expression of train.lr_groups matches.

    Raises UserError for an expression that matches none.
    """
    names = [name for name, p in model.named_parameters() if p.requires_grad]
    return [named_parameters(text, names, key=f"train.lr_groups[{i}].parameters") for i, text in enumerate(expressions)]


def parameter_groups(
    parameters: Sequence[nn.Parameter], settings: Settings, weight_decay: float
) -> list[ParameterGroup]:
    """Return the groups of some parameters for a torch optimizer: for each settings with and without weight decay.

    Norms and biases (fewer than two dimensions) and decays of recurrences get no weight decay unless their entry names
    one. The loop sets the rate of each group to the schedule's times the entry `lr_multiplier`.
    """
    groups = []
    # Sorted, because a checkpoint holds states in the order of the groups.
    for own in sorted({settings[p] for p in parameters}, key=lambda one: one.place):
        mine = [p for p in parameters if settings[p] == own]
        multiplier = {"lr_multiplier": own.lr_multiplier} if own.lr_multiplier != 1.0 else {}
        decays = (weight_decay, 0.0) if own.weight_decay is None else (own.weight_decay, own.weight_decay)
        groups += [
            {"params": [p for p in mine if p.ndim >= 2], "weight_decay": decays[0], **multiplier},
            {"params": [p for p in mine if p.ndim < 2], "weight_decay": decays[1], **multiplier},
        ]
    return [group for group in groups if group["params"]]


def _usual_settings(name: str, parameter: nn.Parameter, plan: Optimizer, heads: str | None) -> GroupSettings:
    if heads is not None and name.startswith(heads):
        return GroupSettings(3, plan.heads_lr_multiplier)
    if name.rpartition(".")[2] in DECAYS and parameter.ndim >= 2:  # numbers of heads, as of norms: Kimi's are 4-D
        return GroupSettings(4, weight_decay=0.0)
    if plan.lora_plus is None:
        return GroupSettings(0)
    if ".lora_embedding_" in name:
        return GroupSettings(1, plan.lora_plus.embedding_multiplier)
    if "lora_B" in name or parameter.ndim == 1:
        return GroupSettings(2, plan.lora_plus.b_multiplier)
    return GroupSettings(0)
