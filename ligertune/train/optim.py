"""Optimizers by recipe name."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import nn

from ligertune.plan import Optimizer


@dataclass(frozen=True)
class OptimizerRow:
    """How to build one: `build(parameter groups, plan)`."""

    build: Callable[[list[dict], Optimizer], torch.optim.Optimizer]


def _adamw(groups: list[dict], plan: Optimizer, *, fused: bool) -> torch.optim.Optimizer:
    return torch.optim.AdamW(groups, lr=0.0, betas=plan.betas, eps=plan.eps, fused=fused)


OPTIMIZERS = {
    "adamw_torch": OptimizerRow(build=lambda groups, plan: _adamw(groups, plan, fused=False)),
    "adamw_torch_fused": OptimizerRow(build=lambda groups, plan: _adamw(groups, plan, fused=True)),
}


def build_optimizer(model: nn.Module, plan: Optimizer) -> torch.optim.Optimizer:
    """AdamW over what trains; norms and biases (fewer than two dimensions) are not decayed.

    The loop sets the rate, times a group's `lr_multiplier`, which Medusa heads have, their biases too.
    """
    named = [(name.startswith("medusa_head."), p) for name, p in model.named_parameters() if p.requires_grad]
    groups = []
    for of_heads, multiplier in ((False, 1.0), (True, plan.heads_lr_multiplier)):
        mine = [p for is_head, p in named if is_head is of_heads]
        own = {"lr_multiplier": multiplier} if multiplier != 1.0 else {}
        groups += [
            {"params": [p for p in mine if p.ndim >= 2], "weight_decay": plan.weight_decay, **own},
            {"params": [p for p in mine if p.ndim < 2], "weight_decay": 0.0, **own},
        ]
    return OPTIMIZERS[plan.name].build([group for group in groups if group["params"]], plan)
