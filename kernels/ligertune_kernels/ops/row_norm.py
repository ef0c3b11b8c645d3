r"""The kernels of rms_norm, add_rms_norm and layer_norm: norms of rows x (E,) with weight w and bias b (E,).

    m = mean(x), or 0 in an RMS norm        r = 1 / sqrt(mean((x - m)²) + eps)
    x̂ = r (x - m)                           y = (offset + w) x̂ + b

Backward, with g = (offset + w) dy, and ds the gradient that reaches x past the norm (0 but in add_rms_norm):

    dx = r (g - mean(g) - x̂ mean(g x̂)) + ds        (an RMS norm has no mean(g))
    dw = sum over rows of dy x̂                     db = sum over rows of dy

Everything is computed in fp32. With ROUND_XHAT x̂ is rounded to x's dtype before it is multiplied, as Llama's norm does.

There are no atomics: a backward program sums dw and db over its own run of rows in registers, and `column_sums` adds
the programs up. The result is therefore the same in every run.

Both directions walk a run of rows with the next ones on their way into shared memory (`num_stages`): a program alone
on its processor must have some 40 kB in flight to fill the memory's bandwidth, and registers cannot hold them.
"""

from __future__ import annotations

import functools
from dataclasses import dataclass

import torch

from ligertune_kernels.device_fns import fp32
from ligertune_kernels.launch import Chip, chip_of, on_device, options, rows_of, tl, triton
from ligertune_kernels.ops.column_sums import column_sums

TILE = 4096  # elements of the rows taken at once, if one row is not more
WHOLE_ROW, WHOLE_ROW_BYTES = 16384, 65536  # up to which the forward holds a row in registers; longer ones are swept
SWEEP_BLOCK = 2048
PART = 8192  # columns of dx and dw that a backward program holds; with 16 warps 124 of the 128 registers of sm90
FORWARD_STAGES, FORWARD_WARPS = 3, 32  # tiles in flight or at work in a program; warps that share a processor
BACKWARD_STAGES, BACKWARD_WARPS = 3, 16


@triton.jit(do_not_specialize=["n_rows", "rows_per_program"])
def _forward_kernel(
    x_ptr,
    residual_ptr,
    w_ptr,
    b_ptr,
    y_ptr,
    sum_ptr,
    mean_ptr,
    rstd_ptr,
    x_row_stride,
    residual_row_stride,
    n_rows,
    n_cols,
    eps,
    offset,
    rows_per_program,
    HAS_RESIDUAL: tl.constexpr,
    HAS_WEIGHT: tl.constexpr,
    HAS_BIAS: tl.constexpr,
    CENTRED: tl.constexpr,
    ROUND_XHAT: tl.constexpr,
    ROWS: tl.constexpr,
    BLOCK: tl.constexpr,
    STAGES: tl.constexpr,
):
    """A run of rows, ROWS whole ones at a time."""
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
            tl.store(mean_ptr + rows, mean, mask=row_mask)
            x = tl.where(mask, x - mean[:, None], 0.0)
        rstd = tl.rsqrt(tl.sum(x * x, axis=1) / n_cols + fp32(eps))
        tl.store(rstd_ptr + rows, rstd, mask=row_mask)
        y = x * rstd[:, None]
        if ROUND_XHAT:
            y = y.to(sum_ptr.dtype.element_ty).to(tl.float32)
        if HAS_WEIGHT:
            y *= (w.to(tl.float32) + fp32(offset))[None, :]
        if HAS_BIAS:
            y += b.to(tl.float32)[None, :]
        tl.store(y_ptr + offs, y.to(y_ptr.dtype.element_ty), mask=mask)


