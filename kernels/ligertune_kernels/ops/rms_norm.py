r"""Root-mean-square norm over the last dimension, of rows x (E,) with weight w (E,).

    r = 1 / sqrt(mean(x²) + eps)        x̂ = r x        y = (offset + w) x̂

Backward, with g = (offset + w) dy:

    dx = r (g - x̂ mean(g x̂))            dw = sum over rows of dy x̂

Everything is computed in fp32. Models differ in where they round:

    llama   x̂ is rounded to x's dtype, then multiplied: y has the promoted dtype of x and w
    gemma   the product is taken in fp32 and rounded once to x's dtype (Gemma: offset 1; OLMo 2: offset 0)
    none    as torch.nn.functional.rms_norm: the same arithmetic as gemma

There are no atomics: each backward program sums dw of its own rows in fp32, and a second step adds the programs up.
The result is therefore the same in every run.
"""

from __future__ import annotations

from typing import Literal

import torch
from torch import nn
from torch.autograd.function import once_differentiable

from ligertune_kernels.device_fns import fp32
from ligertune_kernels.launch import chip_of, on_device, options, rows_of, runs_triton, tl, triton

Cast = Literal["llama", "gemma", "none"]

WHOLE_ROW_FORWARD = 16384  # columns up to which a program holds its row in registers; longer rows are swept twice
WHOLE_ROW_BACKWARD = 8192  # the backward holds x, dy, w and dw: at 16384 it spills on sm80 and sm90 with any warps
SWEEP_BLOCK = 4096
SWEEP_ROWS = 4  # rows swept together, so that the running dw is read and written once for four of them
PROGRAMS_PER_PROCESSOR = 2  # of the backward: two programs × two rows of 4096 keep 64 kB in flight on each


def rms_norm_reference(
    x: torch.Tensor, weight: torch.Tensor, eps: float = 1e-6, *, offset: float = 0.0, cast: Cast = "llama"
) -> torch.Tensor:
    """The same in plain torch, operation for operation what Hugging Face's Llama, Gemma and OLMo 2 norms do."""
    wide = torch.promote_types(x.dtype, torch.float32)
    xhat = x.to(wide)
    xhat = xhat * torch.rsqrt(xhat.pow(2).mean(-1, keepdim=True) + eps)
    if cast == "llama":
        return (weight if offset == 0 else offset + weight) * xhat.to(x.dtype)
    return (xhat * (weight.to(wide) if offset == 0 else offset + weight.to(wide))).to(x.dtype)


# Numbers of rows differ from batch to batch, and Triton would compile anew for each that is or is not a multiple of 16.
@triton.jit(do_not_specialize=["n_rows"])
def _forward_kernel(
    x_ptr,
    w_ptr,
    y_ptr,
    rstd_ptr,
    x_row_stride,
    n_rows,
    n_cols,
    eps,
    offset,
    ROUND_XHAT: tl.constexpr,
    ROWS: tl.constexpr,
    BLOCK: tl.constexpr,
):
    """ROWS whole rows."""
    rows = tl.program_id(0).to(tl.int64) * ROWS + tl.arange(0, ROWS)
    cols = tl.arange(0, BLOCK)
    mask = (rows < n_rows)[:, None] & (cols < n_cols)[None, :]
    x = tl.load(x_ptr + rows[:, None] * x_row_stride + cols[None, :], mask=mask, other=0.0).to(tl.float32)
    w = tl.load(w_ptr + cols, mask=cols < n_cols, other=0.0).to(tl.float32) + fp32(offset)
    rstd = tl.rsqrt(tl.sum(x * x, axis=1) / n_cols + fp32(eps))
    tl.store(rstd_ptr + rows, rstd, mask=rows < n_rows)
    xhat = x * rstd[:, None]
    if ROUND_XHAT:
        xhat = xhat.to(x_ptr.dtype.element_ty).to(tl.float32)
    y = xhat * w[None, :]
    tl.store(y_ptr + rows[:, None] * n_cols + cols[None, :], y.to(y_ptr.dtype.element_ty), mask=mask)


