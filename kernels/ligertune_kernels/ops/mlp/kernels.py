r"""Kernels and autograd of swiglu, geglu and reglu: y = act(gate) · up for rows (N, F), and the backward

    d_gate = dy · up · act'(gate)        d_up = dy · act(gate)

Everything is computed in fp32 and rounded once. gate and up are rows of any stride, so that both halves of a packed
projection (N, 2F) are read in place, and their gradients are written into one (N, 2F) buffer. A `GateForm` adds the
clamp, the factors and the offset of some models; what it leaves at its default costs nothing.

With `inplace` the backward writes d_gate over gate and d_up over up, which it has read for the last time: 2NF elements
less at the peak. The version counters advance: a later backward that needs gate or up raises autograd's error, and a
second backward through the same op is refused. Leaves that require a gradient are not overwritten (their .grad would
share their memory), nor are overlapping gate and up, nor anything under torch.compile, which reuses memory itself.
"""

from __future__ import annotations

from itertools import pairwise
from typing import Literal, NamedTuple

import torch

from ligertune_kernels.autograd import no_double_backward
from ligertune_kernels.chips import Chip
from ligertune_kernels.jit.device_functions import gelu_erf, gelu_erf_grad, gelu_tanh, gelu_tanh_grad, silu, silu_grad
from ligertune_kernels.launcher import Launcher, as_rows, cached, chip_of, contiguous_like, rows_and_stride, tl, triton
from ligertune_kernels.ops.mlp.tiles import backward_tile, forward_tile

Activation = Literal["silu", "gelu_tanh", "gelu_erf", "relu", "relu2"]

OP_OF_ACTIVATION = {
    "silu": "swiglu",
    "gelu_tanh": "geglu",
    "gelu_erf": "geglu",
    "relu": "reglu",
    "relu2": "reglu",
}  # for messages


class GateForm(NamedTuple):
    """How gate and up are combined: scale · act(gate) · (up + up_offset).

    alpha: silu is gate · σ(alpha · gate). limit: gate is at most limit, and up within ±limit, before all else.
    up_first: in a packed tensor (..., 2F) up comes before gate.
    """

    activation: Activation
    alpha: float = 1.0
    limit: float | None = None
    up_offset: float = 0.0
    scale: float = 1.0
    up_first: bool = False

    def constants(self) -> dict[str, object]:
        """Return the constants of the kernels."""
        return {
            "ACTIVATION": self.activation, "ALPHA": float(self.alpha), "UP_OFFSET": float(self.up_offset),
            "SCALE": float(self.scale), "HAS_LIMIT": self.limit is not None, "LIMIT": float(self.limit or 0.0),
        }  # fmt: skip


OVERWRITTEN = (
    "{op}: an earlier backward wrote the gradients over gate and up (inplace=True); "
    "run the forward again instead of backward(retain_graph=True)"
)


@triton.jit
def _activate(gate, ACTIVATION: tl.constexpr, ALPHA: tl.constexpr):
    if ACTIVATION == "silu":
        if ALPHA == 1.0:
            return silu(gate)
        else:
            return gate * tl.sigmoid(ALPHA * gate)
    elif ACTIVATION == "gelu_tanh":
        return gelu_tanh(gate)
    elif ACTIVATION == "gelu_erf":
        return gelu_erf(gate)
    else:
        positive = tl.where(gate < 0.0, 0.0, gate)  # NaN stays NaN, as in torch
        return positive * positive if ACTIVATION == "relu2" else positive


@triton.jit
def _derivative(gate, ACTIVATION: tl.constexpr, ALPHA: tl.constexpr):
    if ACTIVATION == "silu":
        if ALPHA == 1.0:
            return silu_grad(gate)
        else:
            s = tl.sigmoid(ALPHA * gate)
            return s * (1.0 + ALPHA * gate * (1.0 - s))
    elif ACTIVATION == "gelu_tanh":
        return gelu_tanh_grad(gate)
    elif ACTIVATION == "gelu_erf":
        return gelu_erf_grad(gate)
    elif ACTIVATION == "relu2":
        return 2.0 * tl.where(gate < 0.0, 0.0, gate)
    else:
        return tl.where(gate > 0.0, 1.0, 0.0)


