"""Recognise the convolution and the recurrence that a mixer of a hybrid model calls.

A modelling file has both as functions of its own, which transformers exchanges for those of a package (causal-conv1d,
flash-linear-attention) where it is installed. What is tried out is the function of the file, with wrappers that are not
transformers' own. Numbers say whether it computes what our op computes.
"""

from __future__ import annotations

import functools
import inspect
import re
import types
from collections import Counter
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import Any, Literal

import torch
from ligertune_kernels import causal_conv1d_reference, causal_conv1d_step_reference, gated_delta_rule_reference
from ligertune_kernels.ops.recurrence.input_checks import MAX_TAPS
from ligertune_kernels.ops.recurrence.package_functions import ACTIVATIONS
from torch import Tensor, nn
from transformers.activations import ACT2FN

from ligertune.patching.module_patch import decorator_chain, names_in
from ligertune.patching.probe import Definition, Refusal, answer, close, definition_of, numbers, settings_of

Role = Literal["causal_conv1d_fn", "causal_conv1d_update", "chunk_gated_delta_rule", "fused_recurrent_gated_delta_rule"]
CONVOLUTIONS: tuple[Role, ...] = ("causal_conv1d_fn", "causal_conv1d_update")
# transformers' names, which are those of the packages with "torch_" before some and without "fused_"
NAMES: dict[Role, re.Pattern[str]] = {
    "causal_conv1d_fn": re.compile(r"(torch_)?causal_conv1d_fn"),
    "causal_conv1d_update": re.compile(r"(torch_)?causal_conv1d_update"),
    "chunk_gated_delta_rule": re.compile(r"(torch_)?chunk_gated_delta_rule"),
    "fused_recurrent_gated_delta_rule": re.compile(r"(torch_|fused_)?recurrent_gated_delta_rule"),
}
# their tensors, which a forward may give by position or by name
INPUTS: dict[Role, int] = {
    "causal_conv1d_fn": 2,
    "causal_conv1d_update": 3,
    "chunk_gated_delta_rule": 5,
    "fused_recurrent_gated_delta_rule": 5,
}
# further arguments that our functions take as those of the files do
CONVOLUTION_OPTIONS = frozenset({"bias", "activation", "seq_idx"})
RULE_OPTIONS = frozenset({"initial_state", "output_final_state", "use_qk_l2norm_in_kernel", "cu_seqlens", "chunk_size"})
EXCHANGE = ("transformers.", "kernels.")  # they wrap functions to exchange them
STRONG = 30.0  # of decays that forget a state within a token
DECAYS = ("A_log", "A")  # parameters of a recurrence
TOKENS = 70  # of a trial: more than a chunk of 64
RTOL = 1e-4  # of fp32 results of two ways through a chunk
ATOL = 1e-5
BIASES_AND_ACTIVATIONS = ((None, "silu"), (numbers(3, seed=3), "silu"), (None, None))


@dataclass(frozen=True)
class MixerSpec:
    """The functions that a mixer's forward calls and our ops compute, by name."""

    functions: tuple[tuple[str, Role], ...]
    kernel = "gated_delta_rule"


def is_mixer(module: nn.Module) -> bool:
    """Return whether a module's forward calls a gated delta rule of its file."""
    return any(role == "chunk_gated_delta_rule" for _, role in _functions(type(module).forward))


@functools.cache
def _functions(forward: Callable[..., Any]) -> tuple[tuple[str, Role], ...]:
    """Return the globals that a forward calls by one of our names, each with its role."""
    function = inspect.unwrap(forward)
    if not isinstance(function, types.FunctionType):
        return ()
    names = sorted(names_in(function.__code__) & function.__globals__.keys())
    return tuple((name, role) for name in names for role, pattern in NAMES.items() if pattern.fullmatch(name))


