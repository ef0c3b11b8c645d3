"""torch.compile per decoder layer: equal layers share one graph, and FSDP wraps compiled layers."""

from __future__ import annotations

from contextlib import AbstractContextManager

import torch
from torch import nn

from ligertune.errors import UserError
from ligertune.untraced_inputs import hide_from_layers

# Graphs per layer class: eight sequence lengths in training and eight in evaluation, with a margin. torch allows 8.
MAX_GRAPHS = 32


def compile_layers(model: nn.Module, *, dynamic: bool | None = False) -> None:
    """Compile every decoder layer in place.

    dynamic: as in torch.compile. With False each sequence length gets its own graph; `plan_data` keeps lengths few.
    Raises UserError if the model does not name its layer classes (`_no_split_modules`).
    """
    names = set(getattr(model, "_no_split_modules", None) or ())
    layers = [module for module in model.modules() if type(module).__name__ in names]
    if not layers:
        raise UserError(
            f"train.torch_compile: {type(model).__name__} names no layers that could be compiled.",
            hint="Write train.torch_compile: false.",
        )
    torch._dynamo.config.recompile_limit = max(torch._dynamo.config.recompile_limit, MAX_GRAPHS)
    for layer in layers:
        layer.compile(dynamic=dynamic)
    model.register_forward_pre_hook(hide_from_layers, with_kwargs=True)


def run_eagerly() -> AbstractContextManager[object]:
    """Return a context in which compiled layers run eagerly, for generation: each new length would be a new graph."""
    return torch.compiler.set_stance("force_eager")
