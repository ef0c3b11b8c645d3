"""What rms_norm, add_rms_norm and layer_norm run: allocation and launch of the kernels of `norm_kernels`."""

from __future__ import annotations

from dataclasses import dataclass

import torch

from ligertune_kernels.launch import Chip, Launcher, chip_of, on_device, options, remembered, rows_of, triton
from ligertune_kernels.ops.column_sums import column_sums
from ligertune_kernels.ops.norm_kernels import backward_kernel, forward_kernel, forward_sweep_kernel

TILE = 4096  # elements of the rows taken at once, if one row is not more
WHOLE_ROW, WHOLE_ROW_BYTES = 16384, 65536  # up to which the forward holds a row in registers; longer ones are swept
SWEEP_BLOCK = 2048
PART = 8192  # columns of dx and dw that a backward program holds; with 16 warps 124 of the 128 registers of sm90
FORWARD_STAGES, FORWARD_WARPS = 3, 32  # tiles under way or at work in a program; warps that share a processor
BACKWARD_STAGES, BACKWARD_WARPS = 3, 16


@dataclass(frozen=True)
class Walk:
    """A kernel whose programs walk runs of rows: so many rows a step, so many programs at most, for each part."""

    launch: Launcher
    rows: int
    programs: int
    parts: int = 1

    def over(self, n_rows: int) -> tuple[tuple[int, int, int], int]:
        """The grid and the rows of each program: whole steps, as equal as they can be."""
        steps = -(-n_rows // self.rows)
        steps_each = -(-steps // self.programs)
        return (-(-steps // steps_each), self.parts, 1), steps_each * self.rows


def _walk(
    n_cols: int, column_bytes: int, chip: Chip, *, backward: bool, plain: bool
) -> tuple[dict[str, int | bool], tuple[int, int, int]]:
    """Constants of a kernel, and the Walk's numbers; column_bytes are those of all tensors read row by row.

    plain: neither a residual nor a mean, which leaves registers to spare.
    """
    block = triton.next_power_of_2(n_cols)
    wide = backward and column_bytes > 6  # fp32 waits unpacked in registers: less of it, and nothing spills
    if backward and block > PART:
        block = PART // 2 if wide or n_cols > 2 * PART else PART
    parts = -(-n_cols // block)
    rows = max(1, (TILE // 2 if wide else TILE) // block)
    constants = {"ROWS": rows, "BLOCK": block, **options(rows * block, chip)}
    if block > PART:  # 32 warps have 64 registers a thread, which a long layer norm exceeds
        constants["num_warps"] = min(constants["num_warps"], 16)
    if not backward and (block < PART or (block == PART and plain)):
        # A program for each tile reaches 92 to 94 % of an H100's bandwidth here, programs that walk 84 %.
        if block == PART and chip.vendor == "nvidia":
            constants["num_warps"] = 8
        if not plain and chip.arch.startswith("sm10"):  # with 8 warps a residual's tile of 4096 spills 16 bytes there
            constants["num_warps"] = 4
        return constants | {"STAGES": 1}, (rows, 1 << 31, 1)
    share = (BACKWARD_WARPS if backward else FORWARD_WARPS) // constants["num_warps"] or 1
    # Rows under way lie in shared memory, with the weights of the other parts and beside 16 kB for the reductions.
    step_bytes = block * (rows * parts * column_bytes + 4 * (parts - 1))
    waiting = (chip.shared_bytes // share - 16384) // step_bytes if chip.vendor == "nvidia" else 0
    stages = BACKWARD_STAGES if backward else FORWARD_STAGES
    if parts > 1 and plain:  # a row is fetched by each part as it is; without a queue 80 % of the bandwidth, not 65
        stages = 1
    constants["STAGES"] = 1 + max(0, min(waiting, stages - 1))
    if backward:
        constants["PARTS"] = parts
    return constants, (rows, max(1, share * chip.processors // parts), parts)


@remembered
def _forward_walk(
    n_cols: int,
    column_bytes: int,
    residual: bool,
    weight: bool,
    bias: bool,
    centred: bool,
    round_xhat: bool,
    chip: Chip,
) -> Walk:
    flags = {
        "HAS_RESIDUAL": residual,
        "HAS_WEIGHT": weight,
        "HAS_BIAS": bias,
        "CENTRED": centred,
        "ROUND_XHAT": round_xhat,
    }
    if n_cols > WHOLE_ROW or n_cols * column_bytes > WHOLE_ROW_BYTES:
        constants = {**flags, "BLOCK": SWEEP_BLOCK, **options(SWEEP_BLOCK, chip)}
        return Walk(Launcher(forward_sweep_kernel, constants), 1, 1 << 31)
    constants, numbers = _walk(n_cols, column_bytes, chip, backward=False, plain=not (residual or centred))
    return Walk(Launcher(forward_kernel, flags | constants), *numbers)


@remembered
def _backward_walk(
    n_cols: int,
    column_bytes: int,
    residual: bool,
    weight: bool,
    centred: bool,
    round_xhat: bool,
    needs: tuple[bool, bool, bool],
    chip: Chip,
) -> Walk:
    flags = {"HAS_RESIDUAL": residual, "HAS_WEIGHT": weight, "CENTRED": centred, "ROUND_XHAT": round_xhat}
    flags |= dict(zip(("NEEDS_DX", "NEEDS_DW", "NEEDS_DB"), needs, strict=True))
    constants, numbers = _walk(n_cols, column_bytes, chip, backward=True, plain=not (residual or centred))
    return Walk(Launcher(backward_kernel, flags | constants), *numbers)


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
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor | None, torch.Tensor]:
    """y, the normed sum (x itself without a residual), the means (N,) of a centred norm, and rstd (N,)."""
    device, dtype, rows = x.device, x.dtype, rows_of(x)
    n_rows, n_cols = rows.shape
    column_bytes, residual_rows, summed = x.element_size(), rows, x
    if residual is not None:
        column_bytes, residual_rows = column_bytes + residual.element_size(), rows_of(residual)
        dtype = torch.promote_types(dtype, residual.dtype)
        summed = torch.empty(x.shape, dtype=dtype, device=device)
    # A wider weight widens the result of the norm that rounds before it.
    y_dtype = torch.promote_types(dtype, weight.dtype) if round_xhat and weight.dtype != dtype else dtype
    y = torch.empty(x.shape, dtype=y_dtype, device=device)
    rstd = torch.empty(n_rows, dtype=torch.float32, device=device)
    mean = torch.empty(n_rows, dtype=torch.float32, device=device) if centred else None
    walk = _forward_walk(
        n_cols, column_bytes, residual is not None, weight is not None, bias is not None, centred, round_xhat,
        chip_of(device),
    )  # fmt: skip
    grid, rows_per_program = walk.over(n_rows)
    with on_device(x):
        walk.launch(
            grid,
            (
                rows,
                residual_rows,
                rows if weight is None else weight.contiguous(),
                rows if bias is None else bias.contiguous(),
                y,
                rows if residual is None else summed,
                rstd if mean is None else mean,
                rstd,
            ),
            (rows.stride(0), residual_rows.stride(0), n_cols),
            n_rows, float(eps), float(offset), rows_per_program,
        )  # fmt: skip
    return y, summed, mean, rstd


def norm_backward(
    dy: torch.Tensor,
    ds: torch.Tensor | None,
    x: torch.Tensor,
    weight: torch.Tensor | None,
    mean: torch.Tensor | None,
    rstd: torch.Tensor,
    needs: tuple[bool, bool, bool],
    grad_dtype: torch.dtype,
    *,
    offset: float = 0.0,
    round_xhat: bool = False,
) -> tuple[torch.Tensor | None, torch.Tensor | None, torch.Tensor | None]:
    """dx in x's dtype, dw and db in grad_dtype; those that `needs` asks for.

    x is what was normed, ds the gradient it receives beside the norm's.
    """
    needs_dx, needs_dw, needs_db = needs
    device, rows, dy_rows = x.device, rows_of(x), rows_of(dy)
    n_rows, n_cols = rows.shape
    column_bytes, ds_rows = x.element_size() + dy.element_size(), dy_rows
    if ds is not None:
        column_bytes, ds_rows = column_bytes + ds.element_size(), rows_of(ds)
    walk = _backward_walk(
        n_cols, column_bytes, ds is not None, weight is not None, mean is not None, round_xhat, needs, chip_of(device)
    )
    grid, rows_per_program = walk.over(n_rows)
    dx = torch.empty(x.shape, dtype=x.dtype, device=device) if needs_dx else None
    n_sums = (needs_dw + needs_db) * n_cols
    partial = torch.empty(grid[0], n_sums, dtype=torch.float32, device=device) if n_sums else rstd
    with on_device(x):
        walk.launch(
            grid,
            (
                dy_rows,
                ds_rows,
                rows,
                rows if weight is None else weight.contiguous(),
                rstd if mean is None else mean,
                rstd,
                rows if dx is None else dx,
                partial,
            ),
            (dy_rows.stride(0), ds_rows.stride(0), rows.stride(0), n_cols),
            n_rows, float(offset), rows_per_program,
        )  # fmt: skip
    if not n_sums:
        return dx, None, None
    sums = column_sums(partial, grad_dtype)
    if not (needs_dw and needs_db):
        return dx, (sums if needs_dw else None), (sums if needs_db else None)
    return dx, sums[:n_cols], sums[n_cols:]