def recognise_mixer(module: nn.Module) -> MixerSpec | Refusal:
    """Return which functions of a mixer our ops compute, or why they cannot replace all of them."""
    if "forward" in vars(module):
        return Refusal("its forward was replaced on the instance")
    cls = type(module)
    spec = _mixer_spec(cls.forward, definition_of(cls))
    return spec if isinstance(spec, Refusal) else _refuse_convolution(module) or spec


def _refuse_convolution(module: nn.Module) -> Refusal | None:
    """Return why our op cannot compute the convolution that a mixer was configured with, or None."""
    for filters in _channel_filters(module):
        taps = filters.kernel_size[0]
        if not 2 <= taps <= MAX_TAPS:
            return Refusal(f"its convolution has {taps} taps; kernels have 2 to {MAX_TAPS}")
    for name, value in settings_of(module):
        if value in ACT2FN and value not in ACTIVATIONS:
            return Refusal(f"its {name} is {value}; kernels have silu")
    return None


@functools.cache
def _mixer_spec(whole_forward: Callable[..., Any], definition: Definition) -> MixerSpec | Refusal:
    """Recognise the functions of a forward. definition: all that its class computes with, a key of the cache."""
    forward = decorator_chain(whole_forward)[-1]
    if hasattr(forward, "__wrapped__") or not isinstance(forward, types.FunctionType):
        return Refusal("its forward is wrapped by a decorator that is not a plain function")
    functions = _functions(whole_forward)
    for name, role in functions:
        function = torch_function(forward.__globals__[name])
        refusal = _refuse_arguments(function, role) or TRIALS[role](function)
        if refusal is not None:
            return Refusal(f"{name}: {refusal.reason}")
    return MixerSpec(functions)


def state_carriers(modules: Iterable[nn.Module]) -> Counter[str]:
    """Count, by class, those of the modules that mix tokens by a recurrence or a convolution of PyTorch.

    A recurrence has a decay (`A_log`, `A`), or is one of torch's; the convolutions have one filter for each channel.
    """
    return Counter(type(module).__name__ for module in modules if _carries_state(module))


def why_without_kernel(module: nn.Module) -> str:
    """Return why no kernel of ours computes a layer that carries state: what it calls, or the recipe's switch."""
    if not is_mixer(module):
        return "they call no function chunk_gated_delta_rule, and kernels have no other recurrence"
    found = recognise_mixer(module)
    if isinstance(found, Refusal):
        return found.reason
    return "kernels are switched off; write kernels.enabled: true and kernels.mixer: true, or leave both out"


def _carries_state(module: nn.Module) -> bool:
    if isinstance(module, nn.RNNBase):
        return True
    return any(name in module._parameters for name in DECAYS) or bool(_channel_filters(module))


def _channel_filters(module: nn.Module) -> list[nn.Conv1d]:
    """Return a module's convolutions that have one filter for each channel."""
    convolutions = (child for child in module.children() if isinstance(child, nn.Conv1d))
    return [child for child in convolutions if child.groups == child.in_channels > 1]


def torch_function(function: Any) -> Callable[..., Any]:
    """Return a modelling file's own function, behind the module or package's function that it became.

    Wrappers of other code stay: they may change the result.
    """
    if isinstance(function, nn.Module):
        function = function.forward
    return inspect.unwrap(function, stop=lambda wrapper: not _exchanges(wrapper))


def _exchanges(wrapper: Any) -> bool:
    """Return whether a wrapper comes from the code that exchanges functions; `__module__` names what it wraps."""
    return getattr(wrapper, "__globals__", {}).get("__name__", "").startswith(EXCHANGE)


def _refuse_arguments(function: Callable[..., Any], role: Role) -> Refusal | None:
    """Return why a function's arguments differ from those that it is tried out with, or None."""
    known = CONVOLUTION_OPTIONS if role in CONVOLUTIONS else RULE_OPTIONS
    options = list(inspect.signature(function).parameters.values())[INPUTS[role] :]
    for option in options:
        if option.kind is not option.VAR_KEYWORD and option.name not in known:
            return Refusal(f"it takes {option.name}, which kernels do not have")
    return None


