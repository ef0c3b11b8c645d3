"""Benchmarks of the gated delta rule and its convolution, in the shapes of Qwen3.5's mixers, and of their steps."""

from __future__ import annotations

import ligertune_kernels as kernels
import torch
from torch import Tensor

from ligertune.bench.case import Case, OpBenchmark, Tensors, Work, function, providers_of

# those of Qwen3.5-4B, 9B and 35B-A3B
KEY_HEADS = 16
VALUE_HEADS = 32
WIDTH = 128
CHANNELS = (2 * KEY_HEADS + VALUE_HEADS) * WIDTH
TAPS = 4
ROWS = ((4, 2048), (1, 8192), (1, 32768))
CPU_ROWS = ((1, 3), (2, 9))
BATCHES = ((1,), (8,), (64,))  # of generation
CPU_BATCHES = ((1,), (3,))


def _rule_inputs(case: Case, device: torch.device) -> Tensors:
    """Return query and key (B, T, H, K), value (B, T, X, V), decay and beta (B, T, X)."""
    batch, n_tokens = (case.sizes[0], 1) if len(case.sizes) == 1 else case.sizes
    shapes = ((batch, n_tokens, heads, WIDTH) for heads in (KEY_HEADS, KEY_HEADS, VALUE_HEADS))
    made = [torch.randn(shape, dtype=case.dtype, device=device) for shape in shapes]
    # as slow as the slow heads of a trained model, whose states matter
    made.append(-0.1 * torch.rand(batch, n_tokens, VALUE_HEADS, device=device))
    made.append(torch.rand(batch, n_tokens, VALUE_HEADS, dtype=case.dtype, device=device))
    return tuple(made)


def _rule_leaves(case: Case, device: torch.device) -> Tensors:
    return tuple(t.requires_grad_() for t in _rule_inputs(case, device))


def _rule_work(case: Case) -> Work:
    """Return the work of three products of a state and a vector per token and head, and twice that backward."""
    tokens = case.sizes[0] * case.sizes[1]
    keys = tokens * KEY_HEADS * WIDTH * case.dtype.itemsize
    values = tokens * VALUE_HEADS * WIDTH * case.dtype.itemsize
    product = 2.0 * tokens * VALUE_HEADS * WIDTH * WIDTH
    return Work((2.0 * keys + 2.0 * values, 4.0 * keys + 3.0 * values), (3 * product, 6 * product))


def _our_rule(query: Tensor, key: Tensor, value: Tensor, decay: Tensor, beta: Tensor) -> Tensor:
    return kernels.gated_delta_rule(query, key, value, decay, beta, l2_norm=True)


def _eager_rule(query: Tensor, key: Tensor, value: Tensor, decay: Tensor, beta: Tensor) -> Tensor:
    return kernels.gated_delta_rule_reference(query, key, value, decay, beta, l2_norm=True)[0]


GATED_DELTA_RULE = OpBenchmark(
    op="gated_delta_rule",
    dims=("B", "T"),
    sizes=ROWS,
    cpu_sizes=CPU_ROWS,
    args=("query", "key", "value", "decay", "beta"),
    inputs=_rule_leaves,
    work=_rule_work,
    reference=lambda case, args: _eager_rule,
    # torch.compile unrolls the reference's loop over chunks, which takes minutes
    providers=(function("ours", _our_rule), function("eager", _eager_rule)),
)


def _conv_inputs(case: Case, device: torch.device) -> Tensors:
    """Return x (B, T, C), as a projection leaves it, and the weights (C, W)."""
    x = torch.randn(*case.sizes, CHANNELS, dtype=case.dtype, device=device)
    weight = torch.randn(CHANNELS, TAPS, dtype=case.dtype, device=device)
    return x.requires_grad_(), weight.requires_grad_()


def _conv_work(case: Case) -> Work:
    one = case.tensor_bytes() * CHANNELS
    return Work((2.0 * one, 3.0 * one))


def _our_conv(x: Tensor, weight: Tensor) -> Tensor:
    return kernels.causal_conv1d(x.transpose(1, 2), weight, activation="silu")


def _eager_conv(x: Tensor, weight: Tensor) -> Tensor:
    return kernels.causal_conv1d_reference(x.transpose(1, 2), weight, activation="silu")


CAUSAL_CONV1D = OpBenchmark(
    op="causal_conv1d",
    dims=("B", "T"),
    sizes=ROWS,
    cpu_sizes=CPU_ROWS,
    args=("x", "weight"),
    inputs=_conv_inputs,
    work=_conv_work,
    reference=lambda case, args: _eager_conv,
    providers=providers_of(_our_conv, eager=_eager_conv),
)


def _rule_step_inputs(case: Case, device: torch.device) -> Tensors:
    """Return the tensors of one token, and the states (B, X, K, V)."""
    return *_rule_inputs(case, device), torch.randn(case.sizes[0], VALUE_HEADS, WIDTH, WIDTH, device=device)


def _rule_step_work(case: Case) -> Work:
    return Work((2.0 * case.sizes[0] * VALUE_HEADS * WIDTH * WIDTH * 4, 0.0))  # fp32 states, read and written


def _our_rule_step(query: Tensor, key: Tensor, value: Tensor, decay: Tensor, beta: Tensor, state: Tensor) -> Tensors:
    return kernels.gated_delta_rule_step(query, key, value, decay, beta, l2_norm=True, initial_state=state)


def _eager_rule_step(query: Tensor, key: Tensor, value: Tensor, decay: Tensor, beta: Tensor, state: Tensor) -> Tensors:
    return kernels.gated_delta_rule_step_reference(query, key, value, decay, beta, l2_norm=True, initial_state=state)


