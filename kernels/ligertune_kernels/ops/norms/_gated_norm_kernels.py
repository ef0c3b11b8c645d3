r"""Triton kernels of gated_rms_norm: RMS norms of groups of columns, with a gate after or before the norm.

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
"""

from __future__ import annotations

from ligertune_kernels.jit.device_functions import fp32
from ligertune_kernels.launcher import tl, triton


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
