"""Log-probabilities of tokens under a language model, computed only at the positions that are asked for.

`labels` of a batch are those of training: not shifted, IGNORE_INDEX where nothing is asked for. With our loss kernels
in the model no logits are stored; without them those of the positions are read.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from ligertune_kernels import LinearLora, backend, linear_log_probs
from torch import Tensor, nn

from ligertune.data.templates.label_masking import IGNORE_INDEX
from ligertune.models.shape import base_of
from ligertune.patching.deferred_logits import loss_only
from ligertune.patching.fused_loss import KernelLossModel, head_loss, let_head_losses_run

# Rows whose logits `by_torch` makes at a time: 32 MiB in float32 for a vocabulary of 32,000.
CHUNK_ROWS = 256


class LogitForm(NamedTuple):
    """What a model does to z = W h: softcap * tanh(z * logit_scale / softcap), or z * logit_scale without a cap.

    lora: low-rank term of z, of an adapter on the output head.
    """

    logit_scale: float = 1.0
    softcap: float | None = None
    lora: LinearLora | None = None

    def logits(self, z: Tensor, hidden: Tensor) -> Tensor:
        """Return the logits (M, V) of z (M, V) without the low-rank term, and hidden states (M, E)."""
        if self.lora is not None:
            z = z + self.lora.scale * F.linear(F.linear(hidden, self.lora.a), self.lora.b)
        z = z * self.logit_scale
        return z if self.softcap is None else self.softcap * torch.tanh(z / self.softcap)


def by_kernel(
    hidden: Tensor, weight: Tensor, bias: Tensor | None, targets: Tensor, form: LogitForm
) -> tuple[Tensor, Tensor]:
    """Return the log-probabilities (M,) of targets (M,), and whether each is the most probable token, by our kernel."""
    found = linear_log_probs(
        hidden,
        weight,
        targets,
        bias,
        lora=form.lora,
        logit_scale=form.logit_scale,
        softcap=form.softcap,
        statistics=True,
    )
    assert found.argmax is not None  # of `statistics`
    return found.logprob, found.argmax == targets


def by_torch(
    hidden: Tensor, weight: Tensor, bias: Tensor | None, targets: Tensor, form: LogitForm
) -> tuple[Tensor, Tensor]:
    """Compute `by_kernel` in chunks of logits. On a CPU the reference of the kernel, with its statistics, is slower."""
    log_probs = []
    is_best = []
    for rows, asked in zip(hidden.split(CHUNK_ROWS), targets.split(CHUNK_ROWS), strict=True):
        found, best = _of_logits(form.logits(F.linear(rows, weight, bias), rows), asked)
        log_probs.append(found)
        is_best.append(best)
    return torch.cat(log_probs), torch.cat(is_best)


def _of_logits(logits: Tensor, targets: Tensor) -> tuple[Tensor, Tensor]:
    logits = logits.float() if logits.dtype.itemsize < 4 else logits
    log_probs = torch.log_softmax(logits, -1).gather(-1, targets[:, None])[:, 0]
    return log_probs, logits.argmax(-1) == targets


class TargetLogProbs:
    """A HeadLoss that keeps the log-probabilities of targets at some positions.

    rows, targets (M,): places among the N positions of a batch, and the tokens that are asked for after them; a place
    may occur several times. None: the places that have a label, and the labels.
    """

    def __init__(self, rows: Tensor | None = None, targets: Tensor | None = None) -> None:
        self._asked = None if rows is None or targets is None else (rows, targets)
        self.rows: Tensor | None = None  # (M,)
        self.log_probs: Tensor | None = None  # (M,)
        self.is_best: Tensor | None = None  # (M,) bool: whether the target is the most probable token

    def fused(
        self, hidden: Tensor, weight: Tensor, bias: Tensor | None, labels: Tensor, options: dict[str, Any]
    ) -> Tensor:
        """Compute them from hidden states (N, E), without logits of other positions. The returned loss is not read."""
        rows, targets = self._wanted(labels)
        form = LogitForm(options.get("logit_scale", 1.0), options.get("softcap"), options.get("lora"))
        compute = by_kernel if backend(hidden.device) == "triton" else by_torch
        log_probs, is_best = compute(hidden.index_select(0, rows), weight, bias, targets, form)
        return self._keep(rows, log_probs, is_best)

    def dense(self, logits: Tensor, labels: Tensor, num_items_in_batch: int | Tensor | None) -> Tensor:
        """Compute them from logits (N, V). The returned loss is not read."""
        rows, targets = self._wanted(labels)
        return self._keep(rows, *_of_logits(logits.index_select(0, rows), targets))

    def _wanted(self, labels: Tensor) -> tuple[Tensor, Tensor]:
        if self._asked is not None:
            return self._asked
        rows = torch.nonzero(labels != IGNORE_INDEX)[:, 0]
        return rows, labels[rows]

    def _keep(self, rows: Tensor, log_probs: Tensor, is_best: Tensor) -> Tensor:
        self.rows = rows
        self.log_probs = log_probs
        self.is_best = is_best
        return log_probs.sum()

    def sums(self, part_of: Tensor, parts: int) -> Tensor:
        """Return (3, parts) float64: sums of log-probabilities, numbers, and numbers of best tokens.

        part_of (M,): the part that each row belongs to.
        """
        assert self.log_probs is not None and self.is_best is not None  # of the forward
        values = torch.stack([self.log_probs.double(), torch.ones_like(self.log_probs).double(), self.is_best.double()])
        return values.new_zeros(3, parts).index_add_(1, part_of, values)


def prepare_to_score(model: nn.Module, task: str) -> None:
    """Let a model without our loss kernels compute `label_log_probs`. Raises UserError if it cannot."""
    inner = base_of(model)
    if not isinstance(inner, KernelLossModel):
        let_head_losses_run(inner, task)


@torch.no_grad()
def keep_log_probs(model: nn.Module, batch: dict[str, Any], kept: TargetLogProbs) -> TargetLogProbs:
    """Run a forward of a collated batch that fills `kept`, and return it."""
    with loss_only(), head_loss(kept):
        model(**batch, use_cache=False)
    return kept


def document_sums(model: nn.Module, batch: dict[str, Any]) -> Tensor:
    """Return sums over the documents of a packed batch, or the rows of a padded one: (3, D) float64.

    Row 0: log-probabilities of the labels. Row 1: their number. Row 2: how many are the most probable token.
    """
    labels = batch["labels"]
    lengths = batch.get("document_lengths") or [labels.shape[1]] * labels.shape[0]
    kept = keep_log_probs(model, batch, TargetLogProbs())
    assert kept.rows is not None  # of the forward
    ends = torch.tensor(lengths, device=kept.rows.device).cumsum(0)
    return kept.sums(torch.searchsorted(ends, kept.rows, right=True), len(lengths))
