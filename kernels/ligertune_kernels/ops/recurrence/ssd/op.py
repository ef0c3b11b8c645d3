r"""State space duality: the recurrence of Mamba 2, a linear attention whose state decays by a number per head.

State S (P, N) for each head; A < 0, D and dt_bias belong to a head, B and C (N,) to a group of heads:

    dt'_t = clamp(softplus(dt_t + dt_bias))
    S_t = exp(dt'_t A) S_{t-1} + dt'_t x_t B_tᵀ        y_t = S_t C_t + D x_t        out_t = y_t silu(z_t)

In chunks, with G_i the sum of the document's dt' A in the chunk up to token i. D_ij = exp(G_i - G_j) for j <= i in the
same document, else 0. S is the state before the chunk, m_i = exp(G_i), or 0 for documents that begin in the chunk:

    y_i = m_i S C_i + Σ_j D_ij (C_i·B_j) dt'_j x_j + D x_i
    S ← s S + Σ_j w_j x_j B_jᵀ,  w_j = r_j dt'_j,  r_j = D_last,j,  s = m_last

Backward, from the last chunk to the first, dS being the gradient of the state after the chunk, dy = dout silu(z):

    dS ← s dS + Σ_i m_i dy_i C_iᵀ                      dz = dout y silu'(z)        dD = Σ dy x
    dx_j = dt'_j Σ_i D_ij (C_i·B_j) dy_i + w_j dS B_j + D dy_j
    dC_i = Σ over heads m_i Sᵀ dy_i + Σ_j M_ij B_j     M_ij = Σ over heads D_ij dt'_j dy_i·x_j
    dB_j = Σ over heads w_j dSᵀ x_j + Σ_i M_ij C_i
    da_t = Σ_{j < t <= i} D_ij (C_i·B_j) dt'_j dy_i·x_j + Σ_{i >= t} m_i dy_i·S C_i + Σ_{j < t} w_j x_j·dS B_j + s S·dS
    ddt'_j = A da_j + Σ_i D_ij (C_i·B_j) dy_i·x_j + r_j x_j·dS B_j        dA = Σ dt' da

da is the gradient of a token's decay dt' A; its sums are over tokens of t's document and chunk. That of dt is 0 where
dt' is limited. C_i·B_j is computed once for all heads of a group.

The state, sums and decays are fp32; factors of products are rounded to the tensors' dtype. The backward keeps the
inputs alone and computes the states again. While it runs it takes, per token and head, 2 N P / chunk numbers for states
and their gradients, P for dx, 2 P with z, and 8 + 2 N / 64 in fp32; per token and group 2 chunk numbers, and in groups
of more than 16 heads 2 N in fp32 for each 16 of them. A chunk has 128 tokens on Hopper GPUs, fewer elsewhere.

Every document starts from a state of zeros. A scan over chunks runs in parts: documents that begin in different parts
of a row are computed at the same time. No atomics. Kernels: kernels.py, ssd_gradients.py; tiles: tiles.py.
Source: Dao and Gu, arXiv:2405.21060.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch.nn import functional as F

from ligertune_kernels.autograd import autocast, no_double_backward, without_autocast
from ligertune_kernels.chips import Chip
from ligertune_kernels.launcher import chip_of
from ligertune_kernels.ops.attention.document_attention import Documents
from ligertune_kernels.ops.recurrence.input_checks import SsdTensors, check_ssd, check_tensors
from ligertune_kernels.ops.recurrence.ssd import tiles
from ligertune_kernels.ops.recurrence.ssd.launches import SsdLaunches, SsdShape, StepOptions, ssd_launches
from ligertune_kernels.ops.recurrence.ssd.tiles import PART, REFERENCE_CHUNK

NO_LIMIT = (0.0, float("inf"))


def ssd_reference(
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
    initial_state: torch.Tensor | None = None,
    documents: Documents | None = None,
) -> tuple[torch.Tensor, torch.Tensor]:
    """Compute `ssd` and `ssd_with_states` in plain torch, in chunks."""
    wide = torch.promote_types(x.dtype, torch.float32)
    group = x.shape[2] // B.shape[2]
    n_tokens = x.shape[1]
    steps = steps_reference(dt.to(wide), dt_bias, dt_softplus=dt_softplus, dt_limit=dt_limit)
    values = x.to(wide)
    starts = torch.zeros(n_tokens, dtype=torch.int32, device=x.device) if documents is None else documents.starts
    missing = -n_tokens % REFERENCE_CHUNK
    if missing:  # tokens of the last document that change nothing
        starts = torch.cat((starts, starts[-1:].expand(missing)))
    starts = starts.view(-1, REFERENCE_CHUNK)  # (chunks, C)
    firsts = torch.arange(len(starts), device=x.device) * REFERENCE_CHUNK
    # (B, H, chunks, C, ...)
    u = _in_chunks(values * steps[..., None], missing)
    decays = _in_chunks(steps * A.to(wide), missing)
    b, c = (_in_chunks(t.to(wide), missing).repeat_interleave(group, 1) for t in (B, C))

    seen = (starts[:, :, None] == starts[:, None, :]).tril()
    # added up from j to i: a difference of sums since the start of the chunk would lose digits where these are large
    spans = decays[..., None].expand(*decays.shape, REFERENCE_CHUNK).tril(-1).cumsum(-2)  # of decays after j up to i
    between = spans.masked_fill(~seen, float("-inf")).exp()
    logs = (seen.to(wide) @ decays[..., None])[..., 0]
    reads = logs.exp() * (starts < firsts.clamp(min=1)[:, None])
    to_state = between[..., -1, :]
    kept = reads[..., -1]
    local = (between * (c @ b.mT)) @ u
    added = (u * to_state[..., None]).mT @ b  # (B, H, chunks, P, N)
    c = c * reads[..., None]
    batch, _, heads, head_dim = x.shape
    state = u.new_zeros(batch, heads, head_dim, B.shape[-1]) if initial_state is None else initial_state.to(wide)
    out = []
    for i in range(len(starts)):
        out.append(local[:, :, i] + c[:, :, i] @ state.mT)
        state = kept[:, :, i, None, None] * state + added[:, :, i]
    y = torch.cat(out, 2)[:, :, :n_tokens].transpose(1, 2)  # (B, T, H, P)
    y = gated_reference(y, values, D, z)
    return y.to(x.dtype).contiguous(), state


def steps_reference(
    dt: torch.Tensor, dt_bias: torch.Tensor | None, *, dt_softplus: bool, dt_limit: tuple[float, float]
) -> torch.Tensor:
    """Return dt', in dt's dtype."""
    steps = dt if dt_bias is None else dt + dt_bias.to(dt.dtype)
    steps = F.softplus(steps) if dt_softplus else steps
    return steps.clamp(*map(float, dt_limit))


def gated_reference(y: torch.Tensor, x: torch.Tensor, D: torch.Tensor | None, z: torch.Tensor | None) -> torch.Tensor:
    """Return (y + D x) silu(z) of tensors (..., H, P), in y's dtype."""
    if D is not None:
        y = y + D.to(y.dtype).view(D.shape[0], -1) * x
    return y if z is None else y * F.silu(z.to(y.dtype))


