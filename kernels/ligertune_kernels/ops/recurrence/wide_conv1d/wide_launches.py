"""Launches of causal_conv1d for 5 to 8 taps."""

from __future__ import annotations

import torch

from ligertune_kernels.chips import Chip
from ligertune_kernels.launcher import Launcher, cached, chip_of
from ligertune_kernels.ops.recurrence.wide_conv1d.kernels import (
    wide_activation_gradients_kernel,
    wide_backward_kernel,
    wide_forward_kernel,
)
from ligertune_kernels.ops.recurrence.wide_conv1d.tiles import WIDE_COLS, WIDE_TOKENS, WIDE_WARPS


@cached
def _launches(
    taps: int, has_bias: bool, has_documents: bool, silu: bool, chip: Chip
) -> tuple[Launcher, Launcher, Launcher]:
    """Return the launches of the forward, of the activation's gradients and of the backward."""
    shared = {
        "TAPS": taps, "HAS_BIAS": has_bias, "HAS_DOCUMENTS": has_documents, "TOKENS": WIDE_TOKENS, "COLS": WIDE_COLS,
        "num_warps": WIDE_WARPS, "num_stages": 1,
    }  # fmt: skip
    return (
        Launcher(wide_forward_kernel, shared | {"SILU": silu}),
        Launcher(wide_activation_gradients_kernel, shared),
        Launcher(wide_backward_kernel, shared),
    )


def _grid(x: torch.Tensor) -> tuple[int, int, int]:
    batch, n_tokens, n_channels = x.shape
    return -(-n_tokens // WIDE_TOKENS), -(-n_channels // WIDE_COLS), batch


def convolve_wide(
    x: torch.Tensor,  # (B, T, C), neighbouring channels
    weight: torch.Tensor,  # (C, W) contiguous
    bias: torch.Tensor | None,
    starts: torch.Tensor | None,  # (T,) int32
    *,
    silu: bool,
) -> torch.Tensor:  # (B, T, C)
    """Return y."""
    _, n_tokens, n_channels = x.shape
    y = x.new_empty(x.shape)
    launch, _, _ = _launches(weight.shape[1], bias is not None, starts is not None, silu, chip_of(x.device))
    tensors = (x, weight, weight if bias is None else bias, weight if starts is None else starts, y)
    launch(_grid(x), tensors, (*x.stride()[:2], n_channels), n_tokens)
    return y


def differentiate_wide(
    x: torch.Tensor,
    dy: torch.Tensor,  # (B, T, C), neighbouring channels
    weight: torch.Tensor,
    bias: torch.Tensor | None,
    starts: torch.Tensor | None,
    *,
    silu: bool,
) -> tuple[torch.Tensor, torch.Tensor]:  # (B, T, C), (W + 1 with a bias, C) fp32
    """Return dx, and the gradients of the taps with that of the bias after them."""
    batch, n_tokens, n_channels = x.shape
    taps = weight.shape[1]
    _, activation, backward = _launches(taps, bias is not None, starts is not None, silu, chip_of(x.device))
    grid = _grid(x)
    places = weight if starts is None else starts
    dz = dy
    if silu:
        dz = torch.empty(x.shape, dtype=torch.float32, device=x.device)
        activation(
            grid, (x, dy, weight, weight if bias is None else bias, places, dz),
            (*x.stride()[:2], *dy.stride()[:2], n_channels), n_tokens,
        )  # fmt: skip
    dx = x.new_empty(x.shape)
    sums = (batch * grid[0], taps + (bias is not None), n_channels)
    partial = torch.empty(sums, dtype=torch.float32, device=x.device)
    backward(grid, (x, dz, weight, places, dx, partial), (*x.stride()[:2], *dz.stride()[:2], n_channels), n_tokens)
    return dx, partial.sum(0)
