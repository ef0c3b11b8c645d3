"""Mixers of hybrid models: their own forward, with our convolution and recurrence.

Documents of a packed row come with the collator's `document_places`, which transformers' models pass on to both. A
model that does not is an error: its documents would flow into each other.
"""

from __future__ import annotations

import functools
import inspect
from collections.abc import Callable
from typing import Any

from ligertune_kernels.ops.recurrence import package_functions
from torch import nn

from ligertune.attention.packed_documents import ROWS
from ligertune.patching.mixers.mixer_functions import FUNCTIONS, our_function, torch_function
from ligertune.patching.mixers.recognise_mixers import MixerSpec
from ligertune.patching.module_patch import ModulePatch, decorator_chain, rebuild_function


class KernelMixer(ModulePatch):
    """Mixin of a mixer: its own forward, with our functions."""

    @classmethod
    def class_body(cls, original: type[nn.Module], spec: MixerSpec) -> dict[str, Any]:
        namespace = decorator_chain(original.forward)[-1].__globals__
        mixer = original.__name__
        ours = {name: _replacement(torch_function(namespace[name]), role, mixer) for name, role in spec.functions}
        return {"forward": rebuild_function(original.forward, ours)}


def _replacement(original: Callable[..., Any], role: str, mixer: str) -> Callable[..., Any]:
    """Return our function, with the arguments that `original` names; it gets what attention gets, too.

    mixer: the class that calls it, for messages.
    """
    ours = our_function(role)
    if ours is None:
        return original
    names = tuple(inspect.signature(original).parameters)
    inputs = names[: FUNCTIONS[role].inputs]
    options = {*names[len(inputs) :], *package_functions.DOCUMENTS}

    @functools.wraps(ours)
    def compute(*args: Any, **kwargs: Any) -> Any:
        given = dict(zip(names, args, strict=False)) | kwargs
        chosen = {name: value for name, value in given.items() if name in options}
        if ROWS.packed and all(chosen.get(name) is None for name in package_functions.DOCUMENTS):
            raise ValueError(f"{role} of its {mixer} gets no places of documents")
        ROWS.mixed |= ROWS.packed
        return ours(*(given[name] for name in inputs), **chosen)

    return compute
