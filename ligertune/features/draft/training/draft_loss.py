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
CHUNK_BYTES = 1 << 28  # of one float32 copy of the head's logits; three or four are alive at a time
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


class TeacherChunk(NamedTuple):
    """The target's logits of n rows over the draft vocabulary, in float32 or wider."""

    draft_logits: Tensor  # (n, D)
    lse: Tensor  # (n,): over the whole vocabulary
    argmax_drafted: Tensor  # (n,) bool: the most likely token is in the draft vocabulary


def _read_teacher(teacher: TeacherRows, rows: slice) -> TeacherChunk:
    """Return the target's logits of a chunk over the draft vocabulary, and what depends on the whole vocabulary."""
    logits = teacher.transform.logits(F.linear(teacher.hidden[rows], teacher.weight))
    lse = logits.logsumexp(-1)
    if teacher.draft_ids is None:
        return TeacherChunk(logits, lse, torch.ones_like(lse, dtype=torch.bool))
    drafted = logits.index_select(-1, teacher.draft_ids)
    return TeacherChunk(drafted, lse, drafted.amax(-1) == logits.amax(-1))


class RowLosses(NamedTuple):
    """Losses and acceptance (K, n) of rows, and the gradients (K, n, D) of each loss with respect to its logits."""

    losses: Tensor
    alpha: Tensor
    d_logits: Tensor
    trained: Tensor | None = None  # (n,) bool: rows whose loss counts; None: all


def row_losses(logits: Tensor, teacher: TeacherChunk, kind: LossKind) -> RowLosses:
    """Return the losses of the head's logits (K, n, D), without autograd: it would keep twice as many tensors."""
    wide = torch.promote_types(logits.dtype, torch.float32)
    log_q = logits.to(wide).log_softmax(-1)
    q = log_q.exp()
    p = (teacher.draft_logits - teacher.lse[:, None]).exp()
    if kind == "acceptance":
        alpha = torch.minimum(q, p, out=log_q).sum(-1).clamp(min=TINY)
        # alpha grows with q where q < p alone: d alpha / dz_d = q_d [q_d < p_d] - q_d sum_v q_v [q_v < p_v]
        growing = torch.where(q < p, q, 0.0)
        d_logits = q.mul_(growing.sum(-1, keepdim=True)).sub_(growing).div_(alpha[..., None])
        return RowLosses(-alpha.log(), alpha, d_logits)
    log_p = teacher.draft_logits.log_softmax(-1)  # of p_D
    p_drafted = log_p.exp()
    losses = -torch.einsum("nd,knd->kn", p_drafted, log_q)
    alpha = torch.minimum(q, p, out=log_q).sum(-1)
    d_logits = q.sub_(p_drafted)
    if kind == "kl":
        return RowLosses(losses + (p_drafted * log_p).sum(-1), alpha, d_logits)
    return RowLosses(losses, alpha, d_logits, trained=teacher.argmax_drafted)


@dataclass(frozen=True)
class _Sums:
    """What chunks of rows add to: losses and acceptance (K,), and the gradient (D, E) of the head's projection."""

    losses: Tensor
    accepted: Tensor
    d_weight: Tensor | None

    def add(
        self, states: Tensor, weight: Tensor, teacher: TeacherChunk, counted: Tensor, factors: Tensor, kind: LossKind
    ) -> Tensor | None:
        """Add the rows of states (K, n, E); return the gradient of states. factors (K,): of the steps' gradients."""
        found = row_losses(F.linear(states, weight), teacher, kind)
        trained = counted if found.trained is None else counted & found.trained
        self.losses.add_(found.losses.where(trained, 0.0).sum(-1))
        self.accepted.add_(found.alpha.where(counted, 0.0).sum(-1))
        if self.d_weight is None:
            return None
        d_logits = found.d_logits.mul_((trained * factors[:, None])[..., None]).to(states.dtype)
        self.d_weight.add_(d_logits.flatten(0, 1).t() @ states.flatten(0, 1))
        return d_logits @ weight


class _ChunkedLoss(torch.autograd.Function):
    """Loss of hidden (K, M, E) and the head's projection (D, E), with their gradients computed in the forward."""

    @staticmethod
    def forward(
        ctx: Any, hidden: Tensor, weight: Tensor, teacher: TeacherRows, rows: StepRows, kind: LossKind, needs_grad: bool
    ) -> tuple[Tensor, Tensor]:
        wide = torch.promote_types(hidden.dtype, torch.float32)
        weights = rows.weights.to(wide)
        unit = weights.amax()  # gradients are computed in units of it: float16 would lose those of single rows
        sums = _Sums(
            losses=torch.zeros_like(weights),
            accepted=torch.zeros_like(weights),
            d_weight=torch.zeros_like(weight, dtype=wide) if needs_grad else None,
        )
        d_hidden = torch.empty_like(hidden) if needs_grad else None
        n_chunk = max(1, CHUNK_BYTES // (4 * len(hidden) * len(weight)))
        for start in range(0, hidden.shape[1], n_chunk):
            chunk = slice(start, start + n_chunk)
            # The target's logits are read before the head's exist, and no variable keeps those of the chunk before.
            found = sums.add(
                hidden[:, chunk], weight, _read_teacher(teacher, chunk), rows.counted[:, chunk], weights / unit, kind
            )
            if d_hidden is not None and found is not None:
                d_hidden[:, chunk] = found
        if d_hidden is not None:
            ctx.save_for_backward(d_hidden, sums.d_weight, unit)
        ctx.dtype = weight.dtype
        ctx.mark_non_differentiable(sums.accepted)
        return (sums.losses * weights).sum(), sums.accepted

    @staticmethod
    @no_double_backward
    def backward(ctx: Any, upstream: Tensor, _: Tensor) -> tuple[Tensor | None, ...]:
        d_hidden, d_weight, unit = ctx.saved_tensors
        factor = upstream * unit
        return d_hidden * factor.to(d_hidden.dtype), (d_weight * factor).to(ctx.dtype), *(None,) * 4


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