@triton.jit
def _forward_sweep_kernel(
    x_ptr,
    residual_ptr,
    w_ptr,
    b_ptr,
    y_ptr,
    sum_ptr,
    mean_ptr,
    rstd_ptr,
    x_row_stride,
    residual_row_stride,
    n_cols,
    eps,
    offset,
    HAS_RESIDUAL: tl.constexpr,
    HAS_WEIGHT: tl.constexpr,
    HAS_BIAS: tl.constexpr,
    CENTRED: tl.constexpr,
    ROUND_XHAT: tl.constexpr,
    BLOCK: tl.constexpr,
):
    """One row of any length, swept once for each sum and once for y; all sweeps but the first find it in the cache."""
    row = tl.program_id(0).to(tl.int64)
    x_ptr += row * x_row_stride
    total = tl.zeros([BLOCK], dtype=tl.float32)
    if HAS_RESIDUAL or CENTRED:
        for start in range(0, n_cols, BLOCK):
            cols = start + tl.arange(0, BLOCK)
            mask = cols < n_cols
            x = tl.load(x_ptr + cols, mask=mask, other=0.0).to(tl.float32)
            if HAS_RESIDUAL:
                x += tl.load(residual_ptr + row * residual_row_stride + cols, mask=mask, other=0.0).to(tl.float32)
                x = x.to(sum_ptr.dtype.element_ty)
                tl.store(sum_ptr + row * n_cols + cols, x, mask=mask)
            total += x.to(tl.float32)
    if HAS_RESIDUAL:
        tl.debug_barrier()  # the sum is read back by other threads than wrote it, if the compiler so chose
        x_ptr = sum_ptr + row * n_cols
    mean = 0.0
    if CENTRED:
        mean = tl.sum(total, axis=0) / n_cols
        tl.store(mean_ptr + row, mean)
    squares = tl.zeros([BLOCK], dtype=tl.float32)
    for start in range(0, n_cols, BLOCK):
        cols = start + tl.arange(0, BLOCK)
        x = tl.load(x_ptr + cols, mask=cols < n_cols, other=0.0).to(tl.float32)
        x = tl.where(cols < n_cols, x - mean, 0.0)
        squares += x * x
    rstd = tl.rsqrt(tl.sum(squares, axis=0) / n_cols + fp32(eps))
    tl.store(rstd_ptr + row, rstd)
    for start in range(0, n_cols, BLOCK):
        cols = start + tl.arange(0, BLOCK)
        mask = cols < n_cols
        y = (tl.load(x_ptr + cols, mask=mask, other=0.0).to(tl.float32) - mean) * rstd
        if ROUND_XHAT:
            y = y.to(sum_ptr.dtype.element_ty).to(tl.float32)
        if HAS_WEIGHT:
            y *= tl.load(w_ptr + cols, mask=mask, other=0.0).to(tl.float32) + fp32(offset)
        if HAS_BIAS:
            y += tl.load(b_ptr + cols, mask=mask, other=0.0).to(tl.float32)
        tl.store(y_ptr + row * n_cols + cols, y.to(y_ptr.dtype.element_ty), mask=mask)


