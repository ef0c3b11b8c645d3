r"""Causal depthwise convolution of 2 to 8 taps, with bias and SiLU: what stands in front of a recurrence.

x (C, T), weight w (C, W), bias b (C,); x before the first token of t's document counts as 0:

    z_ct = b_c + Σ_j w_c,W-1-j x_c,t-j            y = z, or silu(z)

Backward, with dz = dy, or dy silu'(z), for the tokens that see t:

    dx_ct = Σ_j w_c,W-1-j dz_c,t+j        dw_c,W-1-j = Σ_t dz_ct x_c,t-j        db_c = Σ_t dz_ct

Everything is computed in fp32 and rounded once. The backward keeps x and computes z again.

A program walks along a run of tokens with the last three x of its channels in registers, in the backward also dz and
sums: as tiles, z would be computed once per tap, and its exponentials would take longer than the memory. The backward
reads three tokens of the next run, and adds its part of dw and db to no other program's: column sums follow. There are
no atomics. More than four taps have kernels of their own: wide_conv1d/.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Literal, NamedTuple

import torch
from torch.nn import functional as F

from ligertune_kernels.autograd import no_double_backward
from ligertune_kernels.chips import Chip
from ligertune_kernels.jit.device_functions import LOG2E
from ligertune_kernels.launcher import Launcher, cached, chip_of, runs_triton, tl, triton
from ligertune_kernels.ops.attention.document_attention import Documents
from ligertune_kernels.ops.recurrence.input_checks import check_convolution
from ligertune_kernels.ops.recurrence.tiles import CONV_BACKWARD, CONV_FORWARD, ConvTile
from ligertune_kernels.ops.recurrence.wide_conv1d.wide_launches import convolve_wide, differentiate_wide

RUN_TAPS = 4  # at most, of the kernels that walk along runs
Activation = Literal["silu"]


def causal_conv1d_reference(
    x: torch.Tensor,
    weight: torch.Tensor,
    bias: torch.Tensor | None = None,
    *,
    activation: Activation | None = None,
    documents: Documents | None = None,
) -> torch.Tensor:
    """Compute `causal_conv1d` in plain torch."""
    wide = torch.promote_types(x.dtype, torch.float32)
    taps = weight.shape[1]
    n_tokens = x.shape[-1]
    padded = F.pad(x.to(wide), (taps - 1, 0))
    back = torch.arange(n_tokens, device=x.device)
    if documents is not None:
        back = back - documents.starts  # tokens of the document before t
    z = 0.0 if bias is None else bias.to(wide)[:, None]
    for lag in range(taps):
        seen = padded[..., taps - 1 - lag : taps - 1 - lag + n_tokens] * (back >= lag)
        z = z + weight[:, taps - 1 - lag, None].to(wide) * seen
    return (F.silu(z) if activation == "silu" else z).to(x.dtype)


@triton.jit
def _tap(w_ptr, cols, lag: tl.constexpr, inside, TAPS: tl.constexpr):
    """Load the weights of the token `lag` places back, fp32; zero if there is no such tap."""
    if lag < TAPS:
        return tl.load(w_ptr + cols * TAPS + (TAPS - 1 - lag), mask=inside, other=0.0).to(tl.float32)
    else:
        return cols * 0.0


@triton.jit
def _taps(w_ptr, cols, inside, TAPS: tl.constexpr):
    return (
        _tap(w_ptr, cols, 0, inside, TAPS),
        _tap(w_ptr, cols, 1, inside, TAPS),
        _tap(w_ptr, cols, 2, inside, TAPS),
        _tap(w_ptr, cols, 3, inside, TAPS),
    )


@triton.jit
def _load_token(ptr, token, n_tokens, cols, inside):
    """Load the program's channels of a token, to whose first one `ptr` points; zero outside of the row."""
    return tl.load(ptr + cols, mask=inside & (token >= 0) & (token < n_tokens), other=0.0)


