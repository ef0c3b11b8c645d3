"""Give one module other behaviour without touching its class: `module.__class__` becomes a subclass made for it.

The subclass keeps `__name__`, `__qualname__` and `__module__`: transformers writes `architectures` from the name,
reads the class's source through its module, and looks classes up by `str(cls)`. Everything a patch must know stands
on the class (`patch_spec`), nothing on the instance, so state dict, hooks, `__dict__` and pickles stay as they were.
"""

from __future__ import annotations

import copyreg
import functools
from collections.abc import Hashable
from typing import Any

from torch import nn


class Patch:
    """Base of the mixins. The class made by `patched_class` knows what it replaced and with what it was made."""

    patch_original: type
    patch_mixin: type
    patch_spec: Hashable

    @classmethod
    def class_body(cls, original: type, spec: Hashable) -> dict[str, Any]:
        """What the made class holds beside the mixin: members that depend on the class it stands in for."""
        return {}

    def __reduce_ex__(self, protocol: int) -> str | tuple:
        # The class cannot be found by its name (that is the original's), so a pickle names its ingredients.
        reduced = super().__reduce_ex__(max(protocol, 2))
        if isinstance(reduced, str) or reduced[0] is not copyreg.__newobj__:
            return reduced  # the original pickles itself in a way of its own; it comes back unpatched
        made = type(self)
        if "patch_original" not in vars(made):
            return reduced  # a wrapper (FSDP2) has subclassed ours and answers for itself
        return (_new, (made.patch_original, made.patch_mixin, made.patch_spec), *reduced[2:])


def _new(original: type, mixin: type[Patch], spec: Hashable) -> nn.Module:
    made = patched_class(original, mixin, spec)
    return made.__new__(made)


@functools.cache
def patched_class(original: type, mixin: type[Patch], spec: Hashable) -> type:
    """The subclass of `original` that behaves as `mixin` says; one per (original, mixin, spec) in a process."""
    body = {
        "__module__": original.__module__,
        "__qualname__": original.__qualname__,
        "__doc__": original.__doc__,
        "patch_original": original,
        "patch_mixin": mixin,
        "patch_spec": spec,
        **mixin.class_body(original, spec),
    }
    return type(original.__name__, (mixin, original), body)


def swap(module: nn.Module, mixin: type[Patch], spec: Hashable) -> None:
    """Make `module` behave as `mixin` says. A module wears one patch at a time."""
    if isinstance(module, Patch):
        raise ValueError(f"{type(module).__name__} is patched already: unpatch it first")
    module.__class__ = patched_class(type(module), mixin, spec)


def unswap(module: nn.Module) -> None:
    """Give `module` back the class it had before `swap`."""
    if "patch_original" not in vars(type(module)):
        raise ValueError(f"{type(module).__name__} was wrapped after it was patched: take the wrapper off first")
    module.__class__ = type(module).patch_original


def has_own_hooks(module: nn.Module) -> bool:
    """Return whether hooks of `module`, or a forward set on the instance, see its inputs or outputs."""
    hooks = module._forward_hooks or module._backward_hooks or module._backward_pre_hooks
    return bool(hooks or module._forward_pre_hooks) or "forward" in vars(module)
