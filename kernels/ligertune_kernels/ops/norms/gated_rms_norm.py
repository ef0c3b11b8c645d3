r"""Gated root-mean-square norm of the outputs of linear attention and state-space layers.

x and gate (..., E), weight w (E,) or none; a is SiLU or the sigmoid:

    norm_before_gate    y = w norm(x) a(gate)       Qwen3-Next, Qwen3.5, Kimi Linear, OLMo hybrid
    else                y = w norm(x a(gate))       Mamba 2, Bamba, Granite hybrid, Nemotron-H, Zamba 2, Falcon-H1

norm(z) = z / sqrt(mean(z²) + eps), with a mean over all columns or over each group of group_size columns.
Everything is computed in fp32. Models differ in where they round:

    llama   norm(...) is rounded to x's dtype, then multiplied by w; the product of equal dtypes is rounded, too.
            With norm_before_gate y has x's dtype, else the promoted dtype of x and w
    gemma   all products are taken in fp32 and rounded once to x's dtype (Kimi Linear, Falcon-H1)

The backward keeps x, gate and one fp32 number for each norm. In the kernels' names:

    a(g) = silu(g) or sigmoid(g)
    z = x, or x a(g) if GATE_FIRST      r = 1 / sqrt(mean(z²) + eps)      x̂ = r z
    y = w x̂ a(g), or w x̂ if GATE_FIRST

Backward, with d = dy a(g), or dy if GATE_FIRST, and h = w d:

    dz = r (h - x̂ mean(h x̂))            dw = sum over rows of d x̂
    gate after the norm                 dx = dz           dg = dy w x̂ a'(g)
    gate before the norm                dx = dz a(g)      dg = dz x a'(g)

Either way h x̂ is r dy w x a(g), so that one function sums it. Everything is computed in fp32. ROUND_XHAT rounds x̂ to
x's dtype before the product with w, and that product to the dtype of both if they have the same.

A row of E columns is E / C groups of C columns (n_cols), which are normed each for itself: program_id(1) is the group.
There are no atomics: a backward program sums dw of its group over a run of rows in registers and writes it to its row
of partial_ptr; column_sums adds the rows. x, g and r are all that the backward reads besides dy and w.
Sources: Zhang and Sennrich, arXiv:1910.07467; Dao and Gu, arXiv:2405.21060.
"""

from __future__ import annotations

from typing import Literal, NamedTuple

import torch
from torch.nn import functional as F

from ligertune_kernels.autograd import no_double_backward
from ligertune_kernels.jit.device_functions import fp32
from ligertune_kernels.launcher import (
    BoundLaunch,
    cached,
    chip_of,
    contiguous_like,
    rows_and_stride,
    runs_triton,
    tl,
    triton,
)
from ligertune_kernels.ops.norms import tiles
from ligertune_kernels.ops.norms.kernels import LaunchPlan, column_sums

Activation = Literal["silu", "sigmoid"]
Cast = Literal["llama", "gemma"]
ACTIVATIONS = {"silu": F.silu, "sigmoid": torch.sigmoid}


class GatedNormOptions(NamedTuple):
    """Options of one call, with the group size filled in."""

    group_size: int
    activation: Activation = "silu"
    norm_before_gate: bool = True
    cast: Cast = "llama"

    def flags(self, weight: torch.dtype | None) -> dict[str, bool]:
        """Return the constants that both kernels have."""
        return {
            "HAS_WEIGHT": weight is not None,
            "GATE_FIRST": not self.norm_before_gate,
            "SIGMOID": self.activation == "sigmoid",
            "ROUND_XHAT": self.cast == "llama",
        }


