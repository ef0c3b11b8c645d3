"""Rows that have a label, found on the host while a batch is made; linear_cross_entropy computes only these.

On the device their number would be known only there, and the host would have to wait for it before each launch.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch

from ligertune_kernels.autograd import no_double_backward

MULTIPLE_OF = 16  # rows: suits matrix products, and fewer distinct sizes need fewer plans


def labelled_rows(
    labels: torch.Tensor,  # (..., T), on the CPU
    *,
    ignore_index: int = -100,
    shift: int | Sequence[int] = 0,
    multiple_of: int = MULTIPLE_OF,
) -> torch.Tensor:  # (M,)
    """Return the rows, as indices into the flattened labels, that linear_cross_entropy has to compute.

    shift: labels are those of the tokens themselves, as in a batch, and row t predicts label t + shift of its sequence.
    With several shifts, one for each head, a row is returned if it predicts any label. Rows without a label fill M up
    to a multiple where there are enough rows. Raises ValueError if the labels are not on the CPU.
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
    """Return t[rows] of distinct rows. The backward copies the gradient, where indexing would accumulate it."""
    return _TakeRows.apply(t, rows)


def scatter_rows(values: torch.Tensor, rows: torch.Tensor, n: int) -> torch.Tensor:
    """Return values (M,) at their rows of (n,), with zeros elsewhere."""
    return values.new_zeros(n).index_copy(0, rows, values)
