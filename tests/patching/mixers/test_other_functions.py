"""Functions under the names of Mamba 2's and Kimi's that compute something else where they can are left alone."""

import pytest
import torch
from transformers.models.kimi_linear import modeling_kimi_linear as kimi
from transformers.models.nemotron_h import modeling_nemotron_h as nemotron

from ligertune.patching.mixers.mixer_functions import FUNCTIONS, torch_function, why_not_ours

RECURRENCE = "it computes another recurrence"
scan = torch_function(nemotron.mamba2_chunk_scan)
step = torch_function(nemotron.mamba2_selective_state_update)
whole = torch_function(nemotron.mamba2_split_conv1d_scan_combined)
rule = torch_function(kimi.chunk_kimi_delta_attention)


def scan_without_limits(x, dt, A, B, C, chunk_size, dt_limit=None, D=None, dt_bias=None, dt_softplus=False, **options):
    return scan(x, dt, A, B, C, chunk_size, D=D, dt_bias=dt_bias, dt_softplus=dt_softplus, **options)


def scan_of_chunks(x, dt, A, B, C, chunk_size, initial_states=None, **options):
    """Start from zeros in each chunk; the last state is right only if there is one chunk."""
    if initial_states is not None:
        return scan(x, dt, A, B, C, chunk_size, initial_states=initial_states, **options)
    parts = zip(*(t.split(chunk_size, 1) for t in (x, dt, B, C)), strict=True)
    results = [scan(x, dt, A, b, c, chunk_size, **options) for x, dt, b, c in parts]
    return torch.cat([out for out, _ in results], 1), results[-1][1]


def scan_backwards(x, dt, A, B, C, chunk_size, reverse=False, **options):
    return scan(x, dt, A, B, C, chunk_size, **options)


def scan_with_counter(x, dt, A, B, C, chunk_size, **options):
    return scan(x, dt, A, B, C, chunk_size, **options)


def step_without_state(state, *tensors, **options):
    return step(state.clone(), *tensors, **options)


def step_without_bias(state, x, dt, A, B, C, dt_bias=None, **options):
    return step(state, x, dt, A, B, C, **options)


def whole_mixer(zxbcdt, *tensors, **options):
    return zxbcdt


def rule_of_bounded_decays(query, key, value, g, beta, **options):
    return rule(query, key, value, g.clamp(min=-5), beta, **options)


def rule_of_one_decay(query, key, value, g, beta, **options):
    return rule(query, key, value, g.mean(-1, keepdim=True).expand_as(g), beta, **options)


@pytest.mark.parametrize(
    "role, function, why",
    [
        ("mamba_chunk_scan_combined", scan_without_limits, RECURRENCE),
        ("mamba_chunk_scan_combined", scan_of_chunks, RECURRENCE),
        ("mamba_chunk_scan_combined", scan_backwards, "it takes reverse, which kernels do not have"),
        ("mamba_chunk_scan_combined", scan_with_counter, None),
        ("mamba_chunk_scan_combined", scan, None),
        ("selective_state_update", step_without_state, RECURRENCE),
        ("selective_state_update", step_without_bias, RECURRENCE),
        ("selective_state_update", step, None),
        ("mamba_split_conv1d_scan_combined", whole_mixer, "it computes something, which kernels do in steps"),
        ("mamba_split_conv1d_scan_combined", whole, None),
        ("chunk_kda", rule_of_bounded_decays, RECURRENCE),
        ("chunk_kda", rule_of_one_decay, RECURRENCE),
        ("chunk_kda", rule, None),
        ("fused_recurrent_kda", torch_function(kimi.recurrent_kimi_delta_attention), None),
    ],
)
def test_a_function_that_differs_is_left_alone(role, function, why):
    refusal = why_not_ours(function, FUNCTIONS[role])
    assert (None if refusal is None else refusal.reason) == why