def _in_chunks(t: torch.Tensor, missing: int) -> torch.Tensor:
    """(B, T, H, ...) -> (B, H, chunks, C, ...), with zeros for the missing tokens."""
    if missing:
        t = torch.cat((t, t.new_zeros(t.shape[0], missing, *t.shape[2:])), 1)
    return t.unflatten(1, (-1, REFERENCE_CHUNK)).movedim(3, 1)


class _Inputs(NamedTuple):
    """What autograd keeps."""

    x: torch.Tensor
    dt: torch.Tensor
    A: torch.Tensor
    B: torch.Tensor
    C: torch.Tensor
    D: torch.Tensor
    z: torch.Tensor
    dt_bias: torch.Tensor
    initial_state: torch.Tensor  # (B, H, N, P)
    starts: torch.Tensor
    ends: torch.Tensor

    @staticmethod
    def of(*tensors: torch.Tensor | None) -> _Inputs:
        """Return the inputs. Where one is None, no kernel reads it, and x takes its place."""
        return _Inputs(*(tensors[0] if t is None else t for t in tensors))

    def strides(self, *names: str) -> tuple[int, ...]:
        """Return strides of rows, tokens and heads, which Triton specialises on."""
        return tuple(stride for name in names for stride in getattr(self, name).stride()[:3])


