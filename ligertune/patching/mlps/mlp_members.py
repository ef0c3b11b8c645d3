"""Members of an MLP: its projections with their sizes, and the other functions and modules that its forward calls."""

from __future__ import annotations

import copy
import functools
import types
from collections.abc import Hashable, Iterable
from dataclasses import dataclass, field
from operator import itemgetter
from types import SimpleNamespace
from typing import Any

from torch import Tensor, nn
from transformers import PreTrainedConfig
from transformers.pytorch_utils import Conv1D

from ligertune.patching.module_patch import has_own_hooks
from ligertune.patching.probe import definition_of

Projection = tuple[str, tuple[int, int]]  # name, (inputs, outputs)
Projections = tuple[Projection, ...]


def projections_of(module: nn.Module) -> Projections:
    """Return the children that are linear layers, whatever their class: plain, quantised, with an adapter."""
    if len(module._modules) < 2:
        return ()
    sized = ((name, size_of(child)) for name, child in module._modules.items() if child is not None)
    return tuple((name, size) for name, size in sized if size is not None)


def size_of(module: nn.Module) -> tuple[int, int] | None:
    """Return inputs and outputs of a linear layer; None for another module."""
    if isinstance(module, Conv1D):
        return (module.weight.shape[0], module.nf) if module.weight.ndim == 2 else None
    inputs = getattr(module, "in_features", None)
    outputs = getattr(module, "out_features", None)
    if type(inputs) is not int or type(outputs) is not int:
        return None
    weight = getattr(module, "weight", None)  # 4-bit weights are stored as one column; stacked layers have 3 dimensions
    return (inputs, outputs) if not isinstance(weight, Tensor) or weight.ndim <= 2 else None


@dataclass(frozen=True)
class Member:
    """An attribute of a module without parameters: an activation, a dropout, a list of these.

    Members that compute the same are equal: the key is what they compute with, the value is one of them.
    """

    name: str
    key: Hashable
    value: Any = field(compare=False)


def members_of(module: nn.Module, projections: Projections) -> tuple[Member, ...]:
    """Return the other functions and modules that a module can call, besides its projections."""
    names = {name for name, _ in projections}
    held = {name: value for name, value in vars(module).items() if not name.startswith("_")} | module._modules
    members = []
    for name, value in held.items():
        if isinstance(value, PreTrainedConfig):  # its plain values only: they are the key
            value = plain_config(value)
            members.append(Member(name, tuple(sorted(vars(value).items(), key=itemgetter(0))), value))
        elif name not in names and (key := _key_of(value, module)) is not None:
            members.append(Member(name, key, value))
    return tuple(members)


PLAIN = (bool, int, float, str, type(None))
FUNCTIONS = (types.FunctionType, types.BuiltinFunctionType)
OWN = frozenset(vars(nn.Module()))  # attributes of every module


def _key_of(value: Any, owner: Any = None) -> Hashable | None:
    """Return what tells functions and modules apart that compute different things; None if that is not known.

    owner: the module whose bound method the value may be.
    """
    if isinstance(value, FUNCTIONS):
        return value
    if isinstance(value, types.MethodType):
        return value.__func__ if value.__self__ is owner else None
    if isinstance(value, functools.partial):
        return _key_of_all(functools.partial, {"function": value.func, **dict(enumerate(value.args)), **value.keywords})
    if isinstance(value, nn.Module):
        return _key_of_module(value)
    if isinstance(value, list | tuple):
        return _key_of_all(type(value), dict(enumerate(value)))
    return _key_of_all(dict, value) if isinstance(value, dict) else None


def _key_of_all(kind: type, values: dict[Any, Any], owner: Any = None) -> Hashable | None:
    """Return the key of several values, plain ones among them; None if one of them has none."""
    keys = [
        (name, (type(value), value) if isinstance(value, PLAIN) else _key_of(value, owner))
        for name, value in values.items()
    ]
    return (kind, *keys) if all(key is not None for _, key in keys) else None


def _key_of_module(module: nn.Module) -> Hashable | None:
    """Return the key of a module without parameters and hooks, which its class and attributes describe."""
    has_state = next(module.parameters(), None) is not None or next(module.buffers(), None) is not None
    if has_state or has_own_hooks(module):
        return None
    held = {name: value for name, value in vars(module).items() if name not in OWN} | module._modules
    key = _key_of_all(type(module), held, owner=module)
    return None if key is None else (definition_of(type(module)), key)


def structure_of(module: nn.Module) -> Hashable | None:
    """Return what a module computes but for the values of its parameters; None if that is not known."""
    size = size_of(module)
    if size is not None:
        return type(module), size
    held = {name: value for name, value in vars(module).items() if name not in OWN}
    config = {name: plain_config(held.pop(name)) for name, v in list(held.items()) if isinstance(v, PreTrainedConfig)}
    attributes = _key_of_all(type(module), held, owner=module)
    tensors = (*module._parameters.items(), *module._buffers.items())
    children = [(name, None if child is None else structure_of(child)) for name, child in module._modules.items()]
    if attributes is None or any(key is None and module._modules[name] is not None for name, key in children):
        return None
    shapes = tuple((name, None if tensor is None else tensor.shape) for name, tensor in tensors)
    settings = tuple((name, tuple(sorted(vars(value).items()))) for name, value in config.items())
    return definition_of(type(module)), attributes, shapes, settings, tuple(children)


def plain_config(config: PreTrainedConfig) -> SimpleNamespace:
    """Return the plain values of a configuration, which tell it from others."""
    return SimpleNamespace(**{name: value for name, value in vars(config).items() if isinstance(value, PLAIN)})


def with_members(hollow: nn.Module, members: Iterable[Member]) -> nn.Module:
    """Give a stub copies of the members: its mode is set, and theirs with it."""
    for member in members:
        setattr(hollow, member.name, copy.deepcopy(member.value))
    return hollow
