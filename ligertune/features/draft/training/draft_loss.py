r"""Losses of a draft head against its target, and expected acceptance, without logits of all rows at once.

The state of row i at step k predicts token x_{i+2+k}, for which the target's distribution is that of row
j = i + 1 + k. With z the target's logits at row j, D the draft vocabulary and q the head's distribution over it:

    p = softmax(z)                over all V tokens
    p_D = softmax(z over D)       p renormalised over the draft vocabulary
    alpha = sum_{d in D} min(p_d, q_d)       the chance that the target accepts a token drawn from q

    eagle         -sum_d p_D log q         over rows where the argmax of z is in D (EAGLE-3, SpecForge)
    kl            sum_d p_D log (p_D / q)
    acceptance    -log alpha

    L = sum_k decay^k / n_k sum_rows loss,       n_k: trained tokens that step k can predict, in the global batch

A row counts if x_{i+2+k} is a trained label and row i is of its document. Logits of the head (K, n, D) and of the
target (n, V) are made for n rows at a time, in the dtype of the products; losses are float32. Gradients are computed in
the forward, so that no logits are kept for the backward. Leviathan et al. 2023 (arXiv:2211.17192) define alpha.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, Literal, NamedTuple

import torch
import torch.nn.functional as F
from ligertune_kernels.autograd import autocast, no_double_backward, without_autocast
from torch import Tensor

from ligertune.features.output_head import LogitTransform

LossKind = Literal["eagle", "kl", "acceptance"]
CHUNK_BYTES = 1 << 28  # of one float32 copy of the head's logits; about six are alive at a time
TINY = 1e-30  # acceptance below this has no gradient


@dataclass(frozen=True)
class TeacherRows:
    """What the target's distribution of M rows is computed from."""

    hidden: Tensor  # (M, E): last hidden states
    weight: Tensor  # (V, E): of the output head
    transform: LogitTransform
    draft_ids: Tensor | None  # (D,): ids of the draft vocabulary; None: all


@dataclass(frozen=True)
class StepRows:
    """Which rows of M count at each of K steps, and their weight in the loss."""

    counted: Tensor  # (K, M) bool
    weights: Tensor  # (K,): decay^k / n_k


class DraftLoss(NamedTuple):
    """The loss to train on, and sums of alpha (K,) over the rows (K,) that count, without gradient."""

    loss: Tensor
    accepted: Tensor
    counts: Tensor


class _TeacherChunk(NamedTuple):
    draft_logits: Tensor  # (n, D)
    lse: Tensor  # (n,): over the whole vocabulary
    argmax_drafted: Tensor  # (n,) bool: the most likely token is in the draft vocabulary


def _read_teacher(teacher: TeacherRows, rows: slice) -> _TeacherChunk:
    """Return the target's logits of a chunk over the draft vocabulary, and what depends on the whole vocabulary."""
    logits = teacher.transform.logits(F.linear(teacher.hidden[rows], teacher.weight))
    lse = logits.logsumexp(-1)
    if teacher.draft_ids is None:
        return _TeacherChunk(logits, lse, torch.ones_like(lse, dtype=torch.bool))
    drafted = logits.index_select(-1, teacher.draft_ids)
    return _TeacherChunk(drafted, lse, drafted.amax(-1) == logits.amax(-1))


def row_losses(logits: Tensor, teacher: _TeacherChunk, kind: LossKind) -> tuple[Tensor, Tensor]:
    """Return losses and acceptance (K, n) of the head's logits (K, n, D)."""
    wide = torch.promote_types(logits.dtype, torch.float32)
    log_q = logits.to(wide).log_softmax(-1)
    likelihoods = (teacher.draft_logits - teacher.lse[:, None]).exp()  # p
    alpha = torch.minimum(log_q.exp(), likelihoods).sum(-1)
    if kind == "acceptance":
        return -alpha.clamp(min=TINY).log(), alpha.detach()
    log_p = teacher.draft_logits.log_softmax(-1)  # of p_D
    if kind == "kl":
        return (log_p.exp() * (log_p - log_q)).sum(-1), alpha.detach()
    losses = -(log_p.exp() * log_q).sum(-1)
    return losses.where(teacher.argmax_drafted, 0.0), alpha.detach()


class _ChunkedLoss(torch.autograd.Function):
    """Loss of hidden (K, M, E) and the head's projection (D, E), with their gradients computed in the forward."""

    @staticmethod
    def forward(
        ctx: Any, hidden: Tensor, weight: Tensor, teacher: TeacherRows, rows: StepRows, kind: LossKind, needs_grad: bool
    ) -> tuple[Tensor, Tensor]:
        wide = torch.promote_types(hidden.dtype, torch.float32)
        weights = rows.weights.to(wide)
        loss = hidden.new_zeros((), dtype=wide)
        accepted = hidden.new_zeros(len(hidden), dtype=wide)
        d_hidden = torch.zeros_like(hidden) if needs_grad else None
        d_weight = torch.zeros_like(weight, dtype=wide) if needs_grad else None
        n_chunk = max(1, CHUNK_BYTES // (4 * len(hidden) * len(weight)))
        for start in range(0, hidden.shape[1], n_chunk):
            chunk = slice(start, start + n_chunk)
            counted = rows.counted[:, chunk]
            read = _read_teacher(teacher, chunk)
            states = hidden[:, chunk]
            logits = F.linear(states, weight).requires_grad_(needs_grad)
            with torch.set_grad_enabled(needs_grad):
                losses, alpha = row_losses(logits, read, kind)
                weighted = (losses.where(counted, 0.0).sum(-1) * weights).sum()
            loss += weighted.detach()
            accepted += alpha.where(counted, 0.0).sum(-1)
            if d_hidden is not None and d_weight is not None:
                (d_logits,) = torch.autograd.grad(weighted, logits)
                d_hidden[:, chunk] = d_logits @ weight
                d_weight += d_logits.flatten(0, 1).t() @ states.flatten(0, 1)
        if d_hidden is not None:
            ctx.save_for_backward(d_hidden, d_weight)
        ctx.dtype = weight.dtype
        ctx.mark_non_differentiable(accepted)
        return loss, accepted

    @staticmethod
    @no_double_backward
    def backward(ctx: Any, upstream: Tensor, _: Tensor) -> tuple[Tensor | None, ...]:
        d_hidden, d_weight = ctx.saved_tensors
        return d_hidden * upstream.to(d_hidden.dtype), (d_weight * upstream).to(ctx.dtype), *(None,) * 4


def draft_loss(
    hidden: Tensor,  # (K, M, E): normed states of the head
    weight: Tensor,  # (D, E): of its lm_head
    teacher: TeacherRows,
    rows: StepRows,
    kind: LossKind,
) -> DraftLoss:
    """Return the loss of K steps over M rows of the target, and the acceptance of each step."""
    hidden, weight = autocast(hidden, weight)
    read, teacher_weight = autocast(teacher.hidden, teacher.weight)
    teacher = TeacherRows(read, teacher_weight, teacher.transform, teacher.draft_ids)
    with without_autocast(hidden.device):
        loss, accepted = _ChunkedLoss.apply(hidden, weight, teacher, rows, kind, torch.is_grad_enabled())
    return DraftLoss(loss, accepted, rows.counted.sum(-1))