GATED_DELTA_RULE_STEP = OpBenchmark(
    op="gated_delta_rule_step",
    dims=("B",),
    sizes=BATCHES,
    cpu_sizes=CPU_BATCHES,
    args=("query", "key", "value", "decay", "beta", "state"),
    inputs=_rule_step_inputs,
    work=_rule_step_work,
    reference=lambda case, args: _eager_rule_step,
    providers=providers_of(_our_rule_step, eager=_eager_rule_step),
    modes=("forward",),
)


def _conv_step_inputs(case: Case, device: torch.device) -> Tensors:
    """Return x (B, C, 1), the last tokens (B, C, W) and the weights (C, W)."""
    shapes = ((case.sizes[0], CHANNELS, 1), (case.sizes[0], CHANNELS, TAPS), (CHANNELS, TAPS))
    return tuple(torch.randn(shape, dtype=case.dtype, device=device) for shape in shapes)


def _conv_step_work(case: Case) -> Work:
    return Work((2.0 * case.tensor_bytes() * CHANNELS * TAPS, 0.0))


def _our_conv_step(x: Tensor, state: Tensor, weight: Tensor) -> Tensor:
    return kernels.causal_conv1d_step(x, state, weight, activation="silu")


def _eager_conv_step(x: Tensor, state: Tensor, weight: Tensor) -> Tensor:
    return kernels.causal_conv1d_step_reference(x, state, weight, activation="silu")


CAUSAL_CONV1D_STEP = OpBenchmark(
    op="causal_conv1d_step",
    dims=("B",),
    sizes=BATCHES,
    cpu_sizes=CPU_BATCHES,
    args=("x", "state", "weight"),
    inputs=_conv_step_inputs,
    work=_conv_step_work,
    reference=lambda case, args: _eager_conv_step,
    # the last tokens move on
    providers=(function("ours", _our_conv_step, overwrites=True), function("eager", _eager_conv_step, overwrites=True)),
    modes=("forward",),
)


def _kda_inputs(case: Case, device: torch.device) -> Tensors:
    """Return query, key, value, decay (B, T, X, K) and beta of as many heads as Kimi-Linear-48B has."""
    batch, n_tokens = (case.sizes[0], 1) if len(case.sizes) == 1 else case.sizes
    shape = (batch, n_tokens, VALUE_HEADS, WIDTH)
    query, key, value = (torch.randn(shape, dtype=case.dtype, device=device) for _ in range(3))
    decay = -0.1 * torch.rand(shape, device=device)
    return query, key, value, decay, torch.rand(shape[:3], dtype=case.dtype, device=device)


def _kda_leaves(case: Case, device: torch.device) -> Tensors:
    return tuple(t.requires_grad_() for t in _kda_inputs(case, device))


def _kda_work(case: Case) -> Work:
    """Return the work of the gated delta rule, with decays in fp32 that are as large as a key."""
    tokens = case.sizes[0] * case.sizes[1] * VALUE_HEADS * WIDTH
    one = tokens * case.dtype.itemsize
    product = 2.0 * tokens * WIDTH
    return Work((4.0 * one + 4.0 * tokens, 7.0 * one + 8.0 * tokens), (3 * product, 6 * product))


def _our_kda(query: Tensor, key: Tensor, value: Tensor, decay: Tensor, beta: Tensor) -> Tensor:
    return kernels.kda(query, key, value, decay, beta, l2_norm=True)


def _eager_kda(query: Tensor, key: Tensor, value: Tensor, decay: Tensor, beta: Tensor) -> Tensor:
    return kernels.kda_reference(query, key, value, decay, beta, l2_norm=True)[0]


KDA = OpBenchmark(
    op="kda",
    dims=("B", "T"),
    sizes=ROWS[:2],  # the reference holds a decay per pair of tokens of a chunk and channel
    cpu_sizes=CPU_ROWS,
    args=("query", "key", "value", "decay", "beta"),
    inputs=_kda_leaves,
    work=_kda_work,
    reference=lambda case, args: _eager_kda,
    # torch.compile unrolls the reference's loop over chunks, which takes minutes
    providers=(function("ours", _our_kda), function("eager", _eager_kda)),
)


def _kda_step_inputs(case: Case, device: torch.device) -> Tensors:
    """Return the tensors of one token, and the states (B, X, K, V)."""
    return *_kda_inputs(case, device), torch.randn(case.sizes[0], VALUE_HEADS, WIDTH, WIDTH, device=device)


def _our_kda_step(query: Tensor, key: Tensor, value: Tensor, decay: Tensor, beta: Tensor, state: Tensor) -> Tensors:
    return kernels.kda_step(query, key, value, decay, beta, l2_norm=True, initial_state=state)


def _eager_kda_step(query: Tensor, key: Tensor, value: Tensor, decay: Tensor, beta: Tensor, state: Tensor) -> Tensors:
    return kernels.kda_step_reference(query, key, value, decay, beta, l2_norm=True, initial_state=state)


KDA_STEP = OpBenchmark(
    op="kda_step",
    dims=("B",),
    sizes=BATCHES,
    cpu_sizes=CPU_BATCHES,
    args=("query", "key", "value", "decay", "beta", "state"),
    inputs=_kda_step_inputs,
    work=_rule_step_work,
    reference=lambda case, args: _eager_kda_step,
    providers=providers_of(_our_kda_step, eager=_eager_kda_step),
    modes=("forward",),
)
RECURRENCES = (CAUSAL_CONV1D, GATED_DELTA_RULE, CAUSAL_CONV1D_STEP, GATED_DELTA_RULE_STEP, KDA, KDA_STEP)
