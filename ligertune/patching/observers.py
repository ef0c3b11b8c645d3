"""Observers of a module: hooks, or a forward set on the instance, that see its inputs and outputs.

Wrappers that only provide a module's weight (FSDP2, ZeRO-3, offloading by accelerate, weight norm) pass inputs and
outputs on as they are: they are no observers.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterator
from typing import Any

from torch import nn

WEIGHT_PROVIDERS = (
    "accelerate.",
    "deepspeed.",
    "torch.distributed.fsdp.",
    "torch.distributed._composable.",  # `replicate`, which is DDP by hooks
    "torch.nn.utils.",
    "torch.utils.module_tracker",  # FLOP counters: it notes when a module begins and ends
)
KINDS = {
    "forward hook": "_forward_hooks",
    "forward pre-hook": "_forward_pre_hooks",
    "backward hook": "_backward_hooks",
    "backward pre-hook": "_backward_pre_hooks",
}


def observer_of(module: nn.Module) -> str | None:
    """Return what observes `module`, in words, or None."""
    for name in ("forward", "_old_forward"):  # accelerate's hooks keep the forward that they replace as the second
        forward = vars(module).get(name)
        if forward is not None and not _is_own(module, forward) and not _provides_weight(forward):
            return f"its forward was replaced by {_name(forward)}"
    for kind, hook in _hooks(module):
        if not _provides_weight(hook):
            return f"it has a {kind} ({_name(hook)})"
    return None


def _hooks(module: nn.Module) -> Iterator[tuple[str, Callable[..., Any]]]:
    for kind, name in KINDS.items():
        for hook in getattr(module, name).values():
            yield kind, hook
        for hook in getattr(nn.modules.module, f"_global{name}").values():
            yield f"global {kind}", hook
    added = getattr(module, "_hf_hook", None)  # accelerate's; several are combined in one `SequentialHook`
    for hook in getattr(added, "hooks", (added,) if added is not None else ()):
        yield "hook of accelerate", hook


def _is_own(module: nn.Module, forward: Any) -> bool:
    """Return whether `forward` is the class's own, which accelerate leaves on the instance when its hooks go."""
    return getattr(forward, "__self__", None) is module and forward.__func__ is type(module).forward


def _provides_weight(function: Any) -> bool:
    return _origin(function).startswith(WEIGHT_PROVIDERS)


def _origin(function: Any) -> str:
    """Return the module that defines a function, the function of a partial or method, or an object's class."""
    while isinstance(function, functools.partial):
        function = function.func
    function = getattr(function, "__func__", function)
    return getattr(function, "__module__", None) or type(function).__module__


def _name(function: Any) -> str:
    while isinstance(function, functools.partial):
        function = function.func
    return getattr(function, "__qualname__", type(function).__qualname__)
