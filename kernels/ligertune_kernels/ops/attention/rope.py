r"""Rotary position embedding (RoPE) of queries q (B, H, T, D) and keys k (B, K, T, D) in one launch, or of q alone.

The first R = rotary_dim columns of every head are rotated in pairs (lo, hi); the other columns are copied:

    y_lo = x_lo cos_lo - x_hi sin_lo        y_hi = x_hi cos_hi + x_lo sin_hi

    half-split    lo = i,  hi = i + R/2     (Llama and most others: q cos + rotate_half(q) sin)
    interleaved   lo = 2i, hi = 2i + 1      (GPT-J, Cohere, DeepSeek)
    deinterleaved: x as interleaved, y as half-split (latent attention of DeepSeek V3)

cos and sin have a column for each column of x, or one for each pair.

The backward applies the transpose of each 2×2 matrix: the same formula with sin_lo → -sin_hi and sin_hi → -sin_lo.
Where both columns of a pair hold one angle, as in every model, this is the rotation by the opposite angle.

Everything is computed in fp32 and rounded once. A program rotates a few heads of a few tokens, of q or of k.
"""

from __future__ import annotations

from typing import NamedTuple

import torch

from ligertune_kernels.autograd import no_double_backward
from ligertune_kernels.chips import Chip, launch_options
from ligertune_kernels.launcher import Launcher, cached, chip_of, runs_triton, tl, triton
from ligertune_kernels.ops.attention.tiles import ROPE_PAIRS, power_of_2, rope_tile


class RopeLayout(NamedTuple):
    """Which columns of a head are a pair, and how many are rotated."""

    interleaved: bool
    deinterleave: bool
    rotary_dim: int


class RopeCall(NamedTuple):
    """Key of a launch."""

    n_q_heads: int
    n_k_heads: int
    head_dim: int
    layout: RopeLayout
    batched: bool
    has_positions: bool
    column_per_pair: bool
    backward: bool


