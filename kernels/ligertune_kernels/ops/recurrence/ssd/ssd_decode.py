r"""One token of ssd, for generation: the state S (P, N) of each head is changed in place.

    S ← exp(dt' A) S + dt' x Bᵀ        out = (S C + D x) silu(z)        dt' = clamp(softplus(dt + dt_bias))

It computes in fp32 and has no backward. A step reads and writes the state once: a program holds all columns of some of
its rows.
"""

from __future__ import annotations

import torch

from ligertune_kernels.chips import Chip, launch_options
from ligertune_kernels.jit.device_functions import silu
from ligertune_kernels.launcher import Launcher, cached, chip_of, runs_triton, tl, triton
from ligertune_kernels.ops.recurrence.input_checks import SsdTensors, check_ssd, check_tensors
from ligertune_kernels.ops.recurrence.ssd import tiles
from ligertune_kernels.ops.recurrence.ssd.kernels import time_steps
from ligertune_kernels.ops.recurrence.ssd.launches import StepOptions
from ligertune_kernels.ops.recurrence.ssd.op import NO_LIMIT, gated_reference, in_autocast, readable, steps_reference


def ssd_step_reference(
    state: torch.Tensor,
    x: torch.Tensor,
    dt: torch.Tensor,
    A: torch.Tensor,
    B: torch.Tensor,
    C: torch.Tensor,
    D: torch.Tensor | None = None,
    z: torch.Tensor | None = None,
    dt_bias: torch.Tensor | None = None,
    *,
    dt_softplus: bool = False,
    dt_limit: tuple[float, float] = NO_LIMIT,
) -> torch.Tensor:
    """Compute `ssd_step` in plain torch, in place on `state`."""
    wide = torch.promote_types(x.dtype, torch.float32)
    group = x.shape[1] // B.shape[1]
    steps = steps_reference(dt.to(wide), dt_bias, dt_softplus=dt_softplus, dt_limit=dt_limit)
    b, c = (t.to(wide).repeat_interleave(group, 1) for t in (B, C))
    values = x.to(wide)
    added = (steps[..., None] * values)[..., None] * b[:, :, None]
    new = (steps * A.to(wide)).exp()[..., None, None] * state.to(wide) + added
    state.copy_(new)
    return gated_reference((new @ c[..., None])[..., 0], values, D, z).to(x.dtype)


@triton.jit
def ssd_step_kernel(
    state_ptr,  # (B, H, P, N), in place
    x_ptr,  # (B, H, P)
    dt_ptr,  # (B, H)
    a_ptr,  # (H,)
    b_ptr, c_ptr,  # (B, G, N)
    d_ptr,  # (H,) or (H, P)
    z_ptr,  # (B, H, P)
    dt_bias_ptr,  # (H,)
    out_ptr,  # (B, H, P)
    x_batch_stride, x_head_stride, dt_batch_stride, dt_head_stride, b_batch_stride, b_group_stride,
    c_batch_stride, c_group_stride, z_batch_stride, z_head_stride,
    head_dim, state_dim,
    HEADS: tl.constexpr, GROUP: tl.constexpr, HAS_D: tl.constexpr, D_COLUMNS: tl.constexpr, HAS_Z: tl.constexpr,
    HAS_BIAS: tl.constexpr, SOFTPLUS: tl.constexpr, FLOORED: tl.constexpr, CAPPED: tl.constexpr, LOW: tl.constexpr,
    HIGH: tl.constexpr, ROWS: tl.constexpr, STATE_COLS: tl.constexpr,
):  # fmt: skip
    first_row = tl.program_id(0).to(tl.int64) * ROWS
    places = tl.arange(0, ROWS)
    rows = first_row + places
    head = tl.program_id(1).to(tl.int64)
    batch = tl.program_id(2).to(tl.int64)
    group = head // GROUP
    cols = tl.arange(0, STATE_COLS)
    is_row = rows < head_dim
    is_col = cols < state_dim
    raw = tl.load(dt_ptr + batch * dt_batch_stride + head * dt_head_stride).to(tl.float32)
    if HAS_BIAS:
        raw += tl.load(dt_bias_ptr + head).to(tl.float32)
    step = time_steps(raw, SOFTPLUS, FLOORED, CAPPED, LOW, HIGH)
    x = tl.load(x_ptr + batch * x_batch_stride + head * x_head_stride + rows, mask=is_row, other=0.0).to(tl.float32)
    b = tl.load(b_ptr + batch * b_batch_stride + group * b_group_stride + cols, mask=is_col, other=0.0).to(tl.float32)
    c = tl.load(c_ptr + batch * c_batch_stride + group * c_group_stride + cols, mask=is_col, other=0.0).to(tl.float32)
    at_head = batch * HEADS + head
    state_ptr += (at_head * head_dim + first_row) * state_dim
    state_ptrs = state_ptr + places[:, None] * state_dim + cols[None, :]
    inside = is_row[:, None] & is_col[None, :]
    state = tl.load(state_ptrs, mask=inside, other=0.0).to(tl.float32)
    state = state * tl.exp(step * tl.load(a_ptr + head).to(tl.float32)) + (step * x)[:, None] * b[None, :]
    tl.store(state_ptrs, state.to(state_ptr.dtype.element_ty), mask=inside)
    out = tl.sum(state * c[None, :], 1)
    if HAS_D:
        if D_COLUMNS:
            out += x * tl.load(d_ptr + head * head_dim + rows, mask=is_row, other=0.0).to(tl.float32)
        else:
            out += x * tl.load(d_ptr + head).to(tl.float32)
    if HAS_Z:
        z = tl.load(z_ptr + batch * z_batch_stride + head * z_head_stride + rows, mask=is_row, other=0.0)
        out *= silu(z.to(tl.float32))
    tl.store(out_ptr + at_head * head_dim + rows, out.to(out_ptr.dtype.element_ty), mask=is_row)


