"""Which rows have a label, found on the host while a batch is made, so that the others never meet a matrix product.

On the device their number would be known there alone, and the host would have to wait for it before it could launch
anything of that many rows.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch

from ligertune_kernels.autograd import no_double_backward

MULTIPLE_OF = 16  # rows: matrix products like no other number, and fewer sizes are fewer plans


def labelled_rows(
    labels: torch.Tensor,
    *,
    ignore_index: int = -100,
    shift: int | Sequence[int] = 0,
    multiple_of: int = MULTIPLE_OF,
) -> torch.Tensor:
    """The rows (M,) of labels (..., T) on the CPU, counted over all of them, that linear_cross_entropy has to compute.

    With a shift the labels are those of the tokens themselves, as a batch holds them, and row t predicts the label
    t + shift of its sequence; with several shifts, as several heads have them, any of these labels. Rows without a
    label fill M up to a multiple, as far as there are any: they cost little and count nothing.
    """
    if labels.device.type != "cpu":
        raise ValueError(f"labelled_rows: labels are on {labels.device}; expected the CPU, or the host would wait")
    trained = labels != ignore_index
    shifts = (shift,) if isinstance(shift, int) else tuple(shift)
    ahead = [torch.nn.functional.pad(trained[..., s:], (0, min(s, labels.shape[-1]))) for s in shifts]
    has_label = torch.stack(ahead).any(0).reshape(-1)
    rows = has_label.nonzero().squeeze(1)
    missing = -len(rows) % multiple_of
    if missing and len(rows):
        rows = torch.cat([rows, (~has_label).nonzero().squeeze(1)[:missing]]).sort().values
    return rows


class _TakeRows(torch.autograd.Function):
    @staticmethod
    def forward(ctx, t, rows):
        ctx.save_for_backward(rows)
        ctx.shape = t.shape
        return t.index_select(0, rows)

    @staticmethod
    @no_double_backward
    def backward(ctx, dy):
        (rows,) = ctx.saved_tensors
        return dy.new_zeros(ctx.shape).index_copy_(0, rows, dy), None


def take_rows(t: torch.Tensor, rows: torch.Tensor) -> torch.Tensor:
    """t[rows] of rows that are all different: the gradient is copied to its place, not added up there."""
    return _TakeRows.apply(t, rows)


def spread(values: torch.Tensor, rows: torch.Tensor, n: int) -> torch.Tensor:
    """The inverse: values (M,) at their rows of (n,), zeros elsewhere."""
    return values.new_zeros(n).index_copy(0, rows, values)
