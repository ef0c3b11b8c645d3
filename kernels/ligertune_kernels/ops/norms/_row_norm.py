"""What rms_norm, add_rms_norm and layer_norm run: allocation and launch of the kernels of `norm_kernels`."""

from __future__ import annotations

from dataclasses import dataclass

import torch

from ligertune_kernels.chips import MAX_THREADS, Chip, launch_options
from ligertune_kernels.launcher import BoundLaunch, cached, chip_of, contiguous_like, rows_and_stride, triton
from ligertune_kernels.ops.norms._column_sums import ColumnSums, column_sums_of
from ligertune_kernels.ops.norms._norm_kernels import (
    backward_halves_kernel,
    backward_kernel,
    backward_row_kernel,
    forward_kernel,
    forward_sweep_kernel,
)

TILE = 4096  # elements of the rows taken at once, if one row is not more
WHOLE_ROW, WHOLE_ROW_BYTES = 16384, 65536  # up to which the forward holds a row in registers; longer ones are swept
SWEEP_BLOCK = 2048
PART = 8192  # columns of dx and dw that a backward program holds; with 16 warps 124 of the 128 registers of sm90
FORWARD_STAGES, FORWARD_WARPS = 3, 32  # tiles under way or at work in a program; warps that share a processor
BACKWARD_STAGES, BACKWARD_WARPS = 3, 16
# Of 16 bits, where scripts/tune_kernels found others faster than the rules below, by 2 to 4 %, on an H100:
# rows a step, warps, programs that share a processor; by chip, direction, whether centred, and columns.
MEASURED = {
    ("sm90", "backward", False, 4096): (2, 16, 1),
    ("sm90", "backward", True, 4096): (2, 8, 1),
    ("sm90", "forward", True, 8192): (1, 8, 2),
}


