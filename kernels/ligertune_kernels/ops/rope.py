r"""Rotary position embedding of queries q (B, H, T, D) and keys k (B, K, T, D) in one launch.

The first R = rotary_dim columns of every head are rotated in pairs (lo, hi), the rest passes through:

    y_lo = x_lo cos_lo - x_hi sin_lo        y_hi = x_hi cos_hi + x_lo sin_hi

    half-split    lo = i,  hi = i + R/2     (Llama and most others: q cos + rotate_half(q) sin)
    interleaved   lo = 2i, hi = 2i + 1      (GPT-J, Cohere, DeepSeek)

Backward is the transpose of each 2×2 matrix: the same with sin_lo → -sin_hi and sin_hi → -sin_lo; where both columns
of a pair hold one angle, as in every model, that is the rotation by the opposite angle.

One program turns one token: its cosines are read once for all heads. Arithmetic in fp32, one rounding at the end.

With `inplace` q and k are turned where they lie and the results are new tensors on that memory; the graph behind q
and k stays as it is. What was to read q or k unturned cannot: their version counters move on, and where a gradient
is needed they themselves (all tensors on their memory) become the output of a node whose backward raises. The backward
always writes new tensors: a gradient that comes in belongs to autograd, which hands one tensor to several branches
(both sides of a sum, a hook, the caller's grad_outputs), and nothing tells whether this one is still wanted.
"""

from __future__ import annotations

import torch
from torch.autograd.function import once_differentiable

from ligertune_kernels.launch import chip_of, on_device, options, runs_triton, tl, triton
from ligertune_kernels.ops.overwriting import is_someones_leaf, share_storage, span

TILE = 4096  # elements of one half that a program turns at once: 64 heads of 128; more heads take more turns