@triton.jit
def _load_tokens(ptr, token, stride, n_tokens, cols, inside):
    """Load four tokens from `token` on."""
    # steps from token to token: products of a stride would be 64-bit numbers in registers
    ptr1 = ptr + stride
    ptr2 = ptr1 + stride
    ptr3 = ptr2 + stride
    return (
        _load_token(ptr, token, n_tokens, cols, inside),
        _load_token(ptr1, token + 1, n_tokens, cols, inside),
        _load_token(ptr2, token + 2, n_tokens, cols, inside),
        _load_token(ptr3, token + 3, n_tokens, cols, inside),
    )


@triton.jit
def _load_before(ptr, token, stride, n_tokens, cols, inside):
    """Load the three tokens before `token`, the last one first, fp32."""
    ptr1 = ptr - stride
    ptr2 = ptr1 - stride
    ptr3 = ptr2 - stride
    return (
        _load_token(ptr1, token - 1, n_tokens, cols, inside).to(tl.float32),
        _load_token(ptr2, token - 2, n_tokens, cols, inside).to(tl.float32),
        _load_token(ptr3, token - 3, n_tokens, cols, inside).to(tl.float32),
    )


@triton.jit
def _place(starts_ptr, token, n_tokens, HAS_DOCUMENTS: tl.constexpr):
    """Return how many tokens of its document stand before a token; without documents at least 6."""
    if HAS_DOCUMENTS:
        return token - tl.load(starts_ptr + tl.minimum(token, n_tokens - 1).to(tl.int64))
    else:
        return 6  # a constant, which removes the masks: tokens outside of the row are zero


@triton.jit
def _sigmoid(z, FAST: tl.constexpr):
    """Return the logistic function. tl.sigmoid divides on NVIDIA, and takes more than twice the instructions."""
    if FAST:
        power = tl.inline_asm_elementwise(
            "ex2.approx.ftz.f32 $0, $1;", "=f,f", [z * -LOG2E], tl.float32, is_pure=True, pack=1
        )
        return tl.inline_asm_elementwise(
            "rcp.approx.ftz.f32 $0, $1;", "=f,f", [1.0 + power], tl.float32, is_pure=True, pack=1
        )
    return tl.sigmoid(z)


@triton.jit
def _convolve(x0, seen1, seen2, seen3, w0, w1, w2, w3, bias, TAPS: tl.constexpr):
    # tl.fma, here and below: of a sum of two products the compiler would fuse either, in each loop another
    z = tl.fma(w1, seen1, tl.fma(w0, x0, bias))
    if TAPS > 2:
        z = tl.fma(w2, seen2, z)
    if TAPS > 3:
        z = tl.fma(w3, seen3, z)
    return z


@triton.jit
def _forward_of_token(
    x0, place, x1, x2, x3, w0, w1, w2, w3, bias, y_ptrs, keep, TAPS: tl.constexpr, SILU: tl.constexpr,
    FAST: tl.constexpr,
):  # fmt: skip
    """Write y of a token. Names end in the lag: x2 is x two tokens back."""
    seen1 = tl.where(place >= 1, x1, 0.0)
    seen2 = tl.where(place >= 2, x2, 0.0)
    seen3 = tl.where(place >= 3, x3, 0.0)
    z = _convolve(x0, seen1, seen2, seen3, w0, w1, w2, w3, bias, TAPS)
    if SILU:
        z *= _sigmoid(z, FAST)
    tl.store(y_ptrs, z.to(y_ptrs.dtype.element_ty), mask=keep)