@triton.jit(do_not_specialize=["n_rows", "rows_per_program"])
def _backward_kernel(
    dy_ptr,
    ds_ptr,
    x_ptr,
    w_ptr,
    mean_ptr,
    rstd_ptr,
    dx_ptr,
    partial_ptr,
    dy_row_stride,
    ds_row_stride,
    x_row_stride,
    n_rows,
    n_cols,
    offset,
    rows_per_program,
    HAS_RESIDUAL: tl.constexpr,
    HAS_WEIGHT: tl.constexpr,
    CENTRED: tl.constexpr,
    ROUND_XHAT: tl.constexpr,
    NEEDS_DX: tl.constexpr,
    NEEDS_DW: tl.constexpr,
    NEEDS_DB: tl.constexpr,
    ROWS: tl.constexpr,
    BLOCK: tl.constexpr,
    PARTS: tl.constexpr,
    STAGES: tl.constexpr,
):
    """A run of rows, ROWS at a time: dx, dw and db of the columns of one part. The row's sums need the others too."""
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
        x_rows, dy_rows = x_ptr + rows[:, None] * x_row_stride, dy_ptr + rows[:, None] * dy_row_stride
        x = tl.load(x_rows + cols[None, :], mask=mask, other=0.0).to(tl.float32)
        dy = tl.load(dy_rows + cols[None, :], mask=mask, other=0.0).to(tl.float32)
        rstd = tl.load(rstd_ptr + rows, mask=row_mask, other=0.0)[:, None]
        mean = tl.load(mean_ptr + rows, mask=row_mask, other=0.0)[:, None] if CENTRED else 0.0
        xhat = (x - mean) * rstd
        if NEEDS_DX:
            g = dy
            if HAS_WEIGHT:
                g *= (w.to(tl.float32) + fp32(offset))[None, :]
            g_sum, gx_sum = g, g * xhat
            # A bound that the compiler knows to be 2 leaves no loop, and only then are the rows fetched ahead.
            for k in range(1, PARTS if PARTS <= 2 else tl.num_programs(1)):
                other_cols = (part + k) % PARTS * BLOCK + tl.arange(0, BLOCK)
                other_mask = row_mask[:, None] & (other_cols < n_cols)[None, :]
                other_x = tl.load(x_rows + other_cols[None, :], mask=other_mask, other=0.0).to(tl.float32)
                other_g = tl.load(dy_rows + other_cols[None, :], mask=other_mask, other=0.0).to(tl.float32)
                if HAS_WEIGHT:
                    other_w = tl.load(w_ptr + other_cols, mask=other_cols < n_cols, other=0.0).to(tl.float32)
                    other_g *= (other_w + fp32(offset))[None, :]
                g_sum += other_g
                gx_sum += other_g * ((other_x - mean) * rstd)
            dx = g - xhat * (tl.sum(gx_sum, axis=1) / n_cols)[:, None]
            if CENTRED:
                dx -= (tl.sum(g_sum, axis=1) / n_cols)[:, None]
            dx *= rstd
            if HAS_RESIDUAL:
                ds_offs = rows[:, None] * ds_row_stride + cols[None, :]
                dx += tl.load(ds_ptr + ds_offs, mask=mask, other=0.0).to(tl.float32)
            tl.store(dx_ptr + rows[:, None] * n_cols + cols[None, :], dx.to(dx_ptr.dtype.element_ty), mask=mask)
        if NEEDS_DW:
            if ROUND_XHAT:
                xhat = xhat.to(x_ptr.dtype.element_ty).to(tl.float32)
            dw += dy * xhat
        if NEEDS_DB:
            db += dy
    partial_ptr += tl.program_id(0).to(tl.int64) * (NEEDS_DW + NEEDS_DB) * n_cols
    if NEEDS_DW:
        tl.store(partial_ptr + cols, tl.sum(dw, axis=0), mask=col_mask)
    if NEEDS_DB:
        tl.store(partial_ptr + NEEDS_DW * n_cols + cols, tl.sum(db, axis=0), mask=col_mask)


