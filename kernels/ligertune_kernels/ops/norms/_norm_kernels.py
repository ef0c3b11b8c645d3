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
"""

from __future__ import annotations

from ligertune_kernels.jit.device_functions import fp32
from ligertune_kernels.launcher import tl, triton


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
