r"""Log-probabilities of labels under a linear layer, hidden X (N, E) and weight W (V, E), without storing the logits.

    Z = X Wᵀ + b      z and lse as in kernels.py      l_i = z_iy - lse_i      G_ij = u_i dl_i/dZ_ij
    dX = G W          dW = Gᵀ X        db = sum_i G_i          u (N,): upstream gradient

Rows are taken in chunks as in linear_cross_entropy, whose notes on chunks and rounding hold here too; l is the negative
of its loss, in fp32. u is not known in the forward: the log-probabilities of a document are added, and a loss of the
sums follows. But u is one value per row, so there are two ways:

    frozen layer    The forward computes G and dX with u = 1, and the backward multiplies the rows of dX by u, in place:
                    4 NEV operations. In float16, p W would vanish below 6e-8: the forward multiplies G by 256.
    trained layer   The forward computes l alone. The backward computes the logits again, G with u, and all gradients:
                    8 NEV operations. Nothing but the inputs is kept for it.

Statistics (argmax, entropy, mean logit) come from the logits of the same chunk, which are read once more for them.

torch.compile sees the chunks of a pass as one operator, as in linear_cross_entropy.

linear_token_statistics computes the statistics alone, without gradients: one sweep over each row of a chunk.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import NamedTuple

import torch

from ligertune_kernels.autograd import without_autocast
from ligertune_kernels.ops.losses.cross_entropy import LossFunction
from ligertune_kernels.ops.losses.kernels import (
    LossOptions,
    RowStatistics,
    empty_statistics,
    statistics_torch,
    write_statistics,
)
from ligertune_kernels.ops.losses.labelled_rows import rows_to_take, scatter_rows
from ligertune_kernels.ops.losses.linear_chunks import (
    Head,
    LinearLora,
    Targets,
    check_linear,
    choose_schedule,
    empty_loss,
)
from ligertune_kernels.ops.losses.linear_cross_entropy import ChunkOptions, LinearJob, LinearRowLosses, linear_chunks
from ligertune_kernels.ops.losses.tiles import CHUNK_BYTES, ChunkProducts, schedule_of


class TokenLogProbs(NamedTuple):
    """Log-probabilities in the shape of the labels, and statistics without gradient, None if not asked for.

    All are 0 where the label is ignored. mean_logit is the mean over the vocabulary, after logit_scale and softcap.
    """

    logprob: torch.Tensor
    entropy: torch.Tensor | None = None
    argmax: torch.Tensor | None = None
    mean_logit: torch.Tensor | None = None


def linear_log_probs_reference(
    hidden: torch.Tensor,  # (..., E)
    weight: torch.Tensor,  # (V, E)
    labels: torch.Tensor,  # (...)
    bias: torch.Tensor | None = None,  # (V,)
    *,
    lora: LinearLora | None = None,
    statistics: bool = False,
    **options: int | float | None,
) -> TokenLogProbs:
    """Compute `linear_log_probs` in plain torch with all logits; options are the fields of LossOptions."""
    logits = Head(weight, bias, *(lora or ())).reference_logits(hidden)
    flat = labels.reshape(-1)
    terms = LossOptions(**options)
    found = statistics_torch(logits.reshape(-1, len(weight)), flat, terms)
    measured = RowStatistics(*(t.detach() for t in found)) if statistics else None
    return _token_log_probs(found.logprob, measured, flat, None, labels.shape, terms.ignore_index)


class _OfFrozenHead(LossFunction):
    """Log-probabilities and statistics; dX for an upstream gradient of 1 is computed in the forward."""

    @staticmethod
    def forward(ctx, rows, weight, bias, lora_a, lora_b, job, measures):
        wide = torch.promote_types(rows.dtype, torch.float32)
        scale = LossFunction.scale(ctx, torch.full((), -1.0, dtype=wide, device=rows.device), rows.dtype)
        targets = replace(job.targets, scale=scale, statistics=empty_statistics(rows) if measures else None)
        head = Head(weight, bias, lora_a, lora_b, job.lora_scale)
        needs = (True, False, False, False, False)
        losses, statistics, gradients = linear_chunks(rows, head, targets, job.schedule, needs)
        LossFunction.keep(ctx, "linear_log_probs", (rows,), gradients[:1])
        if statistics is None:
            return (-losses,)
        ctx.mark_non_differentiable(*statistics)
        return -losses, *statistics


def linear_log_probs(
    hidden: torch.Tensor,  # (..., E)
    weight: torch.Tensor,  # (V, E)
    labels: torch.Tensor,  # (...), aligned with hidden: already shifted
    bias: torch.Tensor | None = None,  # (V,)
    *,
    lora: LinearLora | None = None,
    softcap: float | None = None,
    logit_scale: float = 1.0,
    ignore_index: int = -100,
    labelled_rows: torch.Tensor | None = None,  # (M,)
    skip_ignored: bool = True,
    statistics: bool = False,
    chunk_bytes: int = CHUNK_BYTES,
) -> TokenLogProbs:
    """Log-probability of each label under softmax(hidden·Wᵀ + bias + scale·hidden·Aᵀ·Bᵀ), in float32.

    The upstream gradient may differ from token to token. statistics: also return entropy (in nats), argmax (int64) and
    mean logit of each token, without gradients; the log-probabilities are the same bits with and without them. Where
    the label is ignored all results are 0. A label that is neither a class nor ignore_index has a log-probability of
    NaN, and makes the gradient of its row and the gradients of the layer NaN.

    labelled_rows, skip_ignored, options, chunk_bytes and autocast are as in linear_cross_entropy. If only hidden needs
    a gradient, a second backward raises RuntimeError where kernels run. Raises ValueError on mismatched shapes or
    dtypes.
    """
    head = Head(weight, bias, *(lora or ()))
    options = LossOptions(ignore_index, 0.0, softcap, logit_scale)
    hidden, head = check_linear("linear_log_probs", hidden, head, labels)
    rows, flat, index = rows_to_take(
        hidden, labels, labelled_rows, ignore_index, skip_ignored=skip_ignored, vocab_size=len(weight)
    )
    chunks = ChunkOptions(chunk_bytes, skip_ignored and labelled_rows is None)
    job = LinearJob(Targets(flat, options), head.lora_scale, chunks)
    needs_grad = [torch.is_grad_enabled() and t is not None and t.requires_grad for t in (rows, *head.tensors)]
    with without_autocast(rows.device):
        if rows.numel() == 0:
            logprob = empty_loss(rows, head).expand(len(rows))
            found = empty_statistics(rows) if statistics else ()
        elif any(needs_grad[1:]):
            losses, *found = LinearRowLosses.apply(rows, *head.tensors, job, statistics)
            logprob = -losses
        elif needs_grad[0]:
            logprob, *found = _OfFrozenHead.apply(rows, *head.tensors, job, statistics)
        else:
            targets = replace(job.targets, statistics=empty_statistics(rows) if statistics else None)
            losses, found, _ = linear_chunks(rows, head, targets, chunks)
            logprob = -losses
    measured = RowStatistics(*found) if statistics else None
    return _token_log_probs(logprob, measured, flat, index, labels.shape, ignore_index)


def _token_log_probs(
    logprob: torch.Tensor,  # (M,)
    statistics: RowStatistics | None,
    labels: torch.Tensor,  # (M,)
    index: torch.Tensor | None,  # (M,) of all rows
    shape: torch.Size,
    ignore_index: int,
) -> TokenLogProbs:
    """Return the results of M rows in the shape of all labels."""

    def whole(t: torch.Tensor) -> torch.Tensor:
        return (t if index is None else scatter_rows(t, index, shape.numel())).view(shape)

    if statistics is None:
        return TokenLogProbs(whole(logprob))
    ignored = labels == ignore_index
    measured = (statistics.entropy, statistics.argmax, statistics.mean_logit)
    return TokenLogProbs(whole(logprob), *(whole(t.masked_fill(ignored, 0)) for t in measured))


class LogProbsMemory(NamedTuple):
    """Bytes that `linear_log_probs` allocates: while it runs, held until its backward, while that runs.

    The gradients that the backward returns are not counted, and neither are copies of rows that have a label.
    """

    forward: int
    held: int
    backward: int


def log_probs_memory(
    n_rows: int,
    hidden_size: int,
    vocab_size: int,
    dtype: torch.dtype,
    *,
    needs_dw: bool,
    needs_dx: bool = True,
    chunk_bytes: int = CHUNK_BYTES,
    free_bytes: int | None = None,
) -> LogProbsMemory:
    """Predict the memory of `linear_log_probs`. needs_dw: the layer is trained; free_bytes: as in `schedule_of`."""
    sizes = (n_rows, hidden_size, vocab_size, dtype)
    options = {"chunk_bytes": chunk_bytes, "products": ChunkProducts(needs_dx)}
    logits = schedule_of(*sizes, needs_dw=False, **options).extra_bytes
    if needs_dw:
        return LogProbsMemory(logits, 0, schedule_of(*sizes, free_bytes=free_bytes, **options).extra_bytes)
    return LogProbsMemory(logits, n_rows * hidden_size * dtype.itemsize if needs_dx else 0, 0)


@dataclass(frozen=True)
class TokenStatistics:
    """Statistics of each token, in the shape of the labels.

    logprob is 0 where the label is ignored and NaN where it is no class. mean_logit is the mean over the vocabulary.
    """

    logprob: torch.Tensor
    argmax: torch.Tensor
    entropy: torch.Tensor
    mean_logit: torch.Tensor

    @property
    def loss(self) -> torch.Tensor:
        """The cross entropy of each token."""
        return -self.logprob


def linear_token_statistics_reference(
    hidden: torch.Tensor,  # (..., E)
    weight: torch.Tensor,  # (V, E)
    labels: torch.Tensor,  # (...)
    bias: torch.Tensor | None = None,  # (V,)
    *,
    lora: LinearLora | None = None,
    **options: int | float | None,
) -> TokenStatistics:
    """Compute `linear_token_statistics` in plain torch with all logits; options are the fields of LossOptions."""
    logits = Head(weight, bias, *(lora or ())).reference_logits(hidden)
    found = statistics_torch(logits.reshape(-1, len(weight)), labels.reshape(-1), LossOptions(**options))
    return TokenStatistics(*(t.view(labels.shape) for t in found))


@torch.no_grad()
def linear_token_statistics(
    hidden: torch.Tensor,  # (..., E)
    weight: torch.Tensor,  # (V, E)
    labels: torch.Tensor,  # (...)
    bias: torch.Tensor | None = None,  # (V,)
    *,
    lora: LinearLora | None = None,
    softcap: float | None = None,
    logit_scale: float = 1.0,
    ignore_index: int = -100,
) -> TokenStatistics:
    """Return log-probability of the label, argmax, entropy and mean logit of each token, without gradients.

    The options are those of linear_cross_entropy. argmax (int64), entropy (float32, in nats) and mean_logit (float32)
    are computed at ignored labels too. Raises ValueError on mismatched shapes or dtypes.
    """
    head = Head(weight, bias, *(lora or ()))
    options = LossOptions(ignore_index, 0.0, softcap, logit_scale)
    hidden, head = check_linear("linear_token_statistics", hidden, head, labels)
    rows = hidden.reshape(-1, hidden.shape[-1]).contiguous()
    flat = labels.reshape(-1).to(rows.device).contiguous()
    n_rows = len(rows)
    found = empty_statistics(rows)
    if n_rows:
        slot = choose_schedule(rows, head.weight, CHUNK_BYTES, needs=(False, False)).slot
        buffer = rows.new_empty((slot, len(weight)))
        with without_autocast(rows.device):
            for start in range(0, n_rows, slot):
                part = slice(start, min(start + slot, n_rows))
                logits = buffer[: part.stop - start]
                head.write_logits(rows[part], head.low_rank(rows[part]), out=logits)
                write_statistics(logits, flat[part], options, found.of(part))
    return TokenStatistics(*(t.view(labels.shape) for t in found))