@triton.jit
def _forward_kernel(
    gate_ptr, up_ptr, y_ptr,  # (N, F)
    gate_row_stride, up_row_stride, n_cols,
    ACTIVATION: tl.constexpr, ALPHA: tl.constexpr, UP_OFFSET: tl.constexpr, SCALE: tl.constexpr,
    HAS_LIMIT: tl.constexpr, LIMIT: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    # One-dimensional grid: the number of rows may exceed the 65,535 of a grid's other dimensions.
    blocks = tl.cdiv(n_cols, BLOCK)
    row = (tl.program_id(0) // blocks).to(tl.int64)
    cols = (tl.program_id(0) % blocks) * BLOCK + tl.arange(0, BLOCK)
    mask = cols < n_cols
    gate = tl.load(gate_ptr + row * gate_row_stride + cols, mask=mask, other=0.0).to(tl.float32)
    up = tl.load(up_ptr + row * up_row_stride + cols, mask=mask, other=0.0).to(tl.float32)
    if HAS_LIMIT:
        gate = tl.minimum(gate, LIMIT)
        up = tl.minimum(tl.maximum(up, -LIMIT), LIMIT)
    if UP_OFFSET != 0.0:
        up += UP_OFFSET
    y = _activate(gate, ACTIVATION, ALPHA) * up
    if SCALE != 1.0:
        y *= SCALE
    tl.store(y_ptr + row * n_cols + cols, y.to(y_ptr.dtype.element_ty), mask=mask)


@triton.jit
def _backward_kernel(
    dy_ptr, gate_ptr, up_ptr, d_gate_ptr, d_up_ptr,  # (N, F)
    dy_row_stride, gate_row_stride, up_row_stride, d_gate_row_stride, d_up_row_stride, n_cols,
    ACTIVATION: tl.constexpr, ALPHA: tl.constexpr, UP_OFFSET: tl.constexpr, SCALE: tl.constexpr,
    HAS_LIMIT: tl.constexpr, LIMIT: tl.constexpr, NEEDS_GATE: tl.constexpr, NEEDS_UP: tl.constexpr,
    BLOCK: tl.constexpr,
):  # fmt: skip
    blocks = tl.cdiv(n_cols, BLOCK)
    row = (tl.program_id(0) // blocks).to(tl.int64)
    cols = (tl.program_id(0) % blocks) * BLOCK + tl.arange(0, BLOCK)
    mask = cols < n_cols
    dy = tl.load(dy_ptr + row * dy_row_stride + cols, mask=mask, other=0.0).to(tl.float32)
    if SCALE != 1.0:
        dy *= SCALE
    gate = tl.load(gate_ptr + row * gate_row_stride + cols, mask=mask, other=0.0).to(tl.float32)
    low = gate
    if HAS_LIMIT:
        low = tl.minimum(gate, LIMIT)
    # d_gate may be stored over gate and d_up over up: each is loaded before its store, by the same thread.
    if NEEDS_GATE or HAS_LIMIT:
        up = tl.load(up_ptr + row * up_row_stride + cols, mask=mask, other=0.0).to(tl.float32)
    if NEEDS_GATE:
        high = up
        if HAS_LIMIT:
            high = tl.minimum(tl.maximum(up, -LIMIT), LIMIT)
        if UP_OFFSET != 0.0:
            high += UP_OFFSET
        d_gate = dy * high * _derivative(low, ACTIVATION, ALPHA)
        if HAS_LIMIT:  # as torch's clamp: the bounds themselves have a gradient
            d_gate = tl.where(gate <= LIMIT, d_gate, 0.0)
        tl.store(d_gate_ptr + row * d_gate_row_stride + cols, d_gate.to(d_gate_ptr.dtype.element_ty), mask=mask)
    if NEEDS_UP:
        d_up = dy * _activate(low, ACTIVATION, ALPHA)
        if HAS_LIMIT:
            d_up = tl.where((up >= -LIMIT) & (up <= LIMIT), d_up, 0.0)
        tl.store(d_up_ptr + row * d_up_row_stride + cols, d_up.to(d_up_ptr.dtype.element_ty), mask=mask)


@cached
def _plan_forward(n_cols: int, form: GateForm, chip: Chip) -> tuple[Launcher, int]:
    """Return the launcher and the programs per row."""
    tile = forward_tile(n_cols, chip)
    return Launcher(_forward_kernel, form.constants() | tile), -(-n_cols // tile["BLOCK"])


@cached
def _plan_backward(n_cols: int, form: GateForm, needs_gate: bool, needs_up: bool, chip: Chip) -> tuple[Launcher, int]:
    """Return the launcher and the programs per row."""
    tile = backward_tile(n_cols, chip, is_light=form.activation in ("relu", "relu2"))
    constants = {**form.constants(), "NEEDS_GATE": needs_gate, "NEEDS_UP": needs_up, **tile}
    return Launcher(_backward_kernel, constants), -(-n_cols // tile["BLOCK"])


def _forward(
    gate: torch.Tensor,  # (..., F)
    up: torch.Tensor,  # (..., F)
    form: GateForm,
) -> torch.Tensor:  # (..., F), contiguous
    n_cols = gate.shape[-1]
    y = contiguous_like(gate, gate.dtype)
    gate, gate_stride = rows_and_stride(gate)
    up, up_stride = rows_and_stride(up)
    launch, blocks = _plan_forward(n_cols, form, chip_of(gate.device))
    launch((gate.numel() // n_cols * blocks, 1, 1), (gate, up, y), (gate_stride, up_stride, n_cols))
    return y


def _backward(
    dy: torch.Tensor,  # (..., F)
    gate: torch.Tensor,  # (..., F)
    up: torch.Tensor,  # (..., F)
    d_gate: torch.Tensor | None,  # (..., F), rows that can be viewed as (N, F)
    d_up: torch.Tensor | None,  # likewise
    form: GateForm,
) -> None:
    """Fill d_gate and d_up, which may be gate and up themselves; None where no gradient is needed."""
    n_cols = gate.shape[-1]
    filled_gate = d_up if d_gate is None else d_gate
    filled_up = d_gate if d_up is None else d_up
    tensors, strides = zip(*map(rows_and_stride, (dy, gate, up, filled_gate, filled_up)), strict=True)
    flags = d_gate is not None, d_up is not None
    launch, blocks = _plan_backward(n_cols, form, *flags, chip_of(gate.device))
    launch((gate.numel() // n_cols * blocks, 1, 1), tensors, (*strides, n_cols))


def gate_and_up(gate: torch.Tensor, up: torch.Tensor | None, up_first: bool = False) -> tuple[torch.Tensor, ...]:
    """Return gate and up (..., F) of two tensors, or of one packed tensor (..., 2F)."""
    if up is not None:
        return gate, up
    first, second = gate.chunk(2, dim=-1)
    return (second, first) if up_first else (first, second)


def _saved_tensors(ctx) -> tuple[torch.Tensor, ...]:
    """Return what the forward saved; raise in a second backward if the first one overwrote it."""
    if ctx.inplace:
        if ctx.overwritten:
            raise RuntimeError(OVERWRITTEN.format(op=OP_OF_ACTIVATION[ctx.form.activation]))
        ctx.overwritten = True
    return ctx.saved_tensors


def _gradient_of(t: torch.Tensor, inplace: bool) -> torch.Tensor:
    """Return memory for the gradient of t (..., F): new, or t's own, then as rows (N, F) if t is not contiguous."""
    if not inplace:
        return contiguous_like(t, t.dtype)
    torch.autograd.graph.increment_version(t)
    own = t.detach()
    return own if own.is_contiguous() else as_rows(own)


class _Gated(torch.autograd.Function):
    """act(gate) · up of two tensors, or of the two halves of gate (..., 2F) where up is None."""

    @staticmethod
    def forward(ctx, gate, up, form, inplace):
        ctx.save_for_backward(gate, up)
        ctx.form = form
        ctx.inplace = inplace
        ctx.overwritten = False
        return _forward(*gate_and_up(gate, up, form.up_first), form)

    @staticmethod
    @no_double_backward
    def backward(ctx, dy):
        gate, up = _saved_tensors(ctx)
        needs_gate, needs_up = ctx.needs_input_grad[:2]
        d_gate = _gradient_of(gate, ctx.inplace) if needs_gate else None
        d_up = _gradient_of(up, ctx.inplace) if needs_up else None
        up_first = ctx.form.up_first
        d_halves = (d_gate, d_up) if up is not None else gate_and_up(d_gate, None, up_first)
        _backward(dy, *gate_and_up(gate, up, up_first), *d_halves, ctx.form)
        return *(None if d is None else d.view(gate.shape) for d in (d_gate, d_up)), None, None


def gated_activation(
    gate: torch.Tensor,  # (..., F), or (..., 2F) with both halves
    up: torch.Tensor | None,  # (..., F)
    form: GateForm,
    inplace: bool,
) -> torch.Tensor:  # (..., F)
    """Compute scale · act(gate) · (up + up_offset) with the kernels, of two tensors or of one packed tensor."""
    if not torch.is_grad_enabled():
        return _forward(*gate_and_up(gate, up, form.up_first), form)
    inplace = inplace and _may_overwrite(gate, up)
    return _Gated.apply(gate, up, form, inplace)


def _may_overwrite(gate: torch.Tensor, up: torch.Tensor | None) -> bool:
    if torch.compiler.is_compiling() or _is_trainable_leaf(gate):
        return False
    if up is None:
        return _memory_extent(gate) is not None
    return not _is_trainable_leaf(up) and _are_disjoint(gate, up)


def _is_trainable_leaf(t: torch.Tensor) -> bool:
    """Return whether t is, or is a view of, a leaf that requires a gradient (a parameter)."""
    base = t._base if t._is_view() else t
    return base.requires_grad and base.is_leaf


def _memory_extent(t: torch.Tensor) -> int | None:
    """Return the number of elements from t's first to its last in memory; None where t's elements overlap."""
    if t.is_contiguous():
        return t.numel()
    extent = 1
    for stride, size in sorted(zip(t.stride(), t.shape, strict=True)):
        if size > 1:
            if stride < extent:
                return None
            extent += stride * (size - 1)
    return extent


def _are_disjoint(gate: torch.Tensor, up: torch.Tensor) -> bool:
    """Return whether no element of gate and up (..., F) shares memory; False also where this is unclear."""
    extent = _memory_extent(gate)
    if extent is None or _memory_extent(up) is None:
        return False
    if gate.untyped_storage().data_ptr() != up.untyped_storage().data_ptr():
        return True
    distance = abs(gate.storage_offset() - up.storage_offset())
    if gate.stride() != up.stride() or distance >= extent:
        return gate.stride() == up.stride()
    # Halves of a packed projection: rows interleave, and one row of both fits between two rows of either.
    outer = list(zip(gate.stride(), gate.shape, strict=True))[:-1]
    nested = all(after * size <= before for (before, _), (after, size) in pairwise(outer))
    width = gate.shape[-1]
    return bool(outer) and nested and gate.stride(-1) == 1 and width <= distance and distance + width <= outer[-1][0]


def check_gate_and_up(op: str, gate: torch.Tensor, up: torch.Tensor | None, form: GateForm) -> None:
    """Raise ValueError for an odd packed width, gate and up of different shapes or dtypes, or a limit that is none."""
    if up is None and gate.shape[-1] % 2:
        raise ValueError(f"{op}: the packed tensor is {tuple(gate.shape)}: expected an even last size (gate, then up)")
    if up is not None and (gate.shape != up.shape or gate.dtype != up.dtype):
        raise ValueError(
            f"{op}: gate is {tuple(gate.shape)} of {gate.dtype} and up {tuple(up.shape)} of {up.dtype}: "
            "expected the same"
        )
    if up is not None and form.up_first:
        raise ValueError(f"{op}: up_first is for one packed tensor; gate and up are two")
    if form.limit is not None and not form.limit > 0:
        raise ValueError(f"{op}: limit is {form.limit}; expected a positive number or None")
