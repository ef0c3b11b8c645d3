r"""What swiglu and geglu share: y = act(gate) · up, and its backward

    d_gate = dy · up · act'(gate)        d_up = dy · act(gate)

in fp32 with one rounding at the end. gate and up are rows of any stride, so that the two halves of a packed
projection (N, 2F) are read where they lie, and their gradients written into one (N, 2F) buffer.

With `inplace` the backward writes d_gate over gate and d_up over up, which it has read for the last time: 2NF elements
less at the peak. The version counters know: a backward that comes later and needs gate or up raises autograd's error,
and a second one through the same op is refused. Leaves that require a gradient are left alone (their .grad would lie
in their own memory), as are gate and up that overlap, and anything under torch.compile, which reuses memory itself.
"""

from __future__ import annotations

from typing import Literal

import torch

from ligertune_kernels.device_fns import gelu_erf, gelu_erf_grad, gelu_tanh, gelu_tanh_grad, silu, silu_grad
from ligertune_kernels.launch import chip_of, on_device, options, rows_of, tl, triton
from ligertune_kernels.once import differentiable_once
from ligertune_kernels.ops.overwriting import are_apart, is_someones_leaf, span

Activation = Literal["silu", "gelu_tanh", "gelu_erf"]

BLOCK = 2048

SPENT = (
    "{op}: an earlier backward wrote the gradients over gate and up (inplace=True); "
    "run the forward again instead of backward(retain_graph=True)"
)


