"""Benchmarks of recurrences and of their steps: Qwen3.5's gated delta rule and convolution, Nemotron-H's Mamba 2."""

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

# those of Nemotron-H-8B
SSD_HEADS = 128
SSD_GROUPS = 8
SSD_HEAD_DIM = 64
SSD_STATE_DIM = 128


def _ssd_inputs(case: Case, device: torch.device) -> Tensors:
    """Return x (B, T, H, P), dt (B, T, H), A (H,), B and C (B, T, G, N), D and dt_bias (H,); a step has no T."""
    heads = (*case.sizes, SSD_HEADS)
    groups = (*case.sizes, SSD_GROUPS, SSD_STATE_DIM)
    x = torch.randn(*heads, SSD_HEAD_DIM, dtype=case.dtype, device=device)
    dt = torch.randn(heads, dtype=case.dtype, device=device)
    b, c = (torch.randn(groups, dtype=case.dtype, device=device) for _ in range(2))
    a = -1.0 - 15.0 * torch.rand(SSD_HEADS, device=device)  # A and the bias as models begin
    skip = torch.ones(SSD_HEADS, device=device)
    return x, dt, a, b, c, skip, torch.full((SSD_HEADS,), -5.0, device=device)


def _ssd_leaves(case: Case, device: torch.device) -> Tensors:
    return tuple(t.requires_grad_() for t in _ssd_inputs(case, device))


def _ssd_work(case: Case) -> Work:
    """Return the work of two products of a state and a vector per token and head, and twice that backward."""
    tokens = case.sizes[0] * case.sizes[1]
    values = tokens * SSD_HEADS * SSD_HEAD_DIM * case.dtype.itemsize
    keys = tokens * SSD_GROUPS * SSD_STATE_DIM * case.dtype.itemsize
    product = 2.0 * tokens * SSD_HEADS * SSD_HEAD_DIM * SSD_STATE_DIM
    return Work((2.0 * values + 2.0 * keys, 3.0 * values + 4.0 * keys), (2 * product, 4 * product))


def _our_ssd(x: Tensor, dt: Tensor, a: Tensor, b: Tensor, c: Tensor, skip: Tensor, bias: Tensor) -> Tensor:
    return kernels.ssd(x, dt, a, b, c, skip, None, bias, dt_softplus=True)


def _eager_ssd(x: Tensor, dt: Tensor, a: Tensor, b: Tensor, c: Tensor, skip: Tensor, bias: Tensor) -> Tensor:
    return kernels.ssd_reference(x, dt, a, b, c, skip, None, bias, dt_softplus=True)[0]


SSD = OpBenchmark(
    op="ssd",
    dims=("B", "T"),
    sizes=ROWS,
    cpu_sizes=CPU_ROWS,
    args=("x", "dt", "A", "B", "C", "D", "dt_bias"),
    inputs=_ssd_leaves,
    work=_ssd_work,
    reference=lambda case, args: _eager_ssd,
    # torch.compile unrolls the reference's loop over chunks, which takes minutes
    providers=(function("ours", _our_ssd), function("eager", _eager_ssd)),
)


def _ssd_step_inputs(case: Case, device: torch.device) -> Tensors:
    """Return the states (B, H, P, N), and the tensors of one token."""
    state = torch.randn(case.sizes[0], SSD_HEADS, SSD_HEAD_DIM, SSD_STATE_DIM, device=device)
    return state, *_ssd_inputs(case, device)


def _ssd_step_work(case: Case) -> Work:
    state = case.sizes[0] * SSD_HEADS * SSD_HEAD_DIM * SSD_STATE_DIM
    return Work((2.0 * state * 4, 0.0))  # fp32 states, read and written


def _our_ssd_step(
    state: Tensor, x: Tensor, dt: Tensor, a: Tensor, b: Tensor, c: Tensor, skip: Tensor, bias: Tensor
) -> Tensor:
    return kernels.ssd_step(state, x, dt, a, b, c, skip, None, bias, dt_softplus=True)


def _eager_ssd_step(
    state: Tensor, x: Tensor, dt: Tensor, a: Tensor, b: Tensor, c: Tensor, skip: Tensor, bias: Tensor
) -> Tensor:
    return kernels.ssd_step_reference(state, x, dt, a, b, c, skip, None, bias, dt_softplus=True)


SSD_STEP = OpBenchmark(
    op="ssd_step",
    dims=("B",),
    sizes=BATCHES,
    cpu_sizes=CPU_BATCHES,
    args=("state", "x", "dt", "A", "B", "C", "D", "dt_bias"),
    inputs=_ssd_step_inputs,
    work=_ssd_step_work,
    reference=lambda case, args: _eager_ssd_step,
    # the states move on
    providers=(function("ours", _our_ssd_step, overwrites=True), function("eager", _eager_ssd_step, overwrites=True)),
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
RECURRENCES = (
    CAUSAL_CONV1D, GATED_DELTA_RULE, KDA, SSD, CAUSAL_CONV1D_STEP, GATED_DELTA_RULE_STEP, KDA_STEP, SSD_STEP,
)  # fmt: skip