@dataclass(frozen=True)
class Walk:
    """A launch whose programs walk runs of rows: so many rows a step, so many programs at most, for each part."""

    launch: BoundLaunch
    rows: int
    programs: int
    parts: int = 1
    dtypes: tuple[torch.dtype, ...] = ()  # of the results that the launch writes

    def over(self, n_rows: int) -> tuple[tuple[int, int, int], int]:
        """The grid and the rows of each program: whole steps, as equal as they can be."""
        steps = -(-n_rows // self.rows)
        if steps <= self.programs:
            return (steps, self.parts, 1), self.rows
        steps_each = -(-steps // self.programs)
        # A quotient of quotients takes torch.compile minutes where it leaves sizes open: some then have no rows.
        programs = self.programs if torch.compiler.is_compiling() else -(-steps // steps_each)
        return (programs, self.parts, 1), steps_each * self.rows


def _walk(
    n_cols: int, column_bytes: int, chip: Chip, *, backward: bool, residual: bool, centred: bool, in_step: bool
) -> tuple[dict[str, int | bool], tuple[int, int, int]]:
    """Constants of a kernel, and the Walk's numbers; column_bytes are those of all tensors read row by row, in_step
    says whether all rows begin at a vector: otherwise every column has its own address, and fewer are held."""
    plain = not residual and not centred  # which leaves registers to spare
    block = triton.next_power_of_2(n_cols)
    wide = backward and column_bytes > 6  # fp32 waits unpacked in registers: less of it, and nothing spills
    if backward and not in_step and block > PART // 2:
        block = PART // 4
    elif backward and block > PART:
        spills = centred and chip.arch == "sm80"  # 8 bytes, of fp16
        block = PART // 2 if wide or n_cols > 2 * PART or spills else PART
    parts = -(-n_cols // block)
    rows, share = max(1, (TILE // 2 if wide else TILE) // block), None
    narrow = column_bytes == (4 if backward else 2) and not residual and in_step
    measured = MEASURED.get((chip.arch, "backward" if backward else "forward", centred, block)) if narrow else None
    if measured is not None:
        rows, warps, share = measured
    constants = {"ROWS": rows, "BLOCK": block, **launch_options(rows * block, chip)}
    if measured is not None:
        constants["num_warps"] = warps
    if centred and n_cols == 1:  # whose gradient is w dy - w dy: zero, but not where one of the two is rounded alone
        constants["enable_fp_fusion"] = False
    if block > PART:  # 32 warps have 64 registers a thread, which a long layer norm exceeds
        constants["num_warps"] = min(constants["num_warps"], 16)
    if not backward and (block < PART or (block == PART and not centred)):
        # A program for each tile reaches 92 to 98 % of an H100's bandwidth here, programs that walk 82 to 84 %.
        if block == PART and plain and chip.vendor == "nvidia":
            constants["num_warps"] = 8
        if not plain and block < PART and chip.arch.startswith("sm10"):  # 8 spill 16 bytes
            constants["num_warps"] = 4
        return constants | {"STAGES": 1}, (rows, 1 << 31, 1)
    share = share or (BACKWARD_WARPS if backward else FORWARD_WARPS) // constants["num_warps"] or 1
    # Rows under way lie in shared memory, with the weights of the other parts and beside 16 kB for the reductions.
    step_bytes = block * (rows * parts * column_bytes + 4 * (parts - 1))
    waiting = (chip.shared_bytes // share - 16384) // step_bytes if chip.vendor == "nvidia" else 0
    stages = BACKWARD_STAGES if backward else FORWARD_STAGES
    if parts > 1 and not residual and (plain or not chip.arch.startswith("sm10")):  # there it spills 8 bytes
        stages = 1  # a row is fetched by each part as it is; a queue costs 5 to 15 % of the bandwidth
    constants["STAGES"] = 1 + max(0, min(waiting, stages - 1))
    if backward:
        constants["PARTS"] = parts
    return constants, (rows, max(1, share * chip.processors // parts), parts)


def _in_step(integers: tuple[int, ...]) -> bool:
    """Whether rows so far apart and so wide all begin at a vector, as Triton tells: by multiples of 16."""
    return not any(integer % 16 for integer in integers)


def _holds_long_rows(integers: tuple[int, ...], dtypes: tuple[torch.dtype | None, ...], chip: Chip) -> bool:
    """Whether all threads of a program can hold two packed rows of up to WHOLE_ROW columns, weights and dw.

    Not where rows begin anywhere, which are loaded column by column; nor, compiled for sm100 and sm120, where 8 to 64
    bytes spill; nor on NVIDIA in fp16, whose weights the compiler unpacks before the first row.
    """
    packed = all(dtype is None or dtype.itemsize == 2 for dtype in dtypes)
    if not packed or not _in_step(integers):
        return False
    return chip.vendor != "nvidia" or (chip.arch in ("sm80", "sm90") and torch.float16 not in dtypes)


def _holds_halves(
    integers: tuple[int, ...], dtypes: tuple[torch.dtype | None, ...], ds: torch.dtype | None, chip: Chip
) -> bool:
    """Whether 16 warps can hold a packed row of twice PART columns beside dw and db: in 128 registers, to the last one.

    Of bf16 and without a mask; on sm90, whose shared memory holds the next row, too. Others were not tried.
    """
    fits = ds is None and all(dtype is torch.bfloat16 for dtype in dtypes)
    here = chip.arch == "sm90" or chip.vendor == "interpreter"
    return fits and here and integers[-1] == 2 * PART and _in_step(integers)


def _whole_row(n_cols: int, column_bytes: int, chip: Chip) -> dict[str, int | bool]:
    """Constants of the backward that holds a long row: every thread a processor has, and the next row on its way."""
    block = triton.next_power_of_2(n_cols)
    waits = chip.vendor == "nvidia" and block * column_bytes + 16384 <= chip.shared_bytes
    return {
        **launch_options(block, chip),
        "BLOCK": block,
        "num_warps": MAX_THREADS // chip.warp_size,
        "STAGES": 1 + waits,
    }


@cached
def _forward_walk(
    strides: tuple[int, int],
    n_cols: int,
    x: torch.dtype,
    residual: torch.dtype | None,
    weight: torch.dtype | None,
    bias: torch.dtype | None,
    centred: bool,
    round_xhat: bool,
    device: torch.device,
) -> Walk:
    """For tensors of these dtypes; the results are the sum and y."""
    chip = chip_of(device)
    column_bytes = x.itemsize + (0 if residual is None else residual.itemsize)
    total = x if residual is None else torch.promote_types(x, residual)
    # A wider weight widens the result of the norm that rounds before it.
    y = total if weight is None or not round_xhat else torch.promote_types(total, weight)
    flags = {
        "HAS_RESIDUAL": residual is not None,
        "HAS_WEIGHT": weight is not None,
        "HAS_BIAS": bias is not None,
        "CENTRED": centred,
        "ROUND_XHAT": round_xhat,
    }
    kernel, numbers = forward_sweep_kernel, (1, 1 << 31, 1)
    constants = {"BLOCK": SWEEP_BLOCK, **launch_options(SWEEP_BLOCK, chip)}
    in_step = _in_step((*strides, n_cols))
    if n_cols <= (WHOLE_ROW if in_step else PART // 2) and n_cols * column_bytes <= WHOLE_ROW_BYTES:
        kernel, how = forward_kernel, {"backward": False, "residual": residual is not None, "centred": centred}
        constants, numbers = _walk(n_cols, column_bytes, chip, in_step=in_step, **how)
    return Walk(BoundLaunch(kernel, flags | constants, (*strides, n_cols)), *numbers, (total, y))


@cached
def _backward_walk(
    strides: tuple[int, int, int],
    n_cols: int,
    dy: torch.dtype,
    ds: torch.dtype | None,
    x: torch.dtype,
    weight: torch.dtype | None,
    centred: bool,
    round_xhat: bool,
    needs: tuple[bool, bool, bool],
    device: torch.device,
) -> Walk:
    column_bytes = dy.itemsize + x.itemsize + (0 if ds is None else ds.itemsize)
    flags = {"HAS_RESIDUAL": ds is not None, "HAS_WEIGHT": weight is not None, "ROUND_XHAT": round_xhat}
    chip = chip_of(device)
    integers = (*strides, n_cols)
    long = PART < n_cols <= WHOLE_ROW and needs[0] and not centred
    if long and _holds_long_rows(integers, (dy, ds, x, weight), chip):
        constants = flags | {"NEEDS_DW": needs[1]} | _whole_row(n_cols, column_bytes, chip)
        return Walk(BoundLaunch(backward_row_kernel, constants, integers), 1, chip.processors)
    if centred and all(needs) and not round_xhat and _holds_halves(integers, (dy, x, weight), ds, chip):
        constants = {**launch_options(PART, chip), "HALF": PART, "num_warps": 16, "STAGES": 2}
        return Walk(BoundLaunch(backward_halves_kernel, constants, integers), 1, chip.processors)
    flags |= {"CENTRED": centred, **dict(zip(("NEEDS_DX", "NEEDS_DW", "NEEDS_DB"), needs, strict=True))}
    how = {"backward": True, "residual": ds is not None, "centred": centred, "in_step": _in_step(integers)}
    constants, numbers = _walk(n_cols, column_bytes, chip, **how)
    return Walk(BoundLaunch(backward_kernel, flags | constants, integers), *numbers)


@dataclass(frozen=True)
class _Forward:
    """A call forward: all that the shapes, strides and dtypes of its tensors decide."""

    launch: BoundLaunch
    grid: tuple[int, int, int]
    others: tuple[float, ...]  # that the launch takes after the tensors
    n_stats: int
    dtypes: tuple[torch.dtype, ...]  # of the sum and y


@cached
def _forward(
    shape: torch.Size, strides: tuple[int, int], dtypes: tuple[torch.dtype | None, ...],
    eps: float, offset: float, centred: bool, round_xhat: bool, device: torch.device,
) -> _Forward:  # fmt: skip
    """For x of this shape; dtypes and strides in the order of `_forward_walk`."""
    n_cols = shape[-1]
    n_rows = shape.numel() // n_cols
    walk = _forward_walk(strides, n_cols, *dtypes, centred, round_xhat, device)
    grid, rows_per_program = walk.over(n_rows)
    others = (n_rows, float(eps), float(offset), rows_per_program)
    return _Forward(walk.launch, grid, others, 2 * n_rows if centred else n_rows, walk.dtypes)


@dataclass(frozen=True)
class _Backward:
    """A call backward, likewise."""

    launch: BoundLaunch
    grid: tuple[int, int, int]
    others: tuple[float, ...]
    parts: int
    n_sums: int  # columns of fp32 that each program leaves to be summed: dw and db side by side, or none
    sums: ColumnSums | None


@cached
def _backward(
    shape: torch.Size, strides: tuple[int, int, int], dtypes: tuple[torch.dtype | None, ...],
    bias: torch.dtype | None, offset: float, centred: bool, round_xhat: bool, needs: tuple[bool, bool, bool],
    device: torch.device,
) -> _Backward:  # fmt: skip
    """For x of this shape; dtypes and strides in the order of `_backward_walk`."""
    n_cols = shape[-1]
    n_rows = shape.numel() // n_cols
    walk = _backward_walk(strides, n_cols, *dtypes, centred, round_xhat, needs, device)
    grid, rows_per_program = walk.over(n_rows)
    summed = [dtype for dtype, needed in zip((dtypes[-1], bias), needs[1:], strict=True) if needed]
    n_sums = len(summed) * n_cols
    sums = column_sums_of(grid[0], n_sums, n_cols, device, *summed) if summed else None
    return _Backward(walk.launch, grid, (n_rows, float(offset), rows_per_program), walk.parts, n_sums, sums)


def norm_forward(
    x: torch.Tensor,
    residual: torch.Tensor | None,
    weight: torch.Tensor | None,
    bias: torch.Tensor | None,
    eps: float,
    *,
    offset: float = 0.0,
    centred: bool = False,
    round_xhat: bool = False,
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """y, the normed sum (x itself without a residual), and the statistics: rstd (N,), of a centred norm the means (N,)
    after it."""
    shape = x.shape
    rows, row_stride = rows_and_stride(x)
    residual_rows, residual_stride = (rows, row_stride) if residual is None else rows_and_stride(residual)
    dtypes = (
        x.dtype, None if residual is None else residual.dtype, None if weight is None else weight.dtype,
        None if bias is None else bias.dtype,
    )  # fmt: skip
    call = _forward(shape, (row_stride, residual_stride), dtypes, eps, offset, centred, round_xhat, x.device)
    sum_dtype, y_dtype = call.dtypes
    summed = x if residual is None else contiguous_like(x, sum_dtype)
    y = contiguous_like(x, y_dtype)
    stats = x.new_empty(call.n_stats, dtype=torch.float32)
    call.launch(
        call.grid,
        (
            rows,
            residual_rows,
            rows if weight is None else weight.contiguous(),
            rows if bias is None else bias.contiguous(),
            y,
            rows if residual is None else summed,
            stats,
        ),
        *call.others,
    )
    return y, summed, stats


def norm_backward(
    dy: torch.Tensor,
    ds: torch.Tensor | None,
    x: torch.Tensor,
    weight: torch.Tensor | None,
    bias: torch.Tensor | None,
    stats: torch.Tensor,
    needs: tuple[bool, bool, bool],
    *,
    offset: float = 0.0,
    centred: bool = False,
    round_xhat: bool = False,
    inplace: bool = False,
) -> tuple[torch.Tensor | None, torch.Tensor | None, torch.Tensor | None]:
    """dx, dw and db in the dtypes of x, weight and bias; those that `needs` asks for.

    x is what was normed, ds the gradient it receives beside the norm's. inplace: dx may take dy's memory.
    """
    needs_dx, needs_dw, needs_db = needs
    shape = x.shape
    rows, row_stride = rows_and_stride(x)
    dy_rows, dy_stride = rows_and_stride(dy)
    ds_rows, ds_stride = (dy_rows, dy_stride) if ds is None else rows_and_stride(ds)
    dtypes = (dy.dtype, None if ds is None else ds.dtype, x.dtype, None if weight is None else weight.dtype)
    call = _backward(
        shape, (dy_stride, ds_stride, row_stride), dtypes, None if bias is None else bias.dtype,
        offset, centred, round_xhat, needs, x.device,
    )  # fmt: skip
    dx = None
    if needs_dx:
        # A part reads the others' columns of dy; and a program that is compiled has its memory planned.
        over_dy = inplace and call.parts == 1 and dy.dtype is x.dtype and dy.is_contiguous() and ds is not dy
        if over_dy and not torch.compiler.is_compiling():
            dx = dy.detach()
            torch.autograd.graph.increment_version(dy)
        else:
            dx = contiguous_like(x, x.dtype)
    partial = stats if call.sums is None else stats.new_empty(call.grid[0], call.n_sums)
    call.launch(
        call.grid,
        (
            dy_rows,
            ds_rows,
            rows,
            rows if weight is None else weight.contiguous(),
            stats,
            rows if dx is None else dx,
            partial,
        ),
        *call.others,
    )
    dw = contiguous_like(weight, weight.dtype) if needs_dw else None
    db = contiguous_like(bias, bias.dtype) if needs_db else None
    if call.sums is not None:
        call.sums.into(partial, *((dw, db) if needs_dw else (db,)))
    return dx, dw, db
