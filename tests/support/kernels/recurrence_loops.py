"""The recurrences as loops over tokens in float64, written from their definitions, for tests."""

from __future__ import annotations

import math
from collections.abc import Callable

import torch
from ligertune_kernels import Documents
from torch import Tensor
from torch.nn import functional


def delta_rule_loop(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    decay: Tensor,
    beta: Tensor,
    *,
    l2_norm: bool = False,
    initial_state: Tensor | None = None,
    lengths: tuple[int, ...] | None = None,
) -> tuple[Tensor, Tensor]:
    """Return outputs (B, T, X, V) and the last state (B, X, K, V) of the gated delta rule, one token at a time.

    decay: (B, T, X), or (B, T, X, K) for Kimi's delta attention.
    lengths: of packed documents, each of which starts from zeros.
    """
    batch, n_tokens, heads, key_dim = query.shape
    value_heads, value_dim = value.shape[2:]
    if l2_norm:
        query, key = (t / (t.square().sum(-1, keepdim=True) + 1e-6).sqrt() for t in (query, key))
    zeros = query.new_zeros(batch, value_heads, key_dim, value_dim)
    state = zeros if initial_state is None else initial_state
    begins = set() if lengths is None else set(torch.tensor((0, *lengths)).cumsum(0).tolist())
    out = []
    for t in range(n_tokens):
        if t in begins:
            state = zeros
        rows = []
        for head in range(value_heads):
            k = key[:, t, head * heads // value_heads]
            decayed = state[:, head] * decay[:, t, head].exp().view(batch, -1, 1)  # of the head, or of each channel
            held = (k[:, None] @ decayed)[:, 0]
            correction = beta[:, t, head, None] * (value[:, t, head] - held)
            rows.append(decayed + k[:, :, None] * correction[:, None])
        state = torch.stack(rows, 1)
        q = query[:, t].repeat_interleave(value_heads // heads, 1)
        out.append((q[:, :, None] @ state)[:, :, 0] / key_dim**0.5)
    return torch.stack(out, 1), state


def ssd_loop(
    x: Tensor,
    dt: Tensor,
    A: Tensor,
    B: Tensor,
    C: Tensor,
    D: Tensor | None = None,
    z: Tensor | None = None,
    dt_bias: Tensor | None = None,
    *,
    dt_softplus: bool = False,
    dt_limit: tuple[float, float] = (0.0, math.inf),
    initial_state: Tensor | None = None,
    lengths: tuple[int, ...] | None = None,
) -> tuple[Tensor, Tensor]:
    """Return outputs (B, T, H, P) and the last state (B, H, P, N) of state space duality, one token at a time.

    A is (H,), or one for each token, (B, T, H). lengths: of packed documents, each of which starts from zeros.
    """
    batch, n_tokens, heads, head_dim = x.shape
    groups, state_dim = B.shape[2:]
    rates = A.expand(batch, n_tokens, heads)
    zeros = x.new_zeros(batch, heads, head_dim, state_dim)
    state = zeros if initial_state is None else initial_state
    begins = set() if lengths is None else set(torch.tensor((0, *lengths)).cumsum(0).tolist())
    out = []
    for t in range(n_tokens):
        if t in begins:
            state = zeros
        step = dt[:, t] if dt_bias is None else dt[:, t] + dt_bias
        step = functional.softplus(step) if dt_softplus else step
        step = step.clamp(*dt_limit)[:, :, None]  # (B, H, 1)
        b, c = (rows[:, t].repeat_interleave(heads // groups, 1) for rows in (B, C))
        state = (step * rates[:, t, :, None]).exp()[..., None] * state + (step * x[:, t])[..., None] * b[:, :, None]
        y = (state @ c[..., None])[..., 0]
        if D is not None:
            y = y + x[:, t] * (D[:, None] if D.ndim == 1 else D)
        out.append(y if z is None else y * functional.silu(z[:, t]))
    return torch.stack(out, 1), state


def convolution_loop(
    x: Tensor, weight: Tensor, bias: Tensor | None, *, silu: bool, lengths: tuple[int, ...] | None = None
) -> Tensor:
    """Return the causal convolution of x (B, C, T), one token at a time."""
    taps = weight.shape[1]
    lengths = (x.shape[-1],) if lengths is None else lengths
    out = []
    for document in x.split(lengths, -1):
        for t in range(document.shape[-1]):
            z = torch.zeros_like(x[..., 0]) if bias is None else bias.expand_as(x[..., 0])
            for lag in range(min(taps, t + 1)):
                z = z + weight[:, taps - 1 - lag] * document[..., t - lag]
            out.append(z * torch.sigmoid(z) if silu else z)
    return torch.stack(out, -1)


def rule_with_gradients(
    rule: Callable, leaves: list[Tensor], grad: Tensor, documents: Documents | None
) -> list[Tensor]:
    """Return the output of a gated delta rule with l2_norm, and the gradients of query, key, value, decay and beta."""
    leaves = [t.detach().requires_grad_() for t in leaves]
    out = rule(*leaves, l2_norm=True, documents=documents)
    out = out if isinstance(out, Tensor) else out[0]  # the reference returns the last state, too
    return [out, *torch.autograd.grad(out, leaves, grad.to(out.dtype))]
