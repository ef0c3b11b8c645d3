"""torch.compile, layer by layer: one graph serves all of a kind, and FSDP wraps what is compiled."""

from __future__ import annotations

from contextlib import AbstractContextManager

import torch
from torch import nn

from ligertune.attention.untraced_inputs import hide_from_layers
from ligertune.errors import UserError

MOST_GRAPHS = 32  # of a kind of layer: eight lengths to train on, as many to evaluate on; torch gives up after eight


def compile_layers(model: nn.Module, *, dynamic: bool | None = False) -> None:
    """Compile every decoder layer in place; a UserError where the model does not say which modules those are.

    dynamic: torch.compile's. False gives each length that comes a graph: `plan_data` sees to it that there are few.
    """
    names = set(getattr(model, "_no_split_modules", None) or ())
    layers = [module for module in model.modules() if type(module).__name__ in names]
    if not layers:
        raise UserError(
            f"train.torch_compile: {type(model).__name__} names no layers that could be compiled.",
            hint="Write train.torch_compile: false.",
        )
    torch._dynamo.config.recompile_limit = max(torch._dynamo.config.recompile_limit, MOST_GRAPHS)
    for layer in layers:
        layer.compile(dynamic=dynamic)
    hide_from_layers(model)


def as_written() -> AbstractContextManager:
    """Where it is entered, compiled layers run as they are written: a text that grows has a new length at each token,
    every one of which would be a graph."""
    return torch.compiler.set_stance("force_eager")
