"""Group norm: x (N, C, *) with its C channels in G groups, optional weight and bias (C,).

A group of one sample is K = C / G channels of L positions each, contiguous in memory: K L elements. With m and v their
mean and variance and c the channel of an element:

    r = 1 / sqrt(v + eps)        x̂ = r (x - m)        y = w_c x̂ + b_c

Backward, with g = w_c dy and means over the group:

    dx = r (g - mean(g) - x̂ mean(g x̂))        dw_c = sum of dy x̂        db_c = sum of dy

where the sums run over the samples and positions of channel c. The group's means are sums over its channels, weighted
with w_c, so that one sweep gives both. Everything is computed in fp32 and rounded once to x's dtype.

A program computes one group and reads it two or three times; all reads but the first hit the cache. There are no
atomics: channel sums are kept per sample, and column_sums adds the samples. Source: Wu and He, arXiv:1803.08494.
"""

from __future__ import annotations

import torch
from torch import nn
from torch.nn import functional as F

from ligertune_kernels.autograd import no_double_backward
from ligertune_kernels.chips import Chip
from ligertune_kernels.jit.device_functions import fp32
from ligertune_kernels.launcher import Launcher, cached, chip_of, runs_triton, tl, triton
from ligertune_kernels.ops.norms.kernels import column_sums
from ligertune_kernels.ops.norms.tiles import group_constants


def group_norm_reference(
    x: torch.Tensor,
    num_groups: int,
    weight: torch.Tensor | None = None,
    bias: torch.Tensor | None = None,
    eps: float = 1e-5,
) -> torch.Tensor:
    """Compute `group_norm` in plain torch."""
    # Weight and bias are applied here because torch 2.13's backward fails on a CPU for a weight without a bias.
    wide = torch.promote_types(x.dtype, torch.float32)
    y = F.group_norm(x.to(wide), num_groups, eps=eps) if x.numel() else x.to(wide)  # torch 2.15 refuses empty ones
    of_channels = (-1, *[1] * (x.dim() - 2))
    if weight is not None:
        y = y * weight.to(wide).view(of_channels)
    if bias is not None:
        y = y + bias.to(wide).view(of_channels)
    return y.to(x.dtype)


@triton.jit(do_not_specialize=["n_groups"])
def _forward_kernel(
    x_ptr,  # (N, C, L)
    w_ptr, b_ptr,  # (C,)
    y_ptr,  # (N, C, L)
    mean_ptr, rstd_ptr,  # (N G,)
    n_channels, length, n_groups, eps,
    HAS_WEIGHT: tl.constexpr, HAS_BIAS: tl.constexpr, CHANNELS: tl.constexpr, LENGTH: tl.constexpr,
):  # fmt: skip
    """Compute mean, then variance, then y of one group of one sample."""
    group = tl.program_id(0).to(tl.int64)
    n_elements = n_channels * length
    x_ptr += group * n_elements
    y_ptr += group * n_elements
    sums = tl.zeros([CHANNELS, LENGTH], dtype=tl.float32)
    for channel in range(0, n_channels, CHANNELS):
        channels = channel + tl.arange(0, CHANNELS)[:, None]
        for start in range(0, length, LENGTH):
            cols = start + tl.arange(0, LENGTH)[None, :]
            mask = (channels < n_channels) & (cols < length)
            sums += tl.load(x_ptr + channels * length + cols, mask=mask, other=0.0).to(tl.float32)
    mean = tl.sum(tl.sum(sums, axis=1), axis=0) / n_elements
    squares = tl.zeros([CHANNELS, LENGTH], dtype=tl.float32)
    for channel in range(0, n_channels, CHANNELS):
        channels = channel + tl.arange(0, CHANNELS)[:, None]
        for start in range(0, length, LENGTH):
            cols = start + tl.arange(0, LENGTH)[None, :]
            mask = (channels < n_channels) & (cols < length)
            x = tl.load(x_ptr + channels * length + cols, mask=mask, other=0.0).to(tl.float32)
            x = tl.where(mask, x - mean, 0.0)
            squares += x * x
    rstd = tl.rsqrt(tl.sum(tl.sum(squares, axis=1), axis=0) / n_elements + fp32(eps))
    tl.store(mean_ptr + group, mean)
    tl.store(rstd_ptr + group, rstd)
    first_channel = (group % n_groups) * n_channels
    for channel in range(0, n_channels, CHANNELS):
        channels = channel + tl.arange(0, CHANNELS)[:, None]
        for start in range(0, length, LENGTH):
            cols = start + tl.arange(0, LENGTH)[None, :]
            mask = (channels < n_channels) & (cols < length)
            y = (tl.load(x_ptr + channels * length + cols, mask=mask, other=0.0).to(tl.float32) - mean) * rstd
            if HAS_WEIGHT:
                y *= tl.load(w_ptr + first_channel + channels, mask=channels < n_channels, other=0.0).to(tl.float32)
            if HAS_BIAS:
                y += tl.load(b_ptr + first_channel + channels, mask=channels < n_channels, other=0.0).to(tl.float32)
            tl.store(y_ptr + channels * length + cols, y.to(y_ptr.dtype.element_ty), mask=mask)


