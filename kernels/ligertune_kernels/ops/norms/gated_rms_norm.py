r"""Gated root-mean-square norm of the outputs of linear attention and state-space layers.

x and gate (..., E), weight w (E,) or none; a is SiLU or the sigmoid:

    norm_before_gate    y = w norm(x) a(gate)       Qwen3-Next, Qwen3.5, Kimi Linear, OLMo hybrid
    else                y = w norm(x a(gate))       Mamba 2, Bamba, Granite hybrid, Nemotron-H, Zamba 2, Falcon-H1

norm(z) = z / sqrt(mean(z²) + eps), with a mean over all columns or over each group of group_size columns.
Everything is computed in fp32. Models differ in where they round:

    llama   norm(...) is rounded to x's dtype, then multiplied by w; the product of equal dtypes is rounded, too.
            With norm_before_gate y has x's dtype, else the promoted dtype of x and w
    gemma   all products are taken in fp32 and rounded once to x's dtype (Kimi Linear, Falcon-H1)

The backward keeps x, gate and one fp32 number for each norm. Mathematics of both directions and kernels:
_gated_norm_kernels.py. Sources: Zhang and Sennrich, arXiv:1910.07467; Dao and Gu, arXiv:2405.21060.
"""

from __future__ import annotations

from typing import Literal, NamedTuple

import torch
from torch.nn import functional as F

from ligertune_kernels.autograd import no_double_backward
from ligertune_kernels.chips import Chip, gated_norm_tile, launch_options
from ligertune_kernels.launcher import (
    BoundLaunch,
    cached,
    chip_of,
    contiguous_like,
    rows_and_stride,
    runs_triton,
    triton,
)
from ligertune_kernels.ops.norms._column_sums import column_sums
from ligertune_kernels.ops.norms._gated_norm_kernels import (
    gated_backward_kernel,
    gated_forward_kernel,
    gated_forward_sweep_kernel,
)
from ligertune_kernels.ops.norms._row_norm import PROGRAM_PER_TILE, SWEEP_BLOCK, LaunchPlan, stages_that_fit

TILE = 4096  # elements per step where a group has fewer
WHOLE_GROUP = 8192  # longest group that the forward holds in registers; longer ones are swept
BACKWARD_WARPS = 16  # that share a processor

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
    chip = chip_of(call.device)
    x, _, weight = call.dtypes
    widens = call.options.cast == "llama" and not call.options.norm_before_gate and weight is not None
    constants = call.options.flags(weight) | {"KEEPS": keeps}
    cols = call.options.group_size
    if cols <= (WHOLE_GROUP if call.is_aligned() else WHOLE_GROUP // 2):
        block = triton.next_power_of_2(cols)
        kernel = gated_forward_kernel
        rows = max(1, TILE // block)
        constants |= {"ROWS": rows, "BLOCK": block, **launch_options(rows * block, chip)}
    else:
        kernel = gated_forward_sweep_kernel
        rows = 1
        constants |= {"BLOCK": SWEEP_BLOCK, **launch_options(SWEEP_BLOCK, chip)}
    launch = BoundLaunch(kernel, constants, call.integers())
    y_dtype = torch.promote_types(x, weight) if widens else x
    return LaunchPlan(launch, rows, PROGRAM_PER_TILE, call.width // cols, dtypes=(y_dtype,))


def _backward_constants(call: GatedCall, chip: Chip) -> tuple[dict[str, int | bool], int]:
    """Return the tile and launch of the backward, and its programs on each processor."""
    cols = call.options.group_size
    column_bytes = sum(dtype.itemsize for dtype in call.dtypes[:3])
    tile = gated_norm_tile(packed=column_bytes <= 6, chip=chip)
    aligned = call.is_aligned()
    halved = 1 if aligned else 2  # otherwise each column has its own address in registers
    block = min(triton.next_power_of_2(cols), tile.cols // halved)
    rows = max(1, tile.elements // halved // block)
    parts = -(-cols // block)
    constants = {**launch_options(rows * block, chip), "ROWS": rows, "BLOCK": block, "PARTS": parts}
    if tile.warps and aligned:
        constants["num_warps"] = tile.warps
    programs = tile.programs or BACKWARD_WARPS // constants["num_warps"] or 1
    # With parts a step reads whole groups, which no prefetch of one part's rows helps.
    constants["STAGES"] = stages_that_fit(rows * block * column_bytes, programs, chip) if parts == 1 else 1
    return constants, programs


@cached
def _plan_backward(call: GatedCall, needs: tuple[bool, bool, bool]) -> LaunchPlan:
    chip = chip_of(call.device)
    constants, programs = _backward_constants(call, chip)
    constants |= call.options.flags(call.dtypes[3])
    constants |= dict(zip(("NEEDS_DX", "NEEDS_DGATE", "NEEDS_DW"), needs, strict=True))
    constants["NEEDS_DZ"] = needs[0] or (needs[1] and not call.options.norm_before_gate)
    parts = call.width // call.options.group_size * constants["PARTS"]
    launch = BoundLaunch(gated_backward_kernel, constants, call.integers())
    return LaunchPlan(launch, constants["ROWS"], max(1, programs * chip.processors // parts), parts)


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
    (x_rows, x_stride), (gate_rows, gate_stride) = rows_and_stride(x), rows_and_stride(gate)
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
        activation: Activation = "silu",
        norm_before_gate: bool = True,
        cast: Cast = "llama",
        device: torch.device | str | None = None,
        dtype: torch.dtype | None = None,
    ) -> None:
        super().__init__()
        self.eps = eps
        self.options = GatedNormOptions(group_size or hidden_size, activation, norm_before_gate, cast)
        self.weight = torch.nn.Parameter(torch.ones(hidden_size, device=device, dtype=dtype))

    def forward(self, hidden_states: torch.Tensor, gate: torch.Tensor) -> torch.Tensor:
        return gated_rms_norm(hidden_states, gate, self.weight, self.eps, **self.options._asdict())