def _try_convolution(function: Callable[..., Any]) -> Refusal | None:
    x = numbers(2, 3, TOKENS)
    weight = numbers(3, 4, seed=1)
    for bias, activation in BIASES_AND_ACTIVATIONS:
        given = answer(functools.partial(function, activation=activation), x, weight, bias)
        if isinstance(given, Refusal):
            return given
        expected = causal_conv1d_reference(x, weight, bias, activation=activation)
        if not close(given, expected, rtol=RTOL, atol=ATOL):
            return Refusal("it computes another convolution")
    return None


def _try_next_convolution(function: Callable[..., Any]) -> Refusal | None:
    x = numbers(2, 3, 1)
    weight = numbers(3, 4, seed=1)
    for bias, activation in BIASES_AND_ACTIVATIONS:
        states = [numbers(2, 3, 4, seed=2) for _ in range(2)]
        given = answer(functools.partial(function, activation=activation), x, states[0], weight, bias)
        if isinstance(given, Refusal):
            return given
        expected = causal_conv1d_step_reference(x, states[1], weight, bias, activation=activation)
        if not close(given, expected, rtol=RTOL, atol=ATOL) or not torch.equal(*states):
            return Refusal("it computes another convolution")
    return None


def _try_delta_rule(function: Callable[..., Any]) -> Refusal | None:
    # transformers before 5.24 wants as many key heads as value heads
    query, key = (numbers(2, TOKENS, 2, 4, seed=seed) for seed in (0, 1))
    value = numbers(2, TOKENS, 2, 3, seed=2)
    decay = -numbers(2, TOKENS, 2, seed=3).abs()
    beta = numbers(2, TOKENS, 2, seed=4).sigmoid()
    state = numbers(2, 2, 4, 3, seed=5)
    unit = key / key.norm(dim=-1, keepdim=True)
    trials = (
        (key, decay, True, None),
        (key, decay, True, state),
        (unit, decay, False, state),
        (key, STRONG * decay, True, state),
    )
    for k, g, l2_norm, initial in trials:
        options = {"initial_state": initial, "output_final_state": True, "use_qk_l2norm_in_kernel": l2_norm}
        given = answer(functools.partial(function, g=g, beta=beta, **options), query, k, value)
        if isinstance(given, Refusal):
            return given
        expected = gated_delta_rule_reference(query, k, value, g, beta, l2_norm=l2_norm, initial_state=initial)
        if not _both_close(given, expected):
            return Refusal("it computes another recurrence")
    return _try_shared_keys(function, query, key)


def _try_shared_keys(function: Callable[..., Any], query: Tensor, key: Tensor) -> Refusal | None:
    """Try out two value heads a key head, which a function may refuse: its model then repeats keys."""
    value = numbers(2, TOKENS, 4, 3, seed=6)
    decay = -numbers(2, TOKENS, 4, seed=7).abs()
    beta = numbers(2, TOKENS, 4, seed=8).sigmoid()
    options = {"output_final_state": True, "use_qk_l2norm_in_kernel": True}
    given = answer(functools.partial(function, g=decay, beta=beta, **options), query, key, value)
    if isinstance(given, Refusal):
        return None
    expected = gated_delta_rule_reference(query, key, value, decay, beta, l2_norm=True)
    return None if _both_close(given, expected) else Refusal("it shares keys among value heads in another way")


def _both_close(given: Any, expected: tuple[Tensor, Tensor]) -> bool:
    if not isinstance(given, tuple) or len(given) != len(expected):
        return False
    return all(close(one, other, rtol=RTOL, atol=ATOL) for one, other in zip(given, expected, strict=True))


TRIALS: dict[Role, Callable[[Callable[..., Any]], Refusal | None]] = {
    "causal_conv1d_fn": _try_convolution,
    "causal_conv1d_update": _try_next_convolution,
    "chunk_gated_delta_rule": _try_delta_rule,
    "fused_recurrent_gated_delta_rule": _try_delta_rule,
}
