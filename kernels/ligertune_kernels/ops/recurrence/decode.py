r"""One token after another: the forms of causal_conv1d and gated_delta_rule for generation. kda_step: kda/kda_step.py.

The convolution keeps the last tokens of each channel, the recurrence its state S (K, V) for each value head:

    S ← exp(g) S        S ← S + β k (v - Sᵀ k)ᵀ        out = scale Sᵀ q

Both compute in fp32 and have no backward. A step reads and writes the state once: a program holds all keys and some
columns of it in registers, and takes the tokens in turn.
"""

from __future__ import annotations

import torch
from torch.nn import functional as F

from ligertune_kernels.autograd import autocast
from ligertune_kernels.chips import Chip, launch_options
from ligertune_kernels.jit.device_functions import silu
from ligertune_kernels.launcher import Launcher, cached, chip_of, runs_triton, tl, triton
from ligertune_kernels.ops.recurrence import tiles
from ligertune_kernels.ops.recurrence.causal_conv1d import Activation
from ligertune_kernels.ops.recurrence.delta_frame import EPS
from ligertune_kernels.ops.recurrence.input_checks import check_conv_state, check_convolution, check_rule


def causal_conv1d_step_reference(
    x: torch.Tensor,
    conv_state: torch.Tensor,
    weight: torch.Tensor,
    bias: torch.Tensor | None = None,
    *,
    activation: Activation | None = None,
) -> torch.Tensor:
    """Compute `causal_conv1d_step` in plain torch, in place on `conv_state`."""
    if not x.shape[-1]:
        return torch.empty_like(x)
    wide = torch.promote_types(x.dtype, torch.float32)
    tokens = torch.cat((conv_state.to(wide), x.to(wide)), -1)
    y = F.conv1d(tokens, weight.to(wide)[:, None], None if bias is None else bias.to(wide), groups=x.shape[1])
    conv_state.copy_(tokens[..., -conv_state.shape[-1] :])
    y = y[..., -x.shape[-1] :]
    return (F.silu(y) if activation == "silu" else y).to(x.dtype)


@triton.jit
def conv_update_kernel(
    x_ptr,  # (B, C)
    state_ptr,  # (B, C, PLACES), in place
    w_ptr,  # (C, TAPS)
    b_ptr,  # (C,)
    y_ptr,  # (B, C)
    x_batch_stride, x_channel_stride, n_channels,
    TAPS: tl.constexpr, PLACES: tl.constexpr, HAS_BIAS: tl.constexpr, SILU: tl.constexpr, COLS: tl.constexpr,
):  # fmt: skip
    cols = tl.program_id(0) * COLS + tl.arange(0, COLS)
    batch = tl.program_id(1).to(tl.int64)
    inside = cols < n_channels
    x = tl.load(x_ptr + batch * x_batch_stride + cols * x_channel_stride, mask=inside, other=0.0)
    state_ptrs = state_ptr + (batch * n_channels + cols) * PLACES
    z = x.to(tl.float32) * tl.load(w_ptr + cols * TAPS + TAPS - 1, mask=inside, other=0.0).to(tl.float32)
    if HAS_BIAS:
        z += tl.load(b_ptr + cols, mask=inside, other=0.0).to(tl.float32)
    for place in tl.static_range(PLACES):
        before = tl.load(state_ptrs + place, mask=inside, other=0.0)
        if PLACES - place < TAPS:
            w = tl.load(w_ptr + cols * TAPS + TAPS - 1 - (PLACES - place), mask=inside, other=0.0)
            z += before.to(tl.float32) * w.to(tl.float32)
        if place > 0:
            tl.store(state_ptrs + place - 1, before, mask=inside)
    tl.store(state_ptrs + PLACES - 1, x.to(state_ptr.dtype.element_ty), mask=inside)
    if SILU:
        z = silu(z)
    tl.store(y_ptr + batch * n_channels + cols, z.to(y_ptr.dtype.element_ty), mask=inside)


@cached
def _conv_launch(taps: int, places: int, has_bias: bool, activation: Activation | None, chip: Chip) -> Launcher:
    constants = {"TAPS": taps, "PLACES": places, "HAS_BIAS": has_bias, "SILU": activation == "silu"}
    cols = tiles.UPDATE_CHANNELS
    return Launcher(conv_update_kernel, {**constants, "COLS": cols, **launch_options(cols, chip)})


