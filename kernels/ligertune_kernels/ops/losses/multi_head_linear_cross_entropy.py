r"""Cross entropies of K heads over the same tokens, as Medusa trains them, added up with a coefficient each.

    L = sum_k c_k / n_k · sum_i loss(X_k[i] W_kᵀ, y_k[i])        n_k: head k's own labels, or what the caller counts

With one weight for all heads their rows go through the same chunks: each product is as tall as if there were one head
of K N rows, a frozen weight costs no dW, and one that is trained has its K parts summed before they are rounded. Each
row carries c_k/n_k into the row pass.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import torch

from ligertune_kernels.autocast import without_autocast
from ligertune_kernels.ops.losses._linear_inputs import check_shapes, chosen_schedule, rows_to_take, same_dtype
from ligertune_kernels.ops.losses._row_pass import Terms
from ligertune_kernels.ops.losses._schedule import CHUNK_BYTES
from ligertune_kernels.ops.losses.labelled_rows import spread
from ligertune_kernels.ops.losses.linear_cross_entropy import (
    linear_cross_entropy,
    linear_cross_entropy_reference,
    summed_losses,
)

NAME = "multi_head_linear_cross_entropy"
Heads = torch.Tensor | Sequence[torch.Tensor]


class MultiHeadLoss(NamedTuple):
    """The weighted sum, and each head's own mean (K,), without gradient."""

    loss: torch.Tensor
    head_losses: torch.Tensor


def multi_head_linear_cross_entropy_reference(
    hiddens: Heads,
    weight: Heads,
    labels: torch.Tensor,
    coefficients: Sequence[float],
    *,
    softcap: float | None = None,
    logit_scale: float = 1.0,
    z_loss: float = 0.0,
    label_smoothing: float = 0.0,
    ignore_index: int = -100,
    num_items_in_batch: Sequence[int] | torch.Tensor | None = None,
) -> MultiHeadLoss:
    """The same in plain torch, a head at a time, with all logits of each."""
    losses = torch.stack(
        [
            linear_cross_entropy_reference(
                hiddens[k], weight if _is_shared(weight) else weight[k], labels[k], softcap=softcap,
                logit_scale=logit_scale, z_loss=z_loss, label_smoothing=label_smoothing, ignore_index=ignore_index,
                num_items_in_batch=None if num_items_in_batch is None else num_items_in_batch[k],
            )
            for k in range(len(coefficients))
        ]
    )  # fmt: skip
    return MultiHeadLoss(sum(c * loss for c, loss in zip(coefficients, losses, strict=True)), losses.detach())


def multi_head_linear_cross_entropy(
    hiddens: Heads,
    weight: Heads,
    labels: torch.Tensor,
    coefficients: Sequence[float],
    *,
    softcap: float | None = None,
    logit_scale: float = 1.0,
    z_loss: float = 0.0,
    label_smoothing: float = 0.0,
    ignore_index: int = -100,
    num_items_in_batch: Sequence[int] | torch.Tensor | None = None,
    labelled_rows: torch.Tensor | None = None,
    chunk_bytes: int = CHUNK_BYTES,
) -> MultiHeadLoss:
    """The heads' cross entropies, times their coefficients, added up; and each head's own.

    hiddens (K, ..., E), or K tensors (..., E); labels (K, ...), those of a head shifted as that head predicts; weight
    (V, E) for all heads, or (K, V, E), or K tensors. num_items_in_batch (K,) are what the sums are divided by in place
    of each head's own number of labels. labelled_rows, from the function of that name, count over all K heads.
    """
    n_heads = len(coefficients)
    if not len(hiddens) == len(labels) == n_heads or not (_is_shared(weight) or len(weight) == n_heads):
        raise ValueError(
            f"{NAME}: {len(hiddens)} hiddens, {len(labels)} labels and {n_heads} coefficients"
            f"{'' if _is_shared(weight) else f', {len(weight)} weights'}: expected one of each a head"
        )
    counts = _counts(labels, ignore_index, num_items_in_batch, hiddens[0].device)
    if _is_shared(weight):
        terms = Terms(ignore_index, label_smoothing, softcap, logit_scale, z_loss)
        return _through_one_weight(hiddens, weight, labels, coefficients, counts, terms, labelled_rows, chunk_bytes)
    losses = [
        linear_cross_entropy(
            h, w, y, softcap=softcap, logit_scale=logit_scale, z_loss=z_loss, label_smoothing=label_smoothing,
            ignore_index=ignore_index, num_items_in_batch=n, labelled_rows=rows, chunk_bytes=chunk_bytes,
        )
        for h, w, y, n, rows in zip(hiddens, weight, labels, counts, _rows_by_head(labelled_rows, labels), strict=True)
    ]  # fmt: skip
    total = sum(c * loss for c, loss in zip(coefficients, losses, strict=True))
    return MultiHeadLoss(total, torch.stack(losses).detach())