@triton.jit(do_not_specialize=["n_tokens", "run"])
def conv_forward_kernel(
    x_ptr,  # (B, T, C)
    w_ptr,  # (C, TAPS)
    b_ptr,  # (C,)
    starts_ptr,  # (T,) int32
    y_ptr,  # (B, T, C)
    x_batch_stride, x_token_stride, n_channels,
    n_tokens, run,
    TAPS: tl.constexpr, HAS_BIAS: tl.constexpr, HAS_DOCUMENTS: tl.constexpr, SILU: tl.constexpr, FAST: tl.constexpr,
    COLS: tl.constexpr,
):  # fmt: skip
    """Write y of a run of tokens."""
    first_col = tl.program_id(1).to(tl.int64) * COLS
    cols = tl.arange(0, COLS)
    inside = first_col + cols < n_channels
    batch = tl.program_id(2).to(tl.int64)
    w_ptr += first_col * TAPS
    b_ptr += first_col
    first = (tl.program_id(0).to(tl.int64) * run).to(tl.int32)  # as all numbers of tokens; products with them are wider
    end = tl.minimum(first + run, n_tokens)
    x_stride = tl.cast(x_token_stride, tl.int64)
    y_stride = tl.cast(n_channels, tl.int64)
    x_ptr += batch * x_batch_stride + first * x_stride + first_col
    y_ptr += (batch * n_tokens + first) * y_stride + first_col
    w0, w1, w2, w3 = _taps(w_ptr, cols, inside, TAPS)
    bias = tl.zeros([COLS], tl.float32)
    if HAS_BIAS:
        bias += tl.load(b_ptr + cols, mask=inside, other=0.0).to(tl.float32)
    x1, x2, x3 = _load_before(x_ptr, first, x_stride, n_tokens, cols, inside)
    xs_ahead = _load_tokens(x_ptr, first, x_stride, n_tokens, cols, inside)
    place_ahead = _place(starts_ptr, first + 3, n_tokens, HAS_DOCUMENTS)
    for token in range(first, end, 4):
        xs = xs_ahead
        last_place = place_ahead
        ahead_ptr = x_ptr + 4 * x_stride
        # before the first store, which the compiler does not move loads over
        xs_ahead = _load_tokens(ahead_ptr, token + 4, x_stride, n_tokens, cols, inside)
        place_ahead = _place(starts_ptr, token + 7, n_tokens, HAS_DOCUMENTS)
        if (last_place >= 6) & (token + 4 <= end):  # no token is one of the first three of its document
            for i in tl.static_range(4):
                x0 = xs[i].to(tl.float32)
                _forward_of_token(x0, 3, x1, x2, x3, w0, w1, w2, w3, bias, y_ptr + cols, inside, TAPS, SILU, FAST)
                y_ptr += y_stride
                x3 = x2
                x2 = x1
                x1 = x0
        else:
            for i in range(4):
                x0 = _load_token(x_ptr, token + i, n_tokens, cols, inside).to(tl.float32)
                place = _place(starts_ptr, token + i, n_tokens, HAS_DOCUMENTS)
                keep = inside & (token + i < end)
                _forward_of_token(x0, place, x1, x2, x3, w0, w1, w2, w3, bias, y_ptr + cols, keep, TAPS, SILU, FAST)
                x_ptr += x_stride
                y_ptr += y_stride
                x3 = x2
                x2 = x1
                x1 = x0
        x_ptr = ahead_ptr


@triton.jit
def _dz(x0, dy, seen1, seen2, seen3, w0, w1, w2, w3, bias, TAPS: tl.constexpr, SILU: tl.constexpr, FAST: tl.constexpr):
    """Return the gradient of z of a token."""
    if SILU:
        z = _convolve(x0, seen1, seen2, seen3, w0, w1, w2, w3, bias, TAPS)
        s = _sigmoid(z, FAST)
        return dy * (s * tl.fma(z, 1.0 - s, 1.0))
    else:
        return dy


@triton.jit
def _backward_of_token(
    x0, dy, place, is_owned, x1, x2, x3, dx1, dx2, dx3, dw0, dw1, dw2, dw3, db, w0, w1, w2, w3, bias, dx_ptrs, keep,
    TAPS: tl.constexpr, HAS_BIAS: tl.constexpr, SILU: tl.constexpr, FAST: tl.constexpr,
):  # fmt: skip
    """Write the dx that a token completes, and return those after it and the sums. is_owned: dw is the run's."""
    seen1 = tl.where(place >= 1, x1, 0.0)
    seen2 = tl.where(place >= 2, x2, 0.0)
    seen3 = tl.where(place >= 3, x3, 0.0)
    dz = _dz(x0, dy, seen1, seen2, seen3, w0, w1, w2, w3, bias, TAPS, SILU, FAST)
    owned = tl.where(is_owned, dz, 0.0)
    dw0 = tl.fma(owned, x0, dw0)
    dw1 = tl.fma(owned, seen1, dw1)
    dw2 = tl.fma(owned, seen2, dw2)
    dw3 = tl.fma(owned, seen3, dw3)
    if HAS_BIAS:
        db += owned
    dx3 = tl.fma(w3, tl.where(place >= 3, dz, 0.0), dx3)
    tl.store(dx_ptrs, dx3.to(dx_ptrs.dtype.element_ty), mask=keep)
    dx3 = tl.fma(w2, tl.where(place >= 2, dz, 0.0), dx2)
    dx2 = tl.fma(w1, tl.where(place >= 1, dz, 0.0), dx1)
    return w0 * dz, dx2, dx3, dw0, dw1, dw2, dw3, db


