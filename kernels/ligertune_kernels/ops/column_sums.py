"""Sums of the columns of an fp32 matrix (P, C): what the programs of a backward kernel have gathered for the weights.

One program sums a few columns over all rows, in the order of the rows: the result is the same in every run.
"""

from __future__ import annotations

import torch

from ligertune_kernels.launch import Chip, Launcher, chip_of, on_device, options, remembered, tl, triton

TILE = 16384  # elements taken at once: of most matrices every row, so that all their bytes are in flight together
FEWEST_COLS = 32  # 128 bytes of a row


@triton.jit(do_not_specialize=["n_rows"])
def _column_sums_kernel(x_ptr, sums_ptr, n_cols, n_rows, ROWS: tl.constexpr, COLS: tl.constexpr):
    cols = tl.program_id(0) * COLS + tl.arange(0, COLS)
    total = tl.zeros([COLS], dtype=tl.float32)
    for start in range(0, n_rows, ROWS):
        rows = start + tl.arange(0, ROWS)
        mask = (rows < n_rows)[:, None] & (cols < n_cols)[None, :]
        x = tl.load(x_ptr + rows[:, None].to(tl.int64) * n_cols + cols[None, :], mask=mask, other=0.0)
        total += tl.sum(x, axis=0)
    tl.store(sums_ptr + cols, total.to(sums_ptr.dtype.element_ty), mask=cols < n_cols)


@remembered
def _launch(n_rows: int, n_cols: int, chip: Chip) -> tuple[Launcher, tuple[int, int, int]]:
    """The kernel, and some four programs on each processor."""
    cols = min(max(FEWEST_COLS, triton.next_power_of_2(n_cols // (4 * chip.processors) + 1)), 1024)
    rows = min(TILE // cols, triton.next_power_of_2(n_rows))
    constants = {"ROWS": rows, "COLS": cols, **options(rows * cols // 2, chip)}
    return Launcher(_column_sums_kernel, constants), (triton.cdiv(n_cols, cols), 1, 1)


def column_sums(x: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    """x.sum(0) of a contiguous fp32 matrix, rounded once to dtype: one launch, where torch takes two."""
    n_rows, n_cols = x.shape
    sums = torch.empty(n_cols, dtype=dtype, device=x.device)
    launch, grid = _launch(n_rows, n_cols, chip_of(x.device))
    with on_device(x):
        launch(grid, (x, sums), (n_cols,), n_rows)
    return sums
