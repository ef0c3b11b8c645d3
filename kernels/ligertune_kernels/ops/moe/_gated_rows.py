r"""Kernels of the gated activation of `experts`: a = p · act(g) · (u + offset) for rows z = (g, u), and the backward

    h = act(g) · (u + offset)     dp = sum over F of da · h  +  dout · b2     d_g = p da (u + offset) act'(g)
    d_u = p da act(g)

Rows are in the order of `Routing`. Rows behind the last group hold no values, and are neither read nor written.
Everything is computed in fp32 and rounded once. The biases b1 of z and b2 of the down projection are not in memory:
they are added where z is read, and where the outputs are summed.
"""

from __future__ import annotations

from typing import NamedTuple

import torch

from ligertune_kernels.chips import Chip, launch_options
from ligertune_kernels.jit.device_functions import gelu_erf, gelu_erf_grad, gelu_tanh, gelu_tanh_grad
from ligertune_kernels.launcher import Launcher, cached, chip_of, tl, triton
from ligertune_kernels.ops.moe._expert_options import GatedActivation
from ligertune_kernels.ops.moe._routing import Routing

BLOCK = 1024  # columns of gate and of up at a time


@triton.jit
def _halves(ptr, first, n_cols, INTERLEAVED: tl.constexpr, BLOCK: tl.constexpr):
    """Load gate and up of the columns [first, first + BLOCK) of a row of 2 n_cols."""
    if INTERLEAVED:
        cols = 2 * first + tl.arange(0, 2 * BLOCK)
        both = tl.load(ptr + cols, mask=cols < 2 * n_cols, other=0.0).to(tl.float32)
        return tl.split(tl.reshape(both, [BLOCK, 2]))
    else:
        cols = first + tl.arange(0, BLOCK)
        gate = tl.load(ptr + cols, mask=cols < n_cols, other=0.0).to(tl.float32)
        return gate, tl.load(ptr + n_cols + cols, mask=cols < n_cols, other=0.0).to(tl.float32)


@triton.jit
def _store_halves(ptr, first, n_cols, gate, up, INTERLEAVED: tl.constexpr, BLOCK: tl.constexpr):
    gate = gate.to(ptr.dtype.element_ty)
    up = up.to(ptr.dtype.element_ty)
    if INTERLEAVED:
        cols = 2 * first + tl.arange(0, 2 * BLOCK)
        tl.store(ptr + cols, tl.interleave(gate, up), mask=cols < 2 * n_cols)
    else:
        cols = first + tl.arange(0, BLOCK)
        tl.store(ptr + cols, gate, mask=cols < n_cols)
        tl.store(ptr + n_cols + cols, up, mask=cols < n_cols)


@triton.jit
def _activate(gate, FUNCTION: tl.constexpr, ALPHA: tl.constexpr):
    """Return act(gate) and act'(gate)."""
    if FUNCTION == "silu":
        s = tl.sigmoid(ALPHA * gate)
        return gate * s, s * (1.0 + ALPHA * gate * (1.0 - s))
    elif FUNCTION == "gelu_tanh":
        return gelu_tanh(gate), gelu_tanh_grad(gate)
    else:
        return gelu_erf(gate), gelu_erf_grad(gate)


