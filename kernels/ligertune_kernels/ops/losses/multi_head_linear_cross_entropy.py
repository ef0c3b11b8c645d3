r"""Weighted sum of the cross entropies of K heads over the same tokens, as in Medusa.

    L = sum_k c_k / n_k · sum_i loss(X_k[i] W_kᵀ, y_k[i])        n_k: number of labels of head k, or num_items_in_batch

With one weight for all heads, the rows of all heads go through the same chunks: each product is as tall as for one head
of K N rows, a frozen weight needs no dW, and the K parts of a trained one are summed before they are rounded. Each row
has c_k/n_k as its scale in the row pass.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import torch

from ligertune_kernels.autograd import without_autocast
from ligertune_kernels.ops.losses.kernels import LossOptions
from ligertune_kernels.ops.losses.labelled_rows import rows_to_take, scatter_rows
from ligertune_kernels.ops.losses.linear_chunks import Head, Targets, check_linear, empty_loss
from ligertune_kernels.ops.losses.linear_cross_entropy import (
    ChunkOptions,
    linear_cross_entropy,
    linear_cross_entropy_reference,
    summed_losses,
)
from ligertune_kernels.ops.losses.tiles import CHUNK_BYTES

NAME = "multi_head_linear_cross_entropy"
Heads = torch.Tensor | Sequence[torch.Tensor]


class MultiHeadLoss(NamedTuple):
    """The weighted sum, and the mean of each head without gradient."""

    loss: torch.Tensor  # ()
    head_losses: torch.Tensor  # (K,)


def multi_head_linear_cross_entropy_reference(
    hiddens: Heads,
    weight: Heads,
    labels: torch.Tensor,
    coefficients: Sequence[float],
    *,
    num_items_in_batch: Sequence[int] | torch.Tensor | None = None,
    **options: int | float | None,
) -> MultiHeadLoss:
    """Compute `multi_head_linear_cross_entropy` in plain torch with all logits, one head at a time."""
    counts = [None] * len(coefficients) if num_items_in_batch is None else num_items_in_batch
    weights = [weight] * len(coefficients) if _is_shared(weight) else weight
    losses = [
        linear_cross_entropy_reference(h, w, y, num_items_in_batch=n, **options)
        for h, w, y, n in zip(hiddens, weights, labels, counts, strict=True)
    ]
    return _weighted_sum(losses, coefficients)


def multi_head_linear_cross_entropy(
    hiddens: Heads,  # (K, ..., E), or K tensors (..., E)
    weight: Heads,  # (V, E) for all heads, or (K, V, E), or K tensors
    labels: torch.Tensor,  # (K, ...), shifted for each head
    coefficients: Sequence[float],  # (K,)
    *,
    num_items_in_batch: Sequence[int] | torch.Tensor | None = None,  # (K,)
    labelled_rows: torch.Tensor | None = None,  # (M,)
    skip_ignored: bool = True,
    chunk_bytes: int = CHUNK_BYTES,
    **options: int | float | None,
) -> MultiHeadLoss:
    """Return the sum of the heads' cross entropies times their coefficients, and the cross entropy of each head.

    num_items_in_batch replaces the number of labels of each head as the divisor. labelled_rows, from the function of
    that name, are indices into the rows of all K heads; without them, rows with a label are looked for as in
    linear_cross_entropy. options: softcap, logit_scale, z_loss, label_smoothing and ignore_index, as there. Raises
    ValueError on mismatched shapes or dtypes.
    """
    n_heads = len(coefficients)
    if not len(hiddens) == len(labels) == n_heads or not (_is_shared(weight) or len(weight) == n_heads):
        raise ValueError(
            f"{NAME}: {len(hiddens)} hiddens, {len(labels)} labels and {n_heads} coefficients"
            f"{'' if _is_shared(weight) else f', {len(weight)} weights'}: expected one of each per head"
        )
    terms = LossOptions(**options)
    counts = _counts(labels, terms.ignore_index, num_items_in_batch, hiddens[0].device)
    if not _is_shared(weight):
        rows_of_heads = _rows_by_head(labelled_rows, labels)
        same = {"skip_ignored": skip_ignored, "chunk_bytes": chunk_bytes, **options}
        losses = [
            linear_cross_entropy(h, w, y, num_items_in_batch=n, labelled_rows=r, **same)
            for h, w, y, n, r in zip(hiddens, weight, labels, counts, rows_of_heads, strict=True)
        ]
        return _weighted_sum(losses, coefficients)

    stacked = hiddens if isinstance(hiddens, torch.Tensor) else torch.stack(list(hiddens))  # (K, ..., E)
    stacked, head = check_linear(NAME, stacked, Head(weight), labels)
    rows, flat, index = rows_to_take(
        stacked, labels, labelled_rows, terms.ignore_index, skip_ignored=skip_ignored, vocab_size=len(weight)
    )
    if rows.numel() == 0:
        loss = empty_loss(rows, head)
        return MultiHeadLoss(loss, loss.detach().expand(n_heads))
    # The divisor of a row is n_k / c_k: infinite for a coefficient of 0.
    denominators = torch.cat([(n / c).expand(labels[0].numel()) for n, c in zip(counts, coefficients, strict=True)])
    denominators = denominators if index is None else denominators[index]  # (M,)
    schedule = ChunkOptions(chunk_bytes, skip_ignored and labelled_rows is None).schedule(rows, head.weight)
    with without_autocast(rows.device):
        total, losses = summed_losses(rows, head, Targets(flat, terms), denominators, schedule)
    losses = losses if index is None else scatter_rows(losses, index, labels.numel())
    return MultiHeadLoss(total, losses.detach().view(n_heads, -1).sum(1) / torch.stack(counts))


def _weighted_sum(losses: list[torch.Tensor], coefficients: Sequence[float]) -> MultiHeadLoss:
    total = sum(c * loss for c, loss in zip(coefficients, losses, strict=True))
    return MultiHeadLoss(total, torch.stack(losses).detach())


def _is_shared(weight: Heads) -> bool:
    return isinstance(weight, torch.Tensor) and weight.dim() == 2


def _counts(
    labels: torch.Tensor,
    ignore_index: int,
    num_items_in_batch: Sequence[int] | torch.Tensor | None,
    device: torch.device,
) -> list[torch.Tensor]:
    """Return the divisor of each head as a scalar on the device, without a copy for which the host would wait."""
    if num_items_in_batch is None:
        num_items_in_batch = (labels != ignore_index).flatten(1).sum(1)
    if isinstance(num_items_in_batch, torch.Tensor):
        return list(num_items_in_batch.to(device, torch.float32, non_blocking=True).clamp(min=1))
    return [torch.full((), float(max(1, n)), device=device) for n in num_items_in_batch]


def _rows_by_head(labelled_rows: torch.Tensor | None, labels: torch.Tensor) -> list[torch.Tensor | None]:
    """Return the rows of each head, as indices into that head's rows."""
    if labelled_rows is None:
        return [None] * len(labels)
    if labelled_rows.device.type != "cpu":
        raise ValueError(
            f"{NAME}: labelled_rows are on {labelled_rows.device}; heads with separate weights "
            "split them on the host: expected the CPU"
        )
    n = labels[0].numel()
    return [labelled_rows[(labelled_rows >= k * n) & (labelled_rows < (k + 1) * n)] - k * n for k in range(len(labels))]