@triton.jit
def _forward_sweep_kernel(
    x_ptr,
    w_ptr,
    y_ptr,
    rstd_ptr,
    x_row_stride,
    n_cols,
    eps,
    offset,
    ROUND_XHAT: tl.constexpr,
    BLOCK: tl.constexpr,
):
    """One row of any length, swept twice; the second sweep finds it in the cache."""
    row = tl.program_id(0).to(tl.int64)
    squares = tl.zeros([BLOCK], dtype=tl.float32)
    for start in range(0, n_cols, BLOCK):
        cols = start + tl.arange(0, BLOCK)
        x = tl.load(x_ptr + row * x_row_stride + cols, mask=cols < n_cols, other=0.0).to(tl.float32)
        squares += x * x
    rstd = tl.rsqrt(tl.sum(squares, axis=0) / n_cols + fp32(eps))
    tl.store(rstd_ptr + row, rstd)
    for start in range(0, n_cols, BLOCK):
        cols = start + tl.arange(0, BLOCK)
        mask = cols < n_cols
        xhat = tl.load(x_ptr + row * x_row_stride + cols, mask=mask, other=0.0).to(tl.float32) * rstd
        w = tl.load(w_ptr + cols, mask=mask, other=0.0).to(tl.float32) + fp32(offset)
        if ROUND_XHAT:
            xhat = xhat.to(x_ptr.dtype.element_ty).to(tl.float32)
        tl.store(y_ptr + row * n_cols + cols, (xhat * w).to(y_ptr.dtype.element_ty), mask=mask)


@triton.jit(do_not_specialize=["n_rows", "rows_per_program"])
def _backward_kernel(
    dy_ptr,
    x_ptr,
    w_ptr,
    rstd_ptr,
    dx_ptr,
    dw_ptr,
    dy_row_stride,
    x_row_stride,
    n_rows,
    n_cols,
    offset,
    rows_per_program,
    ROUND_XHAT: tl.constexpr,
    NEEDS_DX: tl.constexpr,
    NEEDS_DW: tl.constexpr,
    SUM_ROWS: tl.constexpr,
    ROWS: tl.constexpr,
    BLOCK: tl.constexpr,
):
    """A run of rows, ROWS whole ones at a time; dw of the run stays in registers."""
    first = tl.program_id(0).to(tl.int64) * rows_per_program
    last = tl.minimum(first + rows_per_program, n_rows)
    cols = tl.arange(0, BLOCK)
    col_mask = cols < n_cols
    w = tl.load(w_ptr + cols, mask=col_mask, other=0.0).to(tl.float32) + fp32(offset)
    # Of short rows dw is kept per row of the tile: adding those up at each step would cost a barrier.
    dw = tl.zeros([BLOCK] if SUM_ROWS else [ROWS, BLOCK], dtype=tl.float32)
    for row in range(first, last, ROWS):
        rows = row + tl.arange(0, ROWS)
        mask = (rows < last)[:, None] & col_mask[None, :]
        x = tl.load(x_ptr + rows[:, None] * x_row_stride + cols[None, :], mask=mask, other=0.0).to(tl.float32)
        dy = tl.load(dy_ptr + rows[:, None] * dy_row_stride + cols[None, :], mask=mask, other=0.0).to(tl.float32)
        rstd = tl.load(rstd_ptr + rows, mask=rows < last, other=0.0)[:, None]
        xhat = x * rstd
        if NEEDS_DX:
            g = dy * w[None, :]
            mean = tl.sum(g * xhat, axis=1) / n_cols
            dx = (g - xhat * mean[:, None]) * rstd
            tl.store(dx_ptr + rows[:, None] * n_cols + cols[None, :], dx.to(dx_ptr.dtype.element_ty), mask=mask)
        if NEEDS_DW:
            if ROUND_XHAT:
                xhat = xhat.to(x_ptr.dtype.element_ty).to(tl.float32)
            if SUM_ROWS:
                dw += tl.sum(dy * xhat, axis=0)
            else:
                dw += dy * xhat
    if NEEDS_DW:
        if not SUM_ROWS:
            dw = tl.sum(dw, axis=0)
        tl.store(dw_ptr + tl.program_id(0).to(tl.int64) * n_cols + cols, dw, mask=col_mask)