def apply_rope_reference(
    q: torch.Tensor,
    k: torch.Tensor,
    cos: torch.Tensor,
    sin: torch.Tensor,
    position_ids: torch.Tensor | None = None,
    *,
    interleaved: bool = False,
    rotary_dim: int | None = None,
) -> tuple[torch.Tensor, torch.Tensor]:
    """The same in plain torch."""
    rotary_dim = cos.shape[-1] if rotary_dim is None else rotary_dim
    wide = torch.promote_types(q.dtype, torch.float32)
    if position_ids is not None:
        cos, sin = cos[position_ids], sin[position_ids]
    cos, sin = cos.to(wide).unsqueeze(1), sin.to(wide).unsqueeze(1)  # (B or 1, 1, T, R)

    def rotate(x: torch.Tensor) -> torch.Tensor:
        turned, rest = x[..., :rotary_dim].to(wide), x[..., rotary_dim:]
        if interleaved:
            other = torch.stack((-turned[..., 1::2], turned[..., ::2]), dim=-1).flatten(-2)
        else:
            other = torch.cat((-turned[..., rotary_dim // 2 :], turned[..., : rotary_dim // 2]), dim=-1)
        return torch.cat(((turned * cos + other * sin).to(x.dtype), rest), dim=-1)

    return rotate(q), rotate(k)


@triton.jit
def _rotate_heads(
    x_ptr,
    y_ptr,
    x_head_stride,
    x_col_stride,
    y_head_stride,
    y_col_stride,
    n_heads,
    cos_lo,
    cos_hi,
    sin_lo,
    sin_hi,
    pairs,
    n_pairs,
    head_dim,
    PAIR_STEP: tl.constexpr,
    PAIR_DISTANCE: tl.constexpr,
    ROTARY_DIM: tl.constexpr,
    HEADS: tl.constexpr,
    REST: tl.constexpr,
):
    """All heads of one token, HEADS at a time."""
    lo = pairs[None, :] * PAIR_STEP
    hi = lo + PAIR_DISTANCE
    for start in range(0, n_heads, HEADS):
        heads = (start + tl.arange(0, HEADS))[:, None].to(tl.int64)
        mask = (heads < n_heads) & (pairs < n_pairs)[None, :]
        x_heads, y_heads = x_ptr + heads * x_head_stride, y_ptr + heads * y_head_stride
        x_lo = tl.load(x_heads + lo * x_col_stride, mask=mask, other=0.0).to(tl.float32)
        x_hi = tl.load(x_heads + hi * x_col_stride, mask=mask, other=0.0).to(tl.float32)
        y_lo = x_lo * cos_lo - x_hi * sin_lo
        y_hi = x_hi * cos_hi + x_lo * sin_hi
        tl.store(y_heads + lo * y_col_stride, y_lo.to(y_ptr.dtype.element_ty), mask=mask)
        tl.store(y_heads + hi * y_col_stride, y_hi.to(y_ptr.dtype.element_ty), mask=mask)
        if REST > 0:
            cols = ROTARY_DIM + tl.arange(0, REST)[None, :]
            rest_mask = (heads < n_heads) & (cols < head_dim)
            rest = tl.load(x_heads + cols * x_col_stride, mask=rest_mask)
            tl.store(y_heads + cols * y_col_stride, rest, mask=rest_mask)


@triton.jit(do_not_specialize=["n_tokens", "n_positions"])
def _rope_kernel(
    q_ptr,
    k_ptr,
    q_out_ptr,
    k_out_ptr,
    cos_ptr,
    sin_ptr,
    position_ids_ptr,
    q_batch_stride,
    q_head_stride,
    q_token_stride,
    q_col_stride,
    k_batch_stride,
    k_head_stride,
    k_token_stride,
    k_col_stride,
    q_out_batch_stride,
    q_out_head_stride,
    q_out_token_stride,
    q_out_col_stride,
    k_out_batch_stride,
    k_out_head_stride,
    k_out_token_stride,
    k_out_col_stride,
    cos_batch_stride,
    cos_token_stride,
    n_q_heads,
    n_k_heads,
    n_tokens,
    n_positions,
    head_dim,
    HAS_POSITIONS: tl.constexpr,
    BACKWARD: tl.constexpr,
    PAIR_STEP: tl.constexpr,
    PAIR_DISTANCE: tl.constexpr,
    ROTARY_DIM: tl.constexpr,
    PAIRS: tl.constexpr,
    Q_HEADS: tl.constexpr,
    K_HEADS: tl.constexpr,
    REST: tl.constexpr,
):
    batch = (tl.program_id(0) // n_tokens).to(tl.int64)
    token = (tl.program_id(0) % n_tokens).to(tl.int64)
    n_pairs = ROTARY_DIM // 2
    pairs = tl.arange(0, PAIRS)
    mask = pairs < n_pairs
    angle = batch * cos_batch_stride + token * cos_token_stride
    if HAS_POSITIONS:
        position = tl.load(position_ids_ptr + tl.program_id(0).to(tl.int64)).to(tl.int64)
        mask = mask & (position >= 0) & (position < n_positions)
        angle = position * cos_token_stride
    lo = angle + pairs * PAIR_STEP
    hi = lo + PAIR_DISTANCE
    # A position outside of the table reads nothing and gives NaN.
    cos_lo = tl.load(cos_ptr + lo, mask=mask, other=float("nan")).to(tl.float32)[None, :]
    cos_hi = tl.load(cos_ptr + hi, mask=mask, other=float("nan")).to(tl.float32)[None, :]
    sin_lo = tl.load(sin_ptr + lo, mask=mask, other=float("nan")).to(tl.float32)[None, :]
    sin_hi = tl.load(sin_ptr + hi, mask=mask, other=float("nan")).to(tl.float32)[None, :]
    if BACKWARD:
        turned_lo, turned_hi = -sin_hi, -sin_lo
    else:
        turned_lo, turned_hi = sin_lo, sin_hi
    _rotate_heads(
        q_ptr + batch * q_batch_stride + token * q_token_stride,
        q_out_ptr + batch * q_out_batch_stride + token * q_out_token_stride,
        q_head_stride, q_col_stride, q_out_head_stride, q_out_col_stride, n_q_heads,
        cos_lo, cos_hi, turned_lo, turned_hi, pairs, n_pairs, head_dim,
        PAIR_STEP, PAIR_DISTANCE, ROTARY_DIM, Q_HEADS, REST,
    )  # fmt: skip
    _rotate_heads(
        k_ptr + batch * k_batch_stride + token * k_token_stride,
        k_out_ptr + batch * k_out_batch_stride + token * k_out_token_stride,
        k_head_stride, k_col_stride, k_out_head_stride, k_out_col_stride, n_k_heads,
        cos_lo, cos_hi, turned_lo, turned_hi, pairs, n_pairs, head_dim,
        PAIR_STEP, PAIR_DISTANCE, ROTARY_DIM, K_HEADS, REST,
    )  # fmt: skip


def _rotate(
    q: torch.Tensor,
    k: torch.Tensor,
    cos: torch.Tensor,
    sin: torch.Tensor,
    position_ids: torch.Tensor | None,
    interleaved: bool,
    rotary_dim: int,
    *,
    backward: bool = False,
    inplace: bool = False,
) -> tuple[torch.Tensor, torch.Tensor]:
    """Both rotated, each laid out in memory as it came: a transposed projection (B, T, H, D) stays one."""
    (batch, n_q_heads, n_tokens, head_dim), n_k_heads = q.shape, k.shape[1]
    # In place every element is read and written by one thread, the reads first.
    q_out, k_out = (q.detach(), k.detach()) if inplace else (torch.empty_like(q), torch.empty_like(k))
    if cos.stride() != sin.stride() or cos.stride(-1) != 1:
        cos, sin = cos.contiguous(), sin.contiguous()
    if position_ids is not None:
        position_ids = position_ids.expand(batch, n_tokens).contiguous()
    n_pairs = triton.next_power_of_2(rotary_dim // 2)
    most_heads = max(1, TILE // n_pairs)
    q_heads, k_heads = (min(most_heads, triton.next_power_of_2(max(1, n))) for n in (n_q_heads, n_k_heads))
    rest = 0 if inplace else head_dim - rotary_dim
    with on_device(q):
        _rope_kernel[(batch * n_tokens,)](
            q, k, q_out, k_out, cos, sin, position_ids,
            *q.stride(), *k.stride(), *q_out.stride(), *k_out.stride(),
            cos.stride(0) if cos.shape[0] > 1 else 0, cos.stride(-2),
            n_q_heads, n_k_heads, n_tokens, cos.shape[-2], head_dim,
            HAS_POSITIONS=position_ids is not None, BACKWARD=backward,
            PAIR_STEP=2 if interleaved else 1, PAIR_DISTANCE=1 if interleaved else rotary_dim // 2,
            ROTARY_DIM=rotary_dim, PAIRS=n_pairs, Q_HEADS=q_heads, K_HEADS=k_heads,
            REST=triton.next_power_of_2(rest) if rest else 0,
            **options(max(q_heads, k_heads) * n_pairs, chip_of(q.device)),
        )  # fmt: skip
    if inplace:
        torch.autograd.graph.increment_version((q, k))
    return q_out, k_out


class _Rope(torch.autograd.Function):
    @staticmethod
    def forward(ctx, q, k, cos, sin, position_ids, interleaved, rotary_dim, inplace):
        ctx.save_for_backward(cos, sin, position_ids)
        ctx.interleaved, ctx.rotary_dim = interleaved, rotary_dim
        return _rotate(q, k, cos, sin, position_ids, interleaved, rotary_dim, inplace=inplace)

    @staticmethod
    @once_differentiable
    def backward(ctx, dq, dk):
        cos, sin, position_ids = ctx.saved_tensors
        # A gradient nobody asked for is still a tensor here; without its heads the launch passes it by.
        needs_dq, needs_dk = ctx.needs_input_grad[:2]
        dq, dk = (dq if needs_dq else dq[:, :0]), (dk if needs_dk else dk[:, :0])
        dq, dk = _rotate(dq, dk, cos, sin, position_ids, ctx.interleaved, ctx.rotary_dim, backward=True)
        return (dq if needs_dq else None), (dk if needs_dk else None), None, None, None, None, None, None


class _Overwritten(torch.autograd.Function):
    """Takes over the history of tensors that were written over: no gradient passes them any more."""

    @staticmethod
    def forward(ctx, *overwritten):
        ctx.mark_dirty(*overwritten)
        return overwritten

    @staticmethod
    def backward(ctx, *_):
        raise RuntimeError("apply_rope: q or k was read after it had been rotated in place; read what apply_rope gave")


def _may_overwrite(q: torch.Tensor, k: torch.Tensor, needs_grad: bool) -> bool:
    # torch.compile reuses memory itself; a dispatch mode (selective checkpointing) may keep a projection's output for
    # a second forward, through a tensor that has a version counter of its own.
    if torch.compiler.is_compiling() or torch._C._len_torch_dispatch_stack():
        return False
    return not share_storage(q, k) and all(_is_alone_in_memory(t, needs_grad) for t in (q, k))


def _is_alone_in_memory(t: torch.Tensor, needs_grad: bool) -> bool:
    """Has every element its own; and if it bears a gradient, is all that it views declared spent with it?"""
    reach = span(t)
    if not needs_grad:
        return reach is not None
    covers = reach == t.numel() == _whole(t).numel()
    return covers and t.requires_grad and not t.is_leaf and not is_someones_leaf(t)


def _whole(t: torch.Tensor) -> torch.Tensor:
    return t._base if t._is_view() else t


def apply_rope(
    q: torch.Tensor,
    k: torch.Tensor,
    cos: torch.Tensor,
    sin: torch.Tensor,
    position_ids: torch.Tensor | None = None,
    *,
    interleaved: bool = False,
    rotary_dim: int | None = None,
    inplace: bool = False,
) -> tuple[torch.Tensor, torch.Tensor]:
    """Rotates q (B, H, T, D) and k (B, K, T, D), of any strides, by the angles of cos and sin (B or 1, T, R).

    With position_ids (B, T), cos and sin are tables (S, R); a position outside of them is an error of the caller (on
    a GPU its token becomes NaN). rotary_dim R, by default all columns of cos, is the part of D that is turned. cos
    and sin get no gradient.

    inplace allows the results to lie where q and k lay. The caller must not read q and k again: autograd raises where
    a gradient would pass them afterwards, or if an earlier op kept them. New tensors are made all the same where q and
    k share a storage or repeat their elements, under torch.compile or a dispatch mode, and, if a gradient is needed,
    where one of the two needs none, is (a view of) a leaf, or views a part of a larger tensor (a split's output).
    """
    rotary_dim = cos.shape[-1] if rotary_dim is None else rotary_dim
    _check(q, k, cos, sin, position_ids, rotary_dim)
    if q.numel() == 0 or k.numel() == 0 or rotary_dim == 0 or not (runs_triton(q) and runs_triton(k)):
        return apply_rope_reference(q, k, cos, sin, position_ids, interleaved=interleaved, rotary_dim=rotary_dim)
    needs_grad = torch.is_grad_enabled() and (q.requires_grad or k.requires_grad)
    inplace = inplace and _may_overwrite(q, k, needs_grad)
    if not needs_grad:
        return _rotate(q, k, cos, sin, position_ids, interleaved, rotary_dim, inplace=inplace)
    rotated = _Rope.apply(q, k, cos, sin, position_ids, interleaved, rotary_dim, inplace)
    if inplace:
        _Overwritten.apply(_whole(q), _whole(k))
    return rotated


def _check(
    q: torch.Tensor,
    k: torch.Tensor,
    cos: torch.Tensor,
    sin: torch.Tensor,
    position_ids: torch.Tensor | None,
    rotary_dim: int,
) -> None:
    batch, _, n_tokens, head_dim = q.shape
    if (k.shape[0], *k.shape[2:]) != (batch, n_tokens, head_dim):
        raise ValueError(f"apply_rope: q is {tuple(q.shape)} and k {tuple(k.shape)}: only their heads may differ")
    if cos.shape != sin.shape or cos.shape[-1] != rotary_dim:
        raise ValueError(f"apply_rope: cos is {tuple(cos.shape)}, sin {tuple(sin.shape)}; rotary_dim is {rotary_dim}")
    if rotary_dim > head_dim or rotary_dim % 2:
        raise ValueError(f"apply_rope: rotary_dim is {rotary_dim}; expected an even number up to {head_dim}")
    if position_ids is None and (cos.dim() != 3 or cos.shape[0] not in (1, batch) or cos.shape[1] != n_tokens):
        raise ValueError(f"apply_rope: cos is {tuple(cos.shape)}; expected ({batch} or 1, {n_tokens}, {rotary_dim})")
    if position_ids is not None and cos.dim() != 2:
        raise ValueError(f"apply_rope: with position_ids, cos is a table (S, R), not {tuple(cos.shape)}")
    if torch.is_grad_enabled() and (cos.requires_grad or sin.requires_grad):
        raise ValueError("apply_rope: cos and sin get no gradient here; detach them")
