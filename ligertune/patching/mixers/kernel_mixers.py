"""Mixers of hybrid models: their own forward, with our convolution and recurrence.

Documents of a packed row come with the collator's `document_places`, which transformers' models pass on to both.
"""

from __future__ import annotations

import functools
import inspect
from collections.abc import Callable
from typing import Any

from ligertune_kernels.ops.recurrence import package_functions
from torch import nn

from ligertune.patching.mixers.recognise_mixers import INPUTS, MixerSpec, Role, torch_function
from ligertune.patching.module_patch import ModulePatch, decorator_chain, rebuild_function


class KernelMixer(ModulePatch):
    """Mixin of a mixer: its own forward, with our functions."""

    @classmethod
    def class_body(cls, original: type[nn.Module], spec: MixerSpec) -> dict[str, Any]:
        namespace = decorator_chain(original.forward)[-1].__globals__
        ours = {name: _replacement(namespace[name], role) for name, role in spec.functions}
        return {"forward": rebuild_function(original.forward, ours)}


def _replacement(original: Callable[..., Any], role: Role) -> Callable[..., Any]:
    """Return our function, with the arguments that `original` names; it gets what attention gets, too."""
    function: Callable[..., Any] = getattr(package_functions, role)
    names = tuple(inspect.signature(torch_function(original)).parameters)
    inputs = names[: INPUTS[role]]
    options = {*names[INPUTS[role] :], *package_functions.DOCUMENTS}

    @functools.wraps(function)
    def compute(*args: Any, **kwargs: Any) -> Any:
        given = dict(zip(names, args, strict=False)) | kwargs
        chosen = {name: value for name, value in given.items() if name in options}
        return function(*(given[name] for name in inputs), **chosen)

    return compute