@triton.jit(do_not_specialize=["n_rows", "rows_per_program"])
def _backward_sweep_kernel(
    dy_ptr,
    x_ptr,
    w_ptr,
    rstd_ptr,
    dx_ptr,
    dw_ptr,
    dy_row_stride,
    x_row_stride,
    n_rows,
    n_cols,
    offset,
    rows_per_program,
    ROUND_XHAT: tl.constexpr,
    NEEDS_DX: tl.constexpr,
    NEEDS_DW: tl.constexpr,
    ROWS: tl.constexpr,
    BLOCK: tl.constexpr,
):
    """A run of rows of any length, ROWS at a time in two sweeps; dw is kept in this program's row of dw_ptr (zeros)."""
    first = tl.program_id(0).to(tl.int64) * rows_per_program
    last = tl.minimum(first + rows_per_program, n_rows)
    dw_row_ptr = dw_ptr + tl.program_id(0).to(tl.int64) * n_cols
    for row in range(first, last, ROWS):
        rows = row + tl.arange(0, ROWS)
        row_mask = rows < last
        rstd = tl.load(rstd_ptr + rows, mask=row_mask, other=0.0)[:, None]
        mean = tl.zeros([ROWS], dtype=tl.float32)
        if NEEDS_DX:
            for start in range(0, n_cols, BLOCK):
                cols = start + tl.arange(0, BLOCK)
                mask = row_mask[:, None] & (cols < n_cols)[None, :]
                x = tl.load(x_ptr + rows[:, None] * x_row_stride + cols[None, :], mask=mask, other=0.0)
                dy = tl.load(dy_ptr + rows[:, None] * dy_row_stride + cols[None, :], mask=mask, other=0.0)
                w = tl.load(w_ptr + cols, mask=cols < n_cols, other=0.0).to(tl.float32) + fp32(offset)
                mean += tl.sum(dy.to(tl.float32) * w[None, :] * (x.to(tl.float32) * rstd), axis=1) / n_cols
        for start in range(0, n_cols, BLOCK):
            cols = start + tl.arange(0, BLOCK)
            mask = row_mask[:, None] & (cols < n_cols)[None, :]
            x = tl.load(x_ptr + rows[:, None] * x_row_stride + cols[None, :], mask=mask, other=0.0).to(tl.float32)
            dy = tl.load(dy_ptr + rows[:, None] * dy_row_stride + cols[None, :], mask=mask, other=0.0).to(tl.float32)
            w = tl.load(w_ptr + cols, mask=cols < n_cols, other=0.0).to(tl.float32) + fp32(offset)
            xhat = x * rstd
            if NEEDS_DX:
                dx = (dy * w[None, :] - xhat * mean[:, None]) * rstd
                tl.store(dx_ptr + rows[:, None] * n_cols + cols[None, :], dx.to(dx_ptr.dtype.element_ty), mask=mask)
            if NEEDS_DW:
                if ROUND_XHAT:
                    xhat = xhat.to(x_ptr.dtype.element_ty).to(tl.float32)
                dw = tl.load(dw_row_ptr + cols, mask=cols < n_cols, other=0.0) + tl.sum(dy * xhat, axis=0)
                tl.store(dw_row_ptr + cols, dw, mask=cols < n_cols)
        tl.debug_barrier()  # the next rows' dw is read by other threads than wrote it, if the compiler so chose


