r"""SwiGLU whose results are float8 operands of the next products: y = silu(gate) · up, quantised as it is computed.

    q = round(clamp(y · scale, ±largest))       amax = max(amax, |y|)

    d_gate = dy · up · σ(g) (1 + g (1 - σ(g)))        d_up = dy · silu(g)        both quantised the same way

Neither y nor the gradients of gate and up exist in 16 bits. The forward writes y by rows, for y W^T. The backward
computes y again and writes it by columns, for dW = dz^T y, so that y is not kept between them; and it writes the
gradients by rows and by columns, for dx = d_gate W and dW = d_gate^T x. `quantize_float8` explains copies and scales.

Everything is computed in fp32. y and the gradients are rounded to the dtype of gate before they are scaled, so that the
bits and the amax are those of `swiglu` followed by `quantize_float8`.
"""

from __future__ import annotations

import itertools
from typing import NamedTuple

import torch

from ligertune_kernels.chips import Chip
from ligertune_kernels.jit.device_functions import silu, silu_grad
from ligertune_kernels.launcher import Launcher, cached, chip_of, runs_triton, tl, triton
from ligertune_kernels.ops.float8.quantize_float8 import (
    ALIGNMENT,
    MANTISSA_BITS,
    Float8Copies,
    add_maximum,
    as_integers,
    check_scale,
    float8_bits,
    padded_rows,
    quantize_float8_reference,
    store_by_columns,
)
from ligertune_kernels.ops.float8.tiles import FLOAT8_CONVERSION, PARTS, SWIGLU, SWIGLU_BACKWARD, Float8Tile
from ligertune_kernels.ops.mlp.gated_mlp import swiglu_reference

E4M3 = torch.float8_e4m3fn
E5M2 = torch.float8_e5m2


class SwigluFloat8Gradients(NamedTuple):
    """What the products of a gated MLP's backward read."""

    gate: Float8Copies
    up: Float8Copies
    y_columns: torch.Tensor | None  # (F, N rounded up to a multiple of 16)


Maxima = tuple[torch.Tensor, torch.Tensor]  # of d_gate and d_up, (PARTS,) float32


def swiglu_float8_reference(
    gate: torch.Tensor, up: torch.Tensor, scale: torch.Tensor, *, amax: torch.Tensor | None = None
) -> torch.Tensor:
    """Compute `swiglu_float8` in plain torch."""
    return quantize_float8_reference(swiglu_reference(gate, up), scale, columns=False, amax=amax).rows


def swiglu_float8_backward_reference(
    dy: torch.Tensor,
    gate: torch.Tensor,
    up: torch.Tensor,
    scale: torch.Tensor,
    gate_scale: torch.Tensor,
    up_scale: torch.Tensor,
    *,
    amax: Maxima | None = None,
    columns: bool = True,
) -> SwigluFloat8Gradients:
    """Compute `swiglu_float8_backward` in plain torch."""
    with torch.enable_grad():
        leaves = [t.detach().requires_grad_() for t in (gate, up)]
        y = swiglu_reference(*leaves)
    gradients = torch.autograd.grad(y, leaves, dy)
    d_gate, d_up = (
        quantize_float8_reference(gradient, its_scale, dtype=E5M2, columns=columns, amax=maxima)
        for gradient, its_scale, maxima in zip(gradients, (gate_scale, up_scale), amax or (None, None), strict=True)
    )
    y_columns = quantize_float8_reference(y.detach(), scale, rows=False).columns if columns else None
    return SwigluFloat8Gradients(d_gate, d_up, y_columns)


