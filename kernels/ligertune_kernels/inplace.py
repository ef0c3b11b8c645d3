"""In-place rules: which tensors an op may overwrite where the caller allows it with `inplace=True`.

Where a rule forbids it, the op allocates new tensors: the results are the same and no memory is saved.
"""

from __future__ import annotations

from itertools import pairwise

import torch


def base_of(t: torch.Tensor) -> torch.Tensor:
    """Return the tensor that t views, or t itself."""
    return t._base if t._is_view() else t


def is_trainable_leaf(t: torch.Tensor) -> bool:
    """Return whether t is, or is a view of, a leaf that requires a gradient (a parameter)."""
    return base_of(t).requires_grad and base_of(t).is_leaf


def memory_extent(t: torch.Tensor) -> int | None:
    """Return the number of elements from t's first to its last in memory; None where t's elements overlap."""
    if t.is_contiguous():
        return t.numel()
    extent = 1
    for stride, size in sorted(zip(t.stride(), t.shape, strict=True)):
        if size > 1:
            if stride < extent:
                return None
            extent += stride * (size - 1)
    return extent


def share_storage(a: torch.Tensor, b: torch.Tensor) -> bool:
    """Return whether two tensors lie in the same allocation."""
    return a.untyped_storage().data_ptr() == b.untyped_storage().data_ptr()


def are_disjoint(a: torch.Tensor, b: torch.Tensor) -> bool:
    """Return whether no element of a and b (..., F), of one shape, shares memory; False also where this is unclear."""
    extent = memory_extent(a)
    if extent is None or memory_extent(b) is None:
        return False
    if not share_storage(a, b):
        return True
    distance = abs(a.storage_offset() - b.storage_offset())
    if a.stride() != b.stride() or distance >= extent:
        return a.stride() == b.stride()
    # Halves of a packed projection: rows interleave, and one row of both fits between two rows of either.
    outer = list(zip(a.stride(), a.shape, strict=True))[:-1]
    nested = all(after * size <= before for (before, _), (after, size) in pairwise(outer))
    width = a.shape[-1]
    return bool(outer) and nested and a.stride(-1) == 1 and width <= distance and distance + width <= outer[-1][0]


def owns_its_memory(t: torch.Tensor, *, needs_grad: bool) -> bool:
    """Return whether t's elements do not overlap and, where a gradient is needed, t is all of a non-leaf tensor."""
    extent = memory_extent(t)
    if not needs_grad:
        return extent is not None
    # raise_in_backward replaces the history of the whole tensor that t views.
    covers = extent == t.numel() == base_of(t).numel()
    return covers and t.requires_grad and not t.is_leaf and not is_trainable_leaf(t)


class _Overwritten(torch.autograd.Function):
    @staticmethod
    def forward(ctx, message, *overwritten):
        ctx.message = message
        ctx.mark_dirty(*overwritten)
        return overwritten

    @staticmethod
    def backward(ctx, *_):
        raise RuntimeError(ctx.message)


def raise_in_backward(message: str, *overwritten: torch.Tensor) -> None:
    """Replace the history of overwritten tensors, in place: a gradient that reaches them raises RuntimeError."""
    _Overwritten.apply(message, *overwritten)
