"""What passes through compiled layers unseen: values of a batch that their graphs must not depend on.

transformers hands every keyword of a model on to its layers. torch.compile makes a graph of its own for each size of a
tensor among them and for each number in a tuple, whether the layer uses it or not, and gives up after a few.
"""

from __future__ import annotations

from typing import Any

from torch import nn

PASSED_ON = ("document_lengths", "labelled_rows")


class Unseen:
    """Holds a value. torch.compile asks what kind of object this is, and no more."""

    def __init__(self, value: Any) -> None:
        self.value = value


def look(value: Any) -> Any:
    """What `value` holds, or itself where it was not hidden."""
    return value.value if isinstance(value, Unseen) else value


def hide_from_layers(model: nn.Module) -> None:
    """From now on `model`'s layers see none of `PASSED_ON`; whoever uses them takes a `look`."""
    model.register_forward_pre_hook(_hide, with_kwargs=True)


def _hide(model: nn.Module, args: tuple, kwargs: dict[str, Any]) -> tuple[tuple, dict[str, Any]]:
    hidden = {name: Unseen(kwargs[name]) for name in PASSED_ON if kwargs.get(name) is not None}
    return args, kwargs | hidden
