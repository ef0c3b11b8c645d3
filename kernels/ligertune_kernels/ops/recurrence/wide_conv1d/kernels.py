"""Kernels of causal_conv1d for 5 to 8 taps, which few models have (LFM3: 7).

A program has a tile of tokens and channels, and reads it once for each tap: the copies come from the cache. With an
activation the gradient of z is computed first, in fp32. Sums for dw and db are a program's own; there are no atomics.
"""

from __future__ import annotations

from ligertune_kernels.jit.device_functions import silu, silu_grad
from ligertune_kernels.launcher import tl, triton
from ligertune_kernels.ops.recurrence.chunks import load_starts


@triton.jit
def _convolve_tile(
    x_ptr, w_ptr, b_ptr, tokens, cols, back, n_channels, stride, TAPS: tl.constexpr, HAS_BIAS: tl.constexpr,
):  # fmt: skip
    """Return z of a tile. back: the tokens of the document before each token; fewer than 0 beyond the row."""
    inside = cols < n_channels
    z = tl.zeros([tokens.shape[0], cols.shape[0]], tl.float32)
    for lag in tl.static_range(TAPS):
        seen = (back >= lag)[:, None] & inside[None, :]
        x = tl.load(x_ptr + (tokens - lag).to(tl.int64)[:, None] * stride + cols[None, :], mask=seen, other=0.0)
        w = tl.load(w_ptr + cols * TAPS + (TAPS - 1 - lag), mask=inside, other=0.0)
        z += x.to(tl.float32) * w.to(tl.float32)[None, :]
    if HAS_BIAS:
        z += tl.load(b_ptr + cols, mask=inside, other=0.0).to(tl.float32)[None, :]
    return z


@triton.jit
def _tokens_before(starts_ptr, tokens, n_tokens, HAS_DOCUMENTS: tl.constexpr):
    """Return the tokens of the document before each token; -1 beyond the row."""
    starts = load_starts(starts_ptr, tokens, n_tokens, HAS_DOCUMENTS)
    return tl.where(tokens < n_tokens, tokens - starts, -1)


@triton.jit(do_not_specialize=["n_tokens"])
def wide_forward_kernel(
    x_ptr,  # (B, T, C)
    w_ptr,  # (C, TAPS)
    b_ptr,  # (C,)
    starts_ptr,  # (T,) int32
    y_ptr,  # (B, T, C)
    x_batch_stride, x_token_stride, n_channels,
    n_tokens,
    TAPS: tl.constexpr, HAS_BIAS: tl.constexpr, HAS_DOCUMENTS: tl.constexpr, SILU: tl.constexpr,
    TOKENS: tl.constexpr, COLS: tl.constexpr,
):  # fmt: skip
    """Write y."""
    tokens = tl.program_id(0) * TOKENS + tl.arange(0, TOKENS)
    cols = tl.program_id(1) * COLS + tl.arange(0, COLS)
    batch = tl.program_id(2).to(tl.int64)
    back = _tokens_before(starts_ptr, tokens, n_tokens, HAS_DOCUMENTS)
    x_ptr += batch * x_batch_stride
    z = _convolve_tile(x_ptr, w_ptr, b_ptr, tokens, cols, back, n_channels, x_token_stride, TAPS, HAS_BIAS)
    if SILU:
        z = silu(z)
    at_rows = (batch * n_tokens + tokens)[:, None] * n_channels
    keep = (back >= 0)[:, None] & (cols < n_channels)[None, :]
    tl.store(y_ptr + at_rows + cols[None, :], z.to(y_ptr.dtype.element_ty), mask=keep)