@triton.jit(do_not_specialize=["n_tokens", "run"])
def conv_backward_kernel(
    x_ptr, dy_ptr,  # (B, T, C)
    w_ptr,  # (C, TAPS)
    b_ptr,  # (C,)
    starts_ptr,  # (T,) int32
    dx_ptr,  # (B, T, C)
    partial_ptr,  # (B * runs, TAPS + HAS_BIAS, C) fp32: dw, then db
    x_batch_stride, x_token_stride, dy_batch_stride, dy_token_stride, n_channels,
    n_tokens, run,
    TAPS: tl.constexpr, HAS_BIAS: tl.constexpr, HAS_DOCUMENTS: tl.constexpr, SILU: tl.constexpr, FAST: tl.constexpr,
    COLS: tl.constexpr,
):  # fmt: skip
    """Write dx of a run of tokens, and its part of dw and db."""
    first_col = tl.program_id(1).to(tl.int64) * COLS
    cols = tl.arange(0, COLS)
    inside = first_col + cols < n_channels
    batch = tl.program_id(2).to(tl.int64)
    w_ptr += first_col * TAPS
    b_ptr += first_col
    first = (tl.program_id(0).to(tl.int64) * run).to(tl.int32)  # as all numbers of tokens; products with them are wider
    end = tl.minimum(first + run, n_tokens)
    x_stride = tl.cast(x_token_stride, tl.int64)
    dy_stride = tl.cast(dy_token_stride, tl.int64)
    dx_stride = tl.cast(n_channels, tl.int64)
    x_ptr += batch * x_batch_stride + first * x_stride + first_col
    dy_ptr += batch * dy_batch_stride + first * dy_stride + first_col
    dx_ptr += (batch * n_tokens + first - 3) * dx_stride + first_col  # of the token that the run's first one completes
    w0, w1, w2, w3 = _taps(w_ptr, cols, inside, TAPS)
    bias = tl.zeros([COLS], tl.float32)
    if HAS_BIAS:
        bias += tl.load(b_ptr + cols, mask=inside, other=0.0).to(tl.float32)
    x1, x2, x3 = _load_before(x_ptr, first, x_stride, n_tokens, cols, inside)
    dx1 = tl.zeros([COLS], tl.float32)
    dx2 = tl.zeros([COLS], tl.float32)
    dx3 = tl.zeros([COLS], tl.float32)
    dw0 = tl.zeros([COLS], tl.float32)
    dw1 = tl.zeros([COLS], tl.float32)
    dw2 = tl.zeros([COLS], tl.float32)
    dw3 = tl.zeros([COLS], tl.float32)
    db = tl.zeros([COLS], tl.float32)
    # three tokens more than the run: they see its last ones
    xs_ahead = _load_tokens(x_ptr, first, x_stride, n_tokens, cols, inside)
    dys_ahead = _load_tokens(dy_ptr, first, dy_stride, n_tokens, cols, inside)
    place_ahead = _place(starts_ptr, first + 3, n_tokens, HAS_DOCUMENTS)
    for token in range(first, end + 3, 4):
        xs = xs_ahead
        dys = dys_ahead
        last_place = place_ahead
        x_ahead_ptr = x_ptr + 4 * x_stride
        dy_ahead_ptr = dy_ptr + 4 * dy_stride
        # before the first store, which the compiler does not move loads over
        xs_ahead = _load_tokens(x_ahead_ptr, token + 4, x_stride, n_tokens, cols, inside)
        dys_ahead = _load_tokens(dy_ahead_ptr, token + 4, dy_stride, n_tokens, cols, inside)
        place_ahead = _place(starts_ptr, token + 7, n_tokens, HAS_DOCUMENTS)
        # no token is one of the first three of its document, all are the run's, and those that they complete, too
        if (last_place >= 6) & (token >= first + 3) & (token + 4 <= end):
            for i in tl.static_range(4):
                dx1, dx2, dx3, dw0, dw1, dw2, dw3, db = _backward_of_token(
                    xs[i].to(tl.float32), dys[i].to(tl.float32), 3, True, x1, x2, x3, dx1, dx2, dx3, dw0, dw1, dw2, dw3,
                    db, w0, w1, w2, w3, bias, dx_ptr + cols, inside, TAPS, HAS_BIAS, SILU, FAST,
                )  # fmt: skip
                dx_ptr += dx_stride
                x3 = x2
                x2 = x1
                x1 = xs[i].to(tl.float32)
        else:
            for i in range(4):
                x0 = _load_token(x_ptr, token + i, n_tokens, cols, inside).to(tl.float32)
                dy = _load_token(dy_ptr, token + i, n_tokens, cols, inside).to(tl.float32)
                place = _place(starts_ptr, token + i, n_tokens, HAS_DOCUMENTS)
                ended = token + i - 3
                keep = inside & (ended >= first) & (ended < end)
                dx1, dx2, dx3, dw0, dw1, dw2, dw3, db = _backward_of_token(
                    x0, dy, place, token + i < end, x1, x2, x3, dx1, dx2, dx3, dw0, dw1, dw2, dw3, db, w0, w1, w2, w3,
                    bias, dx_ptr + cols, keep, TAPS, HAS_BIAS, SILU, FAST,
                )  # fmt: skip
                x_ptr += x_stride
                dy_ptr += dy_stride
                dx_ptr += dx_stride
                x3 = x2
                x2 = x1
                x1 = x0
        x_ptr = x_ahead_ptr
        dy_ptr = dy_ahead_ptr
    partial_ptr += (batch * tl.num_programs(0) + tl.program_id(0)) * (TAPS + HAS_BIAS) * dx_stride + first_col
    by_lag = (dw0, dw1, dw2, dw3)
    for lag in tl.static_range(TAPS):
        tl.store(partial_ptr + (TAPS - 1 - lag) * dx_stride + cols, by_lag[lag], mask=inside)
    if HAS_BIAS:
        tl.store(partial_ptr + TAPS * dx_stride + cols, db, mask=inside)


