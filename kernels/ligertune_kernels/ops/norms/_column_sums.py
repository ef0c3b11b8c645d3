"""Column sums of an fp32 matrix (P, C): adds up what P programs of a backward kernel left for dw and db.

One program sums a few columns over all rows, in the order of the rows: the result is the same in every run.
"""

from __future__ import annotations

import torch

from ligertune_kernels.chips import launch_options
from ligertune_kernels.launcher import BoundLaunch, cached, chip_of, tl, triton

TILE = 16384  # elements per step: all rows of most matrices, so that all their bytes are in flight together
FEWEST_COLS = 32  # 128 bytes of a row
FEW_ROWS = 64  # of a matrix from few programs. With more sizes than two, a longer batch would wait for the compiler


@triton.jit(do_not_specialize=["n_rows", "n_first"])
def _column_sums_kernel(
    x_ptr,  # (P, C)
    first_ptr, second_ptr,  # (n_first,), (C - n_first,)
    n_cols, n_first, n_rows,
    ROWS: tl.constexpr, COLS: tl.constexpr, TWO: tl.constexpr,
):  # fmt: skip
    cols = tl.program_id(0) * COLS + tl.arange(0, COLS)
    total = tl.zeros([COLS], dtype=tl.float32)
    for start in range(0, n_rows, ROWS):
        rows = start + tl.arange(0, ROWS)
        mask = (rows < n_rows)[:, None] & (cols < n_cols)[None, :]
        x = tl.load(x_ptr + rows[:, None].to(tl.int64) * n_cols + cols[None, :], mask=mask, other=0.0)
        total += tl.sum(x, axis=0)
    tl.store(first_ptr + cols, total.to(first_ptr.dtype.element_ty), mask=cols < n_first)
    if TWO:
        mask = (cols >= n_first) & (cols < n_cols)
        tl.store(second_ptr + (cols - n_first), total.to(second_ptr.dtype.element_ty), mask=mask)


@cached
def _plan_sums(
    few_rows: bool, n_cols: int, device: torch.device, first: torch.dtype, second: torch.dtype | None
) -> tuple[BoundLaunch, tuple[int, int, int]]:
    """Return the launch and its grid for a matrix of n_cols columns and results of these dtypes."""
    chip = chip_of(device)
    # About four programs per processor: enough to hide each other's loads.
    cols = min(max(FEWEST_COLS, triton.next_power_of_2(n_cols // (4 * chip.processors) + 1)), 1024)
    rows = min(TILE // cols, FEW_ROWS) if few_rows else TILE // cols
    constants = {"ROWS": rows, "COLS": cols, "TWO": second is not None, **launch_options(rows * cols // 2, chip)}
    return BoundLaunch(_column_sums_kernel, constants, (n_cols,)), (triton.cdiv(n_cols, cols), 1, 1)


def column_sums(
    x: torch.Tensor,  # (P, C) float32, contiguous
    first: torch.Tensor,  # (C1,)
    second: torch.Tensor | None = None,  # (C - C1,)
) -> None:
    """Write x.sum(0), rounded once, into `first` and the remaining columns into `second`, in one launch."""
    n_rows, n_cols = x.shape
    second_dtype = None if second is None else second.dtype
    launch, grid = _plan_sums(n_rows <= FEW_ROWS, n_cols, x.device, first.dtype, second_dtype)
    launch(grid, (x, first, first if second is None else second), first.numel(), n_rows)