@triton.jit
def _activation_kernel(
    z_ptr,  # (S, 2F), without the bias
    a_ptr,  # (S, F)
    bias_ptr,  # (X, 2F)
    weights_ptr,  # (N, K)
    pairs_ptr, offsets_ptr, experts_ptr,
    n_cols, n_experts,
    FUNCTION: tl.constexpr, ALPHA: tl.constexpr, LIMIT: tl.constexpr, UP_OFFSET: tl.constexpr,
    HAS_LIMIT: tl.constexpr, HAS_BIAS: tl.constexpr, INTERLEAVED: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    blocks = tl.cdiv(n_cols, BLOCK)
    row = (tl.program_id(0) // blocks).to(tl.int64)
    first = (tl.program_id(0) % blocks) * BLOCK
    if row < tl.load(offsets_ptr + n_experts - 1):
        weight = tl.load(weights_ptr + tl.load(pairs_ptr + row)).to(tl.float32)
        gate, up = _halves(z_ptr + row * (2 * n_cols), first, n_cols, INTERLEAVED, BLOCK)
        if HAS_BIAS:
            expert = tl.load(experts_ptr + row).to(tl.int64)
            more = _halves(bias_ptr + expert * (2 * n_cols), first, n_cols, INTERLEAVED, BLOCK)
            gate = gate + more[0]
            up = up + more[1]
        if HAS_LIMIT:
            gate = tl.minimum(gate, LIMIT)
            up = tl.minimum(tl.maximum(up, -LIMIT), LIMIT)
        activated, _ = _activate(gate, FUNCTION, ALPHA)
        a = weight * activated * (up + UP_OFFSET)
        cols = first + tl.arange(0, BLOCK)
        tl.store(a_ptr + row * n_cols + cols, a.to(a_ptr.dtype.element_ty), mask=cols < n_cols)


@triton.jit
def _activation_backward_kernel(
    z_ptr,  # (S, 2F), without the bias
    da_ptr,  # (S, F); replaced by a if STORE_A
    dz_ptr,  # (S, 2F); may be z
    d_weights_ptr,  # (N, K)
    bias_ptr,  # (X, 2F)
    weights_ptr,  # (N, K)
    dout_ptr,  # (N, E)
    down_bias_ptr,  # (X, E)
    pairs_ptr, offsets_ptr, experts_ptr,
    n_cols, n_experts, dout_row_stride, n_outputs,
    FUNCTION: tl.constexpr, ALPHA: tl.constexpr, LIMIT: tl.constexpr, UP_OFFSET: tl.constexpr,
    HAS_LIMIT: tl.constexpr, HAS_BIAS: tl.constexpr, HAS_DOWN_BIAS: tl.constexpr, INTERLEAVED: tl.constexpr,
    STORE_A: tl.constexpr, STORE_DZ: tl.constexpr, TOP_K: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    row = tl.program_id(0).to(tl.int64)
    pair = tl.load(pairs_ptr + row)
    if row < tl.load(offsets_ptr + n_experts - 1):
        weight = tl.load(weights_ptr + pair).to(tl.float32)
        expert = tl.load(experts_ptr + row).to(tl.int64)
        total = tl.zeros([BLOCK], dtype=tl.float32)
        for first in range(0, n_cols, BLOCK):
            gate, up = _halves(z_ptr + row * (2 * n_cols), first, n_cols, INTERLEAVED, BLOCK)
            if HAS_BIAS:
                more = _halves(bias_ptr + expert * (2 * n_cols), first, n_cols, INTERLEAVED, BLOCK)
                gate = gate + more[0]
                up = up + more[1]
            low = gate
            high = up
            if HAS_LIMIT:
                low = tl.minimum(gate, LIMIT)
                high = tl.minimum(tl.maximum(up, -LIMIT), LIMIT)
            cols = first + tl.arange(0, BLOCK)
            da = tl.load(da_ptr + row * n_cols + cols, mask=cols < n_cols, other=0.0).to(tl.float32)
            activated, derivative = _activate(low, FUNCTION, ALPHA)
            product = activated * (high + UP_OFFSET)
            total += da * product
            # a over da, and dz over z: the thread that stores has loaded the same, unless gate and up are interleaved.
            if INTERLEAVED and (STORE_A or STORE_DZ):
                tl.debug_barrier()
            if STORE_A:
                a = (weight * product).to(da_ptr.dtype.element_ty)
                tl.store(da_ptr + row * n_cols + cols, a, mask=cols < n_cols)
            if STORE_DZ:
                d_gate = weight * da * (high + UP_OFFSET) * derivative
                d_up = weight * da * activated
                if HAS_LIMIT:  # as torch's clamp: the bounds themselves have a gradient
                    d_gate = tl.where(gate <= LIMIT, d_gate, 0.0)
                    d_up = tl.where((up >= -LIMIT) & (up <= LIMIT), d_up, 0.0)
                _store_halves(dz_ptr + row * (2 * n_cols), first, n_cols, d_gate, d_up, INTERLEAVED, BLOCK)
        if HAS_DOWN_BIAS:
            dout_ptr += (pair // TOP_K).to(tl.int64) * dout_row_stride
            for first in range(0, n_outputs, BLOCK):
                cols = first + tl.arange(0, BLOCK)
                dout = tl.load(dout_ptr + cols, mask=cols < n_outputs, other=0.0).to(tl.float32)
                bias = tl.load(down_bias_ptr + expert * n_outputs + cols, mask=cols < n_outputs, other=0.0)
                total += dout * bias.to(tl.float32)
        tl.store(d_weights_ptr + pair, tl.sum(total, 0).to(d_weights_ptr.dtype.element_ty))
    else:
        tl.store(d_weights_ptr + pair, 0.0)


def _activation_constants(activation: GatedActivation) -> dict[str, object]:
    limit = activation.limit
    return {
        "FUNCTION": activation.function, "ALPHA": float(activation.alpha), "UP_OFFSET": float(activation.up_offset),
        "LIMIT": 0.0 if limit is None else float(limit), "HAS_LIMIT": limit is not None,
    }  # fmt: skip


class _Flags(NamedTuple):
    """What the kernels of the activation do."""

    interleaved: bool
    has_bias: bool
    has_down_bias: bool = False
    store_a: bool = False
    store_dz: bool = False


@cached
def _plan_activation(n_cols: int, activation: GatedActivation, flags: _Flags, chip: Chip) -> tuple:
    """Return the launcher of the forward, and the programs per row."""
    block = min(BLOCK, triton.next_power_of_2(n_cols))
    constants = {**_activation_constants(activation), "HAS_BIAS": flags.has_bias, "INTERLEAVED": flags.interleaved}
    return Launcher(_activation_kernel, {**constants, "BLOCK": block, **launch_options(block, chip)}), -(
        -n_cols // block
    )


@cached
def _plan_activation_backward(
    n_cols: int, top_k: int, activation: GatedActivation, flags: _Flags, chip: Chip
) -> Launcher:
    block = min(BLOCK, triton.next_power_of_2(n_cols))
    constants = {
        **_activation_constants(activation), "HAS_BIAS": flags.has_bias, "HAS_DOWN_BIAS": flags.has_down_bias,
        "INTERLEAVED": flags.interleaved, "STORE_A": flags.store_a, "STORE_DZ": flags.store_dz, "TOP_K": top_k,
    }  # fmt: skip
    return Launcher(_activation_backward_kernel, {**constants, "BLOCK": block, **launch_options(block, chip)})


def activate_rows(
    z: torch.Tensor,  # (S, 2F), without the bias
    bias: torch.Tensor | None,  # (X, 2F)
    weights: torch.Tensor,  # (N, K)
    routing: Routing,
    activation: GatedActivation,
    interleaved: bool,
) -> torch.Tensor:  # (S, F)
    """Return the router's weight times act(gate) · (up + offset) of each row."""
    n_rows = z.shape[0]
    n_cols = z.shape[1] // 2
    a = torch.empty((n_rows, n_cols), dtype=z.dtype, device=z.device)
    flags = _Flags(interleaved, bias is not None)
    launch, blocks = _plan_activation(n_cols, activation, flags, chip_of(z.device))
    tensors = (z, a, z if bias is None else bias, weights, routing.pairs, routing.offsets, routing.experts)
    launch((n_rows * blocks, 1, 1), tensors, (n_cols, len(routing.offsets)))
    return a


class ActivationBackward(NamedTuple):
    """Inputs of the backward of the activation, of all experts."""

    z: torch.Tensor  # (S, 2F), without the bias
    bias: torch.Tensor | None  # (X, 2F)
    weights: torch.Tensor  # (N, K)
    dout: torch.Tensor  # (N, E)
    down_bias: torch.Tensor | None  # (X, E)
    activation: GatedActivation
    interleaved: bool

    def run(
        self,
        da: torch.Tensor,  # (S, F)
        routing: Routing,
        *,
        needs_a: bool,
        needs_dz: bool,
        over_z: bool,
    ) -> tuple[torch.Tensor | None, torch.Tensor]:  # (S, 2F), (N, K)
        """Return dz if it is needed, and the gradient of the router's weights.

        a is written over da if it is needed. over_z: write dz over z.
        """
        z = self.z
        absent = self.z
        n_rows = z.shape[0]
        n_cols = z.shape[1] // 2
        dz = (z if over_z else torch.empty_like(z)) if needs_dz else None
        d_weights = torch.empty_like(self.weights)
        flags = _Flags(self.interleaved, self.bias is not None, self.down_bias is not None, needs_a, needs_dz)
        launch = _plan_activation_backward(n_cols, routing.top_k, self.activation, flags, chip_of(z.device))
        tensors = (
            z, da, absent if dz is None else dz, d_weights, absent if self.bias is None else self.bias, self.weights,
            self.dout, absent if self.down_bias is None else self.down_bias,
            routing.pairs, routing.offsets, routing.experts,
        )  # fmt: skip
        integers = n_cols, len(routing.offsets), self.dout.stride(0), self.dout.shape[1]
        launch((n_rows, 1, 1), tensors, integers)
        return dz, d_weights
