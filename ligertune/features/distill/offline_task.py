"""The task distill without a teacher in memory: its most probable tokens are read from a folder.

    loss = (1 - w) D + w CE      D = sum_k q_k (log q_k - log p_k) + r (log r - log s)

q_k: the teacher's K stored probabilities; p_k: the student's of the same tokens; r, s: what is left of 1 in each. D is
forward KL where all other tokens count as one, so it is at most KL(teacher || student), and equals it if K is the whole
vocabulary.
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
import torch.nn.functional as F
from ligertune_kernels import linear_cross_entropy
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from ligertune.features.distill.divergence import (
    CHUNK_ROWS,
    IGNORE_INDEX,
    Divergence,
    divisor_of_labels,
    own_loss_error,
    take_labelled,
    total_loss,
    with_lora_term,
)
from ligertune.features.distill.recipe import DistillSpec
from ligertune.features.distill.teacher_files import StoredTeacher
from ligertune.features.output_head import LogitTransform
from ligertune.features.task import Measures, Task, examples_in_memory
from ligertune.patching.fused_loss import head_loss
from ligertune.planning.memory.model_shape import ModelShape
from ligertune.planning.plan import Plan

if TYPE_CHECKING:
    from ligertune.data.batching.collate import Batcher
    from ligertune.data.examples import Examples

FIELDS = ("teacher_ids", "teacher_log_probs")


class StoredLoss:
    """The loss of one batch, a `HeadLoss`. ids, log_probs: (M, K), of the labelled tokens in the order of the batch."""

    def __init__(self, divergence: Divergence, ids: Tensor, log_probs: Tensor, measures: Measures) -> None:
        self.divergence = divergence
        self.ids = ids
        self.log_probs = log_probs
        self.measures = measures
        self.ran = False

    def fused(
        self, hidden: Tensor, weight: Tensor, bias: Tensor | None, labels: Tensor, options: dict[str, Any]
    ) -> Tensor:
        """Return the loss of hidden states (N, E); the logits of CHUNK_ROWS tokens exist at a time."""
        student = LogitTransform(options["logit_scale"], options["softcap"])
        hidden, weight = with_lora_term(hidden, weight, options)
        hidden, labels = take_labelled(hidden, labels, options["labelled_rows"])

        def logits(rows: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
            return student.logits(F.linear(rows, weight, bias))

        def part(rows: Tensor, weight: Tensor, bias: Tensor | None, *stored: Tensor) -> Tensor:
            return self._sum(logits(rows, weight, bias), *stored)

        total = hidden.sum() * 0.0  # with a gradient if no row has a label
        for rows, *stored in self._chunks(labels):
            total = total + checkpoint(part, hidden[rows], weight, bias, *stored, use_reentrant=False)
        count = options["num_items_in_batch"]
        sft = None
        if self.divergence.sft_weight:
            scaled = {"logit_scale": student.logit_scale, "softcap": student.softcap}
            scaled["skip_ignored"] = options["labelled_rows"] is None
            sft = linear_cross_entropy(hidden, weight, labels, bias, **scaled, num_items_in_batch=count)
        return self._total(total / divisor_of_labels(labels, count), sft, labels, count)

    def dense(self, logits: Tensor, labels: Tensor, num_items_in_batch: int | Tensor | None) -> Tensor:
        """Return the loss of logits (N, V)."""
        total = logits.sum() * 0.0
        sft = None
        divisor = divisor_of_labels(labels, num_items_in_batch)
        for rows, *stored in self._chunks(labels):
            total = total + checkpoint(self._sum, logits[rows], *stored, use_reentrant=False)
        if self.divergence.sft_weight:
            wide = logits.to(torch.promote_types(logits.dtype, torch.float32))
            sft = F.cross_entropy(wide, labels, ignore_index=IGNORE_INDEX, reduction="sum") / divisor
        return self._total(total / divisor, sft, labels, num_items_in_batch)

    def _chunks(self, labels: Tensor) -> list[tuple[slice | Tensor, ...]]:
        """Return (rows, labels, ids, log-probabilities) of each chunk of rows. Other rows get those of a neighbour."""
        places = ((labels != IGNORE_INDEX).cumsum(0) - 1).clamp(min=0)
        parts = [slice(start, start + CHUNK_ROWS) for start in range(0, len(labels), CHUNK_ROWS)]
        return [(rows, labels[rows], self.ids[places[rows]], self.log_probs[places[rows]]) for rows in parts]

    def _sum(self, logits: Tensor, labels: Tensor, ids: Tensor, log_q: Tensor) -> Tensor:
        """Return the divergence summed over labelled rows, of logits (c, V)."""
        logits = logits.to(torch.promote_types(logits.dtype, torch.float32)) / self.divergence.temperature
        log_q = log_q.to(logits.dtype)
        lse = logits.logsumexp(-1)
        q = log_q.exp()
        rows = (q * (log_q - (logits.gather(-1, ids) - lse[:, None]))).sum(-1)
        if ids.shape[1] < logits.shape[1]:
            rest = (1.0 - q.sum(-1)).clamp(min=0.0)
            log_s = logits.scatter(-1, ids, -torch.inf).logsumexp(-1) - lse
            rows = rows + torch.xlogy(rest, rest) - rest * log_s
        return rows.masked_fill(labels == IGNORE_INDEX, 0.0).sum()

    def _total(self, found: Tensor, sft: Tensor | None, labels: Tensor, count: int | Tensor | None) -> Tensor:
        self.ran = True
        return total_loss(self.divergence, self.measures, found, sft, labels, count)


class OfflineDistillTask(Task):
    """Distil stored log-probabilities into the model."""

    gives_predictions = False

    def __init__(self, shape: ModelShape, plan: Plan) -> None:
        super().__init__(shape)
        options = plan.build.section(DistillSpec)
        assert options.teacher_file is not None  # without it the task is a `DistillTask`
        self._folder = Path(options.teacher_file)
        self._divergence = Divergence.of(options)
        self.measures = Measures(self._divergence.measures)
        self._stored: list[tuple[Examples, StoredTeacher]] = []

    def prepare(self, model: nn.Module, batchers: Sequence[Batcher]) -> None:
        """Open the files of the examples."""
        self.measures = Measures(self._divergence.measures, batchers[0].device)
        self._stored = []
        for name, batcher in zip(("train", "eval"), batchers, strict=False):
            examples = examples_in_memory(batcher.examples)
            self._stored.append((examples, StoredTeacher(self._folder, name, examples)))

    def batch_fields(self, examples: Examples, indices: Sequence[int], batch: dict[str, Any]) -> dict[str, Any]:
        """Return the stored token ids and log-probabilities (M, K) of the batch's trained tokens."""
        stored = next(stored for known, stored in self._stored if known is examples)
        return dict(zip(FIELDS, stored.of(indices), strict=True))

    def loss(self, model: nn.Module, batch: dict[str, Any]) -> Tensor:
        """Return this batch's part of the loss."""
        ids, log_probs = (batch[name] for name in FIELDS)
        of_batch = StoredLoss(self._divergence, ids, log_probs, self.measures)
        with head_loss(of_batch):
            loss = super().loss(model, {name: value for name, value in batch.items() if name not in FIELDS})
        if not of_batch.ran:
            raise own_loss_error(self.shape.family)
        return loss
