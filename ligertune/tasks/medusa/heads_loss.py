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
from ligertune_kernels import linear_jsd, multi_head_linear_cross_entropy
from ligertune_kernels.ops.losses.labelled_rows import take_rows
from torch import Tensor

from ligertune.tasks.medusa.head_form import HeadForm
from ligertune.tasks.medusa.head_targets import IGNORE_INDEX
from ligertune.tasks.medusa.heads import MedusaHeads


class Losses(NamedTuple):
    """The loss to train on, and each part's own mean (S,), without gradient."""

    loss: Tensor
    parts: Tensor


class Teacher(NamedTuple):
    """The frozen model's last hidden state (B, T, E) and its output head's weight (V, E)."""

    hidden: Tensor
    weight: Tensor


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
    counts: Sequence[int] | None,
    *,
    form: HeadForm,
    rows: Tensor | None = None,
    teacher: Teacher | None = None,
) -> Losses:
    """hidden (B, T, E), weight (V, E) of the output head, targets (S, B, T), weights and counts of the S parts.

    S is K, or K + 1 with the model's own part first. rows (M,): the only rows that are computed, with all that have a
    target among them; the others meet no block and no projection. With a teacher the model's own part is its KL.
    """
    flat, targets = hidden.reshape(-1, hidden.shape[-1]), targets.flatten(1)  # (N, E), (S, N)
    if rows is not None:
        flat = take_rows(flat, rows) if flat.requires_grad else flat.index_select(0, rows)
        targets = targets.index_select(1, rows)
    own = None
    if teacher is not None:
        taught = teacher.hidden.reshape(-1, teacher.hidden.shape[-1])
        taught = taught if rows is None else taught.index_select(0, rows)
        own = distilled(flat, weight, Teacher(taught, teacher.weight), targets[0], counts and counts[0], form)
        targets, weights, counts = targets[1:], weights[1:], counts and counts[1:]
    with_model = len(targets) > len(heads)
    hiddens: list[Tensor] | Tensor = [flat] * with_model + heads.hidden(flat)
    shared = not heads.own_lm_head
    if shared:
        hiddens = torch.stack(hiddens)  # the single ones are given back here, not behind the loss
    found = multi_head_linear_cross_entropy(
        hiddens,
        weight if shared else [weight] * with_model + heads.projections(weight),
        targets.contiguous(),
        list(weights),
        softcap=form.softcap,
        logit_scale=form.logit_scale,
        num_items_in_batch=counts,
    )
    if own is None:
        return Losses(found.loss, found.head_losses)
    return Losses(own + found.loss, torch.cat([own.detach()[None], found.head_losses]))


def distilled(
    hidden: Tensor, weight: Tensor, teacher: Teacher, targets: Tensor, count: int | None, form: HeadForm
) -> Tensor:
    """KL(teacher || model) of rows (N, E) that have a target (N,), divided by their number, without logits.

    A scale of the logits is a temperature; under a soft cap the logits are made after all.
    """
    if form.softcap is not None:
        return _kl(form.logits(F.linear(hidden, weight)), form.logits(F.linear(*teacher)), targets, count)
    return linear_jsd(
        hidden, weight, *teacher, labels=targets, beta=0.0, temperature=1 / form.logit_scale, num_items_in_batch=count
    )


def _kl(student: Tensor, teacher: Tensor, targets: Tensor, count: int | None) -> Tensor:
    """KL(teacher || student) of logits (..., V) over the places that have a target (...)."""
    there = targets != IGNORE_INDEX
    divergence = F.kl_div(student.log_softmax(-1), teacher.log_softmax(-1), reduction="none", log_target=True).sum(-1)
    return divergence.masked_fill(~there, 0.0).sum() / max(1, int(there.sum()) if count is None else count)


def naive_loss(
    hidden: Tensor,
    heads: MedusaHeads,
    weight: Tensor,
    targets: Tensor,
    weights: Sequence[float],
    counts: Sequence[int] | None,
    *,
    form: HeadForm,
    rows: Tensor | None = None,
    teacher: Teacher | None = None,
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
    if teacher is not None:
        parts[0] = _kl(logits[0], form.logits(F.linear(*teacher)), targets[0], counts and counts[0])
    return Losses(sum(w * part for w, part in zip(weights, parts, strict=True)), torch.stack(parts).detach())
