"""Which tensors of a forward nobody reads but the one op they go to: our kernels may write over those.

Two things are needed. The code must show it: `sources_of` reads a forward's source and answers only where a name holds
nothing but what submodules gave for it. And these submodules must give new memory that neither autograd nor anybody
else looks at: `gives_memory_of_its_own` asks that at every call, since adapters, hooks and wrappers come after `patch`.
"""

from __future__ import annotations

import ast
import inspect
import textwrap
from collections.abc import Callable, Iterable, Iterator

import torch
from torch import nn

from ligertune.activations.gate_offload import KeptGate
from ligertune.patching.module_patch import Patch
from ligertune.patching.recompute import is_linear

RESHAPES = ("view", "transpose", "reshape", "permute", "contiguous")
# Code that runs more than once, or out of the order in which it is written, or sees the names of another function.
OUT_OF_ORDER = (ast.For, ast.While, ast.Try, ast.Lambda, ast.FunctionDef, ast.comprehension, ast.Global, ast.Nonlocal)


def gives_memory_of_its_own(modules: Iterable[nn.Module | None]) -> bool:
    """Are all of them, now, layers whose output is new and neither kept for their backward nor seen by a hook?

    A plain nn.Linear keeps its weight and its input, or how that is made, and so does our RMS norm. Adapters and
    quantised layers are other classes; under torch.compile nothing is gained.
    """
    if torch.compiler.is_compiling() or nn.modules.module._has_any_global_hook():
        return False
    return all(_is_plain(module) and not is_watched(module) for module in modules)


def _is_plain(module: nn.Module | None) -> bool:
    if is_linear(module) or getattr(type(module), "patch_mixin", None) is KeptGate:
        return not hasattr(module, "parametrizations")
    return isinstance(module, Patch) and getattr(module.patch_spec, "kernel", None) == "rms_norm"


def is_watched(module: nn.Module) -> bool:
    """Does a hook, or a forward of its own, see what it is given or gives?"""
    hooks = module._forward_hooks or module._backward_hooks or module._backward_pre_hooks
    return bool(hooks or module._forward_pre_hooks) or "forward" in vars(module)


def sources_of(forward: Callable, consumer: str) -> tuple[str, ...]:
    """The submodules that give the first two arguments of `x, y = consumer(x, y, …)`; none where something else might.

    Until that call the names x and y may only be assigned, each alone, what submodules and reshapings make of x or y
    themselves or of one other name; nothing else may read them.
    """
    try:
        tree = ast.parse(textwrap.dedent(inspect.getsource(forward)))
    except (OSError, TypeError, SyntaxError):  # no source at hand
        return ()
    function = tree.body[0]
    nodes = [node for statement in getattr(function, "body", ()) for node in ast.walk(statement)]
    parameters = {node.arg for node in ast.walk(function) if isinstance(node, ast.arg)}
    uses = [node for node in nodes if isinstance(node, ast.Name) and node.id == consumer]
    calls = [node for node in nodes if isinstance(node, ast.Assign) and _consumes(node, consumer)]
    if len(calls) != 1 or len(uses) != 1 or any(isinstance(node, OUT_OF_ORDER) for node in nodes):
        return ()
    (call,) = calls
    sources: list[str] = []
    for argument in call.value.args[:2]:
        found = _sources_of_name(argument.id, call, nodes)
        if not found or argument.id in parameters:
            return ()
        sources += found
    return tuple(dict.fromkeys(sources))


def _consumes(node: ast.Assign, consumer: str) -> bool:
    """Is it `x, y = consumer(x, y, …)` with two names?"""
    target, value = node.targets[0], node.value
    if len(node.targets) != 1 or not isinstance(target, ast.Tuple) or not isinstance(value, ast.Call):
        return False
    names = [name.id for name in (*target.elts, *value.args[:2]) if isinstance(name, ast.Name)]
    is_consumer = isinstance(value.func, ast.Name) and value.func.id == consumer
    return is_consumer and len(names) == 4 and names[:2] == names[2:] and names[0] != names[1]


def _sources_of_name(name: str, call: ast.Assign, nodes: list[ast.AST]) -> list[str]:
    sources: list[str] = []
    accounted = {id(node) for node in ast.walk(call)}
    for node in nodes:
        target = node.targets[0] if isinstance(node, ast.Assign) else None
        if node is call or not isinstance(target, ast.Name) or target.id != name:
            continue
        found = _submodules(node.value, name)
        if found is None or len(node.targets) != 1:
            return []
        sources += found
        accounted |= {id(part) for part in ast.walk(node)}
    before = (node for node in nodes if isinstance(node, ast.Name) and node.id == name and node.lineno <= call.lineno)
    return sources if all(id(node) in accounted for node in before) else []


def _submodules(value: ast.expr, name: str) -> list[str] | None:
    """The submodules that `self.norm(self.proj(other).view(…)).transpose(…)` calls; None for anything else."""
    if isinstance(value, ast.Name) and value.id == name:
        return []
    if not isinstance(value, ast.Call) or not isinstance(value.func, ast.Attribute):
        return None
    owner, called = value.func.value, value.func.attr
    if isinstance(owner, ast.Name) and owner.id == "self":
        if len(value.args) != 1 or value.keywords:
            return None
        (argument,) = value.args
        if isinstance(argument, ast.Name) and argument.id != name:
            return [called]
        inner = _submodules(argument, name)
        return None if inner is None else [*inner, called]
    if called not in RESHAPES or any(part.id == name for part in _names((*value.args, *value.keywords))):
        return None
    return _submodules(owner, name)


def _names(values: Iterable[ast.AST]) -> Iterator[ast.Name]:
    return (part for value in values for part in ast.walk(value) if isinstance(part, ast.Name))
