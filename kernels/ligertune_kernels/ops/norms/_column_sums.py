"""Sums of the columns of an fp32 matrix (P, C): what the programs of a backward kernel have gathered for the weights.

One program sums a few columns over all rows, in the order of the rows: the result is the same in every run.
"""

from __future__ import annotations

from typing import NamedTuple

import torch

from ligertune_kernels.chips import launch_options
from ligertune_kernels.launcher import BoundLaunch, cached, chip_of, tl, triton

TILE = 16384  # elements taken at once: of most matrices every row, so that all their bytes are in flight together
FEWEST_COLS = 32  # 128 bytes of a row


@triton.jit(do_not_specialize=["n_rows", "n_first"])
def _column_sums_kernel(
    x_ptr, first_ptr, second_ptr, n_cols, n_first, n_rows, ROWS: tl.constexpr, COLS: tl.constexpr, TWO: tl.constexpr
):
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


class ColumnSums(NamedTuple):
    """x.sum(0) of contiguous fp32 matrices of one shape."""

    launch: BoundLaunch
    grid: tuple[int, int, int]
    others: tuple[int, int]

    def into(self, x: torch.Tensor, first: torch.Tensor, second: torch.Tensor | None = None) -> None:
        """As `column_sums`, without a look at the shapes."""
        # no __call__: torch 2.11 cannot compile that of an object which is made while it traces
        self.launch(self.grid, (x, first, first if second is None else second), *self.others)


@cached
def column_sums_of(
    n_rows: int, n_cols: int, n_first: int, device: torch.device, first: torch.dtype, second: torch.dtype | None = None
) -> ColumnSums:
    """For matrices (n_rows, n_cols), the first columns of which are summed apart: some four programs a processor."""
    chip = chip_of(device)
    cols = min(max(FEWEST_COLS, triton.next_power_of_2(n_cols // (4 * chip.processors) + 1)), 1024)
    rows = min(TILE // cols, triton.next_power_of_2(n_rows))
    launch = _launch(rows, cols, n_cols, first, second, device)
    return ColumnSums(launch, (triton.cdiv(n_cols, cols), 1, 1), (n_first, n_rows))


@cached
def _launch(
    rows: int, cols: int, n_cols: int, first: torch.dtype, second: torch.dtype | None, device: torch.device
) -> BoundLaunch:
    constants = {
        "ROWS": rows,
        "COLS": cols,
        "TWO": second is not None,
        **launch_options(rows * cols // 2, chip_of(device)),
    }
    return BoundLaunch(_column_sums_kernel, constants, (n_cols,))


def column_sums(x: torch.Tensor, first: torch.Tensor, second: torch.Tensor | None = None) -> None:
    """x.sum(0) of a contiguous fp32 matrix, rounded once: into `first`, and what it has no room for into `second`.

    One launch, where torch takes two for each.
    """
    second_dtype = None if second is None else second.dtype
    column_sums_of(*x.shape, first.numel(), x.device, first.dtype, second_dtype).into(x, first, second)