@triton.jit(do_not_specialize=["n_rows"])
def _swiglu_float8_kernel(
    gate_ptr, up_ptr,  # (N, F)
    scale_ptr,  # () float32
    y_rows_ptr,  # (N, F) uint8
    amax_ptr,  # (programs,) float32
    n_cols, n_rows,
    MANTISSA_BITS: tl.constexpr, LARGEST: tl.constexpr, HARDWARE: tl.constexpr, HAS_AMAX: tl.constexpr,
    BLOCK_ROWS: tl.constexpr, BLOCK_COLS: tl.constexpr,
):  # fmt: skip
    """Each program computes every n-th tile."""
    scale = tl.load(scale_ptr)
    col_blocks = tl.cdiv(n_cols, BLOCK_COLS)
    largest = tl.zeros((BLOCK_ROWS, BLOCK_COLS), tl.float32)
    for tile in range(tl.program_id(0), tl.cdiv(n_rows, BLOCK_ROWS) * col_blocks, tl.num_programs(0)):
        rows = (tile // col_blocks) * BLOCK_ROWS + tl.arange(0, BLOCK_ROWS)
        cols = (tile % col_blocks) * BLOCK_COLS + tl.arange(0, BLOCK_COLS)
        inside = (rows < n_rows)[:, None] & (cols < n_cols)[None, :]
        at = rows.to(tl.int64)[:, None] * n_cols + cols[None, :]
        gate = tl.load(gate_ptr + at, mask=inside, other=0.0).to(tl.float32)
        up = tl.load(up_ptr + at, mask=inside, other=0.0).to(tl.float32)
        y = (silu(gate) * up).to(gate_ptr.dtype.element_ty).to(tl.float32)
        if HAS_AMAX:
            largest = tl.maximum(largest, tl.abs(y))
        q = float8_bits(y * scale, MANTISSA_BITS, LARGEST, HARDWARE)
        tl.store(y_rows_ptr + at, q, mask=inside)
    if HAS_AMAX:
        add_maximum(amax_ptr, largest)


@triton.jit(do_not_specialize=["n_rows"])
def _swiglu_float8_backward_kernel(
    dy_ptr, gate_ptr, up_ptr,  # (N, F)
    scale_ptr, gate_scale_ptr, up_scale_ptr,  # () float32
    d_gate_rows_ptr, d_up_rows_ptr,  # (N, F) uint8
    d_gate_columns_ptr, d_up_columns_ptr, y_columns_ptr,  # (F, N rounded up / 4) uint32
    gate_amax_ptr, up_amax_ptr,  # (programs,) float32
    n_cols, n_rows,
    Y_MANTISSA_BITS: tl.constexpr, Y_LARGEST: tl.constexpr, MANTISSA_BITS: tl.constexpr, LARGEST: tl.constexpr,
    HARDWARE: tl.constexpr, HAS_COLUMNS: tl.constexpr, HAS_AMAX: tl.constexpr, ALIGNMENT: tl.constexpr,
    BLOCK_ROWS: tl.constexpr, BLOCK_COLS: tl.constexpr,
):  # fmt: skip
    """Each program computes every n-th tile. Slots after the last row hold zeros, so their gradients are zero."""
    scale = tl.load(scale_ptr)
    gate_scale = tl.load(gate_scale_ptr)
    up_scale = tl.load(up_scale_ptr)
    n_words = (n_rows + ALIGNMENT - 1) // ALIGNMENT * (ALIGNMENT // 4)  # of a column
    col_blocks = tl.cdiv(n_cols, BLOCK_COLS)
    QUADS: tl.constexpr = BLOCK_ROWS // 4
    gate_largest = tl.zeros((QUADS, BLOCK_COLS), tl.float32)
    up_largest = tl.zeros((QUADS, BLOCK_COLS), tl.float32)
    for tile in range(tl.program_id(0), tl.cdiv(n_words, QUADS) * col_blocks, tl.num_programs(0)):
        quads = (tile // col_blocks) * QUADS + tl.arange(0, QUADS)
        cols = (tile % col_blocks) * BLOCK_COLS + tl.arange(0, BLOCK_COLS)
        d_gate_words = tl.zeros((QUADS, BLOCK_COLS), tl.uint32)
        d_up_words = tl.zeros((QUADS, BLOCK_COLS), tl.uint32)
        y_words = tl.zeros((QUADS, BLOCK_COLS), tl.uint32)
        for i in tl.static_range(4):
            rows = quads * 4 + i
            inside = (rows < n_rows)[:, None] & (cols < n_cols)[None, :]
            at = rows.to(tl.int64)[:, None] * n_cols + cols[None, :]
            dy = tl.load(dy_ptr + at, mask=inside, other=0.0).to(tl.float32)
            gate = tl.load(gate_ptr + at, mask=inside, other=0.0).to(tl.float32)
            up = tl.load(up_ptr + at, mask=inside, other=0.0).to(tl.float32)
            activated = silu(gate)
            d_gate = (dy * up * silu_grad(gate)).to(gate_ptr.dtype.element_ty).to(tl.float32)
            d_up = (dy * activated).to(up_ptr.dtype.element_ty).to(tl.float32)
            if HAS_AMAX:
                gate_largest = tl.maximum(gate_largest, tl.abs(d_gate))
                up_largest = tl.maximum(up_largest, tl.abs(d_up))
            q = float8_bits(d_gate * gate_scale, MANTISSA_BITS, LARGEST, HARDWARE)
            tl.store(d_gate_rows_ptr + at, q, mask=inside)
            d_gate_words |= q.to(tl.uint32) << (8 * i)
            q = float8_bits(d_up * up_scale, MANTISSA_BITS, LARGEST, HARDWARE)
            tl.store(d_up_rows_ptr + at, q, mask=inside)
            d_up_words |= q.to(tl.uint32) << (8 * i)
            if HAS_COLUMNS:
                y = (activated * up).to(gate_ptr.dtype.element_ty).to(tl.float32)
                y_words |= float8_bits(y * scale, Y_MANTISSA_BITS, Y_LARGEST, HARDWARE).to(tl.uint32) << (8 * i)
        if HAS_COLUMNS:
            store_by_columns(d_gate_words, d_gate_columns_ptr, n_words, quads, cols, n_cols, n_words)
            store_by_columns(d_up_words, d_up_columns_ptr, n_words, quads, cols, n_cols, n_words)
            store_by_columns(y_words, y_columns_ptr, n_words, quads, cols, n_cols, n_words)
    if HAS_AMAX:
        add_maximum(gate_amax_ptr, gate_largest)
        add_maximum(up_amax_ptr, up_largest)


def _options(launch: Float8Tile, chip: Chip) -> dict[str, int | bool]:
    """Return the constants of both kernels: the float8 conversion, the tile, and Triton's options."""
    hardware = FLOAT8_CONVERSION.holds(chip)  # elsewhere integer operations round: the same bits
    # Products and sums are fused as in `swiglu`, for the same bits.
    options = {"num_warps": launch.num_warps, "num_stages": 1, "enable_fp_fusion": True}
    return {"HARDWARE": hardware, "BLOCK_ROWS": launch.rows, "BLOCK_COLS": launch.cols, **options}


@cached
def _plan_forward(amax: bool, chip: Chip) -> Launcher:
    rounding = {"MANTISSA_BITS": MANTISSA_BITS[E4M3], "LARGEST": torch.finfo(E4M3).max}
    return Launcher(_swiglu_float8_kernel, {**rounding, "HAS_AMAX": amax, **_options(SWIGLU, chip)})


@cached
def _plan_backward(launch: Float8Tile, columns: bool, amax: bool, chip: Chip) -> Launcher:
    constants = {
        "Y_MANTISSA_BITS": MANTISSA_BITS[E4M3],
        "Y_LARGEST": torch.finfo(E4M3).max,
        "MANTISSA_BITS": MANTISSA_BITS[E5M2],
        "LARGEST": torch.finfo(E5M2).max,
        "HAS_COLUMNS": columns,
        "HAS_AMAX": amax,
        "ALIGNMENT": ALIGNMENT,
    }
    return Launcher(_swiglu_float8_backward_kernel, {**constants, **_options(launch, chip)})


def _programs(n_rows: int, n_cols: int, launch: Float8Tile) -> int:
    return min(PARTS, -(-n_rows // launch.rows) * -(-n_cols // launch.cols))


def swiglu_float8(
    gate: torch.Tensor,  # (..., F), N rows
    up: torch.Tensor,  # (..., F)
    scale: torch.Tensor,  # () float32: multiplies y
    *,
    amax: torch.Tensor | None = None,  # (PARTS,) float32
) -> torch.Tensor:  # (..., F) float8_e4m3fn
    """Return silu(gate) · up in float8. Deterministic; `swiglu_float8_backward` has the gradients.

    amax: running maxima of |y|, updated in place. Inputs that are not contiguous are copied. Raises ValueError on
    mismatched shapes or dtypes, and for a scale or amax of another shape or dtype.
    """
    _check("swiglu_float8", (gate, up), (scale,), (amax,))
    if not gate.numel() or not runs_triton(gate):
        return swiglu_float8_reference(gate, up, scale, amax=amax)
    n_cols = gate.shape[-1]
    n_rows = gate.numel() // n_cols
    y = torch.empty(gate.shape, dtype=E4M3, device=gate.device)
    _plan_forward(amax is not None, chip_of(gate.device))(
        (_programs(n_rows, n_cols, SWIGLU), 1, 1),
        (gate.contiguous(), up.contiguous(), scale, y.view(torch.uint8), scale if amax is None else amax),
        (n_cols,), n_rows,
    )  # fmt: skip
    return y


def swiglu_float8_backward(
    dy: torch.Tensor,  # (..., F), N rows
    gate: torch.Tensor,  # (..., F)
    up: torch.Tensor,  # (..., F)
    scale: torch.Tensor,  # () float32: multiplies y
    gate_scale: torch.Tensor,  # () float32: multiplies d_gate
    up_scale: torch.Tensor,  # () float32: multiplies d_up
    *,
    amax: Maxima | None = None,
    columns: bool = True,
) -> SwigluFloat8Gradients:
    """Return the gradients of gate and up in float8_e5m2, and y in float8_e4m3fn by columns. Deterministic.

    amax: running maxima of |d_gate| and of |d_up|, updated in place. columns: False leaves the columns out, which only
    the gradients of weights need. Raises ValueError as `swiglu_float8` does.
    """
    maxima = (None, None) if amax is None else amax
    _check("swiglu_float8_backward", (gate, up, dy), (scale, gate_scale, up_scale), maxima)
    if not gate.numel() or not runs_triton(gate):
        return swiglu_float8_backward_reference(dy, gate, up, scale, gate_scale, up_scale, amax=amax, columns=columns)
    inputs = [t.contiguous() for t in (dy, gate, up)]
    n_cols = gate.shape[-1]
    n_rows = gate.numel() // n_cols
    by_rows = [torch.empty(gate.shape, dtype=E5M2, device=gate.device) for _ in range(2)]
    shape = n_cols, padded_rows(n_rows)
    by_columns = [
        torch.empty(shape, dtype=dtype, device=gate.device) if columns else None for dtype in (E5M2, E5M2, E4M3)
    ]
    outputs = as_integers(by_rows, by_columns, instead=scale)
    launch = SWIGLU_BACKWARD[gate.dtype.itemsize]
    _plan_backward(launch, columns, amax is not None, chip_of(gate.device))(
        (_programs(n_rows, n_cols, launch), 1, 1),
        (*inputs, scale, gate_scale, up_scale, *outputs, *(scale if amax is None else each for each in maxima)),
        (n_cols,), n_rows,
    )  # fmt: skip
    return SwigluFloat8Gradients(*map(Float8Copies, by_rows, by_columns[:2]), by_columns[2])


def _check(
    op: str,
    tensors: tuple[torch.Tensor, ...],
    scales: tuple[torch.Tensor, ...],
    maxima: tuple[torch.Tensor | None, ...],
) -> None:
    found = [f"{tuple(t.shape)} {t.dtype}" for t in tensors]
    if len(set(found)) > 1:
        shown = ", ".join(f"{name} {each}" for name, each in zip(("gate", "up", "dy"), found, strict=False))
        raise ValueError(f"{op}: {shown}: expected the same shapes and dtypes")
    for scale, amax in itertools.zip_longest(scales, maxima):
        check_scale(op, scale, amax)
