"""Try out functions of modelling files, to see whether they compute what our convolution and recurrences compute."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import torch
from ligertune_kernels import (
    causal_conv1d_reference,
    causal_conv1d_step_reference,
    gated_delta_rule_reference,
    kda_reference,
    ssd_reference,
    ssd_step_reference,
)
from torch import Tensor

from ligertune.patching.probe import Refusal, answer, close, numbers

STRONG = 30.0  # of decays that forget a state within a token
TOKENS = 70  # of a trial: more than a chunk of 64
RTOL = 1e-4  # of fp32 results of two ways through a chunk
ATOL = 1e-5
NO_LIMIT = (0.0, float("inf"))  # of Mamba 2's steps of time
BIASES_AND_ACTIVATIONS = ((None, "silu"), (numbers(3, seed=3), "silu"), (None, None))


def try_convolution(function: Callable[..., Any]) -> Refusal | None:
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


def try_next_convolution(function: Callable[..., Any]) -> Refusal | None:
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


def try_delta_rule(function: Callable[..., Any]) -> Refusal | None:
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


def try_channel_delta_rule(function: Callable[..., Any]) -> Refusal | None:
    query, key = (numbers(2, TOKENS, 2, 4, seed=seed) for seed in (0, 1))
    value = numbers(2, TOKENS, 2, 3, seed=2)
    decay = -numbers(2, TOKENS, 2, 4, seed=3).abs()
    beta = numbers(2, TOKENS, 2, seed=4).sigmoid()
    state = numbers(2, 2, 4, 3, seed=5)
    unit = key / key.norm(dim=-1, keepdim=True)
    trials = ((key, decay, True, None), (unit, decay, False, state), (key, STRONG * decay, True, state))
    for k, g, l2_norm, initial in trials:
        options = {"initial_state": initial, "output_final_state": True, "use_qk_l2norm_in_kernel": l2_norm}
        given = answer(functools.partial(function, g=g, beta=beta, **options), query, k, value)
        if isinstance(given, Refusal):
            return given
        if not _both_close(given, kda_reference(query, k, value, g, beta, l2_norm=l2_norm, initial_state=initial)):
            return Refusal("it computes another recurrence")
    return None


def try_ssd(function: Callable[..., Any]) -> Refusal | None:
    x = numbers(2, TOKENS, 4, 3)
    dt = numbers(2, TOKENS, 4, seed=1)
    A = -numbers(4, seed=2).abs()
    B, C = (numbers(2, TOKENS, 2, 5, seed=seed) for seed in (3, 4))
    D = numbers(4, seed=5)
    dt_bias = numbers(4, seed=6)
    state = numbers(2, 4, 3, 5, seed=7)
    trials = (
        (A, NO_LIMIT, None, 16),
        (A, NO_LIMIT, state, 256),
        (A, (0.5, 1.0), state, 16),
        (STRONG * A, NO_LIMIT, state, 16),
    )
    for decay, limit, initial, chunk in trials:
        steps = functools.partial(function, D=D, dt_bias=dt_bias, dt_softplus=True, dt_limit=limit)
        whole = functools.partial(steps, initial_states=initial, return_final_states=True)
        given = answer(whole, x, dt, decay, B, C, chunk)
        if isinstance(given, Refusal):
            return given
        expected = ssd_reference(
            x, dt, decay, B, C, D, dt_bias=dt_bias, dt_softplus=True, dt_limit=limit, initial_state=initial
        )
        if not _both_close(given, expected):
            return Refusal("it computes another recurrence")
    return None


def try_ssd_step(function: Callable[..., Any]) -> Refusal | None:
    x = numbers(2, 4, 3)
    dt = numbers(2, 4, seed=1)
    A = -numbers(4, seed=2).abs()
    B, C = (numbers(2, 2, 5, seed=seed) for seed in (3, 4))
    D = numbers(4, seed=5)
    dt_bias = numbers(4, seed=6)
    states = [numbers(2, 4, 3, 5, seed=7) for _ in range(2)]
    expanded = dt[..., None].expand(2, 4, 3), A[:, None, None].expand(4, 3, 5)
    of_columns = {"D": D[:, None].expand(4, 3), "dt_bias": dt_bias[:, None].expand(4, 3), "dt_softplus": True}
    given = answer(functools.partial(function, **of_columns), states[0], x, *expanded, B, C)
    if isinstance(given, Refusal):
        return given
    expected = ssd_step_reference(states[1], x, dt, A, B, C, D, dt_bias=dt_bias, dt_softplus=True)
    same = close(given, expected, rtol=RTOL, atol=ATOL) and close(states[0], states[1], rtol=RTOL, atol=ATOL)
    return None if same else Refusal("it computes another recurrence")


def try_nothing(function: Callable[..., Any]) -> Refusal | None:
    """Try out a function that stands for one of a package alone, and returns None for the mixer to go on."""
    of_heads = numbers(2)
    given = answer(function, numbers(1, 2, 30), numbers(18, 4), None, of_heads, -of_heads.abs(), of_heads, 16)
    if isinstance(given, Refusal):
        return given
    return None if given is None else Refusal("it computes something, which kernels do in steps")