def apply_rope_reference(
    q: torch.Tensor,
    k: torch.Tensor | None,
    cos: torch.Tensor,
    sin: torch.Tensor,
    position_ids: torch.Tensor | None = None,
    *,
    interleaved: bool = False,
    deinterleave: bool = False,
    rotary_dim: int | None = None,
) -> tuple[torch.Tensor, torch.Tensor | None]:
    """Compute `apply_rope` in plain torch."""
    rotary_dim = cos.shape[-1] if rotary_dim is None else rotary_dim
    wide = torch.promote_types(q.dtype, torch.float32)
    if position_ids is not None:
        cos = cos[position_ids]
        sin = sin[position_ids]
    if cos.shape[-1] < rotary_dim:
        cos, sin = (t.repeat_interleave(2, -1) if interleaved else torch.cat((t, t), -1) for t in (cos, sin))
    cos = cos.to(wide).unsqueeze(1)  # (B or 1, 1, T, R)
    sin = sin.to(wide).unsqueeze(1)

    def rotate(x: torch.Tensor) -> torch.Tensor:
        rotated = x[..., :rotary_dim].to(wide)
        rest = x[..., rotary_dim:]
        if interleaved:
            other = torch.stack((-rotated[..., 1::2], rotated[..., ::2]), dim=-1).flatten(-2)
        else:
            other = torch.cat((-rotated[..., rotary_dim // 2 :], rotated[..., : rotary_dim // 2]), dim=-1)
        y = rotated * cos + other * sin
        y = torch.cat((y[..., ::2], y[..., 1::2]), dim=-1) if deinterleave else y
        return torch.cat((y.to(x.dtype), rest), dim=-1)

    return rotate(q), None if k is None else rotate(k)


@triton.jit
def _load_pairs(
    ptrs, col_stride, mask, other, PAIRS: tl.constexpr, ROTARY_DIM: tl.constexpr, INTERLEAVED: tl.constexpr
):
    """Return lo and hi of every pair, (TOKENS, HEADS, PAIRS) fp32; interleaved pairs are loaded as one row."""
    if INTERLEAVED:
        cols = tl.arange(0, 2 * PAIRS)[None, None, :].to(tl.int64)
        row = tl.load(ptrs + cols * col_stride, mask=mask & (cols < ROTARY_DIM), other=other)
        lo, hi = tl.split(tl.reshape(row, (row.shape[0], row.shape[1], PAIRS, 2)))
    else:
        cols = tl.arange(0, PAIRS)[None, None, :].to(tl.int64)
        mask = mask & (cols < ROTARY_DIM // 2)
        lo = tl.load(ptrs + cols * col_stride, mask=mask, other=other)
        hi = tl.load(ptrs + (cols + ROTARY_DIM // 2) * col_stride, mask=mask, other=other)
    return lo.to(tl.float32), hi.to(tl.float32)


@triton.jit
def _load_angles(
    ptrs, col_stride, mask, PAIRS: tl.constexpr, ROTARY_DIM: tl.constexpr, INTERLEAVED: tl.constexpr,
    COLUMN_PER_PAIR: tl.constexpr,
):  # fmt: skip
    """Return cos or sin of lo and hi. What is masked becomes NaN."""
    if COLUMN_PER_PAIR:
        cols = tl.arange(0, PAIRS)[None, None, :].to(tl.int64)
        mask = mask & (cols < ROTARY_DIM // 2)
        both = tl.load(ptrs + cols * col_stride, mask=mask, other=float("nan")).to(tl.float32)
        return both, both
    else:
        return _load_pairs(ptrs, col_stride, mask, float("nan"), PAIRS, ROTARY_DIM, INTERLEAVED)


@triton.jit
def _store_pairs(
    ptrs, col_stride, mask, lo, hi, PAIRS: tl.constexpr, ROTARY_DIM: tl.constexpr, INTERLEAVED: tl.constexpr
):
    """Store lo and hi of every pair, the reverse of _load_pairs."""
    if INTERLEAVED:
        cols = tl.arange(0, 2 * PAIRS)[None, None, :].to(tl.int64)
        row = tl.reshape(tl.join(lo, hi), (lo.shape[0], lo.shape[1], 2 * PAIRS))
        tl.store(ptrs + cols * col_stride, row, mask=mask & (cols < ROTARY_DIM))
    else:
        cols = tl.arange(0, PAIRS)[None, None, :].to(tl.int64)
        mask = mask & (cols < ROTARY_DIM // 2)
        tl.store(ptrs + cols * col_stride, lo, mask=mask)
        tl.store(ptrs + (cols + ROTARY_DIM // 2) * col_stride, hi, mask=mask)


@triton.jit
def _rotate_tile(
    x_ptr, y_ptr, x_batch_stride, x_head_stride, x_token_stride, x_col_stride,
    y_batch_stride, y_head_stride, y_token_stride, y_col_stride,
    cos_ptr, sin_ptr, position_ids_ptr, cos_batch_stride, cos_token_stride, cos_col_stride,
    first_row, first_head, n_heads, n_rows, n_tokens, n_positions, head_dim,
    BATCHED: tl.constexpr, HAS_POSITIONS: tl.constexpr, BACKWARD: tl.constexpr, INTERLEAVED: tl.constexpr,
    DEINTERLEAVE: tl.constexpr, COLUMN_PER_PAIR: tl.constexpr, ROTARY_DIM: tl.constexpr, PAIRS: tl.constexpr,
    REST: tl.constexpr, TOKENS: tl.constexpr, HEADS: tl.constexpr,
):  # fmt: skip
    """Rotate HEADS heads of TOKENS tokens, counted through all sequences."""
    X_INTERLEAVED: tl.constexpr = INTERLEAVED and not (DEINTERLEAVE and BACKWARD)
    Y_INTERLEAVED: tl.constexpr = INTERLEAVED and (BACKWARD or not DEINTERLEAVE)
    rows = first_row + tl.arange(0, TOKENS)[:, None, None]
    in_range = tl.arange(0, TOKENS)[:, None, None] < n_rows - first_row  # rows may overflow int32 past the last token
    heads = (first_head + tl.arange(0, HEADS)[None, :, None]).to(tl.int64)
    mask = in_range & (heads < n_heads)
    if BATCHED:
        batch = (rows // n_tokens).to(tl.int64)
        token = (rows % n_tokens).to(tl.int64)
    else:
        batch = 0
        token = rows.to(tl.int64)
    x_ptrs = x_ptr + batch * x_batch_stride + token * x_token_stride + heads * x_head_stride
    y_ptrs = y_ptr + batch * y_batch_stride + token * y_token_stride + heads * y_head_stride
    angle = batch * cos_batch_stride + token * cos_token_stride
    x_lo, x_hi = _load_pairs(x_ptrs, x_col_stride, mask, 0.0, PAIRS, ROTARY_DIM, X_INTERLEAVED)
    if REST > 0:
        cols = ROTARY_DIM + tl.arange(0, REST)[None, None, :].to(tl.int64)
        rest = tl.load(x_ptrs + cols * x_col_stride, mask=mask & (cols < head_dim))
    if HAS_POSITIONS:
        position = tl.load(position_ids_ptr + rows.to(tl.int64), mask=in_range, other=0).to(tl.int64)
        angle = position * cos_token_stride
        in_range = in_range & (position >= 0) & (position < n_positions)
    # A position outside the table loads nothing and gives NaN.
    cos_ptrs = cos_ptr + angle
    sin_ptrs = sin_ptr + angle
    cos_lo, cos_hi = _load_angles(cos_ptrs, cos_col_stride, in_range, PAIRS, ROTARY_DIM, INTERLEAVED, COLUMN_PER_PAIR)
    sin_lo, sin_hi = _load_angles(sin_ptrs, cos_col_stride, in_range, PAIRS, ROTARY_DIM, INTERLEAVED, COLUMN_PER_PAIR)
    if BACKWARD:
        sin_lo, sin_hi = -sin_hi, -sin_lo
    y_lo = (x_lo * cos_lo - x_hi * sin_lo).to(y_ptr.dtype.element_ty)
    y_hi = (x_hi * cos_hi + x_lo * sin_hi).to(y_ptr.dtype.element_ty)
    _store_pairs(y_ptrs, y_col_stride, mask, y_lo, y_hi, PAIRS, ROTARY_DIM, Y_INTERLEAVED)
    if REST > 0:
        tl.store(y_ptrs + cols * y_col_stride, rest, mask=mask & (cols < head_dim))


@triton.jit(do_not_specialize=["n_rows", "n_tokens", "n_positions"])
def _rope_kernel(
    q_ptr,  # (B, H, T, D)
    k_ptr,  # (B, K, T, D)
    q_out_ptr, k_out_ptr,  # as q and k
    cos_ptr, sin_ptr,  # (B or 1, T, R), or tables (S, R); R/2 with COLUMN_PER_PAIR
    position_ids_ptr,  # (B, T)
    q_batch_stride, q_head_stride, q_token_stride, q_col_stride,
    k_batch_stride, k_head_stride, k_token_stride, k_col_stride,
    q_out_batch_stride, q_out_head_stride, q_out_token_stride, q_out_col_stride,
    k_out_batch_stride, k_out_head_stride, k_out_token_stride, k_out_col_stride,
    cos_batch_stride, cos_token_stride, cos_col_stride, head_dim,
    n_rows, n_tokens, n_positions,
    BATCHED: tl.constexpr, HAS_POSITIONS: tl.constexpr, BACKWARD: tl.constexpr, INTERLEAVED: tl.constexpr,
    DEINTERLEAVE: tl.constexpr, COLUMN_PER_PAIR: tl.constexpr, ROTARY_DIM: tl.constexpr, PAIRS: tl.constexpr,
    REST: tl.constexpr, GROUP: tl.constexpr,
    N_Q_HEADS: tl.constexpr, N_K_HEADS: tl.constexpr,
    Q_TOKENS: tl.constexpr, K_TOKENS: tl.constexpr, Q_HEADS: tl.constexpr, K_HEADS: tl.constexpr,
):  # fmt: skip
    """Rotate one tile. Of the programs for GROUP tokens, [0, Q_PROGRAMS) rotate q and the others k."""
    Q_PROGRAMS: tl.constexpr = (N_Q_HEADS + Q_HEADS - 1) // Q_HEADS * (GROUP // Q_TOKENS)
    K_PROGRAMS: tl.constexpr = (N_K_HEADS + K_HEADS - 1) // K_HEADS * (GROUP // K_TOKENS)
    group = tl.program_id(0) // (Q_PROGRAMS + K_PROGRAMS) + 0 * n_rows  # int64 only for 2**31 tokens
    tile = tl.program_id(0) % (Q_PROGRAMS + K_PROGRAMS)
    if tile < Q_PROGRAMS:
        _rotate_tile(
            q_ptr, q_out_ptr, q_batch_stride, q_head_stride, q_token_stride, q_col_stride,
            q_out_batch_stride, q_out_head_stride, q_out_token_stride, q_out_col_stride,
            cos_ptr, sin_ptr, position_ids_ptr, cos_batch_stride, cos_token_stride, cos_col_stride,
            group * GROUP + tile % (GROUP // Q_TOKENS) * Q_TOKENS, tile // (GROUP // Q_TOKENS) * Q_HEADS,
            N_Q_HEADS, n_rows, n_tokens, n_positions, head_dim,
            BATCHED, HAS_POSITIONS, BACKWARD, INTERLEAVED, DEINTERLEAVE, COLUMN_PER_PAIR, ROTARY_DIM, PAIRS, REST,
            Q_TOKENS, Q_HEADS,
        )  # fmt: skip
    else:
        tile -= Q_PROGRAMS
        _rotate_tile(
            k_ptr, k_out_ptr, k_batch_stride, k_head_stride, k_token_stride, k_col_stride,
            k_out_batch_stride, k_out_head_stride, k_out_token_stride, k_out_col_stride,
            cos_ptr, sin_ptr, position_ids_ptr, cos_batch_stride, cos_token_stride, cos_col_stride,
            group * GROUP + tile % (GROUP // K_TOKENS) * K_TOKENS, tile // (GROUP // K_TOKENS) * K_HEADS,
            N_K_HEADS, n_rows, n_tokens, n_positions, head_dim,
            BATCHED, HAS_POSITIONS, BACKWARD, INTERLEAVED, DEINTERLEAVE, COLUMN_PER_PAIR, ROTARY_DIM, PAIRS, REST,
            K_TOKENS, K_HEADS,
        )  # fmt: skip


@cached
def _launch(call: RopeCall, chip: Chip) -> tuple[Launcher, int, int]:
    """Return the launcher, the tokens of a group of programs, and the programs of a group."""
    interleaved, deinterleave, rotary_dim = call.layout
    n_q_heads = call.n_q_heads
    n_k_heads = call.n_k_heads
    n_pairs = power_of_2(rotary_dim // 2)
    rest = power_of_2(call.head_dim - rotary_dim) if rotary_dim < call.head_dim else 0
    width = max(n_pairs, rest // 2)
    q_tokens, q_heads = rope_tile(n_q_heads or n_k_heads, width)  # without heads: as the other, for a group no larger
    k_tokens, k_heads = rope_tile(n_k_heads or n_q_heads, width)
    group = max(q_tokens, k_tokens)
    tile = q_tokens * q_heads * width
    q_programs = -(-n_q_heads // q_heads) * (group // q_tokens)
    k_programs = -(-n_k_heads // k_heads) * (group // k_tokens)
    constants = {
        "BATCHED": call.batched, "HAS_POSITIONS": call.has_positions, "BACKWARD": call.backward,
        "INTERLEAVED": interleaved, "DEINTERLEAVE": deinterleave, "COLUMN_PER_PAIR": call.column_per_pair,
        "ROTARY_DIM": rotary_dim, "PAIRS": n_pairs, "REST": rest, "GROUP": group,
        "N_Q_HEADS": n_q_heads, "N_K_HEADS": n_k_heads,
        "Q_TOKENS": q_tokens, "K_TOKENS": k_tokens, "Q_HEADS": q_heads, "K_HEADS": k_heads,
        # Half the warps of a tile of elements up to the usual size: 16 pairs per thread.
        **launch_options(tile // 2 if tile <= 2 * ROPE_PAIRS else tile, chip),
    }  # fmt: skip
    return Launcher(_rope_kernel, constants), group, q_programs + k_programs


def _rotate(
    q: torch.Tensor,
    k: torch.Tensor,
    cos: torch.Tensor,
    sin: torch.Tensor,
    position_ids: torch.Tensor | None,
    layout: RopeLayout,
    *,
    backward: bool = False,
) -> tuple[torch.Tensor, torch.Tensor]:
    """Rotate q and k. Results keep the inputs' memory layout: a transposed projection (B, T, H, D) stays transposed."""
    batch, n_q_heads, n_tokens, head_dim = q.shape
    q_out = torch.empty_like(q)
    k_out = torch.empty_like(k)
    if cos.stride() != sin.stride():
        cos = cos.contiguous()
        sin = sin.contiguous()
    has_positions = position_ids is not None
    batched = batch > 1
    position_ids = position_ids.expand(batch, n_tokens).contiguous() if has_positions else cos  # not read
    column_per_pair = cos.shape[-1] < layout.rotary_dim
    call = RopeCall(n_q_heads, k.shape[1], head_dim, layout, batched, has_positions, column_per_pair, backward)
    launch, group, programs = _launch(call, chip_of(q.device))
    tensors = q, k, q_out, k_out
    # The batch stride grows with the sequence; 0 for a batch of one keeps Triton from specialising on it.
    strides = [stride if batched or i else 0 for t in tensors for i, stride in enumerate(t.stride())]
    # The grid stays under 2**31: a program has at least 2048 pairs or a whole head.
    launch(
        (-(-batch * n_tokens // group) * programs, 1, 1), (*tensors, cos, sin, position_ids),
        (*strides, cos.stride(0) if cos.shape[0] > 1 else 0, cos.stride(-2), cos.stride(-1), head_dim),
        batch * n_tokens, n_tokens, cos.shape[-2],
    )  # fmt: skip
    return q_out, k_out


class _Rope(torch.autograd.Function):
    @staticmethod
    def forward(ctx, q, k, cos, sin, position_ids, layout):
        ctx.save_for_backward(cos, sin, position_ids)
        ctx.layout = layout
        return _rotate(q, k, cos, sin, position_ids, layout)

    @staticmethod
    @no_double_backward
    def backward(ctx, dq, dk):
        cos, sin, position_ids = ctx.saved_tensors
        # A gradient that is not needed is still passed as a tensor; with no heads left, no program reads it.
        needs_dq, needs_dk = ctx.needs_input_grad[:2]
        dq = dq if needs_dq else dq[:, :0]
        dk = dk if needs_dk else dk[:, :0]
        dq, dk = _rotate(dq, dk, cos, sin, position_ids, ctx.layout, backward=True)
        return (dq if needs_dq else None), (dk if needs_dk else None), *(None,) * 4


def apply_rope(
    q: torch.Tensor,  # (B, H, T, D), any strides
    k: torch.Tensor | None,  # (B, K, T, D), any strides; None: q alone is rotated
    cos: torch.Tensor,  # (B or 1, T, R), or with position_ids a table (S, R); any strides; R or R/2 columns
    sin: torch.Tensor,  # as cos
    position_ids: torch.Tensor | None = None,  # (B, T)
    *,
    interleaved: bool = False,
    deinterleave: bool = False,
    rotary_dim: int | None = None,
) -> tuple[torch.Tensor, torch.Tensor | None]:  # as q and k
    """Rotate q and k by the angles of cos and sin, which get no gradient (Su et al., arXiv:2104.09864).

    A position outside the table is a caller's error (on a GPU its token becomes NaN). rotary_dim R, by default all
    columns of cos, is how many columns of a head are rotated. cos and sin with R/2 columns have one for each pair.
    interleaved: columns 2i and 2i + 1 are a pair, otherwise i and i + R/2.
    deinterleave: the results have the columns 2i of interleaved pairs first, then the columns 2i + 1.

    Raises ValueError on mismatched shapes, deinterleave without interleaved, and cos or sin that require a gradient.
    """
    rotary_dim = cos.shape[-1] if rotary_dim is None else rotary_dim
    alone = k is None
    k = q.new_empty(q.shape[0], 0, *q.shape[2:]) if k is None else k  # no heads: no program reads it
    _check(q, k, cos, sin, position_ids, rotary_dim)
    if deinterleave and not interleaved:
        raise ValueError("apply_rope: deinterleave=True needs interleaved=True")
    layout = RopeLayout(interleaved, deinterleave, rotary_dim)
    if q.numel() == 0 or rotary_dim == 0 or not (runs_triton(q) and runs_triton(k)):
        options = {"interleaved": interleaved, "deinterleave": deinterleave, "rotary_dim": rotary_dim}
        rotated = apply_rope_reference(q, k, cos, sin, position_ids, **options)
    elif torch.is_grad_enabled() and (q.requires_grad or k.requires_grad):
        rotated = _Rope.apply(q, k, cos, sin, position_ids, layout)
    else:
        rotated = _rotate(q, k, cos, sin, position_ids, layout)
    return (rotated[0], None) if alone else rotated


def _check(
    q: torch.Tensor, k: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor, position_ids: torch.Tensor | None,
    rotary_dim: int,
) -> None:  # fmt: skip
    batch, _, n_tokens, head_dim = q.shape
    if (k.shape[0], *k.shape[2:]) != (batch, n_tokens, head_dim):
        raise ValueError(f"apply_rope: q is {tuple(q.shape)} and k {tuple(k.shape)}: only their heads may differ")
    if cos.shape != sin.shape or cos.shape[-1] not in (rotary_dim, rotary_dim / 2):
        raise ValueError(f"apply_rope: cos is {tuple(cos.shape)}, sin {tuple(sin.shape)}; rotary_dim is {rotary_dim}")
    if rotary_dim > head_dim or rotary_dim % 2:
        raise ValueError(f"apply_rope: rotary_dim is {rotary_dim}; expected an even number up to {head_dim}")
    if position_ids is None and (cos.dim() != 3 or cos.shape[0] not in (1, batch) or cos.shape[1] != n_tokens):
        raise ValueError(f"apply_rope: cos is {tuple(cos.shape)}; expected ({batch} or 1, {n_tokens}, {rotary_dim})")
    if position_ids is not None and cos.dim() != 2:
        raise ValueError(f"apply_rope: with position_ids, cos is a table (S, R), not {tuple(cos.shape)}")
    if torch.is_grad_enabled() and (cos.requires_grad or sin.requires_grad):
        raise ValueError("apply_rope: cos and sin get no gradient here; detach them")
