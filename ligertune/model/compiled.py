"""torch.compile, layer by layer: one graph serves all of a kind, and FSDP wraps what is compiled."""

from __future__ import annotations

from torch import nn

from ligertune.errors import UserError


def compile_layers(model: nn.Module, *, lengths_vary: bool = False) -> None:
    """Compile every decoder layer in place; a UserError where the model does not say which modules those are.

    lengths_vary: batches have a few lengths, and each gets a graph; else torch may make one for all that come.
    """
    names = set(getattr(model, "_no_split_modules", None) or ())
    layers = [module for module in model.modules() if type(module).__name__ in names]
    if not layers:
        raise UserError(
            f"train.torch_compile: {type(model).__name__} names no layers that could be compiled.",
            hint="Write train.torch_compile: false.",
        )
    for layer in layers:
        layer.compile(dynamic=False if lengths_vary else None)