def gated_rms_norm_reference(
    x: torch.Tensor,
    gate: torch.Tensor,
    weight: torch.Tensor | None = None,
    eps: float = 1e-6,
    *,
    group_size: int | None = None,
    activation: Activation = "silu",
    norm_before_gate: bool = True,
    cast: Cast = "llama",
) -> torch.Tensor:
    """Compute `gated_rms_norm` in plain torch, with the operations of transformers' models."""
    wide = torch.promote_types(x.dtype, torch.float32)
    act = ACTIVATIONS[activation](gate.to(torch.promote_types(gate.dtype, torch.float32)))
    h = x.to(wide) if norm_before_gate else x.to(wide) * act
    groups = h.unflatten(-1, (-1, group_size)) if group_size else h
    groups = groups * torch.rsqrt(groups.pow(2).mean(-1, keepdim=True) + eps)
    h = groups.flatten(-2) if group_size else groups
    if cast == "llama":
        h = h.to(x.dtype) if weight is None else weight * h.to(x.dtype)
    elif weight is not None:
        h = weight.to(wide) * h
    if norm_before_gate:
        h = h * act
    return h if cast == "llama" and not norm_before_gate else h.to(x.dtype)


@triton.jit
def _activate(gate, SIGMOID: tl.constexpr):
    """Return a(g) and a'(g)."""
    s = tl.sigmoid(gate)
    if SIGMOID:
        return s, s * (1.0 - s)
    else:
        return gate * s, s * (1.0 + gate * (1.0 - s))


@triton.jit
def _weighted(xhat, w, x_ptr, w_ptr, HAS_WEIGHT: tl.constexpr, ROUND_XHAT: tl.constexpr):
    """Return x̂, rounded as ROUND_XHAT says, and w x̂, both in fp32."""
    if ROUND_XHAT:
        xhat = xhat.to(x_ptr.dtype.element_ty).to(tl.float32)
    product = xhat
    if HAS_WEIGHT:
        product = xhat * w.to(tl.float32)[None, :]
        if ROUND_XHAT and x_ptr.dtype.element_ty == w_ptr.dtype.element_ty:
            product = product.to(x_ptr.dtype.element_ty).to(tl.float32)
    return xhat, product


