"""What each head is to predict, and how many such predictions there are.

Labels shift and hidden states do not: the target of a head with shift s (head k: k + 1; the model's own head: 1) at
position t is label[t + s], if that is trained and belongs to the document of t. Whether t itself is trained does not
matter: a prompt's last tokens look ahead into the answer.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor

IGNORE_INDEX = -100


def shifts(num_heads: int, *, with_model: bool) -> tuple[int, ...]:
    """How far ahead each predicts: the model's own head first, where it trains too."""
    return tuple(range(1 if with_model else 2, num_heads + 2))


def shifted_targets(labels: Tensor, position_ids: Tensor | None, shifts: Sequence[int]) -> Tensor:
    """labels (B, T), not shifted -> targets (S, B, T).

    position_ids (B, T) count from 0 in each document of a packed row: s places on is the same document if and only if
    the position there is s higher. Without them a row is one document.
    """
    columns = []
    for shift in shifts:
        target = _ahead(labels, shift, fill=IGNORE_INDEX)
        if position_ids is not None:
            same = _ahead(position_ids, shift, fill=-1) == position_ids + shift
            target = target.masked_fill(~same, IGNORE_INDEX)
        columns.append(target)
    return torch.stack(columns)


def _ahead(values: Tensor, shift: int, *, fill: int) -> Tensor:
    """values (B, T) from `shift` places on, filled up at the end."""
    return F.pad(values[:, shift:], (0, min(shift, values.shape[1])), value=fill)


def count_targets(
    labels: Sequence[np.ndarray], trained: Sequence[int] | np.ndarray, shifts: Sequence[int]
) -> list[int]:
    """How many targets each shift has in examples that are documents of their own.

    labels: those of each example; trained: how many of them are trained, the first never counted. Only the first few
    labels are read: shift s has no target for those before place s.
    """
    counts = np.full(len(shifts), int(np.sum(trained)), dtype=np.int64)
    furthest = max(shifts)
    for row in labels:
        head = np.asarray(row[1:furthest]) != IGNORE_INDEX
        missed = np.concatenate([[0], np.cumsum(head)])  # trained among places 1 .. i
        counts -= missed[[min(shift - 1, len(head)) for shift in shifts]]
    return counts.tolist()