def _forward(
    x: torch.Tensor, weight: torch.Tensor, eps: float, offset: float, cast: Cast
) -> tuple[torch.Tensor, torch.Tensor]:
    """y like x, and rstd (N,) in fp32."""
    rows, weight = rows_of(x), weight.contiguous()
    n_rows, n_cols = rows.shape
    y_dtype = torch.promote_types(x.dtype, weight.dtype) if cast == "llama" else x.dtype
    y = torch.empty(x.shape, dtype=y_dtype, device=x.device)
    rstd = torch.empty(n_rows, dtype=torch.float32, device=x.device)
    chip = chip_of(x.device)
    with on_device(x):
        if n_cols <= WHOLE_ROW_FORWARD:
            block = triton.next_power_of_2(n_cols)
            tile_rows = max(1, 2048 // block)
            _forward_kernel[(triton.cdiv(n_rows, tile_rows),)](
                rows, weight, y, rstd, rows.stride(0), n_rows, n_cols, eps, offset,
                ROUND_XHAT=cast == "llama", ROWS=tile_rows, BLOCK=block, **options(tile_rows * block, chip),
            )  # fmt: skip
        else:
            _forward_sweep_kernel[(n_rows,)](
                rows, weight, y, rstd, rows.stride(0), n_cols, eps, offset,
                ROUND_XHAT=cast == "llama", BLOCK=SWEEP_BLOCK, **options(SWEEP_BLOCK, chip),
            )  # fmt: skip
    return y, rstd


def _backward(
    dy: torch.Tensor,
    x: torch.Tensor,
    weight: torch.Tensor,
    rstd: torch.Tensor,
    offset: float,
    cast: Cast,
    needs_dx: bool,
    needs_dw: bool,
) -> tuple[torch.Tensor | None, torch.Tensor | None]:
    dy_rows, rows, contiguous_weight = rows_of(dy), rows_of(x), weight.contiguous()
    n_rows, n_cols = rows.shape
    whole = n_cols <= WHOLE_ROW_BACKWARD
    block = triton.next_power_of_2(n_cols) if whole else SWEEP_BLOCK // 2
    # A tile of 8192 elements at E = 4096: two rows at once, 16 elements a thread. Of short rows many, up to 4096.
    tile_rows = max(4096 // block, 1 if block > 4096 else 2) if whole else SWEEP_ROWS
    chip = chip_of(x.device)
    programs = min(triton.cdiv(n_rows, tile_rows), PROGRAMS_PER_PROCESSOR * chip.processors)
    rows_per_program = triton.cdiv(triton.cdiv(n_rows, programs), tile_rows) * tile_rows
    programs = triton.cdiv(n_rows, rows_per_program)
    dx = torch.empty(x.shape, dtype=x.dtype, device=x.device) if needs_dx else rstd
    make = torch.empty if whole else torch.zeros
    dw = make((programs, n_cols), dtype=torch.float32, device=x.device) if needs_dw else rstd
    arguments = (
        dy_rows, rows, contiguous_weight, rstd, dx, dw, dy_rows.stride(0), rows.stride(0), n_rows, n_cols, offset,
        rows_per_program,
    )  # fmt: skip
    flags = {"ROUND_XHAT": cast == "llama", "NEEDS_DX": needs_dx, "NEEDS_DW": needs_dw}
    tile = {"ROWS": tile_rows, "BLOCK": block, **options(tile_rows * block, chip)}
    with on_device(x):
        if whole:
            _backward_kernel[(programs,)](*arguments, SUM_ROWS=block > 1024, **flags, **tile)
        else:
            _backward_sweep_kernel[(programs,)](*arguments, **flags, **tile)
    return (dx if needs_dx else None), (dw.sum(0).to(weight.dtype) if needs_dw else None)


class _RMSNorm(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x, weight, eps, offset, cast):
        y, rstd = _forward(x, weight, eps, offset, cast)
        ctx.save_for_backward(x, weight, rstd)
        ctx.offset, ctx.cast = offset, cast
        return y

    @staticmethod
    @once_differentiable
    def backward(ctx, dy):
        x, weight, rstd = ctx.saved_tensors
        dx, dw = _backward(dy, x, weight, rstd, ctx.offset, ctx.cast, *ctx.needs_input_grad[:2])
        return dx, dw, None, None, None


def rms_norm(
    x: torch.Tensor, weight: torch.Tensor, eps: float = 1e-6, *, offset: float = 0.0, cast: Cast = "llama"
) -> torch.Tensor:
    """Root-mean-square norm of x (..., E) with weight (E,), rounded where the model that `cast` names rounds.

    The result has x's dtype, except under "llama" with a wider weight (bf16 x, fp32 weight: fp32), as in that model.
    """
    if weight.shape != x.shape[-1:]:
        raise ValueError(
            f"rms_norm: weight is {tuple(weight.shape)}, but x is {tuple(x.shape)}: expected its last size"
        )
    if cast not in ("llama", "gemma", "none"):
        raise ValueError(f"rms_norm: cast is {cast!r}; expected 'llama', 'gemma' or 'none'")
    if x.numel() == 0 or not runs_triton(x) or not runs_triton(weight):
        return rms_norm_reference(x, weight, eps, offset=offset, cast=cast)
    if torch.is_grad_enabled() and (x.requires_grad or weight.requires_grad):
        return _RMSNorm.apply(x, weight, eps, offset, cast)
    return _forward(x, weight, eps, offset, cast)[0]


class RMSNorm(nn.Module):
    """`rms_norm` with its weight: ones, or zeros where the offset is one."""

    def __init__(
        self,
        hidden_size: int,
        eps: float = 1e-6,
        *,
        offset: float = 0.0,
        cast: Cast = "llama",
        device: torch.device | str | None = None,
        dtype: torch.dtype | None = None,
    ) -> None:
        super().__init__()
        self.eps, self.offset, self.cast = eps, offset, cast
        self.weight = nn.Parameter(torch.full((hidden_size,), 1.0 - offset, device=device, dtype=dtype))

    def forward(self, hidden_states: torch.Tensor) -> torch.Tensor:
        return rms_norm(hidden_states, self.weight, self.eps, offset=self.offset, cast=self.cast)

    def extra_repr(self) -> str:
        return f"{self.weight.shape[0]}, eps={self.eps}, offset={self.offset}, cast={self.cast!r}"
