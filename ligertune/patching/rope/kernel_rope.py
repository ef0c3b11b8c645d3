"""Rotary position embeddings: an attention's forward calls `apply_rope` instead of its modelling file's function.

A modelling file keeps its rotary function as a global that every model of the family shares, so replacing it there
would change other models. `KernelRope` runs the same byte code on a private copy of the globals, in which only the
recognised rotary functions differ.
"""

from __future__ import annotations

import dis
import functools
import inspect
import re
import types
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from torch import nn

from ligertune.attention.image_attention import IMAGE_ATTENTION_GLOBALS, attends_per_image
from ligertune.patching.module_patch import ModulePatch, decorator_chain, names_in, rebuild_function
from ligertune.patching.probe import Definition, Refusal, definition_of
from ligertune.patching.rope.probe_rotation import helpers_of, recognise_rotation
from ligertune.patching.rope.rotation import Rotation, rotary_function

# such as apply_rotary_pos_emb, apply_rotary_emb, apply_multidimensional_rope
ROTARY_FUNCTION = re.compile(r"apply.*(rotary|rope)", re.IGNORECASE)
ROTARY_CLASS = re.compile(r"rotary|rope", re.IGNORECASE)


Rotations = tuple[tuple[str, Rotation], ...]  # functions by name


@dataclass(frozen=True)
class RopeSpec:
    """The rotary functions that a forward calls and our kernel computes.

    A function that calls others, for one section of the columns after another, has the rotations of these.
    """

    functions: tuple[tuple[str, Rotation | Rotations], ...]
    per_image: bool = False  # the forward also attends within one image after another (`image_attention`)
    kernel = "apply_rope"


def is_rotary(module: nn.Module) -> bool:
    """Return whether a module's forward calls a rotary function of its file, or such a method of its class."""
    cls: type = type(module)
    return bool(_rotary_names(cls, type(module).forward))


def is_rotary_table(module: nn.Module) -> bool:
    """Return whether a module computes the angles of a rotary embedding, going by the name of its class."""
    return ROTARY_CLASS.search(type(module).__name__) is not None


@functools.cache
def _rotary_names(cls: type, forward: Callable[..., Any]) -> tuple[str, ...]:
    function = inspect.unwrap(forward)
    code = getattr(function, "__code__", None)
    namespace = getattr(function, "__globals__", {})
    named = filter(ROTARY_FUNCTION.search, sorted(names_in(code)) if code else ())
    return tuple(name for name in named if callable(namespace.get(name, getattr(cls, name, None))))


def recognise_rope(module: nn.Module) -> RopeSpec | Refusal:
    """Return which rotary functions of an attention `apply_rope` can compute, or why it cannot replace all of them."""
    if "forward" in vars(module):
        return Refusal("its forward was replaced on the instance")
    cls: type = type(module)
    forward = type(module).forward
    namespace = getattr(inspect.unwrap(forward), "__globals__", {})
    names = _rotary_names(cls, forward)
    helpers = tuple(helpers_of(namespace.get(name)) for name in names)
    return _rope_spec(forward, names, (*definition_of(cls), *helpers))


@functools.cache
def _rope_spec(whole_forward: Callable[..., Any], names: tuple[str, ...], definition: Definition) -> RopeSpec | Refusal:
    """Recognise the rotary functions `names` of a forward. definition: all that the class and they compute with."""
    forward = decorator_chain(whole_forward)[-1]
    if hasattr(forward, "__wrapped__") or not isinstance(forward, types.FunctionType):
        return Refusal("its forward is wrapped by a decorator that is not a plain function")
    if "__name__" in _globals_read(forward.__code__):  # `rebuild_function` removes it
        return Refusal("its forward reads __name__")
    functions = []
    for name in names:
        if name not in forward.__globals__:
            return Refusal(f"it computes RoPE in its own method {name}, which stays with PyTorch")
        function = forward.__globals__[name]
        rotation = recognise_rotation(function)
        if isinstance(rotation, Refusal) and not (rotations := _rotations_inside(function)):
            return rotation
        functions.append((name, rotations if isinstance(rotation, Refusal) else rotation))
    return RopeSpec(tuple(functions), attends_per_image(names_in(forward.__code__)))


def _rotations_inside(function: Callable[..., Any]) -> Rotations:
    """Return the rotary functions that a function calls; none if it cannot be rebuilt, or one is not recognised."""
    if not isinstance(function, types.FunctionType) or hasattr(function, "__wrapped__"):
        return ()
    names = _globals_read(function.__code__)
    if "__name__" in names:  # `rebuild_function` removes it
        return ()
    rotations = []
    for name in sorted(filter(ROTARY_FUNCTION.search, names)):
        inner = function.__globals__.get(name)
        if callable(inner):
            rotation = recognise_rotation(inner)
            if isinstance(rotation, Refusal):
                return ()
            rotations.append((name, rotation))
    return tuple(rotations)


def _globals_read(code: types.CodeType) -> set[str]:
    """Return the names of the globals that a function reads, or a function inside it."""
    names = {step.argval for step in dis.get_instructions(code) if step.opname == "LOAD_GLOBAL"}
    return names.union(*(_globals_read(inner) for inner in code.co_consts if isinstance(inner, types.CodeType)))


def _replacement(function: Callable[..., Any], rotation: Rotation | Rotations) -> Callable[..., Any]:
    if isinstance(rotation, Rotation):
        return rotary_function(function, rotation)
    inside = {name: rotary_function(function.__globals__[name], inner) for name, inner in rotation}
    return rebuild_function(function, inside)


class KernelRope(ModulePatch):
    """Mixin of an attention module: its own forward, with our rotary functions."""

    @classmethod
    def class_body(cls, original: type[nn.Module], spec: RopeSpec) -> dict[str, Any]:
        namespace = decorator_chain(original.forward)[-1].__globals__
        ours = {name: _replacement(namespace[name], rotation) for name, rotation in spec.functions}
        if spec.per_image:
            ours |= IMAGE_ATTENTION_GLOBALS
        return {"forward": rebuild_function(original.forward, ours)}