class _Shape(NamedTuple):
    """Key of the launches."""

    taps: int
    has_bias: bool
    has_documents: bool
    activation: Activation | None


class _Launch(NamedTuple):
    """A kernel with its constants, and its tile."""

    launcher: Launcher
    tile: ConvTile


@cached
def _launches(shape: _Shape, chip: Chip) -> tuple[_Launch, _Launch]:
    """Return the launches of forward and backward."""
    shared = {
        "TAPS": shape.taps, "HAS_BIAS": shape.has_bias, "HAS_DOCUMENTS": shape.has_documents,
        "SILU": shape.activation == "silu", "FAST": chip.vendor == "nvidia",
    }  # fmt: skip

    def launch(kernel: Callable, tile: ConvTile) -> _Launch:
        return _Launch(Launcher(kernel, shared | tile.constants(chip)), tile)

    return launch(conv_forward_kernel, CONV_FORWARD), launch(conv_backward_kernel, CONV_BACKWARD)


def _or_stand_in(stand_in: torch.Tensor, *tensors: torch.Tensor | None) -> tuple[torch.Tensor, ...]:
    """Return tensors, with one that the kernels do not read for those that are missing."""
    return tuple(stand_in if t is None else t for t in tensors)


class _Conv(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x, weight, bias, starts, shape):  # x (B, T, C) with neighbouring channels
        ctx.save_for_backward(x, weight, bias, starts)
        ctx.shape = shape
        if shape.taps > RUN_TAPS:
            return convolve_wide(x, weight, bias, starts, silu=shape.activation == "silu")
        batch, n_tokens, n_channels = x.shape
        (launcher, tile), _ = _launches(shape, chip_of(x.device))
        y = x.new_empty(x.shape)
        run = tile.run_of(batch * n_tokens, n_channels, chip_of(x.device))
        grid = (-(-n_tokens // run), -(-n_channels // tile.cols), batch)
        launcher(
            grid, (x, weight, *_or_stand_in(weight, bias, starts), y), (*x.stride()[:2], n_channels), n_tokens, run
        )
        return y

    @staticmethod
    @no_double_backward
    def backward(ctx, dy):
        x, weight, bias, starts = ctx.saved_tensors
        shape = ctx.shape
        dy = dy if dy.stride(-1) == 1 else dy.contiguous()
        if shape.taps > RUN_TAPS:
            dx, sums = differentiate_wide(x, dy, weight, bias, starts, silu=shape.activation == "silu")
        else:
            dx, sums = _differentiate(x, dy, weight, bias, starts, shape)
        dw = torch.empty_like(weight).copy_(sums[: shape.taps].t())
        db = sums[shape.taps].to(bias.dtype) if shape.has_bias else None
        return dx, dw, db, None, None


def _differentiate(
    x: torch.Tensor,
    dy: torch.Tensor,
    weight: torch.Tensor,
    bias: torch.Tensor | None,
    starts: torch.Tensor | None,
    shape: _Shape,
) -> tuple[torch.Tensor, torch.Tensor]:
    """Return dx, and the gradients (W, C) of the taps in fp32, with that of the bias after them."""
    batch, n_tokens, n_channels = x.shape
    _, (launcher, tile) = _launches(shape, chip_of(x.device))
    dx = x.new_empty(x.shape)
    run = tile.run_of(batch * n_tokens, n_channels, chip_of(x.device))
    runs = -(-n_tokens // run)
    sums = (batch * runs, shape.taps + shape.has_bias, n_channels)
    partial = torch.empty(sums, dtype=torch.float32, device=x.device)
    launcher(
        (runs, -(-n_channels // tile.cols), batch),
        (x, dy, weight, *_or_stand_in(weight, bias, starts), dx, partial),
        (*x.stride()[:2], *dy.stride()[:2], n_channels), n_tokens, run,
    )  # fmt: skip
    return dx, partial.sum(0)


def causal_conv1d(
    x: torch.Tensor,  # (B, C, T)
    weight: torch.Tensor,  # (C, W), W from 2 to 8
    bias: torch.Tensor | None = None,  # (C,)
    *,
    activation: Activation | None = None,
    documents: Documents | None = None,
) -> torch.Tensor:  # (B, C, T), a view of (B, T, C)
    """Convolve each channel with its weights over the last W tokens, and activate. Deterministic.

    documents: packed documents of one row (B = 1); no token sees another document. x is read without a copy if it is a
    view of (B, T, C), as a transposed projection is.

    Raises ValueError on mismatched shapes, dtypes, devices and other activations, TypeError for what is no tensor.
    """
    check_convolution("causal_conv1d", x, weight, bias, activation)
    if documents is not None and (x.shape[0] != 1 or documents.starts.shape != x.shape[2:]):
        raise ValueError(
            f"causal_conv1d: documents have starts {tuple(documents.starts.shape)} and x {tuple(x.shape)}; "
            "expected (T,) and (1, C, T)"
        )
    if x.numel() == 0 or not runs_triton(x):
        return causal_conv1d_reference(x, weight, bias, activation=activation, documents=documents)
    tokens_first = x.transpose(1, 2)
    if tokens_first.stride(-1) != 1:
        tokens_first = tokens_first.contiguous()
    shape = _Shape(weight.shape[1], bias is not None, documents is not None, activation)
    bias = None if bias is None else bias.contiguous()
    starts = None if documents is None else documents.starts.contiguous()
    return _Conv.apply(tokens_first, weight.contiguous(), bias, starts, shape).transpose(1, 2)