@triton.jit(do_not_specialize=["n_groups"])
def _backward_kernel(
    dy_ptr, x_ptr,  # (N, C, L)
    w_ptr,  # (C,)
    mean_ptr, rstd_ptr,  # (N G,)
    dx_ptr,  # (N, C, L)
    partial_ptr,  # (N, 2 C): dw, then db of each sample
    n_channels, length, n_groups,
    HAS_WEIGHT: tl.constexpr, NEEDS_DX: tl.constexpr, NEEDS_SUMS: tl.constexpr,
    CHANNELS: tl.constexpr, LENGTH: tl.constexpr,
):  # fmt: skip
    """Write dw and db of the group's channels to the sample's row of partial_ptr, then dx of the group."""
    group = tl.program_id(0).to(tl.int64)
    n_elements = n_channels * length
    x_ptr += group * n_elements
    dy_ptr += group * n_elements
    dx_ptr += group * n_elements
    first_channel = (group % n_groups) * n_channels
    all_channels = n_groups * n_channels
    partial_ptr += group // n_groups * 2 * all_channels + first_channel
    mean = tl.load(mean_ptr + group)
    rstd = tl.load(rstd_ptr + group)
    g_sum = 0.0
    gx_sum = 0.0
    for channel in range(0, n_channels, CHANNELS):
        channels = channel + tl.arange(0, CHANNELS)
        channel_mask = channels < n_channels
        dw = tl.zeros([CHANNELS, LENGTH], dtype=tl.float32)
        db = tl.zeros([CHANNELS, LENGTH], dtype=tl.float32)
        for start in range(0, length, LENGTH):
            cols = start + tl.arange(0, LENGTH)[None, :]
            mask = channel_mask[:, None] & (cols < length)
            offs = channels[:, None] * length + cols
            x = tl.load(x_ptr + offs, mask=mask, other=0.0).to(tl.float32)
            dy = tl.load(dy_ptr + offs, mask=mask, other=0.0).to(tl.float32)
            dw += dy * ((x - mean) * rstd)
            db += dy
        dw_sums = tl.sum(dw, axis=1)
        db_sums = tl.sum(db, axis=1)
        if NEEDS_SUMS:
            tl.store(partial_ptr + channels, dw_sums, mask=channel_mask)
            tl.store(partial_ptr + all_channels + channels, db_sums, mask=channel_mask)
        if HAS_WEIGHT:
            w = tl.load(w_ptr + first_channel + channels, mask=channel_mask, other=0.0).to(tl.float32)
            dw_sums *= w
            db_sums *= w
        gx_sum += tl.sum(dw_sums, axis=0)
        g_sum += tl.sum(db_sums, axis=0)
    if NEEDS_DX:
        for channel in range(0, n_channels, CHANNELS):
            channels = channel + tl.arange(0, CHANNELS)[:, None]
            for start in range(0, length, LENGTH):
                cols = start + tl.arange(0, LENGTH)[None, :]
                mask = (channels < n_channels) & (cols < length)
                offs = channels * length + cols
                xhat = (tl.load(x_ptr + offs, mask=mask, other=0.0).to(tl.float32) - mean) * rstd
                g = tl.load(dy_ptr + offs, mask=mask, other=0.0).to(tl.float32)
                if HAS_WEIGHT:
                    g *= tl.load(w_ptr + first_channel + channels, mask=channels < n_channels, other=0.0).to(tl.float32)
                dx = (g - (g_sum + xhat * gx_sum) / n_elements) * rstd
                tl.store(dx_ptr + offs, dx.to(dx_ptr.dtype.element_ty), mask=mask)


@cached
def _plan_forward(n_channels: int, length: int, weight: bool, bias: bool, chip: Chip) -> Launcher:
    return Launcher(
        _forward_kernel, {"HAS_WEIGHT": weight, "HAS_BIAS": bias, **group_constants(n_channels, length, chip)}
    )


@cached
def _plan_backward(
    n_channels: int, length: int, weight: bool, needs_dx: bool, needs_sums: bool, chip: Chip
) -> Launcher:
    flags = {"HAS_WEIGHT": weight, "NEEDS_DX": needs_dx, "NEEDS_SUMS": needs_sums}
    return Launcher(_backward_kernel, {**flags, **group_constants(n_channels, length, chip)})


