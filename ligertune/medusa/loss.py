"""The loss of Medusa training: the heads' cross entropies, and in stage 2 the model's own beside them.

    stage 1:  L = sum_k decay^k CE_k                 CE_k: over head k's own targets, divided by their number in the
    stage 2:  L = CE_1 + c sum_k decay^k CE_k              whole global batch; CE_1: the model's own next-token loss

`fused_loss` never holds logits beyond a chunk of rows, which all heads share; `naive_loss` makes all of them, in plain
torch, and is what the other is tested against.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import torch
import torch.nn.functional as F
from ligertune_kernels import multi_head_linear_cross_entropy
from ligertune_kernels.ops.labelled_rows import take_rows
from torch import Tensor

from ligertune.medusa.head_form import HeadForm
from ligertune.medusa.heads import MedusaHeads
from ligertune.medusa.targets import IGNORE_INDEX


class Losses(NamedTuple):
    """The loss to train on, and each part's own mean (S,), without gradient."""

    loss: Tensor
    parts: Tensor


def coefficients(num_heads: int, decay: float, heads_coefficient: float, *, with_model: bool) -> list[float]:
    """Weights of the parts: the model's own loss first, where it trains too."""
    heads = [decay**k for k in range(1, num_heads + 1)]
    return [1.0, *(heads_coefficient * weight for weight in heads)] if with_model else heads


def fused_loss(
    hidden: Tensor,
    heads: MedusaHeads,
    weight: Tensor,
    targets: Tensor,
    weights: Sequence[float],
    counts: Sequence[int] | Tensor | None,
    *,
    form: HeadForm,
    rows: Tensor | None = None,
) -> Losses:
    """hidden (B, T, E), weight (V, E) of the output head, targets (S, B, T), weights and counts of the S parts.

    S is K, or K + 1 with the model's own part first. rows (M,): the only rows that are computed, with all that have a
    target among them; the others meet no block and no projection.
    """
    flat, targets = hidden.reshape(-1, hidden.shape[-1]), targets.flatten(1)  # (N, E), (S, N)
    if rows is not None:
        flat = take_rows(flat, rows) if flat.requires_grad else flat.index_select(0, rows)
        targets = targets.index_select(1, rows)
    with_model = len(targets) > len(heads)
    hiddens = [flat] * with_model + heads.hidden(flat)
    shared = not heads.own_lm_head
    found = multi_head_linear_cross_entropy(
        hiddens,
        weight if shared else [weight] * with_model + heads.projections(weight),
        targets.contiguous(),
        list(weights),
        softcap=form.softcap,
        logit_scale=form.logit_scale,
        num_items_in_batch=counts,
    )
    return Losses(found.loss, found.head_losses)


def naive_loss(
    hidden: Tensor,
    heads: MedusaHeads,
    weight: Tensor,
    targets: Tensor,
    weights: Sequence[float],
    counts: Sequence[int] | Tensor | None,
    *,
    form: HeadForm,
    rows: Tensor | None = None,
) -> Losses:
    """The same with all logits (S, B, T, V) at once, as a straightforward implementation has them; rows is not used."""
    with_model = len(targets) > len(heads)
    hiddens = [hidden] * with_model + heads.hidden(hidden)
    projections = [weight] * with_model + heads.projections(weight)
    logits = [form.logits(F.linear(h, w)) for h, w in zip(hiddens, projections, strict=True)]
    parts = []
    for i, (one, target) in enumerate(zip(logits, targets, strict=True)):
        total = F.cross_entropy(one.flatten(0, -2), target.flatten(), ignore_index=IGNORE_INDEX, reduction="sum")
        count = (target != IGNORE_INDEX).sum() if counts is None else torch.as_tensor(counts[i], device=total.device)
        parts.append(total / count.clamp(min=1))
    return Losses(sum(w * part for w, part in zip(weights, parts, strict=True)), torch.stack(parts).detach())