def _through_one_weight(
    hiddens: Heads,
    weight: torch.Tensor,
    labels: torch.Tensor,
    coefficients: Sequence[float],
    counts: list[torch.Tensor],
    terms: Terms,
    labelled_rows: torch.Tensor | None,
    chunk_bytes: int,
) -> MultiHeadLoss:
    """All heads' rows in one run, each divided by n_k / c_k: by infinity where c_k is 0."""
    stacked = hiddens if isinstance(hiddens, torch.Tensor) else torch.stack(list(hiddens))  # (K, ..., E)
    check_shapes(NAME, stacked, weight, labels, None, None, None)
    stacked, weight = same_dtype(NAME, stacked, weight)
    rows, flat, index = rows_to_take(stacked, labels, labelled_rows, terms.ignore_index)
    if rows.numel() == 0:
        nothing = rows.sum(dtype=torch.float32) + weight[:0].sum(dtype=torch.float32)  # zero, with zero gradients
        return MultiHeadLoss(nothing, nothing.detach().expand(len(counts)))
    parted = [(n / c).expand(labels[0].numel()) for n, c in zip(counts, coefficients, strict=True)]
    denominators = torch.cat(parted) if index is None else torch.cat(parted)[index]  # (M,)
    schedule = chosen_schedule(rows, weight, chunk_bytes)
    with without_autocast(rows.device):
        total, losses = summed_losses(
            rows, weight, None, None, None, flat, None, denominators, 1.0, terms, schedule
        )  # fmt: skip
    losses = losses if index is None else spread(losses, index, labels.numel())
    return MultiHeadLoss(total, losses.detach().view(len(counts), -1).sum(1) / torch.stack(counts))


def _is_shared(weight: Heads) -> bool:
    return isinstance(weight, torch.Tensor) and weight.dim() == 2


def _counts(
    labels: torch.Tensor,
    ignore_index: int,
    num_items_in_batch: Sequence[int] | torch.Tensor | None,
    device: torch.device,
) -> list[torch.Tensor]:
    """What each head's sum is divided by: scalars on the device, made without a copy that the host would wait for."""
    if num_items_in_batch is None:
        num_items_in_batch = (labels != ignore_index).flatten(1).sum(1)
    if isinstance(num_items_in_batch, torch.Tensor):
        return list(num_items_in_batch.to(device, torch.float32, non_blocking=True).clamp(min=1))
    return [torch.full((), float(max(1, n)), device=device) for n in num_items_in_batch]


def _rows_by_head(labelled_rows: torch.Tensor | None, labels: torch.Tensor) -> list[torch.Tensor | None]:
    """The rows of each head, counted from its own first."""
    if labelled_rows is None:
        return [None] * len(labels)
    if labelled_rows.device.type != "cpu":
        raise ValueError(
            f"{NAME}: labelled_rows are on {labelled_rows.device}; heads with weights of "
            "their own part them on the host: expected the CPU"
        )
    n = labels[0].numel()
    return [labelled_rows[(labelled_rows >= k * n) & (labelled_rows < (k + 1) * n)] - k * n for k in range(len(labels))]