def _forward(
    x: torch.Tensor, num_groups: int, weight: torch.Tensor | None, bias: torch.Tensor | None, eps: float
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Return y, and the mean and rstd of each group (N G,)."""
    x = x.contiguous()
    n_channels = x.shape[1] // num_groups
    length = x.numel() // (x.shape[0] * x.shape[1])
    y = torch.empty_like(x)
    mean, rstd = (torch.empty(x.shape[0] * num_groups, dtype=torch.float32, device=x.device) for _ in range(2))
    launch = _plan_forward(n_channels, length, weight is not None, bias is not None, chip_of(x.device))
    given = (x if weight is None else weight.contiguous(), x if bias is None else bias.contiguous())
    launch((mean.numel(), 1, 1), (x, *given, y, mean, rstd), (n_channels, length), num_groups, float(eps))
    return y, mean, rstd


def _backward(
    dy: torch.Tensor,
    x: torch.Tensor,
    weight: torch.Tensor | None,
    bias: torch.Tensor | None,
    mean: torch.Tensor,
    rstd: torch.Tensor,
    needs: tuple[bool, bool, bool],
) -> tuple[torch.Tensor | None, torch.Tensor | None, torch.Tensor | None]:
    """Return dx, dw and db in the dtypes of x, weight and bias, None where `needs` is False."""
    needs_dx, needs_dw, needs_db = needs
    x = x.contiguous()
    dy = dy.contiguous()
    n_samples, n_channels = x.shape[:2]
    num_groups = mean.numel() // n_samples
    group = (n_channels // num_groups, x.numel() // (n_samples * n_channels))
    dx = torch.empty_like(x) if needs_dx else None
    partial = mean
    if needs_dw or needs_db:
        partial = torch.empty((n_samples, 2 * n_channels), dtype=torch.float32, device=x.device)
    launch = _plan_backward(*group, weight is not None, needs_dx, needs_dw or needs_db, chip_of(x.device))
    w = x if weight is None else weight.contiguous()
    launch((mean.numel(), 1, 1), (dy, x, w, mean, rstd, x if dx is None else dx, partial), group, num_groups)
    if not (needs_dw or needs_db):
        return dx, None, None
    dw, db = (
        torch.empty(n_channels, dtype=torch.float32 if t is None else t.dtype, device=x.device) for t in (weight, bias)
    )
    column_sums(partial, dw, db)
    return dx, dw if needs_dw else None, db if needs_db else None


class _GroupNorm(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x, num_groups, weight, bias, eps):
        y, mean, rstd = _forward(x, num_groups, weight, bias, eps)
        ctx.save_for_backward(x, weight, bias, mean, rstd)
        return y

    @staticmethod
    @no_double_backward
    def backward(ctx, dy):
        needs_dx, _, needs_dw, needs_db, _ = ctx.needs_input_grad
        dx, dw, db = _backward(dy, *ctx.saved_tensors, (needs_dx, needs_dw, needs_db))
        return dx, None, dw, db, None


def group_norm(
    x: torch.Tensor,  # (N, C, *)
    num_groups: int,
    weight: torch.Tensor | None = None,  # (C,)
    bias: torch.Tensor | None = None,  # (C,)
    eps: float = 1e-5,
) -> torch.Tensor:  # (N, C, *)
    """Compute torch.nn.functional.group_norm in x's dtype. Raises ValueError on mismatched shapes."""
    if x.dim() < 2 or num_groups < 1 or x.shape[1] % num_groups:
        raise ValueError(f"group_norm: x is {tuple(x.shape)}: expected (N, C, *) with C a multiple of {num_groups}")
    for name, t in (("weight", weight), ("bias", bias)):
        if t is not None and t.shape != x.shape[1:2]:
            raise ValueError(
                f"group_norm: {name} is {tuple(t.shape)}, but x is {tuple(x.shape)}: expected its channels"
            )
    given = [t for t in (x, weight, bias) if t is not None]
    if x.numel() == 0 or not all(runs_triton(t) for t in given):
        return group_norm_reference(x, num_groups, weight, bias, eps)
    if torch.is_grad_enabled() and any(t.requires_grad for t in given):
        return _GroupNorm.apply(x, num_groups, weight, bias, eps)
    return _forward(x, num_groups, weight, bias, eps)[0]


class GroupNorm(nn.GroupNorm):
    """`group_norm` as a module, with the parameters of torch.nn.GroupNorm."""

    def forward(self, hidden_states: torch.Tensor) -> torch.Tensor:
        return group_norm(hidden_states, self.num_groups, self.weight, self.bias, self.eps)