@triton.jit(do_not_specialize=["n_tokens"])
def wide_activation_gradients_kernel(
    x_ptr, dy_ptr,  # (B, T, C)
    w_ptr,  # (C, TAPS)
    b_ptr,  # (C,)
    starts_ptr,  # (T,) int32
    dz_ptr,  # (B, T, C) fp32
    x_batch_stride, x_token_stride, dy_batch_stride, dy_token_stride, n_channels,
    n_tokens,
    TAPS: tl.constexpr, HAS_BIAS: tl.constexpr, HAS_DOCUMENTS: tl.constexpr, TOKENS: tl.constexpr, COLS: tl.constexpr,
):  # fmt: skip
    """Write dz = dy silu'(z)."""
    tokens = tl.program_id(0) * TOKENS + tl.arange(0, TOKENS)
    cols = tl.program_id(1) * COLS + tl.arange(0, COLS)
    batch = tl.program_id(2).to(tl.int64)
    back = _tokens_before(starts_ptr, tokens, n_tokens, HAS_DOCUMENTS)
    x_ptr += batch * x_batch_stride
    z = _convolve_tile(x_ptr, w_ptr, b_ptr, tokens, cols, back, n_channels, x_token_stride, TAPS, HAS_BIAS)
    keep = (back >= 0)[:, None] & (cols < n_channels)[None, :]
    at_dy = batch * dy_batch_stride + tokens.to(tl.int64)[:, None] * dy_token_stride
    dy = tl.load(dy_ptr + at_dy + cols[None, :], mask=keep, other=0.0).to(tl.float32)
    at_rows = (batch * n_tokens + tokens)[:, None] * n_channels
    tl.store(dz_ptr + at_rows + cols[None, :], dy * silu_grad(z), mask=keep)


@triton.jit(do_not_specialize=["n_tokens"])
def wide_backward_kernel(
    x_ptr,  # (B, T, C)
    dz_ptr,  # (B, T, C)
    w_ptr,  # (C, TAPS)
    starts_ptr,  # (T,) int32
    dx_ptr,  # (B, T, C)
    partial_ptr,  # (B * tiles, TAPS + HAS_BIAS, C) fp32: dw, then db
    x_batch_stride, x_token_stride, dz_batch_stride, dz_token_stride, n_channels,
    n_tokens,
    TAPS: tl.constexpr, HAS_BIAS: tl.constexpr, HAS_DOCUMENTS: tl.constexpr, TOKENS: tl.constexpr, COLS: tl.constexpr,
):  # fmt: skip
    """Write dx, and the tile's parts of dw and db."""
    tokens = tl.program_id(0) * TOKENS + tl.arange(0, TOKENS)
    cols = tl.program_id(1) * COLS + tl.arange(0, COLS)
    batch = tl.program_id(2).to(tl.int64)
    inside = cols < n_channels
    back = _tokens_before(starts_ptr, tokens, n_tokens, HAS_DOCUMENTS)
    keep = (back >= 0)[:, None] & inside[None, :]
    x_ptr += batch * x_batch_stride + cols[None, :]
    dz_ptr += batch * dz_batch_stride + cols[None, :]
    own = tl.load(dz_ptr + tokens.to(tl.int64)[:, None] * dz_token_stride, mask=keep, other=0.0).to(tl.float32)
    at_tile = (batch * tl.num_programs(0) + tl.program_id(0)) * (TAPS + HAS_BIAS)
    partial_ptr += at_tile * n_channels + cols
    dx = tl.zeros([TOKENS, COLS], tl.float32)
    for lag in tl.static_range(TAPS):
        seen = (back >= lag)[:, None] & inside[None, :]
        x = tl.load(x_ptr + (tokens - lag).to(tl.int64)[:, None] * x_token_stride, mask=seen, other=0.0)
        d_tap = tl.sum(own * x.to(tl.float32), 0)
        tl.store(partial_ptr + (TAPS - 1 - lag) * n_channels, d_tap, mask=inside)
        later = tokens + lag
        reads = (_tokens_before(starts_ptr, later, n_tokens, HAS_DOCUMENTS) >= lag)[:, None] & inside[None, :]
        dz = tl.load(dz_ptr + later.to(tl.int64)[:, None] * dz_token_stride, mask=reads, other=0.0)
        w = tl.load(w_ptr + cols * TAPS + (TAPS - 1 - lag), mask=inside, other=0.0)
        dx += dz.to(tl.float32) * w.to(tl.float32)[None, :]
    if HAS_BIAS:
        tl.store(partial_ptr + TAPS * n_channels, tl.sum(own, 0), mask=inside)
    at_rows = (batch * n_tokens + tokens)[:, None] * n_channels
    tl.store(dx_ptr + at_rows + cols[None, :], dx.to(dx_ptr.dtype.element_ty), mask=keep)