@triton.jit
def _forward_kernel(
    gate_ptr,
    up_ptr,
    y_ptr,
    gate_row_stride,
    up_row_stride,
    n_cols,
    ACTIVATION: tl.constexpr,
    BLOCK: tl.constexpr,
):
    blocks = tl.cdiv(n_cols, BLOCK)
    row = (tl.program_id(0) // blocks).to(tl.int64)
    cols = (tl.program_id(0) % blocks) * BLOCK + tl.arange(0, BLOCK)
    mask = cols < n_cols
    gate = tl.load(gate_ptr + row * gate_row_stride + cols, mask=mask, other=0.0).to(tl.float32)
    up = tl.load(up_ptr + row * up_row_stride + cols, mask=mask, other=0.0).to(tl.float32)
    if ACTIVATION == "silu":
        y = silu(gate) * up
    elif ACTIVATION == "gelu_tanh":
        y = gelu_tanh(gate) * up
    else:
        y = gelu_erf(gate) * up
    tl.store(y_ptr + row * n_cols + cols, y.to(y_ptr.dtype.element_ty), mask=mask)


@triton.jit
def _backward_kernel(
    dy_ptr,
    gate_ptr,
    up_ptr,
    d_gate_ptr,
    d_up_ptr,
    dy_row_stride,
    gate_row_stride,
    up_row_stride,
    d_gate_row_stride,
    d_up_row_stride,
    n_cols,
    ACTIVATION: tl.constexpr,
    NEEDS_GATE: tl.constexpr,
    NEEDS_UP: tl.constexpr,
    BLOCK: tl.constexpr,
):
    blocks = tl.cdiv(n_cols, BLOCK)
    row = (tl.program_id(0) // blocks).to(tl.int64)
    cols = (tl.program_id(0) % blocks) * BLOCK + tl.arange(0, BLOCK)
    mask = cols < n_cols
    dy = tl.load(dy_ptr + row * dy_row_stride + cols, mask=mask, other=0.0).to(tl.float32)
    gate = tl.load(gate_ptr + row * gate_row_stride + cols, mask=mask, other=0.0).to(tl.float32)
    if NEEDS_GATE:
        up = tl.load(up_ptr + row * up_row_stride + cols, mask=mask, other=0.0).to(tl.float32)
        if ACTIVATION == "silu":
            d_gate = dy * up * silu_grad(gate)
        elif ACTIVATION == "gelu_tanh":
            d_gate = dy * up * gelu_tanh_grad(gate)
        else:
            d_gate = dy * up * gelu_erf_grad(gate)
        tl.store(d_gate_ptr + row * d_gate_row_stride + cols, d_gate.to(d_gate_ptr.dtype.element_ty), mask=mask)
    if NEEDS_UP:
        if ACTIVATION == "silu":
            d_up = dy * silu(gate)
        elif ACTIVATION == "gelu_tanh":
            d_up = dy * gelu_tanh(gate)
        else:
            d_up = dy * gelu_erf(gate)
        tl.store(d_up_ptr + row * d_up_row_stride + cols, d_up.to(d_up_ptr.dtype.element_ty), mask=mask)


def forward(gate: torch.Tensor, up: torch.Tensor, activation: Activation) -> torch.Tensor:
    y = torch.empty(gate.shape, dtype=gate.dtype, device=gate.device)
    gate, up = rows_of(gate), rows_of(up)
    n_rows, n_cols = gate.shape
    block = min(BLOCK, triton.next_power_of_2(n_cols))
    with on_device(gate):
        _forward_kernel[(n_rows * triton.cdiv(n_cols, block),)](
            gate, up, y, gate.stride(0), up.stride(0), n_cols,
            ACTIVATION=activation, BLOCK=block, **options(block // 2, chip_of(gate.device)),
        )  # fmt: skip
    return y


def _backward(
    dy: torch.Tensor,
    gate: torch.Tensor,
    up: torch.Tensor,
    d_gate: torch.Tensor | None,
    d_up: torch.Tensor | None,
    activation: Activation,
) -> None:
    """Fills d_gate and d_up, rows (N, F), which may be gate and up themselves; None where no gradient is needed."""
    dy, gate, up = rows_of(dy), rows_of(gate), rows_of(up)
    n_rows, n_cols = gate.shape
    block = min(BLOCK, triton.next_power_of_2(n_cols))
    filled_gate, filled_up = (d_up if d_gate is None else d_gate), (d_gate if d_up is None else d_up)
    with on_device(gate):
        # Where gradients go over their inputs, every element is read and written by one thread, the reads first.
        _backward_kernel[(n_rows * triton.cdiv(n_cols, block),)](
            dy, gate, up, filled_gate, filled_up,
            dy.stride(0), gate.stride(0), up.stride(0), filled_gate.stride(0), filled_up.stride(0), n_cols,
            ACTIVATION=activation, NEEDS_GATE=d_gate is not None, NEEDS_UP=d_up is not None, BLOCK=block,
            **options(block, chip_of(gate.device)),
        )  # fmt: skip


def _saved_once(ctx) -> tuple[torch.Tensor, ...]:
    """What the forward saved, for the one backward that there may be if that writes over it."""
    if ctx.inplace:
        if ctx.spent:
            raise RuntimeError(SPENT.format(op="swiglu" if ctx.activation == "silu" else "geglu"))
        ctx.spent = True
    return ctx.saved_tensors


def _gradient_of(t: torch.Tensor, inplace: bool) -> torch.Tensor:
    """Rows (N, F) for the gradient of t (..., F): t's own memory, or new."""
    if not inplace:
        return torch.empty((t.numel() // t.shape[-1], t.shape[-1]), dtype=t.dtype, device=t.device)
    torch.autograd.graph.increment_version(t)
    return rows_of(t.detach())


class Gated(torch.autograd.Function):
    """act(gate) · up of two tensors."""

    @staticmethod
    def forward(ctx, gate, up, activation, inplace):
        ctx.save_for_backward(gate, up)
        ctx.activation, ctx.inplace, ctx.spent = activation, inplace, False
        return forward(gate, up, activation)

    @staticmethod
    @differentiable_once
    def backward(ctx, dy):
        gate, up = _saved_once(ctx)
        needs_gate, needs_up = ctx.needs_input_grad[:2]
        d_gate = _gradient_of(gate, ctx.inplace) if needs_gate else None
        d_up = _gradient_of(up, ctx.inplace) if needs_up else None
        _backward(dy, gate, up, d_gate, d_up, ctx.activation)
        return *(None if d is None else d.view(gate.shape) for d in (d_gate, d_up)), None, None


class GatedPacked(torch.autograd.Function):
    """act(gate) · up of the two halves of one tensor (..., 2F)."""

    @staticmethod
    def forward(ctx, gate_up, activation, inplace):
        ctx.save_for_backward(gate_up)
        ctx.activation, ctx.inplace, ctx.spent = activation, inplace, False
        return forward(*gate_up.chunk(2, dim=-1), activation)

    @staticmethod
    @differentiable_once
    def backward(ctx, dy):
        (gate_up,) = _saved_once(ctx)
        d_gate_up = _gradient_of(gate_up, ctx.inplace)
        _backward(dy, *gate_up.chunk(2, dim=-1), *d_gate_up.chunk(2, dim=-1), ctx.activation)
        return d_gate_up.view(gate_up.shape), None, None


def apply(gate: torch.Tensor, up: torch.Tensor | None, activation: Activation, inplace: bool) -> torch.Tensor:
    """The kernels' way: split if up is given, else packed."""
    if not torch.is_grad_enabled():
        return forward(*(gate.chunk(2, dim=-1) if up is None else (gate, up)), activation)
    inplace = inplace and _may_overwrite(gate, up)
    return GatedPacked.apply(gate, activation, inplace) if up is None else Gated.apply(gate, up, activation, inplace)


def _may_overwrite(gate: torch.Tensor, up: torch.Tensor | None) -> bool:
    if torch.compiler.is_compiling() or is_someones_leaf(gate):
        return False
    if up is None:
        return span(gate) is not None
    return not is_someones_leaf(up) and are_apart(gate, up)


def check(op: str, gate: torch.Tensor, up: torch.Tensor | None) -> None:
    if up is None and gate.shape[-1] % 2:
        raise ValueError(f"{op}: the packed tensor is {tuple(gate.shape)}: expected an even last size (gate, then up)")
    if up is not None and (gate.shape != up.shape or gate.dtype != up.dtype):
        raise ValueError(
            f"{op}: gate is {tuple(gate.shape)} of {gate.dtype} and up {tuple(up.shape)} of {up.dtype}: "
            "expected the same"
        )
