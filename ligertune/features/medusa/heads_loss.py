"""Medusa loss: targets of each head, and the weighted sum of the heads' cross entropies.

    stage 1:  L = sum_k decay^k CE_k                 CE_k: summed over head k's targets, divided by their number in the
    stage 2:  L = CE_1 + c sum_k decay^k CE_k              global batch; CE_1: the model's own next-token loss

The target of a part with shift s (head k: k + 1; the model's own head: 1) at position t is label[t + s], if that label
is trained and belongs to the document of t. Position t itself need not be trained: the last tokens of a prompt predict
tokens of the answer. Source: Cai et al. 2024, "Training Strategies".

`fused_loss` holds the logits of one chunk of rows at a time, shared by all heads. `naive_loss` makes all logits in
plain torch; it runs when kernels are off and is the reference in tests.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple

import torch
import torch.nn.functional as F
from ligertune_kernels import linear_jsd, multi_head_linear_cross_entropy
from ligertune_kernels.ops.losses.labelled_rows import take_rows
from torch import Tensor

from ligertune.features.medusa.heads import MedusaHeads
from ligertune.features.output_head import LogitTransform

IGNORE_INDEX = -100


def target_shifts(num_heads: int, *, with_model: bool) -> tuple[int, ...]:
    """Return how many tokens ahead each part predicts; the model's own head comes first if it trains too."""
    return tuple(range(1 if with_model else 2, num_heads + 2))


def shifted_targets(labels: Tensor, position_ids: Tensor | None, shifts: Sequence[int]) -> Tensor:
    """Return the targets (S, B, T) of unshifted labels (B, T).

    position_ids (B, T) start at 0 in each document of a packed row: position t + s is in the document of t if and only
    if its position id is s higher. Without them each row is one document.
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
    """Shift values (B, T) left by `shift` positions."""
    return F.pad(values[:, shift:], (0, min(shift, values.shape[1])), value=fill)


def part_weights(num_heads: int, decay: float, heads_coefficient: float, *, with_model: bool) -> list[float]:
    """Return the weight of each part of the loss; the model's own loss comes first if it trains too."""
    heads = [decay**k for k in range(1, num_heads + 1)]
    return [1.0, *(heads_coefficient * weight for weight in heads)] if with_model else heads


class TeacherOutput(NamedTuple):
    """The frozen model's last hidden state (B, T, E) and its output head's weight (V, E)."""

    hidden: Tensor
    weight: Tensor


@dataclass(frozen=True)
class LossInputs:
    """Inputs of both losses. The loss has S parts: the K heads, after the model's own part if it trains."""

    hidden: Tensor  # (B, T, E): the model's last hidden state
    heads: MedusaHeads
    weight: Tensor  # (V, E): of the output head
    targets: Tensor  # (S, B, T)
    weights: Sequence[float]  # S
    counts: Sequence[int] | None  # S divisors; None divides each part by its targets in this batch
    transform: LogitTransform
    rows: Tensor | None = None  # (M,): the rows of (B * T) to compute; all rows with a target are among them
    teacher: TeacherOutput | None = None  # the model's own part is then KL(teacher || model)

    @property
    def with_model(self) -> bool:
        return len(self.targets) > len(self.heads)


class Losses(NamedTuple):
    """The loss to train on, and the mean of each part (S,) without gradient."""

    loss: Tensor
    parts: Tensor


