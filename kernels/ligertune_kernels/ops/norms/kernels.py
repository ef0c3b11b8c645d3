r"""Triton kernels of rms_norm, add_rms_norm and layer_norm: norms of rows x (E,) with weight w and bias b (E,).

    m = mean(x), or 0 in an RMS norm        r = 1 / sqrt(mean((x - m)²) + eps)
    x̂ = r (x - m)                           y = (offset + w) x̂ + b

Backward, with g = (offset + w) dy, and ds the gradient that reaches x past the norm (0 except in add_rms_norm):

    dx = r (g - mean(g) - x̂ mean(g x̂)) + ds        (an RMS norm has no mean(g))
    dw = sum over rows of dy x̂                     db = sum over rows of dy

Everything is computed in fp32. ROUND_XHAT rounds x̂ to x's dtype before the product, as Llama's norm does; ROUND_RSTD
rounds r before its product with x. The statistics of N rows are one fp32 tensor: r and, if CENTRED, then m of each row.

There are no atomics: a backward program sums dw and db over its run of rows in registers and writes them to its row of
partial_ptr; column_sums adds the rows. The result is therefore the same in every run.

Programs that loop over rows prefetch the next rows into shared memory (STAGES): a program alone on its processor needs
about 40 kB in flight to fill the memory bandwidth, more than registers can hold.

column_sums adds up what P programs of a backward kernel left for dw and db, an fp32 matrix (P, C): one program sums a
few columns over all rows, in the order of the rows.

After the kernels stand their launches. A launch plan depends on the last sizes, strides, dtypes and the chip, not on
the number of rows, and is cached; tiles.py chooses tiles, warps and numbers of programs.
"""

from __future__ import annotations

from typing import NamedTuple

import torch

from ligertune_kernels.autograd import no_double_backward
from ligertune_kernels.jit.device_functions import fp32
from ligertune_kernels.launcher import BoundLaunch, cached, chip_of, contiguous_like, rows_and_stride, tl, triton
from ligertune_kernels.ops.norms import tiles
from ligertune_kernels.ops.norms.tiles import NormCall


class NormOptions(NamedTuple):
    """Options of one call of rms_norm, add_rms_norm or layer_norm."""

    eps: float
    offset: float = 0.0
    centred: bool = False  # subtract the mean
    round_xhat: bool = False  # round x̂ to x's dtype before its product with the weight
    round_rstd: bool = False  # round r to x's dtype before its product with x
    inplace: bool = False  # dx may be written over dy


@triton.jit
def _round(value, ptr, ROUNDS: tl.constexpr):
    return value.to(ptr.dtype.element_ty).to(tl.float32) if ROUNDS else value


