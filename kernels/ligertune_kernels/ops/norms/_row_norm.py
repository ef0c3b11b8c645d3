"""Launch plans of rms_norm, add_rms_norm and layer_norm: kernel, tile, grid and the tensors of the results.

A plan depends on shapes' last sizes, strides, dtypes and the chip, not on the number of rows, and is cached.
"""

from __future__ import annotations

from typing import NamedTuple

import torch

from ligertune_kernels.chips import MAX_THREADS, Chip, applies, launch_options, measured_norm_tile
from ligertune_kernels.launcher import BoundLaunch, cached, chip_of, contiguous_like, rows_and_stride, triton
from ligertune_kernels.ops.norms._column_sums import column_sums
from ligertune_kernels.ops.norms._norm_kernels import (
    backward_halves_kernel,
    backward_kernel,
    backward_row_kernel,
    forward_kernel,
    forward_sweep_kernel,
)

TILE = 4096  # elements per step where a row has fewer
# longest row that the forward holds in registers; longer rows are swept
WHOLE_ROW = 16384
WHOLE_ROW_BYTES = 65536
SWEEP_BLOCK = 2048
PART = 8192  # columns of dx and dw that a backward program holds; with 16 warps 124 of the 128 registers of sm90
STAGES = 3  # tiles of a program in flight or in work
# warps that share a processor
FORWARD_WARPS = 32
BACKWARD_WARPS = 16
REDUCTION_BYTES = 16384  # of shared memory, for sums over warps
PROGRAM_PER_TILE = 1 << 31  # programs: as many as there are tiles


class Call(NamedTuple):
    """Key of a launch plan; its tensors are x, residual, weight, bias, or in the backward dy, ds, x, weight."""

    n_cols: int
    strides: tuple[int, ...]  # of the rows of x and residual or, backward, of dy, ds and x
    dtypes: tuple[torch.dtype | None, ...]  # None: there is no such tensor
    centred: bool
    round_xhat: bool
    device: torch.device
    round_rstd: bool = False

    def integers(self) -> tuple[int, ...]:
        """Return the integers that Triton specialises on."""
        return (*self.strides, self.n_cols)

    def is_aligned(self) -> bool:
        """Return whether all rows begin at a vector of 16 elements. Otherwise each column has its own address."""
        return not any(integer % 16 for integer in self.integers())


