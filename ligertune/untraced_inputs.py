"""Hide values of a batch from torch.compile, so that compiled layers are not recompiled for each of them.

transformers passes every keyword of a model on to its layers. torch.compile makes one graph per size of each tensor
among them and per number in each tuple, whether the layer uses it or not, and gives up after a few.
"""

from __future__ import annotations

from typing import Any

from torch import nn

HIDDEN = ("document_lengths", "labelled_rows")


class Untraced:
    """Holder of a value. torch.compile guards on its type and not on the value."""

    def __init__(self, value: Any) -> None:
        self.value = value


def reveal(value: Any) -> Any:
    """Return the value inside an `Untraced`, or any other value as it is."""
    return value.value if isinstance(value, Untraced) else value


def hide_from_layers(
    model: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]
) -> tuple[tuple[Any, ...], dict[str, Any]]:
    """Forward pre-hook of a model: wrap the keywords `HIDDEN`; their users call `reveal`."""
    hidden = {name: Untraced(kwargs[name]) for name in HIDDEN if kwargs.get(name) is not None}
    return args, kwargs | hidden