@cached
def _step_launch(
    heads: int, group: int, state_dim: int, d_dims: int, has_z: bool, options: StepOptions, chip: Chip
) -> Launcher:
    cols = triton.next_power_of_2(state_dim)
    constants = {
        "HEADS": heads, "GROUP": group, "HAS_D": d_dims > 0, "D_COLUMNS": d_dims == 2, "HAS_Z": has_z,
        "ROWS": tiles.STEP_ROWS, "STATE_COLS": cols,
    }  # fmt: skip
    return Launcher(ssd_step_kernel, constants | options.constants() | launch_options(cols * tiles.STEP_ROWS, chip))


def ssd_step(
    state: torch.Tensor,  # (B, H, P, N), in place
    x: torch.Tensor,  # (B, H, P)
    dt: torch.Tensor,  # (B, H)
    A: torch.Tensor,  # (H,): negative
    B: torch.Tensor,  # (B, G, N), G divides H
    C: torch.Tensor,  # (B, G, N)
    D: torch.Tensor | None = None,  # (H,) or (H, P)
    z: torch.Tensor | None = None,  # (B, H, P)
    dt_bias: torch.Tensor | None = None,  # (H,)
    *,
    dt_softplus: bool = False,
    dt_limit: tuple[float, float] = NO_LIMIT,
) -> torch.Tensor:  # (B, H, P)
    """Compute `ssd` of the next token, and change the state in place. No gradient.

    The reference runs for states that are not contiguous and wider than 256.
    Raises ValueError on mismatched shapes, dtypes or devices, TypeError for what is no tensor.
    """
    tensors = SsdTensors(x, dt, A, B, C, D, z, dt_bias)
    check_ssd("ssd_step", tensors, dt_limit)
    check_tensors("ssd_step", x=x, state=state)
    if x.ndim != 3 or state is None or state.shape != (*x.shape, B.shape[-1]):
        raise ValueError(
            f"ssd_step: x is {tuple(x.shape)} and state {None if state is None else tuple(state.shape)}; expected "
            f"(B, H, P) and (B, H, P, {B.shape[-1]})"
        )
    state = state.detach()
    tensors = in_autocast(SsdTensors(*(None if t is None else t.detach() for t in tensors)))
    if x.numel() == 0 or B.shape[-1] > tiles.MAX_WIDTH or not state.is_contiguous() or not runs_triton(tensors.x):
        return ssd_step_reference(state, *tensors, dt_softplus=dt_softplus, dt_limit=dt_limit)
    x, dt, A, B, C, D, z, dt_bias = readable(tensors)
    batch, heads, head_dim = x.shape
    groups, state_dim = B.shape[1:]
    out = x.new_empty(x.shape)
    options = StepOptions(dt_bias is not None, dt_softplus, tuple(dt_limit))
    launch = _step_launch(
        heads, heads // groups, state_dim, 0 if D is None else D.ndim, z is not None, options, chip_of(x.device)
    )
    strides = (*x.stride()[:2], *dt.stride(), *B.stride()[:2], *C.stride()[:2], *(x if z is None else z).stride()[:2])
    launch(
        (-(-head_dim // tiles.STEP_ROWS), heads, batch),
        (state, x, dt, A, B, C, x if D is None else D, x if z is None else z, A if dt_bias is None else dt_bias, out),
        (*strides, head_dim, state_dim),
    )  # fmt: skip
    return out
