"""What an argument must be before an op may write over it, as `inplace=True` allows.

Where it may not be written over, the op makes new tensors: the results are the same, only the memory is not saved.
"""

from __future__ import annotations

from itertools import pairwise

import torch


def is_someones_leaf(t: torch.Tensor) -> bool:
    """Is it, or does it view, a tensor whose gradient is kept beside its values (a parameter)?"""
    whole = t._base if t._is_view() else t
    return whole.requires_grad and whole.is_leaf


def span(t: torch.Tensor) -> int | None:
    """How many elements lie from its first to its last in memory; None where some share their memory."""
    if t.is_contiguous():
        return t.numel()
    reach = 1
    for stride, size in sorted(zip(t.stride(), t.shape, strict=True)):
        if size > 1:
            if stride < reach:
                return None
            reach += stride * (size - 1)
    return reach


def share_storage(a: torch.Tensor, b: torch.Tensor) -> bool:
    return a.untyped_storage().data_ptr() == b.untyped_storage().data_ptr()


def are_apart(a: torch.Tensor, b: torch.Tensor) -> bool:
    """Has every element of a and b (..., F), of one shape, memory of its own? No, too, where that is hard to say."""
    reach = span(a)
    if reach is None or span(b) is None:
        return False
    if not share_storage(a, b):
        return True
    distance = abs(a.storage_offset() - b.storage_offset())
    if a.stride() != b.stride() or distance >= reach:
        return a.stride() == b.stride()
    # The halves of a packed projection: rows beside each other, within what one row of both takes.
    outer = list(zip(a.stride(), a.shape, strict=True))[:-1]
    nested = all(after * size <= before for (before, _), (after, size) in pairwise(outer))
    width = a.shape[-1]
    return bool(outer) and nested and a.stride(-1) == 1 and width <= distance and distance + width <= outer[-1][0]