class LaunchPlan(NamedTuple):
    """A launch whose programs each take a run of rows."""

    launch: BoundLaunch
    rows: int  # per step
    programs: int  # at most, for each part
    parts: int = 1  # of a row's columns, each computed by separate programs
    dtypes: tuple[torch.dtype, ...] = ()  # of the sum and of y

    def grid(self, n_rows: int) -> tuple[tuple[int, int, int], int]:
        """Return the grid and the rows of each program: whole steps, spread as evenly as possible."""
        steps = -(-n_rows // self.rows)
        if torch.compiler.is_compiling() and self.programs != PROGRAM_PER_TILE:
            # A number that depends on n_rows makes torch.compile write more graphs. Some programs may get no rows.
            return (self.programs, self.parts, 1), -(-steps // self.programs) * self.rows
        if steps <= self.programs:
            return (steps, self.parts, 1), self.rows
        steps_each = -(-steps // self.programs)
        return (-(-steps // steps_each), self.parts, 1), steps_each * self.rows


def stages_that_fit(step_bytes: int, programs: int, chip: Chip) -> int:
    """Return the steps in flight that fit into shared memory with this many programs per processor; 1 on AMD."""
    if chip.vendor != "nvidia":
        return 1
    waiting = (chip.shared_bytes // programs - REDUCTION_BYTES) // step_bytes
    return 1 + max(0, min(waiting, STAGES - 1))


def _tile_constants(rows: int, block: int, call: Call, chip: Chip) -> dict[str, int | bool]:
    constants = {"ROWS": rows, "BLOCK": block, **launch_options(rows * block, chip)}
    if call.centred and call.n_cols == 1:
        # The gradient w dy - w dy is zero only if both products are rounded, and fusing leaves one unrounded.
        constants["enable_fp_fusion"] = False
    return constants


def _plan_forward_tile(
    call: Call, column_bytes: int, chip: Chip, *, residual: bool
) -> tuple[dict[str, int | bool], int, int]:
    """Return constants, rows per step and programs of forward_kernel."""
    plain = not residual and not call.centred  # which leaves registers unused
    block = triton.next_power_of_2(call.n_cols)
    measured = None
    if column_bytes == 2 and call.is_aligned():
        measured = measured_norm_tile("forward", centred=call.centred, cols=block, chip=chip)
    rows = max(1, TILE // block) if measured is None else measured.rows
    constants = _tile_constants(rows, block, call, chip)
    if measured is not None:
        constants["num_warps"] = measured.warps
    if block > PART:  # 32 warps have 64 registers per thread, too few for a long layer norm
        constants["num_warps"] = min(constants["num_warps"], 16)
    if block < PART or (block == PART and not call.centred):
        # One program per tile reaches 92 to 98 % of an H100's bandwidth; programs that loop over rows, 82 to 84 %.
        if block == PART and plain and chip.vendor == "nvidia":
            constants["num_warps"] = 8
        if block < PART and not plain and applies("norm_forward_4_warps", chip):
            constants["num_warps"] = 4
        return constants | {"STAGES": 1}, rows, PROGRAM_PER_TILE
    programs = FORWARD_WARPS // constants["num_warps"] or 1 if measured is None else measured.programs
    stages = stages_that_fit(block * rows * column_bytes, programs, chip)
    return constants | {"STAGES": stages}, rows, programs * chip.processors


@cached
def _plan_forward(call: Call) -> LaunchPlan:
    chip = chip_of(call.device)
    x, residual, weight, bias = call.dtypes
    column_bytes = x.itemsize + (0 if residual is None else residual.itemsize)
    sum_dtype = x if residual is None else torch.promote_types(x, residual)
    # Llama's norm multiplies a rounded x̂ by the weight, so that a wider weight makes y wider.
    y_dtype = sum_dtype if weight is None or not call.round_xhat else torch.promote_types(sum_dtype, weight)
    flags = {
        "HAS_RESIDUAL": residual is not None,
        "HAS_WEIGHT": weight is not None,
        "HAS_BIAS": bias is not None,
        "CENTRED": call.centred,
        "ROUND_XHAT": call.round_xhat,
        "ROUND_RSTD": call.round_rstd,
    }
    longest = WHOLE_ROW if call.is_aligned() else PART // 2
    if call.n_cols <= longest and call.n_cols * column_bytes <= WHOLE_ROW_BYTES:
        kernel = forward_kernel
        constants, rows, programs = _plan_forward_tile(call, column_bytes, chip, residual=residual is not None)
    else:
        kernel = forward_sweep_kernel
        rows = 1
        programs = PROGRAM_PER_TILE
        constants = {"BLOCK": SWEEP_BLOCK, **launch_options(SWEEP_BLOCK, chip)}
    launch = BoundLaunch(kernel, flags | constants, call.integers())
    return LaunchPlan(launch, rows, programs, dtypes=(sum_dtype, y_dtype))


def _backward_block(call: Call, chip: Chip, *, wide: bool) -> int:
    """Return the columns of a part; wide: fp32 values wait unpacked in registers, so that fewer columns fit."""
    block = triton.next_power_of_2(call.n_cols)
    if not call.is_aligned() and block > PART // 2:
        return PART // 4
    if block <= PART:
        return block
    halve = call.centred and applies("layer_norm_backward_half_parts", chip)
    return PART // 2 if wide or halve or call.n_cols > 2 * PART else PART


def _plan_backward_tile(call: Call, column_bytes: int, chip: Chip) -> tuple[dict[str, int | bool], int, int, int]:
    """Return constants, rows per step, programs and parts of backward_kernel."""
    residual = call.dtypes[1] is not None
    wide = column_bytes > 6
    block = _backward_block(call, chip, wide=wide)
    parts = -(-call.n_cols // block)
    measured = None
    if column_bytes == 4 and not residual and call.is_aligned():
        measured = measured_norm_tile("backward", centred=call.centred, cols=block, chip=chip)
    rows = max(1, (TILE // 2 if wide else TILE) // block) if measured is None else measured.rows
    constants = _tile_constants(rows, block, call, chip)
    if measured is not None:
        constants["num_warps"] = measured.warps
    programs = BACKWARD_WARPS // constants["num_warps"] or 1 if measured is None else measured.programs
    if parts > 1 and not residual and not (call.centred and applies("norm_backward_prefetch_parts", chip)):
        stages = 1  # each part reads the whole row anyway; prefetching costs 5 to 15 % of the bandwidth
    else:
        # Shared memory also holds the weights of the other parts.
        stages = stages_that_fit(block * (rows * parts * column_bytes + 4 * (parts - 1)), programs, chip)
    constants |= {"STAGES": stages, "PARTS": parts}
    return constants, rows, max(1, programs * chip.processors // parts), parts


def _fits_whole_long_row(call: Call, chip: Chip) -> bool:
    """Return whether all threads of a program can hold two packed rows of WHOLE_ROW columns, weights and dw."""
    packed = all(dtype is None or dtype.itemsize == 2 for dtype in call.dtypes)
    # On NVIDIA the compiler unpacks fp16 weights before the first row, which takes twice the registers.
    unpacks = chip.vendor == "nvidia" and torch.float16 in call.dtypes
    fits = PART < call.n_cols <= WHOLE_ROW and not call.centred and packed and not unpacks
    return fits and call.is_aligned() and applies("rms_norm_backward_whole_long_row", chip)


def _fits_halves(call: Call, chip: Chip) -> bool:
    """Return whether 16 warps can hold a packed row of 2 PART columns with dw and db: in all 128 registers."""
    dy, ds, x, weight = call.dtypes
    fits = call.centred and not call.round_xhat and ds is None and call.n_cols == 2 * PART and call.is_aligned()
    return fits and dy is x is weight is torch.bfloat16 and applies("layer_norm_backward_halves", chip)


@cached
def _plan_backward(call: Call, needs: tuple[bool, bool, bool]) -> LaunchPlan:
    chip = chip_of(call.device)
    column_bytes = sum(dtype.itemsize for dtype in call.dtypes[:3] if dtype is not None)
    flags = {
        "HAS_RESIDUAL": call.dtypes[1] is not None,
        "HAS_WEIGHT": call.dtypes[3] is not None,
        "ROUND_XHAT": call.round_xhat,
    }
    if needs[0] and _fits_whole_long_row(call, chip):
        block = triton.next_power_of_2(call.n_cols)
        prefetches = chip.vendor == "nvidia" and block * column_bytes + REDUCTION_BYTES <= chip.shared_bytes
        constants = flags | {"NEEDS_DW": needs[1], "BLOCK": block, "STAGES": 1 + prefetches}
        constants |= launch_options(block, chip) | {"num_warps": MAX_THREADS // chip.warp_size}
        return LaunchPlan(BoundLaunch(backward_row_kernel, constants, call.integers()), 1, chip.processors)
    if all(needs) and _fits_halves(call, chip):
        constants = {**launch_options(PART, chip), "HALF": PART, "num_warps": 16, "STAGES": 2}
        return LaunchPlan(BoundLaunch(backward_halves_kernel, constants, call.integers()), 1, chip.processors)
    constants, *numbers = _plan_backward_tile(call, column_bytes, chip)
    constants |= flags | {"CENTRED": call.centred}
    constants |= dict(zip(("NEEDS_DX", "NEEDS_DW", "NEEDS_DB"), needs, strict=True))
    return LaunchPlan(BoundLaunch(backward_kernel, constants, call.integers()), *numbers)


def _dtype(t: torch.Tensor | None) -> torch.dtype | None:
    return None if t is None else t.dtype


def norm_forward(
    x: torch.Tensor,  # (..., E)
    residual: torch.Tensor | None,  # (..., E), added to x before the norm
    weight: torch.Tensor | None,  # (E,)
    bias: torch.Tensor | None,  # (E,)
    eps: float,
    *,
    offset: float = 0.0,
    centred: bool = False,
    round_xhat: bool = False,
    round_rstd: bool = False,
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Return y, the sum that is normed (x without a residual), and fp32 statistics: rstd (N,), if centred means (N,).

    N is the number of rows. centred: subtract the mean; round_xhat: round x̂ to x's dtype before the product;
    round_rstd: round r to x's dtype before its product with x.
    """
    n_cols = x.shape[-1]
    n_rows = x.numel() // n_cols
    rows, row_stride = rows_and_stride(x)
    residual_rows, residual_stride = (rows, row_stride) if residual is None else rows_and_stride(residual)
    dtypes = x.dtype, _dtype(residual), _dtype(weight), _dtype(bias)
    strides = row_stride, residual_stride
    plan = _plan_forward(Call(n_cols, strides, dtypes, centred, round_xhat, x.device, round_rstd))
    grid, rows_per_program = plan.grid(n_rows)
    summed = x if residual is None else contiguous_like(x, plan.dtypes[0])
    y = contiguous_like(x, plan.dtypes[1])
    stats = x.new_empty(2 * n_rows if centred else n_rows, dtype=torch.float32)
    tensors = (
        rows,
        residual_rows,
        rows if weight is None else weight.contiguous(),
        rows if bias is None else bias.contiguous(),
        y,
        rows if residual is None else summed,
        stats,
    )
    plan.launch(grid, tensors, n_rows, float(eps), float(offset), rows_per_program)
    return y, summed, stats


def norm_backward(
    dy: torch.Tensor,  # (..., E)
    ds: torch.Tensor | None,  # (..., E), gradient that reaches x past the norm
    x: torch.Tensor,  # (..., E), the sum that was normed
    weight: torch.Tensor | None,  # (E,)
    bias: torch.Tensor | None,  # (E,)
    stats: torch.Tensor,  # (N,) or (2 N,), from norm_forward
    needs: tuple[bool, bool, bool],
    *,
    offset: float = 0.0,
    centred: bool = False,
    round_xhat: bool = False,
    inplace: bool = False,
) -> tuple[torch.Tensor | None, torch.Tensor | None, torch.Tensor | None]:
    """Return dx, dw and db in the dtypes of x, weight and bias, None where `needs` is False.

    inplace: dx may be written over dy.
    """
    needs_dx, needs_dw, needs_db = needs
    n_cols = x.shape[-1]
    rows, row_stride = rows_and_stride(x)
    dy_rows, dy_stride = rows_and_stride(dy)
    ds_rows, ds_stride = (dy_rows, dy_stride) if ds is None else rows_and_stride(ds)
    dtypes = dy.dtype, _dtype(ds), x.dtype, _dtype(weight)
    strides = dy_stride, ds_stride, row_stride
    plan = _plan_backward(Call(n_cols, strides, dtypes, centred, round_xhat, x.device), needs)
    n_rows = x.numel() // n_cols
    grid, rows_per_program = plan.grid(n_rows)
    dx = None
    if needs_dx:
        # A part reads the other parts' columns of dy, and torch.compile plans the memory itself.
        over_dy = inplace and plan.parts == 1 and dy.dtype is x.dtype and dy.is_contiguous() and ds is not dy
        if over_dy and not torch.compiler.is_compiling():
            dx = dy.detach()
            torch.autograd.graph.increment_version(dy)
        else:
            dx = contiguous_like(x, x.dtype)
    dw = contiguous_like(weight, weight.dtype) if needs_dw else None
    db = contiguous_like(bias, bias.dtype) if needs_db else None
    sums = [t for t in (dw, db) if t is not None]
    partial = stats.new_empty(grid[0], len(sums) * n_cols) if sums else stats
    weight_or_any = rows if weight is None else weight.contiguous()
    tensors = dy_rows, ds_rows, rows, weight_or_any, stats, rows if dx is None else dx, partial
    plan.launch(grid, tensors, n_rows, float(offset), rows_per_program)
    if sums:
        column_sums(partial, *sums)
    return dx, dw, db