@triton.jit(do_not_specialize=["n_rows", "rows_per_program"])
def gated_forward_kernel(
    x_ptr, gate_ptr,  # (N, E)
    w_ptr,  # (E,)
    y_ptr,  # (N, E)
    stats_ptr,  # (E / C, N)
    x_row_stride, gate_row_stride, n_cols, width, n_rows, eps, rows_per_program,
    HAS_WEIGHT: tl.constexpr, GATE_FIRST: tl.constexpr, SIGMOID: tl.constexpr, ROUND_XHAT: tl.constexpr,
    KEEPS: tl.constexpr, ROWS: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """Norm one group of ROWS whole rows. KEEPS: write r for the backward."""
    first = tl.program_id(0).to(tl.int64) * rows_per_program
    last = tl.minimum(first + rows_per_program, n_rows)
    group = tl.program_id(1).to(tl.int64)
    cols = tl.arange(0, BLOCK)
    col_mask = cols < n_cols
    places = group * n_cols + cols
    rows = first + tl.arange(0, ROWS)
    row_mask = rows < last
    mask = row_mask[:, None] & col_mask[None, :]
    w = tl.load(w_ptr + places, mask=col_mask, other=0.0) if HAS_WEIGHT else 0.0
    x = tl.load(x_ptr + rows[:, None] * x_row_stride + places[None, :], mask=mask, other=0.0).to(tl.float32)
    gate = tl.load(gate_ptr + rows[:, None] * gate_row_stride + places[None, :], mask=mask, other=0.0)
    act, _ = _activate(gate.to(tl.float32), SIGMOID)
    if GATE_FIRST:
        x *= act
    rstd = tl.rsqrt(tl.sum(x * x, axis=1) / n_cols + fp32(eps))
    if KEEPS:
        tl.store(stats_ptr + group * n_rows + rows, rstd, mask=row_mask)
    _, y = _weighted(x * rstd[:, None], w, x_ptr, w_ptr, HAS_WEIGHT, ROUND_XHAT)
    if not GATE_FIRST:
        y *= act
    tl.store(y_ptr + rows[:, None] * width + places[None, :], y.to(y_ptr.dtype.element_ty), mask=mask)


@triton.jit(do_not_specialize=["n_rows", "rows_per_program"])
def gated_forward_sweep_kernel(
    x_ptr, gate_ptr,  # (N, E)
    w_ptr,  # (E,)
    y_ptr,  # (N, E)
    stats_ptr,  # (E / C, N)
    x_row_stride, gate_row_stride, n_cols, width, n_rows, eps, rows_per_program,
    HAS_WEIGHT: tl.constexpr, GATE_FIRST: tl.constexpr, SIGMOID: tl.constexpr, ROUND_XHAT: tl.constexpr,
    KEEPS: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """Norm a group of one row, of any length: it is read for the sum and, from the cache, for y."""
    row = tl.program_id(0).to(tl.int64)
    group = tl.program_id(1).to(tl.int64)
    x_ptr += row * x_row_stride + group * n_cols
    gate_ptr += row * gate_row_stride + group * n_cols
    squares = tl.zeros([1, BLOCK], dtype=tl.float32)
    for start in range(0, n_cols, BLOCK):
        cols = start + tl.arange(0, BLOCK)
        mask = cols < n_cols
        z = tl.load(x_ptr + cols, mask=mask, other=0.0).to(tl.float32)
        if GATE_FIRST:
            act, _ = _activate(tl.load(gate_ptr + cols, mask=mask, other=0.0).to(tl.float32), SIGMOID)
            z *= act
        squares += (z * z)[None, :]
    rstd = tl.rsqrt(tl.sum(squares, axis=1) / n_cols + fp32(eps))
    if KEEPS:
        tl.store(stats_ptr + group * n_rows + row + tl.arange(0, 1), rstd)
    for start in range(0, n_cols, BLOCK):
        cols = start + tl.arange(0, BLOCK)
        mask = cols < n_cols
        w = tl.load(w_ptr + group * n_cols + cols, mask=mask, other=0.0) if HAS_WEIGHT else 0.0
        z = tl.load(x_ptr + cols, mask=mask, other=0.0).to(tl.float32)[None, :]
        act, _ = _activate(tl.load(gate_ptr + cols, mask=mask, other=0.0).to(tl.float32)[None, :], SIGMOID)
        if GATE_FIRST:
            z *= act
        _, y = _weighted(z * rstd[:, None], w, x_ptr, w_ptr, HAS_WEIGHT, ROUND_XHAT)
        if not GATE_FIRST:
            y *= act
        y_places = row * width + group * n_cols + cols[None, :]
        tl.store(y_ptr + y_places, y.to(y_ptr.dtype.element_ty), mask=mask[None, :])


@triton.jit
def _sum_of_row(
    dy, x, act, w, dy_rows, x_rows, gate_rows, w_ptr, row_mask, part, n_cols,
    HAS_WEIGHT: tl.constexpr, SIGMOID: tl.constexpr, BLOCK: tl.constexpr, PARTS: tl.constexpr,
):  # fmt: skip
    """Return the sum of dy w x a(g) over the group's columns, those of the other parts too: (ROWS,)."""
    product = dy * x * act
    if HAS_WEIGHT:
        product *= w.to(tl.float32)[None, :]
    for k in range(1, PARTS):
        cols = (part + k) % PARTS * BLOCK + tl.arange(0, BLOCK)
        mask = row_mask[:, None] & (cols < n_cols)[None, :]
        other = tl.load(x_rows + cols[None, :], mask=mask, other=0.0).to(tl.float32)
        other *= tl.load(dy_rows + cols[None, :], mask=mask, other=0.0).to(tl.float32)
        if HAS_WEIGHT:
            other *= tl.load(w_ptr + cols, mask=cols < n_cols, other=0.0).to(tl.float32)[None, :]
        other_act, _ = _activate(tl.load(gate_rows + cols[None, :], mask=mask, other=0.0).to(tl.float32), SIGMOID)
        product += other * other_act
    return tl.sum(product, axis=1)


@triton.jit(do_not_specialize=["n_rows", "rows_per_program"])
def gated_backward_kernel(
    dy_ptr, x_ptr, gate_ptr,  # (N, E)
    w_ptr,  # (E,)
    stats_ptr,  # (E / C, N)
    dx_ptr, dgate_ptr,  # (N, E)
    partial_ptr,  # (programs, E)
    dy_row_stride, x_row_stride, gate_row_stride, n_cols, width, n_rows, rows_per_program,
    HAS_WEIGHT: tl.constexpr, GATE_FIRST: tl.constexpr, SIGMOID: tl.constexpr, ROUND_XHAT: tl.constexpr,
    NEEDS_DX: tl.constexpr, NEEDS_DGATE: tl.constexpr, NEEDS_DW: tl.constexpr, NEEDS_DZ: tl.constexpr,
    ROWS: tl.constexpr, BLOCK: tl.constexpr, PARTS: tl.constexpr, STAGES: tl.constexpr,
):  # fmt: skip
    """Write dx and dg of one part's columns for a run of rows, and their dw. The sum over a group needs all parts."""
    first = tl.program_id(0).to(tl.int64) * rows_per_program
    last = tl.minimum(first + rows_per_program, n_rows)
    group = (tl.program_id(1) // PARTS).to(tl.int64)
    part = tl.program_id(1) % PARTS
    cols = part * BLOCK + tl.arange(0, BLOCK)
    col_mask = cols < n_cols
    begin = group * n_cols  # of the group's columns
    w = tl.load(w_ptr + begin + cols, mask=col_mask, other=0.0) if HAS_WEIGHT else 0.0
    dw = tl.zeros([ROWS, BLOCK], dtype=tl.float32)
    for row in tl.range(first, last, ROWS, num_stages=STAGES):
        rows = row + tl.arange(0, ROWS)
        row_mask = rows < last
        mask = row_mask[:, None] & col_mask[None, :]
        dy_rows = dy_ptr + rows[:, None] * dy_row_stride + begin
        x_rows = x_ptr + rows[:, None] * x_row_stride + begin
        gate_rows = gate_ptr + rows[:, None] * gate_row_stride + begin
        dy = tl.load(dy_rows + cols[None, :], mask=mask, other=0.0).to(tl.float32)
        x = tl.load(x_rows + cols[None, :], mask=mask, other=0.0).to(tl.float32)
        gate = tl.load(gate_rows + cols[None, :], mask=mask, other=0.0).to(tl.float32)
        rstd = tl.load(stats_ptr + group * n_rows + rows, mask=row_mask, other=0.0)
        act, slope = _activate(gate, SIGMOID)
        offs = rows[:, None] * width + begin + cols[None, :]
        xhat = (x * act if GATE_FIRST else x) * rstd[:, None]
        d = dy if GATE_FIRST else dy * act
        rounded, product = _weighted(xhat, w, x_ptr, w_ptr, HAS_WEIGHT, ROUND_XHAT)
        if NEEDS_DW:
            dw += d * rounded
        if NEEDS_DGATE and not GATE_FIRST:
            tl.store(dgate_ptr + offs, (dy * product * slope).to(dgate_ptr.dtype.element_ty), mask=mask)
        if NEEDS_DZ:
            total = _sum_of_row(
                dy, x, act, w, dy_rows, x_rows, gate_rows, w_ptr + begin, row_mask, part, n_cols,
                HAS_WEIGHT, SIGMOID, BLOCK, PARTS,
            )  # fmt: skip
            h = d * w.to(tl.float32)[None, :] if HAS_WEIGHT else d
            dz = (h - xhat * (total * rstd / n_cols)[:, None]) * rstd[:, None]
            if NEEDS_DGATE and GATE_FIRST:
                tl.store(dgate_ptr + offs, (dz * x * slope).to(dgate_ptr.dtype.element_ty), mask=mask)
            if NEEDS_DX:
                dx = dz * act if GATE_FIRST else dz
                tl.store(dx_ptr + offs, dx.to(dx_ptr.dtype.element_ty), mask=mask)
    if NEEDS_DW:
        partial_ptr += tl.program_id(0).to(tl.int64) * width + begin
        tl.store(partial_ptr + cols, tl.sum(dw, axis=0), mask=col_mask)


class GatedCall(NamedTuple):
    """Key of a launch plan; its tensors are x, gate, weight, or in the backward dy, x, gate, weight."""

    width: int
    strides: tuple[int, ...]  # of the rows of x and gate or, backward, of dy, x and gate
    dtypes: tuple[torch.dtype | None, ...]  # None: there is no weight
    options: GatedNormOptions
    device: torch.device

    def integers(self) -> tuple[int, ...]:
        """Return the integers that Triton specialises on."""
        return (*self.strides, self.options.group_size, self.width)

    def is_aligned(self) -> bool:
        """Return whether all groups begin at a vector of 16 elements."""
        return not any(integer % 16 for integer in self.integers())


@cached
def _plan_forward(call: GatedCall, keeps: bool) -> LaunchPlan:
    x, _, weight = call.dtypes
    # Mamba 2 multiplies the rounded norm by its weight last: the product has the wider dtype of both.
    widens = call.options.cast == "llama" and not call.options.norm_before_gate and weight is not None
    cols = call.options.group_size
    chip = chip_of(call.device)
    kernel = gated_forward_kernel
    tiling = tiles.gated_forward_tiling(cols, chip, aligned=call.is_aligned())
    if tiling is None:
        kernel = gated_forward_sweep_kernel
        tiling = tiles.sweep_tiling(chip)
    constants = call.options.flags(weight) | {"KEEPS": keeps} | tiling.constants
    launch = BoundLaunch(kernel, constants, call.integers())
    y_dtype = torch.promote_types(x, weight) if widens else x
    return LaunchPlan(launch, tiling.rows, tiling.programs, call.width // cols, dtypes=(y_dtype,))


@cached
def _plan_backward(call: GatedCall, needs: tuple[bool, bool, bool]) -> LaunchPlan:
    chip = chip_of(call.device)
    needs_dx, needs_dgate, needs_dw = needs
    cols = call.options.group_size
    column_bytes = sum(dtype.itemsize for dtype in call.dtypes[:3])
    tiling = tiles.gated_backward_tiling(cols, column_bytes, chip, aligned=call.is_aligned())
    constants = tiling.constants | call.options.flags(call.dtypes[3])
    constants |= {"NEEDS_DX": needs_dx, "NEEDS_DGATE": needs_dgate, "NEEDS_DW": needs_dw}
    # A gate after the norm has a gradient without dz, which takes a sum over the whole group.
    constants["NEEDS_DZ"] = needs_dx or (needs_dgate and not call.options.norm_before_gate)
    parts = call.width // cols * tiling.parts
    launch = BoundLaunch(gated_backward_kernel, constants, call.integers())
    return LaunchPlan(launch, tiling.rows, max(1, tiling.programs * chip.processors // parts), parts)


def _dtype(t: torch.Tensor | None) -> torch.dtype | None:
    return None if t is None else t.dtype


def _forward(
    x: torch.Tensor,
    gate: torch.Tensor,
    weight: torch.Tensor | None,
    eps: float,
    options: GatedNormOptions,
    *,
    keeps: bool,
) -> tuple[torch.Tensor, torch.Tensor]:
    """Return y and, if keeps, r of each group: (E / C, N) float32, flat."""
    width = x.shape[-1]
    n_rows = x.numel() // width
    x_rows, x_stride = rows_and_stride(x)
    gate_rows, gate_stride = rows_and_stride(gate)
    dtypes = x.dtype, gate.dtype, _dtype(weight)
    plan = _plan_forward(GatedCall(width, (x_stride, gate_stride), dtypes, options, x.device), keeps)
    grid, rows_per_program = plan.grid(n_rows)
    y = contiguous_like(x, plan.dtypes[0])
    stats = x.new_empty(n_rows * plan.parts if keeps else 0, dtype=torch.float32)
    tensors = x_rows, gate_rows, x_rows if weight is None else weight.contiguous(), y, stats if keeps else x_rows
    plan.launch(grid, tensors, n_rows, float(eps), rows_per_program)
    return y, stats


class _GatedRMSNorm(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x, gate, weight, eps, options):
        y, stats = _forward(x, gate, weight, eps, options, keeps=True)
        ctx.save_for_backward(x, gate, weight, stats)
        ctx.options = options
        return y

    @staticmethod
    @no_double_backward
    def backward(ctx, dy):
        x, gate, weight, stats = ctx.saved_tensors
        needs = ctx.needs_input_grad[:3]
        width = x.shape[-1]
        n_rows = x.numel() // width
        rows, strides = zip(*map(rows_and_stride, (dy, x, gate)), strict=True)
        dtypes = dy.dtype, x.dtype, gate.dtype, _dtype(weight)
        plan = _plan_backward(GatedCall(width, strides, dtypes, ctx.options, x.device), needs)
        grid, rows_per_program = plan.grid(n_rows)
        dx, dgate, dw = (
            contiguous_like(t, t.dtype) if needed else None for t, needed in zip((x, gate, weight), needs, strict=True)
        )
        partial = stats.new_empty(grid[0], width) if needs[2] else stats
        results = (stats if t is None else t for t in (dx, dgate))
        tensors = *rows, stats if weight is None else weight.contiguous(), stats, *results, partial
        plan.launch(grid, tensors, n_rows, rows_per_program)
        if needs[2]:
            column_sums(partial, dw)
        return dx, dgate, dw, None, None


def _check(x: torch.Tensor, gate: torch.Tensor, weight: torch.Tensor | None, options: GatedNormOptions) -> None:
    """Raise ValueError for shapes and options that gated_rms_norm does not take."""
    if gate.shape != x.shape:
        raise ValueError(f"gated_rms_norm: gate is {tuple(gate.shape)}, but x is {tuple(x.shape)}: expected its shape")
    if weight is not None and weight.shape != x.shape[-1:]:
        raise ValueError(
            f"gated_rms_norm: weight is {tuple(weight.shape)}, but x is {tuple(x.shape)}: expected its last size"
        )
    if options.group_size < 1 or x.shape[-1] % options.group_size:
        raise ValueError(
            f"gated_rms_norm: group_size is {options.group_size}, but x has {x.shape[-1]} columns: expected a divisor"
        )
    if options.activation not in ACTIVATIONS:
        raise ValueError(f"gated_rms_norm: activation is {options.activation!r}; expected 'silu' or 'sigmoid'")
    if options.cast not in ("llama", "gemma"):
        raise ValueError(f"gated_rms_norm: cast is {options.cast!r}; expected 'llama' or 'gemma'")


def gated_rms_norm(
    x: torch.Tensor,  # (..., E)
    gate: torch.Tensor,  # (..., E)
    weight: torch.Tensor | None = None,  # (E,)
    eps: float = 1e-6,
    *,
    group_size: int | None = None,
    activation: Activation = "silu",
    norm_before_gate: bool = True,
    cast: Cast = "llama",
) -> torch.Tensor:  # (..., E)
    """Return weight · norm(x) · act(gate), or weight · norm(x · act(gate)) without norm_before_gate.

    The norm divides by the root mean square of group_size columns, by default of all. The result has x's dtype, except
    under "llama" with a wider weight and the gate first: the promoted dtype, as in transformers' Mamba 2.

    Raises ValueError on mismatched shapes, a group_size that does not divide E, an unknown activation or cast.
    """
    options = GatedNormOptions(x.shape[-1] if group_size is None else group_size, activation, norm_before_gate, cast)
    given = [t for t in (x, gate, weight) if t is not None]
    if x.numel():
        _check(x, gate, weight, options)
    if x.numel() == 0 or not all(runs_triton(t) for t in given):
        return gated_rms_norm_reference(x, gate, weight, eps, **options._asdict() | {"group_size": group_size})
    if torch.is_grad_enabled() and any(t.requires_grad for t in given):
        return _GatedRMSNorm.apply(x, gate, weight, eps, options)
    return _forward(x, gate, weight, eps, options, keeps=False)[0]


class GatedRMSNorm(torch.nn.Module):
    """`gated_rms_norm` as a module, whose weight starts at ones."""

    def __init__(
        self,
        hidden_size: int,
        eps: float = 1e-6,
        *,
        group_size: int | None = None,
        device: torch.device | str | None = None,
        dtype: torch.dtype | None = None,
        **options: str | bool,
    ) -> None:
        """options: activation, norm_before_gate and cast of `gated_rms_norm`; others raise TypeError."""
        super().__init__()
        self.eps = eps
        self.options = GatedNormOptions(group_size or hidden_size, **options)
        self.weight = torch.nn.Parameter(torch.ones(hidden_size, device=device, dtype=dtype))

    def forward(self, hidden_states: torch.Tensor, gate: torch.Tensor) -> torch.Tensor:
        return gated_rms_norm(hidden_states, gate, self.weight, self.eps, **self.options._asdict())