class _Prepared(NamedTuple):
    """Results of the first two kernels."""

    products: torch.Tensor  # (B, chunks, G, C, C): C_i·B_j
    factors: torch.Tensor  # (B, chunks, H, 4, C) fp32: dt', G, w, m
    kept: torch.Tensor  # (B, chunks, H) fp32: s
    states: torch.Tensor  # (B, chunks, H, N, P): before each chunk


def _scan_grid(shape: SsdShape, launches: SsdLaunches, batch: int, n_tokens: int) -> tuple[tuple[int, int, int], int]:
    """Return the grid of a scan, and the tokens of a part of a row, in which a program looks for its documents."""
    part = min(PART, n_tokens) if shape.has_documents else n_tokens
    return (launches.scan_tiles, shape.heads, batch * -(-n_tokens // part)), part


def _prepare(x: _Inputs, shape: SsdShape, chip: Chip, final_state: torch.Tensor) -> _Prepared:
    batch, n_tokens, heads, head_dim = x.x.shape
    groups, state_dim = x.B.shape[2:]
    launches = ssd_launches(shape, chip)
    chunk = launches.chunk
    n_chunks = -(-n_tokens // chunk)
    products = x.x.new_empty((batch, n_chunks, groups, chunk, chunk))
    factors = torch.empty((batch, n_chunks, heads, 4, chunk), dtype=torch.float32, device=x.x.device)
    kept = factors.new_empty((batch, n_chunks, heads))
    states = x.x.new_empty((batch, n_chunks, heads, state_dim, head_dim))
    launches.prepare(
        (n_chunks * launches.prepare_tiles, batch, 1),
        (x.B, x.C, x.dt, x.dt_bias, x.A, x.starts, products, factors, kept),
        x.strides("B", "C", "dt"), n_tokens, n_chunks,
    )  # fmt: skip
    grid, part = _scan_grid(shape, launches, batch, n_tokens)
    launches.scan(
        grid,
        (x.B, x.x, factors, kept, x.starts, x.ends, x.initial_state, states, final_state),
        x.strides("B", "x"), n_tokens, n_chunks, part,
    )  # fmt: skip
    return _Prepared(products, factors, kept, states)


def _outputs(
    x: _Inputs, made: _Prepared, shape: SsdShape, chip: Chip, d_out: torch.Tensor | None = None
) -> tuple[torch.Tensor, torch.Tensor | None]:
    """Return the outputs and None; given the outputs' gradient, dy and dz."""
    launches = ssd_launches(shape, chip)
    batch, n_tokens, heads, _ = x.x.shape
    n_chunks = made.states.shape[1]
    out = x.x.new_empty(x.x.shape)
    dz = None if d_out is None else x.x.new_empty(x.x.shape)
    launch = launches.outputs if d_out is None else launches.outputs_back
    launch(
        (n_chunks * heads, batch, 1),
        (x.x, x.C, x.z, x.D, made.products, made.factors, x.starts, made.states,
         x.x if d_out is None else d_out, out, out if dz is None else dz),
        x.strides("x", "C", "z"), n_tokens, n_chunks,
    )  # fmt: skip
    return out, dz


def _scan_back(
    x: _Inputs, made: _Prepared, shape: SsdShape, chip: Chip, dy: torch.Tensor, d_final: torch.Tensor
) -> tuple[torch.Tensor, torch.Tensor | None]:
    """Return dS after each chunk, and the gradient of the initial state."""
    launches = ssd_launches(shape, chip)
    batch, n_tokens = x.x.shape[:2]
    d_states = torch.empty_like(made.states)
    d_initial = made.kept.new_empty(x.initial_state.shape if shape.has_initial else (0,))
    grid, part = _scan_grid(shape, launches, batch, n_tokens)
    launches.scan_back(
        grid,
        (x.C, dy, made.factors, made.kept, x.starts, x.ends, d_final.contiguous() if shape.has_final else dy,
         d_states, d_initial),
        (*x.strides("C"), *dy.stride()[:3]), n_tokens, made.states.shape[1], part,
    )  # fmt: skip
    return d_states, d_initial if shape.has_initial else None


def _key_gradients(
    x: _Inputs, made: _Prepared, shape: SsdShape, chip: Chip, dy: torch.Tensor, d_states: torch.Tensor
) -> tuple[torch.Tensor, torch.Tensor, tuple[torch.Tensor, ...]]:
    """Return dB, dC, and what ssd_step_gradients_kernel reads."""
    launches = ssd_launches(shape, chip)
    batch, n_tokens, heads, _ = x.x.shape
    groups, state_dim = x.B.shape[2:]
    _, n_chunks, _, _, chunk = made.factors.shape
    parts = launches.parts
    programs = n_chunks * groups * parts
    d_products = x.x.new_empty((batch, n_chunks, groups, parts, chunk, chunk))
    rows = made.factors.new_empty((batch, n_chunks, heads, 2, chunk))
    cols = made.factors.new_empty((launches.row_tiles, batch, n_chunks, heads, chunk))
    launches.products(
        (programs, launches.row_tiles, batch),
        (x.x, dy, made.products, made.factors, x.starts, d_products, rows, cols),
        x.strides("x"), n_tokens, n_chunks,
    )  # fmt: skip
    partial = (parts, batch, n_tokens, groups, state_dim)
    dtype = x.B.dtype if parts == 1 else torch.float32
    dc = torch.empty(partial, dtype=dtype, device=dy.device)
    db = torch.empty(partial, dtype=dtype, device=dy.device)
    reads = made.factors.new_empty((launches.key_tiles, batch, n_chunks, heads, chunk))
    writes = torch.empty_like(reads)
    carried = made.factors.new_empty((launches.key_tiles, batch, n_chunks, heads))
    grid = (programs, launches.key_tiles, batch)
    launches.reads(
        grid,
        (x.C, x.B, dy, d_products, made.factors, made.states, made.states, dc, reads, carried),
        (*x.strides("C", "B"), *dy.stride()[:3]), n_tokens, n_chunks,
    )  # fmt: skip
    launches.writes(
        grid,
        (x.B, x.C, x.x, d_products, made.factors, d_states, made.states, db, writes, carried),
        x.strides("B", "C", "x"), n_tokens, n_chunks,
    )  # fmt: skip
    db, dc = (t[0] if parts == 1 else t.sum(0).to(x.B.dtype) for t in (db, dc))
    return db, dc, (rows, cols, reads, writes, carried)


class _Ssd(torch.autograd.Function):
    @staticmethod
    def forward(ctx, shape, *inputs):
        x = _Inputs.of(*inputs)
        chip = chip_of(x.x.device)
        size = (x.x.shape[0], shape.heads, shape.state_dim, shape.head_dim) if shape.has_final else (0,)
        final_state = torch.empty(size, dtype=torch.float32, device=x.x.device)
        out, _ = _outputs(x, _prepare(x, shape, chip, final_state), shape, chip)
        ctx.save_for_backward(*inputs)
        ctx.shape = shape
        if not shape.has_final:
            ctx.mark_non_differentiable(final_state)
        return out, final_state

    @staticmethod
    @no_double_backward
    def backward(ctx, d_out, d_final):
        inputs = ctx.saved_tensors
        x = _Inputs.of(*inputs)
        shape = ctx.shape
        chip = chip_of(x.x.device)
        launches = ssd_launches(shape, chip)
        batch, n_tokens, heads, _ = x.x.shape
        d_out = d_out.contiguous()
        # without a gradient of the final state, the kernel that computes this state again need not store it
        made = _prepare(x, shape._replace(has_final=False), chip, x.x)
        n_chunks = made.states.shape[1]
        dy, dz = _outputs(x, made, shape, chip, d_out) if shape.has_z else (d_out, None)
        d_states, d_initial = _scan_back(x, made, shape, chip, dy, d_final)
        db, dc, sums = _key_gradients(x, made, shape, chip, dy, d_states)
        dx = x.x.new_empty(x.x.shape)
        columns = (x.D.shape[-1],) if shape.d_columns else ()
        partial_d = made.kept.new_empty((batch, n_chunks, heads, *columns) if shape.has_d else (0,))
        launches.inputs(
            (n_chunks * heads, batch, 1),
            (x.x, x.B, x.D, dy, made.products, made.factors, x.starts, d_states, dx, partial_d),
            x.strides("x", "B"), n_tokens, n_chunks,
        )  # fmt: skip
        d_dt = x.dt.new_empty(x.dt.shape)
        partial = made.kept.new_empty((2, batch, n_chunks, heads))
        launches.steps(
            (n_chunks * heads, batch, 1),
            (x.dt, x.dt_bias, x.A, x.starts, made.factors, made.kept, *sums, d_dt, partial),
            x.strides("dt"), n_tokens, n_chunks,
        )  # fmt: skip
        d_a, d_bias = partial.sum((1, 2))
        d_skip = partial_d.sum((0, 1)).to(x.D.dtype) if shape.has_d else None
        d_bias = d_bias.to(x.dt_bias.dtype) if shape.steps.has_bias else None
        return None, dx, d_dt, d_a.to(x.A.dtype), db, dc, d_skip, dz, d_bias, d_initial, None, None


def ssd(
    x: torch.Tensor,  # (B, T, H, P)
    dt: torch.Tensor,  # (B, T, H)
    A: torch.Tensor,  # (H,): negative
    B: torch.Tensor,  # (B, T, G, N), G divides H: neighbouring heads share a group
    C: torch.Tensor,  # (B, T, G, N)
    D: torch.Tensor | None = None,  # (H,) or (H, P)
    z: torch.Tensor | None = None,  # (B, T, H, P)
    dt_bias: torch.Tensor | None = None,  # (H,)
    *,
    dt_softplus: bool = False,
    dt_limit: tuple[float, float] = NO_LIMIT,
    documents: Documents | None = None,
) -> torch.Tensor:  # (B, T, H, P) contiguous
    """Compute the recurrence of Mamba 2 for each row, from a state of zeros. Deterministic.

    dt_softplus: softplus of dt + dt_bias, then limited by dt_limit. documents: of a packed row (B = 1); each starts
    from a state of zeros. Under autocast x, B, C and z are converted to its dtype. x, B, C and z are read without a
    copy if their last dimension has unit stride. The reference runs for heads and states wider than 256.

    Raises ValueError on mismatched shapes, dtypes or devices, TypeError for what is no tensor.
    """
    tensors = SsdTensors(x, dt, A, B, C, D, z, dt_bias)
    _check("ssd", tensors, dt_limit)
    if documents is not None and (x.shape[0] != 1 or any(places.shape != x.shape[1:2] for places in documents[:2])):
        raise ValueError(
            f"ssd: documents have starts {tuple(documents.starts.shape)} and x {tuple(x.shape)}; expected (T,) and "
            "(1, T, H, P)"
        )
    if x.numel() == 0:
        return x * _zero(*tensors[1:]).to(x.dtype)
    tensors = in_autocast(tensors)
    if not tiles.runs_ssd_kernels(tensors.x, B.shape[-1]):
        options = {"dt_softplus": dt_softplus, "dt_limit": dt_limit, "documents": documents}
        with without_autocast(x.device):
            return ssd_reference(*tensors, **options)[0]
    steps = StepOptions(dt_bias is not None, dt_softplus, tuple(dt_limit))
    shape = _shape(tensors, steps)._replace(has_documents=documents is not None)
    starts, ends = (None, None) if documents is None else (places.contiguous() for places in documents[:2])
    out, _ = _Ssd.apply(shape, *readable(tensors), None, starts, ends)
    return out


def ssd_with_states(
    x: torch.Tensor,  # (B, T, H, P)
    dt: torch.Tensor,  # (B, T, H)
    A: torch.Tensor,  # (H,): negative
    B: torch.Tensor,  # (B, T, G, N)
    C: torch.Tensor,  # (B, T, G, N)
    D: torch.Tensor | None = None,  # (H,) or (H, P)
    z: torch.Tensor | None = None,  # (B, T, H, P)
    dt_bias: torch.Tensor | None = None,  # (H,)
    *,
    dt_softplus: bool = False,
    dt_limit: tuple[float, float] = NO_LIMIT,
    initial_state: torch.Tensor | None = None,  # (B, H, P, N)
) -> tuple[torch.Tensor, torch.Tensor]:  # (B, T, H, P) contiguous; (B, H, P, N) float32
    """Compute `ssd` from a state, or zeros, and the state after the last token; both have gradients."""
    tensors = SsdTensors(x, dt, A, B, C, D, z, dt_bias)
    _check("ssd_with_states", tensors, dt_limit)
    batch, _, heads, head_dim = x.shape
    size = (batch, heads, head_dim, B.shape[-1])
    if initial_state is not None:
        check_tensors("ssd_with_states", x=x, initial_state=initial_state)
        if initial_state.shape != size:
            raise ValueError(f"ssd_with_states: initial_state is {tuple(initial_state.shape)}; expected {size}")
    if x.numel() == 0:
        zero = _zero(*tensors)
        dtype = torch.promote_types(x.dtype, torch.float32)
        state = x.new_zeros(size, dtype=dtype) if initial_state is None else initial_state.to(dtype)
        return x * zero.to(x.dtype), state + zero.to(dtype)
    tensors = in_autocast(tensors)
    if not tiles.runs_ssd_kernels(tensors.x, B.shape[-1]):
        options = {"dt_softplus": dt_softplus, "dt_limit": dt_limit, "initial_state": initial_state}
        with without_autocast(x.device):
            return ssd_reference(*tensors, **options)
    steps = StepOptions(dt_bias is not None, dt_softplus, tuple(dt_limit))
    shape = _shape(tensors, steps)._replace(has_initial=initial_state is not None, has_final=True)
    initial = None if initial_state is None else initial_state.mT.contiguous()
    out, final_state = _Ssd.apply(shape, *readable(tensors), initial, None, None)
    return out, final_state.mT.contiguous()


def _check(op: str, tensors: SsdTensors, dt_limit: tuple[float, float]) -> None:
    check_ssd(op, tensors, dt_limit)
    if tensors.x.ndim != 4:
        raise ValueError(f"{op}: x is {tuple(tensors.x.shape)}; expected (B, T, H, P)")


def in_autocast(tensors: SsdTensors) -> SsdTensors:
    """Return the tensors with the wide ones in the dtype of autocast, where it is on."""
    x, B, C = autocast(tensors.x, tensors.B, tensors.C)
    z = None if tensors.z is None else tensors.z.to(x.dtype)
    return tensors._replace(x=x, B=B, C=C, z=z)


def _zero(*tensors: torch.Tensor | None) -> torch.Tensor:
    """Return 0 with gradients for all tensors, some of which have no elements."""
    return sum(t.sum() * 0 for t in tensors if t is not None)


def _shape(tensors: SsdTensors, steps: StepOptions) -> SsdShape:
    heads, head_dim = tensors.x.shape[2:]
    groups, state_dim = tensors.B.shape[2:]
    has_d = tensors.D is not None
    return SsdShape(
        heads,
        heads // groups,
        head_dim,
        state_dim,
        tensors.x.dtype,
        steps,
        has_d,
        d_columns=has_d and tensors.D.ndim == 2,
        has_z=tensors.z is not None,
    )


def readable(tensors: SsdTensors) -> SsdTensors:
    """Return the tensors as kernels read them: wide ones with unit column stride, those of heads contiguous."""
    x, dt, A, B, C, D, z, dt_bias = tensors
    x, B, C, z = (t if t is None or t.stride(-1) == 1 else t.contiguous() for t in (x, B, C, z))
    A, D, dt_bias = (None if t is None else t.contiguous() for t in (A, D, dt_bias))
    return SsdTensors(x, dt, A, B, C, D, z, dt_bias)