@triton.jit(do_not_specialize=["n_rows", "rows_per_program"])
def forward_kernel(
    x_ptr, residual_ptr,  # (N, E)
    w_ptr, b_ptr,  # (E,)
    y_ptr, sum_ptr,  # (N, E)
    stats_ptr,  # (N,) or (2 N,)
    x_row_stride, residual_row_stride, n_cols, n_rows, eps, offset, rows_per_program,
    HAS_RESIDUAL: tl.constexpr, HAS_WEIGHT: tl.constexpr, HAS_BIAS: tl.constexpr, CENTRED: tl.constexpr,
    ROUND_XHAT: tl.constexpr, ROUND_RSTD: tl.constexpr, ROWS: tl.constexpr, BLOCK: tl.constexpr, STAGES: tl.constexpr,
):  # fmt: skip
    """Norm a run of rows, ROWS whole rows per step."""
    first = tl.program_id(0).to(tl.int64) * rows_per_program
    last = tl.minimum(first + rows_per_program, n_rows)
    cols = tl.arange(0, BLOCK)
    col_mask = cols < n_cols
    if HAS_WEIGHT:
        w = tl.load(w_ptr + cols, mask=col_mask, other=0.0)
    if HAS_BIAS:
        b = tl.load(b_ptr + cols, mask=col_mask, other=0.0)
    for row in tl.range(first, last, ROWS, num_stages=STAGES):
        rows = row + tl.arange(0, ROWS)
        row_mask = rows < last
        mask = row_mask[:, None] & col_mask[None, :]
        x = tl.load(x_ptr + rows[:, None] * x_row_stride + cols[None, :], mask=mask, other=0.0)
        offs = rows[:, None] * n_cols + cols[None, :]
        if HAS_RESIDUAL:
            residual_offs = rows[:, None] * residual_row_stride + cols[None, :]
            x = x.to(tl.float32) + tl.load(residual_ptr + residual_offs, mask=mask, other=0.0).to(tl.float32)
            x = x.to(sum_ptr.dtype.element_ty)
            tl.store(sum_ptr + offs, x, mask=mask)
        x = x.to(tl.float32)
        if CENTRED:
            mean = tl.sum(x, axis=1) / n_cols
            x = tl.where(mask, x - mean[:, None], 0.0)
        rstd = tl.rsqrt(tl.sum(x * x, axis=1) / n_cols + fp32(eps))
        tl.store(stats_ptr + rows, rstd, mask=row_mask)
        if CENTRED:
            tl.store(stats_ptr + n_rows + rows, mean, mask=row_mask)
        y = x * _round(rstd, sum_ptr, ROUND_RSTD)[:, None]
        y = _round(y, sum_ptr, ROUND_XHAT)
        if HAS_WEIGHT:
            y *= (w.to(tl.float32) + fp32(offset))[None, :]
        if HAS_BIAS:
            y += b.to(tl.float32)[None, :]
        tl.store(y_ptr + offs, y.to(y_ptr.dtype.element_ty), mask=mask)


@triton.jit
def _add_residual(
    x_ptr, residual_ptr, sum_ptr, row, residual_row_stride, n_cols, HAS_RESIDUAL: tl.constexpr, BLOCK: tl.constexpr
):  # fmt: skip
    """Write x + residual of one row, if there is a residual; return BLOCK partial sums over the columns."""
    total = tl.zeros([BLOCK], dtype=tl.float32)
    for start in range(0, n_cols, BLOCK):
        cols = start + tl.arange(0, BLOCK)
        mask = cols < n_cols
        x = tl.load(x_ptr + cols, mask=mask, other=0.0).to(tl.float32)
        if HAS_RESIDUAL:
            x += tl.load(residual_ptr + row * residual_row_stride + cols, mask=mask, other=0.0).to(tl.float32)
            x = x.to(sum_ptr.dtype.element_ty)
            tl.store(sum_ptr + row * n_cols + cols, x, mask=mask)
        total += x.to(tl.float32)
    return total