def causal_conv1d_step(
    x: torch.Tensor,  # (B, C, L)
    conv_state: torch.Tensor,  # (B, C, S), S at least W - 1: the last tokens, in place
    weight: torch.Tensor,  # (C, W), W from 2 to 8
    bias: torch.Tensor | None = None,  # (C,)
    *,
    activation: Activation | None = None,
) -> torch.Tensor:  # (B, C, L)
    """Convolve the next L tokens with those of the state, and append them to it. The kernel takes one token.

    Raises ValueError on mismatched shapes, dtypes, devices and other activations, TypeError for what is no tensor.
    """
    check_convolution("causal_conv1d_step", x, weight, bias, activation)
    batch, n_channels, n_tokens = x.shape
    taps = weight.shape[-1]
    check_conv_state("causal_conv1d_step", x, conv_state, taps)
    if n_tokens != 1 or not conv_state.is_contiguous() or x.numel() == 0 or not runs_triton(x):
        return causal_conv1d_step_reference(x, conv_state, weight, bias, activation=activation)
    weight = weight.contiguous()
    y = x.new_empty((batch, n_channels, 1))
    _conv_launch(taps, conv_state.shape[-1], bias is not None, activation, chip_of(x.device))(
        (-(-n_channels // tiles.UPDATE_CHANNELS), batch, 1),
        (x, conv_state, weight, weight if bias is None else bias.contiguous(), y),
        (*x.stride()[:2], n_channels),
    )  # fmt: skip
    return y


def gated_delta_rule_step_reference(
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    decay: torch.Tensor,
    beta: torch.Tensor,
    *,
    l2_norm: bool = False,
    initial_state: torch.Tensor | None = None,
) -> tuple[torch.Tensor, torch.Tensor]:
    """Compute `gated_delta_rule_step` in plain torch."""
    wide = torch.promote_types(query.dtype, torch.float32)
    group = value.shape[2] // key.shape[2]
    q, k = (t.to(wide).repeat_interleave(group, 2) for t in (query, key))
    if l2_norm:
        q, k = (t * torch.rsqrt(t.square().sum(-1, keepdim=True) + EPS) for t in (q, k))
    q = q * query.shape[-1] ** -0.5
    v, g, b = (t.to(wide) for t in (value, decay, beta))
    if g.ndim == 3:  # one decay for all key channels of a head
        g = g[..., None]
    batch, n_tokens, heads, value_dim = v.shape
    state = v.new_zeros(batch, heads, k.shape[-1], value_dim) if initial_state is None else initial_state.to(wide)
    out = torch.empty_like(v)
    for i in range(n_tokens):
        state = g[:, i, :, :, None].exp() * state
        error = v[:, i] - torch.einsum("bxkv,bxk->bxv", state, k[:, i])
        state = state + k[:, i, :, :, None] * (b[:, i, :, None] * error)[:, :, None]
        out[:, i] = torch.einsum("bxkv,bxk->bxv", state, q[:, i])
    return out.to(query.dtype), state


@triton.jit(do_not_specialize=["n_tokens"])
def recurrent_step_kernel(
    q_ptr, k_ptr,  # (B, T, H, K), contiguous
    v_ptr,  # (B, T, X, V), contiguous
    decay_ptr,  # (B, T, X), with DECAYS_OF_CHANNELS (B, T, X, K)
    beta_ptr,  # (B, T, X)
    initial_ptr,  # (B, X, K, V)
    out_ptr,  # (B, T, X, V)
    final_ptr,  # (B, X, K, V) fp32
    key_dim, value_dim,
    n_tokens,
    HEADS: tl.constexpr, GROUP: tl.constexpr, NORMED: tl.constexpr, HAS_INITIAL: tl.constexpr,
    DECAYS_OF_CHANNELS: tl.constexpr, KEYS: tl.constexpr, COLS: tl.constexpr, EPSILON: tl.constexpr,
    SCALE: tl.constexpr,
):  # fmt: skip
    cols = tl.program_id(0) * COLS + tl.arange(0, COLS)
    value_head = tl.program_id(1).to(tl.int64)
    batch = tl.program_id(2).to(tl.int64)
    keys = tl.arange(0, KEYS)
    value_heads = HEADS * GROUP
    inside = (keys < key_dim)[:, None] & (cols < value_dim)[None, :]
    at_state = (batch * value_heads + value_head) * key_dim * value_dim
    places = keys[:, None] * value_dim + cols[None, :]
    state = tl.zeros([KEYS, COLS], tl.float32)
    if HAS_INITIAL:
        state += tl.load(initial_ptr + at_state + places, mask=inside, other=0.0).to(tl.float32)
    for i in range(n_tokens):
        token = batch * n_tokens + i
        at_keys = (token * HEADS + value_head // GROUP) * key_dim
        at_head = token * value_heads + value_head
        q = tl.load(q_ptr + at_keys + keys, mask=keys < key_dim, other=0.0).to(tl.float32)
        k = tl.load(k_ptr + at_keys + keys, mask=keys < key_dim, other=0.0).to(tl.float32)
        if NORMED:
            q *= tl.rsqrt(tl.sum(q * q, 0) + EPSILON)
            k *= tl.rsqrt(tl.sum(k * k, 0) + EPSILON)
        v = tl.load(v_ptr + at_head * value_dim + cols, mask=cols < value_dim, other=0.0).to(tl.float32)
        if DECAYS_OF_CHANNELS:
            decays = tl.load(decay_ptr + at_head * key_dim + keys, mask=keys < key_dim, other=0.0)
            state *= tl.exp(decays.to(tl.float32))[:, None]
        else:
            state *= tl.exp(tl.load(decay_ptr + at_head).to(tl.float32))
        error = v - tl.sum(state * k[:, None], 0)
        state += k[:, None] * (error * tl.load(beta_ptr + at_head).to(tl.float32))[None, :]
        out = tl.sum(state * q[:, None], 0) * SCALE
        tl.store(out_ptr + at_head * value_dim + cols, out.to(out_ptr.dtype.element_ty), mask=cols < value_dim)
    tl.store(final_ptr + at_state + places, state, mask=inside)


@cached
def _step_launch(
    heads: int, group: int, key_dim: int, l2_norm: bool, has_initial: bool, decays_of_channels: bool, chip: Chip
) -> Launcher:
    keys = triton.next_power_of_2(key_dim)
    constants = {
        "HEADS": heads, "GROUP": group, "NORMED": l2_norm, "HAS_INITIAL": has_initial,
        "DECAYS_OF_CHANNELS": decays_of_channels, "KEYS": keys, "COLS": tiles.STEP_COLS, "EPSILON": EPS,
        "SCALE": key_dim**-0.5,
    }  # fmt: skip
    return Launcher(recurrent_step_kernel, {**constants, **launch_options(keys * tiles.STEP_COLS, chip)})


def run_step(
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    decay: torch.Tensor,  # (B, T, X), or (B, T, X, K) for kda
    beta: torch.Tensor,
    l2_norm: bool,
    initial_state: torch.Tensor | None,
) -> tuple[torch.Tensor, torch.Tensor] | None:
    """Compute `gated_delta_rule_step` or `kda_step` by the kernel; return None where their reference runs."""
    batch, _, heads, key_dim = key.shape
    value_heads, value_dim = value.shape[2:]
    if value.numel() == 0 or max(key_dim, value_dim) > tiles.MAX_WIDTH or not runs_triton(query):
        return None
    query, key, value, decay, beta = (t.detach().contiguous() for t in (query, key, value, decay, beta))
    out = torch.empty_like(value, dtype=query.dtype)
    final = torch.empty((batch, value_heads, key_dim, value_dim), dtype=torch.float32, device=query.device)
    initial = final if initial_state is None else initial_state.detach().contiguous()
    launch = _step_launch(
        heads, value_heads // heads, key_dim, l2_norm, initial_state is not None, decay.ndim == 4, chip_of(query.device)
    )
    launch(
        (-(-value_dim // tiles.STEP_COLS), value_heads, batch),
        (query, key, value, decay, beta, initial, out, final),
        (key_dim, value_dim), query.shape[1],
    )  # fmt: skip
    return out, final


def gated_delta_rule_step(
    query: torch.Tensor,  # (B, T, H, K)
    key: torch.Tensor,  # (B, T, H, K)
    value: torch.Tensor,  # (B, T, X, V), H divides X: neighbouring value heads share a key head
    decay: torch.Tensor,  # (B, T, X): logarithms, at most 0
    beta: torch.Tensor,  # (B, T, X)
    *,
    l2_norm: bool = False,
    initial_state: torch.Tensor | None = None,  # (B, X, K, V)
) -> tuple[torch.Tensor, torch.Tensor]:  # (B, T, X, V); (B, X, K, V) float32
    """Compute the gated delta rule of few tokens, one after the other, and the state after them. No gradient.

    What `gated_delta_rule` computes, without chunks. The reference runs for heads wider than 256.
    Raises ValueError on mismatched shapes, dtypes or devices, TypeError for what is no tensor.
    """
    check_rule("gated_delta_rule_step", query, key, value, decay, beta, initial_state)
    query, key, value = autocast(query, key, value)
    found = run_step(query, key, value, decay, beta, l2_norm, initial_state)
    if found is not None:
        return found
    return gated_delta_rule_step_reference(query, key, value, decay, beta, l2_norm=l2_norm, initial_state=initial_state)