@dataclass(frozen=True)
class Launch:
    """How many rows a program takes at once, how many programs share the rows, and the kernel's constants."""

    rows: int
    programs: int
    constants: dict[str, int | bool]

    def split(self, n_rows: int) -> tuple[int, int]:
        """Programs, and the rows of each: whole tiles, as equal as they can be."""
        tiles = -(-n_rows // self.rows)
        tiles_per_program = -(-tiles // self.programs)
        return -(-tiles // tiles_per_program), tiles_per_program * self.rows


@functools.lru_cache(maxsize=256)
def _launch(n_cols: int, column_bytes: int, backward: bool, chip: Chip) -> Launch:
    """For rows of so many columns; column_bytes are those of all tensors that are read row by row."""
    block = triton.next_power_of_2(n_cols)
    if backward and block > PART:
        block = PART if n_cols <= 2 * PART and column_bytes <= 6 else PART // 2
    parts = -(-n_cols // block)
    rows = max(1, TILE // block)
    launch_options = options(rows * block, chip)
    if block > 8192:  # 32 warps have 64 registers a thread, which a long layer norm exceeds
        launch_options["num_warps"] = min(launch_options["num_warps"], 16)
    share = (BACKWARD_WARPS if backward else FORWARD_WARPS) // launch_options["num_warps"] or 1
    # Rows under way lie in shared memory, with the weights of the other parts and beside 16 kB for the reductions.
    tile_bytes = block * (rows * parts * column_bytes + 4 * (parts - 1))
    waiting = (chip.shared_bytes // share - 16384) // tile_bytes
    stages = 1 + max(0, min(waiting, (BACKWARD_STAGES if backward else FORWARD_STAGES) - 1))
    constants = {"ROWS": rows, "BLOCK": block, "STAGES": stages if chip.vendor == "nvidia" else 1, **launch_options}
    if backward:
        constants["PARTS"] = parts
    return Launch(rows, max(1, share * chip.processors // parts), constants)


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
    device, rows = x.device, rows_of(x)
    n_rows, n_cols = rows.shape
    residual_rows = rows if residual is None else rows_of(residual)
    sum_dtype = x.dtype if residual is None else torch.promote_types(x.dtype, residual.dtype)
    y_dtype = torch.promote_types(sum_dtype, weight.dtype) if round_xhat else sum_dtype
    y = torch.empty(x.shape, dtype=y_dtype, device=device)
    summed = x if residual is None else torch.empty(x.shape, dtype=sum_dtype, device=device)
    rstd = torch.empty(n_rows, dtype=torch.float32, device=device)
    mean = torch.empty_like(rstd) if centred else None
    tensors = (
        rows, residual_rows,
        rows if weight is None else weight.contiguous(), rows if bias is None else bias.contiguous(),
        y, rows if residual is None else summed, rstd if mean is None else mean, rstd,
        rows.stride(0), residual_rows.stride(0),
    )  # fmt: skip
    flags = {
        "HAS_RESIDUAL": residual is not None,
        "HAS_WEIGHT": weight is not None,
        "HAS_BIAS": bias is not None,
        "CENTRED": centred,
        "ROUND_XHAT": round_xhat,
    }
    column_bytes = x.element_size() + (0 if residual is None else residual.element_size())
    chip = chip_of(device)
    with on_device(x):
        if n_cols > WHOLE_ROW or n_cols * column_bytes > WHOLE_ROW_BYTES:
            _forward_sweep_kernel[(n_rows,)](
                *tensors, n_cols, eps, offset, BLOCK=SWEEP_BLOCK, **flags, **options(SWEEP_BLOCK, chip)
            )
        else:
            launch = _launch(n_cols, column_bytes, False, chip)
            programs, rows_per_program = launch.split(n_rows)
            _forward_kernel[(programs,)](
                *tensors, n_rows, n_cols, eps, offset, rows_per_program, **flags, **launch.constants
            )
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
    ds_rows = rows if ds is None else rows_of(ds)
    column_bytes = x.element_size() + dy.element_size() + (0 if ds is None else ds.element_size())
    launch = _launch(n_cols, column_bytes, True, chip_of(device))
    programs, rows_per_program = launch.split(n_rows)
    dx = torch.empty(x.shape, dtype=x.dtype, device=device) if needs_dx else None
    partial = rstd
    if needs_dw or needs_db:
        partial = torch.empty(programs, (needs_dw + needs_db) * n_cols, dtype=torch.float32, device=device)
    with on_device(x):
        _backward_kernel[(programs, launch.constants["PARTS"])](
            dy_rows, ds_rows, rows, rows if weight is None else weight.contiguous(), rstd if mean is None else mean,
            rstd, rstd if dx is None else dx, partial, dy_rows.stride(0), ds_rows.stride(0), rows.stride(0),
            n_rows, n_cols, offset, rows_per_program,
            HAS_RESIDUAL=ds is not None, HAS_WEIGHT=weight is not None, CENTRED=mean is not None, ROUND_XHAT=round_xhat,
            NEEDS_DX=needs_dx, NEEDS_DW=needs_dw, NEEDS_DB=needs_db, **launch.constants,
        )  # fmt: skip
    if partial is rstd:
        return dx, None, None
    sums = column_sums(partial, grad_dtype)
    return dx, (sums[:n_cols] if needs_dw else None), (sums[-n_cols:] if needs_db else None)