@triton.jit(do_not_specialize=["n_rows", "rows_per_program"])
def forward_sweep_kernel(
    x_ptr, residual_ptr,  # (N, E)
    w_ptr, b_ptr,  # (E,)
    y_ptr, sum_ptr,  # (N, E)
    stats_ptr,  # (N,) or (2 N,)
    x_row_stride, residual_row_stride, n_cols, n_rows, eps, offset, rows_per_program,
    HAS_RESIDUAL: tl.constexpr, HAS_WEIGHT: tl.constexpr, HAS_BIAS: tl.constexpr,
    CENTRED: tl.constexpr, ROUND_XHAT: tl.constexpr, ROUND_RSTD: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """Norm one row of any length, read once for each sum and once for y; all reads but the first hit the cache."""
    row = tl.program_id(0).to(tl.int64)
    x_ptr += row * x_row_stride
    if HAS_RESIDUAL or CENTRED:
        total = _add_residual(x_ptr, residual_ptr, sum_ptr, row, residual_row_stride, n_cols, HAS_RESIDUAL, BLOCK)
    if HAS_RESIDUAL:
        tl.debug_barrier()  # other threads than wrote the sum may read it back
        x_ptr = sum_ptr + row * n_cols
    mean = 0.0
    if CENTRED:
        mean = tl.sum(total, axis=0) / n_cols
        tl.store(stats_ptr + n_rows + row, mean)
    squares = tl.zeros([BLOCK], dtype=tl.float32)
    for start in range(0, n_cols, BLOCK):
        cols = start + tl.arange(0, BLOCK)
        x = tl.load(x_ptr + cols, mask=cols < n_cols, other=0.0).to(tl.float32)
        x = tl.where(cols < n_cols, x - mean, 0.0)
        squares += x * x
    rstd = tl.rsqrt(tl.sum(squares, axis=0) / n_cols + fp32(eps))
    tl.store(stats_ptr + row, rstd)
    rstd = _round(rstd, sum_ptr, ROUND_RSTD)
    for start in range(0, n_cols, BLOCK):
        cols = start + tl.arange(0, BLOCK)
        mask = cols < n_cols
        y = (tl.load(x_ptr + cols, mask=mask, other=0.0).to(tl.float32) - mean) * rstd
        y = _round(y, sum_ptr, ROUND_XHAT)
        if HAS_WEIGHT:
            y *= tl.load(w_ptr + cols, mask=mask, other=0.0).to(tl.float32) + fp32(offset)
        if HAS_BIAS:
            y += tl.load(b_ptr + cols, mask=mask, other=0.0).to(tl.float32)
        tl.store(y_ptr + row * n_cols + cols, y.to(y_ptr.dtype.element_ty), mask=mask)


@triton.jit
def _add_other_parts(
    g_sum, gx_sum,  # (ROWS, BLOCK): g and g x̂ of this part
    x_rows, dy_rows, w_ptr, mean, rstd, row_mask, part, n_cols, offset,
    HAS_WEIGHT: tl.constexpr, BLOCK: tl.constexpr, PARTS: tl.constexpr,
):  # fmt: skip
    """Add g and g x̂ of the row's other parts."""
    # Only a bound that is 2 at compile time leaves no loop, and only then does the compiler prefetch the rows.
    for k in range(1, PARTS if PARTS <= 2 else tl.num_programs(1)):
        cols = (part + k) % PARTS * BLOCK + tl.arange(0, BLOCK)
        mask = row_mask[:, None] & (cols < n_cols)[None, :]
        x = tl.load(x_rows + cols[None, :], mask=mask, other=0.0).to(tl.float32)
        g = tl.load(dy_rows + cols[None, :], mask=mask, other=0.0).to(tl.float32)
        if HAS_WEIGHT:
            w = tl.load(w_ptr + cols, mask=cols < n_cols, other=0.0).to(tl.float32)
            g *= (w + fp32(offset))[None, :]
        g_sum += g
        gx_sum += g * ((x - mean) * rstd)
    return g_sum, gx_sum


@triton.jit
def _dx_of_rows(
    g, xhat, g_sum, gx_sum, rstd, ds_ptr, ds_row_stride, rows, cols, mask, n_cols,
    CENTRED: tl.constexpr, HAS_RESIDUAL: tl.constexpr,
):  # fmt: skip
    """Return dx (ROWS, BLOCK) in fp32 from the sums over the rows."""
    dx = g - xhat * (tl.sum(gx_sum, axis=1) / n_cols)[:, None]
    if CENTRED:
        dx -= (tl.sum(g_sum, axis=1) / n_cols)[:, None]
    dx *= rstd
    if HAS_RESIDUAL:
        ds_offs = rows[:, None] * ds_row_stride + cols[None, :]
        dx += tl.load(ds_ptr + ds_offs, mask=mask, other=0.0).to(tl.float32)
    return dx


@triton.jit(do_not_specialize=["n_rows", "rows_per_program"])
def backward_kernel(
    dy_ptr, ds_ptr, x_ptr,  # (N, E)
    w_ptr,  # (E,)
    stats_ptr,  # (N,) or (2 N,)
    dx_ptr,  # (N, E)
    partial_ptr,  # (programs, E) or (programs, 2 E): dw, then db
    dy_row_stride, ds_row_stride, x_row_stride, n_cols, n_rows, offset, rows_per_program,
    HAS_RESIDUAL: tl.constexpr, HAS_WEIGHT: tl.constexpr, CENTRED: tl.constexpr, ROUND_XHAT: tl.constexpr,
    NEEDS_DX: tl.constexpr, NEEDS_DW: tl.constexpr, NEEDS_DB: tl.constexpr,
    ROWS: tl.constexpr, BLOCK: tl.constexpr, PARTS: tl.constexpr, STAGES: tl.constexpr,
):  # fmt: skip
    """Write dx of one part's columns for a run of rows, and their dw and db. The row's means need all parts."""
    first = tl.program_id(0).to(tl.int64) * rows_per_program
    last = tl.minimum(first + rows_per_program, n_rows)
    part = tl.program_id(1)
    cols = part * BLOCK + tl.arange(0, BLOCK)
    col_mask = cols < n_cols
    if HAS_WEIGHT:
        w = tl.load(w_ptr + cols, mask=col_mask, other=0.0)
    dw = tl.zeros([ROWS, BLOCK], dtype=tl.float32)
    db = tl.zeros([ROWS, BLOCK], dtype=tl.float32)
    for row in tl.range(first, last, ROWS, num_stages=STAGES):
        rows = row + tl.arange(0, ROWS)
        row_mask = rows < last
        mask = row_mask[:, None] & col_mask[None, :]
        x_rows = x_ptr + rows[:, None] * x_row_stride
        dy_rows = dy_ptr + rows[:, None] * dy_row_stride
        x = tl.load(x_rows + cols[None, :], mask=mask, other=0.0).to(tl.float32)
        dy = tl.load(dy_rows + cols[None, :], mask=mask, other=0.0).to(tl.float32)
        rstd = tl.load(stats_ptr + rows, mask=row_mask, other=0.0)[:, None]
        mean = tl.load(stats_ptr + n_rows + rows, mask=row_mask, other=0.0)[:, None] if CENTRED else 0.0
        xhat = (x - mean) * rstd
        if NEEDS_DX:
            g = dy
            if HAS_WEIGHT:
                g *= (w.to(tl.float32) + fp32(offset))[None, :]
            g_sum, gx_sum = _add_other_parts(
                g, g * xhat, x_rows, dy_rows, w_ptr, mean, rstd, row_mask, part, n_cols, offset,
                HAS_WEIGHT, BLOCK, PARTS,
            )  # fmt: skip
            dx = _dx_of_rows(
                g, xhat, g_sum, gx_sum, rstd, ds_ptr, ds_row_stride, rows, cols, mask, n_cols, CENTRED, HAS_RESIDUAL
            )
            tl.store(dx_ptr + rows[:, None] * n_cols + cols[None, :], dx.to(dx_ptr.dtype.element_ty), mask=mask)
        if NEEDS_DW:
            dw += dy * _round(xhat, x_ptr, ROUND_XHAT)
        if NEEDS_DB:
            db += dy
    partial_ptr += tl.program_id(0).to(tl.int64) * (NEEDS_DW + NEEDS_DB) * n_cols
    if NEEDS_DW:
        tl.store(partial_ptr + cols, tl.sum(dw, axis=0), mask=col_mask)
    if NEEDS_DB:
        tl.store(partial_ptr + NEEDS_DW * n_cols + cols, tl.sum(db, axis=0), mask=col_mask)


@triton.jit
def _keep_packed(x, mean):
    """Return x (16 bits) unchanged, in a way that makes the compiler wait for the mean.

    The compiler would otherwise keep the fp32 form of x while the row is summed, in twice the registers.
    """
    # These bits are a NaN that no sum gives, whatever NaN it adds. Without the sum, sm80 and sm90 spill 8 bytes.
    zero = ((mean + 0.0).to(tl.int32, bitcast=True) == 0x7FC12345).to(tl.int16)
    return (x.to(tl.int16, bitcast=True) ^ zero).to(x.dtype, bitcast=True)


@triton.jit(do_not_specialize=["n_rows", "rows_per_program"])
def backward_row_kernel(
    dy_ptr, ds_ptr, x_ptr,  # (N, E)
    w_ptr,  # (E,)
    stats_ptr,  # (N,) or (2 N,)
    dx_ptr,  # (N, E)
    partial_ptr,  # (programs, E) or (programs, 2 E): dw, then db
    dy_row_stride, ds_row_stride, x_row_stride, n_cols, n_rows, offset, rows_per_program,
    HAS_RESIDUAL: tl.constexpr, HAS_WEIGHT: tl.constexpr, ROUND_XHAT: tl.constexpr, NEEDS_DW: tl.constexpr,
    BLOCK: tl.constexpr, STAGES: tl.constexpr,
):  # fmt: skip
    """Backward of an RMS norm for a run of rows, each read once and kept packed in registers.

    The program has every thread of its processor. One-dimensional columns at scalar rows take the fewest registers.
    """
    first = tl.program_id(0).to(tl.int64) * rows_per_program
    last = tl.minimum(first + rows_per_program, n_rows)
    cols = tl.arange(0, BLOCK)
    mask = cols < n_cols
    if HAS_WEIGHT:
        w = tl.load(w_ptr + cols, mask=mask, other=0.0)
    dw = tl.zeros([BLOCK], dtype=tl.float32)
    for row in tl.range(first, last, 1, num_stages=STAGES):
        x = tl.load(x_ptr + row * x_row_stride + cols, mask=mask, other=0.0)
        dy = tl.load(dy_ptr + row * dy_row_stride + cols, mask=mask, other=0.0)
        rstd = tl.load(stats_ptr + row)
        g = dy.to(tl.float32) * (w.to(tl.float32) + fp32(offset)) if HAS_WEIGHT else dy.to(tl.float32)
        mean = tl.sum(g * (x.to(tl.float32) * rstd), axis=0) / n_cols
        x = _keep_packed(x, mean)
        dy = _keep_packed(dy, mean)
        xhat = x.to(tl.float32) * rstd
        g = dy.to(tl.float32) * (w.to(tl.float32) + fp32(offset)) if HAS_WEIGHT else dy.to(tl.float32)
        dx = (g - xhat * mean) * rstd
        if HAS_RESIDUAL:
            dx += tl.load(ds_ptr + row * ds_row_stride + cols, mask=mask, other=0.0).to(tl.float32)
        tl.store(dx_ptr + row * n_cols + cols, dx.to(dx_ptr.dtype.element_ty), mask=mask)
        if NEEDS_DW:
            dw += dy.to(tl.float32) * _round(xhat, x_ptr, ROUND_XHAT)
    if NEEDS_DW:
        tl.store(partial_ptr + tl.program_id(0).to(tl.int64) * n_cols + cols, dw, mask=mask)


@triton.jit
def _add_pairs(a, b, more_a, more_b):
    return a + more_a, b + more_b


@triton.jit
def _sums_of_half(x, dy, w_ptr, mean, rstd, offset):
    """Return the sums of g x̂ and g over half a row."""
    # volatile: w is loaded for each row, as no registers are left to keep it.
    g = dy.to(tl.float32) * (tl.load(w_ptr, volatile=True).to(tl.float32) + fp32(offset))
    return tl.reduce((g * ((x.to(tl.float32) - mean) * rstd), g), 0, _add_pairs)


@triton.jit
def _gradients_of_half(x, dy, dw, db, w_ptr, dx_ptr, mean, rstd, offset, gx_mean, g_mean):
    """Write dx of half a row; return dw and db with the row added."""
    xhat = (x.to(tl.float32) - mean) * rstd
    g = dy.to(tl.float32) * (tl.load(w_ptr, volatile=True).to(tl.float32) + fp32(offset))
    tl.store(dx_ptr, ((g - xhat * gx_mean - g_mean) * rstd).to(dx_ptr.dtype.element_ty))
    return dw + dy.to(tl.float32) * xhat, db + dy.to(tl.float32)


@triton.jit(do_not_specialize=["n_rows", "rows_per_program"])
def backward_halves_kernel(
    dy_ptr, ds_ptr, x_ptr,  # (N, E)
    w_ptr,  # (E,)
    stats_ptr,  # (N,) or (2 N,)
    dx_ptr,  # (N, E)
    partial_ptr,  # (programs, E) or (programs, 2 E): dw, then db
    dy_row_stride, ds_row_stride, x_row_stride, n_cols, n_rows, offset, rows_per_program,
    HALF: tl.constexpr, STAGES: tl.constexpr,
):  # fmt: skip
    """Backward of a layer norm with weight and bias for a run of rows of 2 HALF columns, each read once.

    Rows stay packed in the registers of the only program on the processor. The halves take turns, so that temporary
    values need half the registers.
    """
    first = tl.program_id(0).to(tl.int64) * rows_per_program
    last = tl.minimum(first + rows_per_program, n_rows)
    low = tl.arange(0, HALF)
    high = HALF + low
    dw_low = tl.zeros([HALF], dtype=tl.float32)
    db_low = tl.zeros([HALF], dtype=tl.float32)
    dw_high = tl.zeros([HALF], dtype=tl.float32)
    db_high = tl.zeros([HALF], dtype=tl.float32)
    for row in tl.range(first, last, 1, num_stages=STAGES):
        x_row = x_ptr + row * x_row_stride
        dy_row = dy_ptr + row * dy_row_stride
        dx_row = dx_ptr + row * n_cols
        x_low = tl.load(x_row + low)
        dy_low = tl.load(dy_row + low)
        x_high = tl.load(x_row + high)
        dy_high = tl.load(dy_row + high)
        rstd = tl.load(stats_ptr + row)
        mean = tl.load(stats_ptr + n_rows + row)
        gx_sum, g_sum = _sums_of_half(x_low, dy_low, w_ptr + low, mean, rstd, offset)
        more_gx, more_g = _sums_of_half(x_high, dy_high, w_ptr + high, mean, rstd, offset)
        gx_mean = (gx_sum + more_gx) / n_cols
        g_mean = (g_sum + more_g) / n_cols
        x_low = _keep_packed(x_low, gx_mean)
        dy_low = _keep_packed(dy_low, g_mean)
        x_high = _keep_packed(x_high, gx_mean)
        dy_high = _keep_packed(dy_high, g_mean)
        dw_low, db_low = _gradients_of_half(
            x_low, dy_low, dw_low, db_low, w_ptr + low, dx_row + low, mean, rstd, offset, gx_mean, g_mean
        )
        dw_high, db_high = _gradients_of_half(
            x_high, dy_high, dw_high, db_high, w_ptr + high, dx_row + high, mean, rstd, offset, gx_mean, g_mean
        )
    partial_ptr += tl.program_id(0).to(tl.int64) * 2 * n_cols
    tl.store(partial_ptr + low, dw_low)
    tl.store(partial_ptr + high, dw_high)
    tl.store(partial_ptr + n_cols + low, db_low)
    tl.store(partial_ptr + n_cols + high, db_high)


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
        if torch.compiler.is_compiling() and self.programs != tiles.PROGRAM_PER_TILE:
            # A number that depends on n_rows makes torch.compile write more graphs. Some programs may get no rows.
            return (self.programs, self.parts, 1), -(-steps // self.programs) * self.rows
        if steps <= self.programs:
            return (steps, self.parts, 1), self.rows
        steps_each = -(-steps // self.programs)
        return (-(-steps // steps_each), self.parts, 1), steps_each * self.rows

    def may_overwrite(self, dy: torch.Tensor, x: torch.Tensor) -> bool:
        """Return whether dx may be written over dy while programs read dy."""
        # A part reads the other parts' columns of dy, and torch.compile plans the memory itself.
        if torch.compiler.is_compiling():
            return False
        return self.parts == 1 and dy.dtype is x.dtype and dy.is_contiguous()


@cached
def _plan_forward(call: NormCall) -> LaunchPlan:
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
    if tiles.holds_whole_row(call, column_bytes):
        kernel = forward_kernel
        tiling = tiles.forward_tiling(call, column_bytes, chip)
    else:
        kernel = forward_sweep_kernel
        tiling = tiles.sweep_tiling(chip)
    launch = BoundLaunch(kernel, flags | tiling.constants, call.integers())
    return LaunchPlan(launch, tiling.rows, tiling.programs, dtypes=(sum_dtype, y_dtype))


@cached
def _plan_backward(call: NormCall, needs: tuple[bool, bool, bool]) -> LaunchPlan:
    chip = chip_of(call.device)
    needs_dx, needs_dw, needs_db = needs
    column_bytes = sum(dtype.itemsize for dtype in call.dtypes[:3] if dtype is not None)
    flags = {
        "HAS_RESIDUAL": call.dtypes[1] is not None,
        "HAS_WEIGHT": call.dtypes[3] is not None,
        "ROUND_XHAT": call.round_xhat,
        "NEEDS_DW": needs_dw,
    }
    if needs_dx and tiles.fits_whole_long_row(call, chip):
        kernel = backward_row_kernel
        tiling = tiles.long_row_tiling(call, column_bytes, chip)
    elif all(needs) and tiles.fits_halves(call, chip):
        kernel = backward_halves_kernel
        flags = {}
        tiling = tiles.halves_tiling(chip)
    else:
        kernel = backward_kernel
        flags |= {"CENTRED": call.centred, "NEEDS_DX": needs_dx, "NEEDS_DB": needs_db}
        tiling = tiles.backward_tiling(call, column_bytes, chip)
    launch = BoundLaunch(kernel, flags | tiling.constants, call.integers())
    return LaunchPlan(launch, tiling.rows, tiling.programs, tiling.parts)


@cached
def _plan_sums(
    few_rows: bool, n_cols: int, device: torch.device, first: torch.dtype, second: torch.dtype | None
) -> tuple[BoundLaunch, tuple[int, int, int]]:
    """Return the launch and its grid for a matrix of n_cols columns and results of these dtypes."""
    constants = tiles.sums_constants(n_cols, chip_of(device), few_rows=few_rows)
    grid = (triton.cdiv(n_cols, constants["COLS"]), 1, 1)
    constants["TWO"] = second is not None
    return BoundLaunch(_column_sums_kernel, constants, (n_cols,)), grid


def column_sums(
    x: torch.Tensor,  # (P, C) float32, contiguous
    first: torch.Tensor,  # (C1,)
    second: torch.Tensor | None = None,  # (C - C1,)
) -> None:
    """Write x.sum(0), rounded once, into `first` and the remaining columns into `second`, in one launch."""
    n_rows, n_cols = x.shape
    second_dtype = None if second is None else second.dtype
    launch, grid = _plan_sums(n_rows <= tiles.SUMS_FEW_ROWS, n_cols, x.device, first.dtype, second_dtype)
    launch(grid, (x, first, first if second is None else second), first.numel(), n_rows)


def _dtype(t: torch.Tensor | None) -> torch.dtype | None:
    return None if t is None else t.dtype


def norm_forward(
    x: torch.Tensor,  # (..., E)
    residual: torch.Tensor | None,  # (..., E), added to x before the norm
    weight: torch.Tensor | None,  # (E,)
    bias: torch.Tensor | None,  # (E,)
    options: NormOptions,
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Return y, the sum that is normed (x without a residual), and fp32 statistics: rstd (N,), if centred means (N,).

    N is the number of rows.
    """
    n_cols = x.shape[-1]
    n_rows = x.numel() // n_cols
    rows, row_stride = rows_and_stride(x)
    residual_rows, residual_stride = (rows, row_stride) if residual is None else rows_and_stride(residual)
    dtypes = x.dtype, _dtype(residual), _dtype(weight), _dtype(bias)
    strides = row_stride, residual_stride
    call = NormCall(n_cols, strides, dtypes, options.centred, options.round_xhat, x.device, options.round_rstd)
    plan = _plan_forward(call)
    grid, rows_per_program = plan.grid(n_rows)
    summed = x if residual is None else contiguous_like(x, plan.dtypes[0])
    y = contiguous_like(x, plan.dtypes[1])
    stats = x.new_empty(2 * n_rows if options.centred else n_rows, dtype=torch.float32)
    tensors = (
        rows,
        residual_rows,
        rows if weight is None else weight.contiguous(),
        rows if bias is None else bias.contiguous(),
        y,
        rows if residual is None else summed,
        stats,
    )
    plan.launch(grid, tensors, n_rows, float(options.eps), float(options.offset), rows_per_program)
    return y, summed, stats


def norm_backward(
    dy: torch.Tensor,  # (..., E)
    ds: torch.Tensor | None,  # (..., E), gradient that reaches x past the norm
    x: torch.Tensor,  # (..., E), the sum that was normed
    weight: torch.Tensor | None,  # (E,)
    bias: torch.Tensor | None,  # (E,)
    stats: torch.Tensor,  # (N,) or (2 N,), from norm_forward
    needs: tuple[bool, bool, bool],
    options: NormOptions,
) -> tuple[torch.Tensor | None, torch.Tensor | None, torch.Tensor | None]:
    """Return dx, dw and db in the dtypes of x, weight and bias, None where `needs` is False."""
    needs_dx, needs_dw, needs_db = needs
    n_cols = x.shape[-1]
    rows, row_stride = rows_and_stride(x)
    dy_rows, dy_stride = rows_and_stride(dy)
    ds_rows, ds_stride = (dy_rows, dy_stride) if ds is None else rows_and_stride(ds)
    dtypes = dy.dtype, _dtype(ds), x.dtype, _dtype(weight)
    strides = dy_stride, ds_stride, row_stride
    plan = _plan_backward(NormCall(n_cols, strides, dtypes, options.centred, options.round_xhat, x.device), needs)
    n_rows = x.numel() // n_cols
    grid, rows_per_program = plan.grid(n_rows)
    dx = None
    if needs_dx:
        over_dy = options.inplace and ds is not dy and plan.may_overwrite(dy, x)
        dx = _taken_over(dy) if over_dy else contiguous_like(x, x.dtype)
    dw = contiguous_like(weight, weight.dtype) if needs_dw else None
    db = contiguous_like(bias, bias.dtype) if needs_db else None
    sums = [t for t in (dw, db) if t is not None]
    partial = stats.new_empty(grid[0], len(sums) * n_cols) if sums else stats
    weight_or_any = rows if weight is None else weight.contiguous()
    tensors = dy_rows, ds_rows, rows, weight_or_any, stats, rows if dx is None else dx, partial
    plan.launch(grid, tensors, n_rows, float(options.offset), rows_per_program)
    if sums:
        column_sums(partial, *sums)
    return dx, dw, db


def _taken_over(dy: torch.Tensor) -> torch.Tensor:
    """Return the memory of dy, to be overwritten."""
    torch.autograd.graph.increment_version(dy)
    return dy.detach()


class RowNorm(torch.autograd.Function):
    """The norm of rows without a residual: `rms_norm` and, with options.centred, `layer_norm`."""

    @staticmethod
    def forward(ctx, x, weight, bias, options):
        y, _, stats = norm_forward(x, None, weight, bias, options)
        ctx.save_for_backward(x, weight, bias, stats)
        ctx.options = options
        return y

    @staticmethod
    @no_double_backward
    def backward(ctx, dy):
        x, weight, bias, stats = ctx.saved_tensors
        grads = norm_backward(dy, None, x, weight, bias, stats, ctx.needs_input_grad[:3], ctx.options)
        return *grads, None
