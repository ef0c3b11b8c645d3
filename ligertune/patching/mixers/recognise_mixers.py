"""Recognise the convolution and the recurrence that a mixer of a hybrid model calls.

What is tried out is the function of the modelling file, with wrappers that are not transformers' own. Numbers say
whether it computes what our op computes.
"""

from __future__ import annotations

import functools
import inspect
import types
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from ligertune_kernels.ops.recurrence.input_checks import MAX_TAPS
from torch import nn
from transformers.activations import ACT2FN

from ligertune.errors import plural
from ligertune.patching.mixers.mixer_functions import CONVOLUTION, FUNCTIONS, torch_function, why_not_ours
from ligertune.patching.module_patch import decorator_chain, names_in
from ligertune.patching.probe import Definition, Refusal, definition_of, settings_of

SILU = ("silu", "swish")  # its names in transformers
DECAYS = ("A_log", "A")  # parameters of a recurrence
# parts of the names of functions that compute a recurrence, ours or another
RECURRENCES = ("delta_rule", "recurren", "scan", "delta_attention", "kda")


@dataclass(frozen=True)
class MixerSpec:
    """The functions that a mixer's forward calls and our ops compute: each by its name, with that of the packages."""

    functions: tuple[tuple[str, str], ...]
    kernel: str  # the op of its recurrence, or the convolution's if it has none


def is_mixer(module: nn.Module) -> bool:
    """Return whether a module's forward calls a recurrence or a convolution of its file that one of our ops may be."""
    return op_of(module) is not None


def op_of(module: nn.Module) -> str | None:
    """Return the op of the recurrence that a module's forward calls by name, or the convolution's, or None."""
    return _first_op(_functions(type(module).forward))


def _first_op(functions: tuple[tuple[str, str], ...]) -> str | None:
    """Return the op of a recurrence; without one, that of the convolution of whole rows."""
    ops = sorted(FUNCTIONS[role].op for _, role in functions)
    recurrences = (op for op in ops if op != CONVOLUTION)
    convolves = any(role == "causal_conv1d_fn" for _, role in functions)
    return next(recurrences, CONVOLUTION if convolves else None)


@functools.cache
def _functions(forward: Callable[..., Any]) -> tuple[tuple[str, str], ...]:
    """Return the globals that a forward calls by one of our functions' names, each with that of the packages."""
    function = inspect.unwrap(forward)
    if not isinstance(function, types.FunctionType):
        return ()
    names = sorted(_called(function))
    return tuple((name, role) for name in names for role in FUNCTIONS if FUNCTIONS[role].pattern.fullmatch(name))


def _called(function: types.FunctionType) -> set[str]:
    """Return the globals that a function names."""
    return names_in(function.__code__) & function.__globals__.keys()


def recognise_mixer(module: nn.Module) -> MixerSpec | Refusal:
    """Return which functions of a mixer our ops compute, or why they cannot replace all of them."""
    if "forward" in vars(module):
        return Refusal("its forward was replaced on the instance")
    cls = type(module)
    spec = _mixer_spec(cls.forward, definition_of(cls))
    if isinstance(spec, Refusal):
        return spec
    if spec.kernel == CONVOLUTION and any(_has_decay(part) for part in module.modules()):
        return Refusal("it has a decay and calls no recurrence that kernels compute")
    return _refuse_convolution(module) or spec


def _refuse_convolution(module: nn.Module) -> Refusal | None:
    """Return why our op cannot compute the convolution that a mixer was configured with, or None."""
    for filters in _channel_filters(module):
        taps = filters.kernel_size[0]
        if not 2 <= taps <= MAX_TAPS:
            return Refusal(f"its convolution has {plural(taps, 'tap')}; kernels have 2 to {MAX_TAPS}")
    for name, value in settings_of(module):
        if value in ACT2FN and value not in SILU:
            return Refusal(f"its {name} is {value}; kernels have silu")
    return None


@functools.cache
def _mixer_spec(whole_forward: Callable[..., Any], definition: Definition) -> MixerSpec | Refusal:
    """Recognise the functions of a forward. definition: all that its class computes with, a key of the cache."""
    forward = decorator_chain(whole_forward)[-1]
    if hasattr(forward, "__wrapped__") or not isinstance(forward, types.FunctionType):
        return Refusal("its forward is wrapped by a decorator that is not a plain function")
    functions = _functions(whole_forward)
    ours = {name for name, _ in functions}
    for name in sorted(_called(forward) - ours):
        if any(part in name for part in RECURRENCES):
            return Refusal(f"kernels have no {name}, which PyTorch computes")
    for name, role in functions:
        refusal = why_not_ours(torch_function(forward.__globals__[name]), FUNCTIONS[role])
        if refusal is not None:
            return Refusal(f"{name}: {refusal.reason}")
    op = _first_op(functions)
    return Refusal("it calls neither recurrence nor convolution by name") if op is None else MixerSpec(functions, op)


def state_carriers(model: nn.Module) -> list[nn.Module]:
    """Return the outermost modules of a model that mix tokens by a recurrence or a convolution of PyTorch.

    A recurrence has a decay (`A_log`, `A`), or is one of torch's; the convolutions have one filter for each channel.
    """
    if _carries_state(model):
        return [model]
    return [carrier for child in model.children() for carrier in state_carriers(child)]


def why_without_kernel(module: nn.Module) -> str:
    """Return why no kernel of ours computes a layer that carries state: what it calls, or the recipe's switch."""
    if not is_mixer(module):
        return "kernels compute neither their recurrence nor their convolution"
    found = recognise_mixer(module)
    if isinstance(found, Refusal):
        return found.reason
    return "kernels are switched off; write kernels.enabled: true and kernels.mixer: true, or leave both out"


def _carries_state(module: nn.Module) -> bool:
    if isinstance(module, nn.RNNBase):
        return True
    return _has_decay(module) or bool(_channel_filters(module))


def _has_decay(module: nn.Module) -> bool:
    return any(name in module._parameters for name in DECAYS)


def _channel_filters(module: nn.Module) -> list[nn.Conv1d]:
    """Return a module's convolutions that have one filter for each channel."""
    convolutions = (child for child in module.children() if isinstance(child, nn.Conv1d))
    return [child for child in convolutions if child.groups == child.in_channels > 1]