def fused_loss(inputs: LossInputs) -> Losses:
    """Return the Medusa loss, computed by our kernels in chunks of rows. Rows outside `rows` meet no block."""
    heads = inputs.heads
    weight = inputs.weight
    counts = inputs.counts
    weights = list(inputs.weights)
    rows = inputs.rows
    # (N, E), (S, N)
    hidden = inputs.hidden.flatten(0, -2)
    targets = inputs.targets.flatten(1)
    if rows is not None:
        hidden = take_rows(hidden, rows) if hidden.requires_grad else hidden.index_select(0, rows)
        targets = targets.index_select(1, rows)
    # Few of `rows` lack a target of one head: on a GPU the host would wait for little.
    skip_ignored = rows is None or hidden.device.type == "cpu"
    with_model = inputs.with_model
    own = None
    if inputs.teacher is not None:
        taught = inputs.teacher.hidden.flatten(0, -2)
        taught = taught if rows is None else taught.index_select(0, rows)
        teacher = TeacherOutput(taught, inputs.teacher.weight)
        own_count = None if counts is None else counts[0]
        own = teacher_divergence(
            hidden, weight, teacher, targets[0], own_count, inputs.transform, skip_ignored=skip_ignored
        )
        with_model = False
        targets = targets[1:]
        weights = weights[1:]
        counts = counts and counts[1:]
    single = [hidden] * with_model + heads.hidden(hidden)
    shared = not heads.own_lm_head
    hiddens = torch.stack(single) if shared else single
    del single  # frees the stacked tensors now, not after the loss
    found = multi_head_linear_cross_entropy(
        hiddens,
        weight if shared else [weight] * with_model + heads.projections(weight),
        targets.contiguous(),
        weights,
        softcap=inputs.transform.softcap,
        logit_scale=inputs.transform.logit_scale,
        num_items_in_batch=counts,
        skip_ignored=skip_ignored,
    )
    if own is None:
        return Losses(found.loss, found.head_losses)
    return Losses(own + found.loss, torch.cat([own.detach()[None], found.head_losses]))


def teacher_divergence(
    hidden: Tensor,  # (N, E)
    weight: Tensor,  # (V, E)
    teacher: TeacherOutput,  # (N, E), (V, E)
    targets: Tensor,  # (N,): selects rows
    count: int | None,
    transform: LogitTransform,
    *,
    skip_ignored: bool = True,
) -> Tensor:
    """Return KL(teacher || model) over the rows with a target, divided by `count` or their number.

    Without a soft cap no logits are made, and the logit scale acts as an inverse temperature.
    """
    if transform.softcap is not None:
        return _kl(transform.logits(F.linear(hidden, weight)), transform.logits(F.linear(*teacher)), targets, count)
    scale = transform.logit_scale
    options = {"num_items_in_batch": count, "skip_ignored": skip_ignored}
    return linear_jsd(hidden, weight, *teacher, labels=targets, beta=0.0, temperature=1 / scale, **options)


def _kl(student: Tensor, teacher: Tensor, targets: Tensor, count: int | None) -> Tensor:
    """Return KL(teacher || student) of logits (..., V) over the positions with a target (...)."""
    labelled = targets != IGNORE_INDEX
    divergence = F.kl_div(student.log_softmax(-1), teacher.log_softmax(-1), reduction="none", log_target=True).sum(-1)
    return divergence.masked_fill(~labelled, 0.0).sum() / max(1, int(labelled.sum()) if count is None else count)


def naive_loss(inputs: LossInputs) -> Losses:
    """Return the Medusa loss from all logits (S, B, T, V) at once. `rows` is not used."""
    hidden = inputs.hidden
    heads = inputs.heads
    weight = inputs.weight
    counts = inputs.counts
    hiddens = [hidden] * inputs.with_model + heads.hidden(hidden)
    projections = [weight] * inputs.with_model + heads.projections(weight)
    logits = [inputs.transform.logits(F.linear(h, w)) for h, w in zip(hiddens, projections, strict=True)]
    parts = []
    for i, (one, target) in enumerate(zip(logits, inputs.targets, strict=True)):
        total = F.cross_entropy(one.flatten(0, -2), target.flatten(), ignore_index=IGNORE_INDEX, reduction="sum")
        count = (target != IGNORE_INDEX).sum() if counts is None else torch.as_tensor(counts[i], device=total.device)
        parts.append(total / count.clamp(min=1))
    if inputs.teacher is not None:
        teacher_logits = inputs.transform.logits(F.linear(*inputs.teacher))
        parts[0] = _kl(logits[0], teacher_logits, inputs.targets[0], None if counts is None else counts[0])
    weighted = [w * part for w, part in zip(inputs.weights, parts, strict=True)]
    return Losses(sum(weighted, start=torch.zeros_like(parts[0])), torch.stack(parts).detach())
