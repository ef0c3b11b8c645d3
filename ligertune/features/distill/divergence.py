"""Divergence of a student's next-token distribution from a teacher's, inside the student's output head.

    loss = (1 - w) D + w CE        D: forward KL, reverse KL or generalised JSD, as of `jsd`; w: distill.sft_weight

D and the cross-entropy CE are sums over the labelled tokens, divided by the trained tokens of the global batch.
`linear_jsd` computes D from hidden states, without the logits of either model. It has no soft cap, and one temperature
for both models. With a soft cap, or with logit scales whose ratio is not a power of two, the logits of CHUNK_ROWS
tokens are made at a time instead (`TeacherHead.has_kernel`).
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
from ligertune_kernels import LinearLora, jsd, linear_cross_entropy, linear_jsd
from ligertune_kernels.ops.losses.labelled_rows import take_rows
from torch import Tensor
from torch.utils.checkpoint import checkpoint

from ligertune.errors import UserError
from ligertune.features.distill.recipe import DistillSpec
from ligertune.features.output_head import LogitTransform
from ligertune.features.task import Measures
from ligertune.planning.memory.activation_bytes import LOSS_CHUNK_ROWS

IGNORE_INDEX = -100
CHUNK_ROWS = LOSS_CHUNK_ROWS  # tokens whose logits exist at a time where no kernel computes the divergence


@dataclass(frozen=True)
class Divergence:
    """Which divergence, and its share of the loss. beta: 0 forward KL, 1 reverse KL, in between generalised JSD."""

    beta: float = 0.5
    temperature: float = 1.0
    sft_weight: float = 0.0

    @staticmethod
    def of(options: DistillSpec) -> Divergence:
        beta = {"forward_kl": 0.0, "reverse_kl": 1.0, "jsd": options.beta}[options.loss]
        return Divergence(beta, options.temperature, options.sft_weight)

    @property
    def measures(self) -> tuple[str, ...]:
        return ("kl", "sft_loss") if self.sft_weight else ("kl",)

    def sum_of_logits(self, student: Tensor, teacher: Tensor, labels: Tensor) -> Tensor:
        """Return the sum over labelled rows, of logits (N, V)."""
        log_probs = [
            (z.to(torch.promote_types(z.dtype, torch.float32)) / self.temperature).log_softmax(-1)
            for z in (student, teacher)
        ]
        return jsd(*log_probs, beta=self.beta, labels=labels, ignore_index=IGNORE_INDEX, reduction="sum")


@dataclass(frozen=True)
class TeacherHead:
    """The teacher's output head: logits (N, V') of hidden states (N, E')."""

    weight: Tensor  # (V', E')
    transform: LogitTransform

    def logits(self, hidden: Tensor, vocab_size: int) -> Tensor:
        """Return the logits (N, vocab_size) of hidden states (N, E')."""
        return self.transform.logits(F.linear(hidden, self.weight[:vocab_size]))

    def has_kernel(self, student: LogitTransform) -> bool:
        """Return whether `linear_jsd` computes the divergence of a student with these logits exactly."""
        caps = student.softcap is not None or self.transform.softcap is not None
        return not caps and math.frexp(self._ratio(student))[0] == 0.5  # the mantissa of a power of two

    def scaled(self, hidden: Tensor, student: LogitTransform) -> Tensor:
        """Return hidden states whose logits need the student's scale. The factor is a power of two, which is exact."""
        ratio = self._ratio(student)
        return hidden if ratio == 1.0 else hidden * ratio

    def _ratio(self, student: LogitTransform) -> float:
        return self.transform.logit_scale / student.logit_scale


class DistillLoss:
    """The loss of one batch, a `HeadLoss`.

    ran: whether the student's forward has called it. in_chunks: whether it made logits because no kernel is exact.
    """

    def __init__(
        self,
        divergence: Divergence,
        head: TeacherHead,
        teacher_hidden: Tensor,  # (N, E')
        measures: Measures,
    ) -> None:
        self.divergence = divergence
        self.head = head
        self.teacher_hidden = teacher_hidden
        self.measures = measures
        self.ran = self.in_chunks = False

    def fused(
        self, hidden: Tensor, weight: Tensor, bias: Tensor | None, labels: Tensor, options: dict[str, Any]
    ) -> Tensor:
        """Return the loss of the student's hidden states (N, E) and head: weight (V, E) and bias (V,).

        options: also lora, a LinearLora, if the head has a LoRA adapter.
        """
        student = LogitTransform(options["logit_scale"], options["softcap"])
        taught = self.teacher_hidden
        hidden, weight = with_lora_term(hidden, weight, options)
        hidden, labels = take_labelled(hidden, labels, rows := options["labelled_rows"])
        taught = taught if rows is None else taught.index_select(0, rows)
        count = options["num_items_in_batch"]
        if self.head.has_kernel(student):
            size = self._shared_vocabulary(len(weight))
            # Divided by the kernel: a division behind it would be one more pass over the gradients.
            found = linear_jsd(
                hidden,
                _first(weight, size),
                self.head.scaled(taught, student),
                _first(self.head.weight, size),
                labels=labels,
                beta=self.divergence.beta,
                temperature=self.divergence.temperature / student.logit_scale,
                student_bias=None if bias is None else _first(bias, size),
                num_items_in_batch=count,
                skip_ignored=rows is None,
            )
        else:
            self.in_chunks = True
            found = self._in_chunks(hidden, weight, bias, taught, labels, student) / divisor_of_labels(labels, count)
        sft = None
        if self.divergence.sft_weight:
            scaled = {"logit_scale": student.logit_scale, "softcap": student.softcap, "skip_ignored": rows is None}
            sft = linear_cross_entropy(hidden, weight, labels, bias, **scaled, num_items_in_batch=count)
        return self._total(found, sft, labels, count)

    def dense(self, logits: Tensor, labels: Tensor, num_items_in_batch: int | Tensor | None) -> Tensor:
        """Return the loss of the student's logits (N, V); the teacher's are made a chunk of rows at a time."""
        size = self._shared_vocabulary(logits.shape[1])
        total = torch.zeros((), device=logits.device)

        def part(logits: Tensor, taught: Tensor, labels: Tensor) -> Tensor:
            return self.divergence.sum_of_logits(logits[:, :size], self.head.logits(taught, size), labels)

        for rows in _chunks(len(labels)):
            inputs = logits[rows], self.teacher_hidden[rows], labels[rows]
            total = total + checkpoint(part, *inputs, use_reentrant=False)
        divisor = divisor_of_labels(labels, num_items_in_batch)
        sft = None
        if self.divergence.sft_weight:
            wide = logits.to(torch.promote_types(logits.dtype, torch.float32))
            sft = F.cross_entropy(wide, labels, ignore_index=IGNORE_INDEX, reduction="sum") / divisor
        return self._total(total / divisor, sft, labels, num_items_in_batch)

    def _in_chunks(
        self,
        hidden: Tensor,
        weight: Tensor,
        bias: Tensor | None,
        taught: Tensor,
        labels: Tensor,
        student: LogitTransform,
    ) -> Tensor:
        """Return the sum over labelled rows; the logits of a chunk exist in its forward and again in its backward."""
        size = self._shared_vocabulary(len(weight))

        def part(hidden: Tensor, weight: Tensor, bias: Tensor | None, taught: Tensor, labels: Tensor) -> Tensor:
            logits = student.logits(F.linear(hidden, weight[:size], None if bias is None else bias[:size]))
            return self.divergence.sum_of_logits(logits, self.head.logits(taught, size), labels)

        total = hidden.sum() * 0.0  # with a gradient if no row has a label
        for rows in _chunks(len(labels)):
            inputs = hidden[rows], weight, bias, taught[rows], labels[rows]
            total = total + checkpoint(part, *inputs, use_reentrant=False)
        return total

    def _shared_vocabulary(self, vocab_size: int) -> int:
        """Return the number of tokens of both models. The longer head has rows of padding, which are left out."""
        return min(vocab_size, len(self.head.weight))

    def _total(self, found: Tensor, sft: Tensor | None, labels: Tensor, count: int | Tensor | None) -> Tensor:
        self.ran = True
        return total_loss(self.divergence, self.measures, found, sft, labels, count)


def total_loss(
    divergence: Divergence,
    measures: Measures,
    found: Tensor,  # (): the divergence
    sft: Tensor | None,  # (): the cross-entropy
    labels: Tensor,  # (N,)
    count: int | Tensor | None,  # what both were divided by; None: the number of labels
) -> Tensor:
    """Return the loss; add its parts, as sums over tokens, to the measures."""
    labelled = (labels != IGNORE_INDEX).sum()
    divisor = divisor_of_labels(labels, count)
    measures.add("kl", found.detach() * divisor, count=labelled)
    if sft is None:
        return found
    measures.add("sft_loss", sft.detach() * divisor, count=labelled)
    return (1.0 - divergence.sft_weight) * found + divergence.sft_weight * sft


def take_labelled(hidden: Tensor, labels: Tensor, rows: Tensor | None) -> tuple[Tensor, Tensor]:
    """Return hidden states (M, E) and labels (M,) of the rows to compute; all of them without `rows`."""
    if rows is None:
        return hidden, labels
    taken = take_rows(hidden, rows) if hidden.requires_grad else hidden.index_select(0, rows)
    return taken, labels.index_select(0, rows)


def own_loss_error(family: str) -> UserError:
    """Return the error of a student whose forward did not call the head's loss."""
    return UserError(
        f"task: distill replaces the loss of a model, and this {family} computes its loss itself.",
        hint="Choose another student.",
    )


def divisor_of_labels(labels: Tensor, count: int | Tensor | None) -> int | Tensor:
    """Return `count`, or the number of labels."""
    return (labels != IGNORE_INDEX).sum().clamp(min=1) if count is None else count


def with_lora_term(hidden: Tensor, weight: Tensor, options: dict[str, Any]) -> tuple[Tensor, Tensor]:
    """Return hidden states (N, E + R) and a weight (V, E + R) whose product contains the adapter's term, if any."""
    lora: LinearLora | None = options.get("lora")
    if lora is None:
        return hidden, weight
    low_rank = F.linear(hidden, lora.a.to(hidden.dtype)) * lora.scale
    return torch.cat([hidden, low_rank.to(hidden.dtype)], -1), torch.cat([weight, lora.b.to(weight.dtype)], 1)


def _first(rows: Tensor, count: int) -> Tensor:
    return rows if len(rows) == count else rows[:count]


def _chunks(n_rows: int) -> Iterator[slice]:
    return (slice(start, start + CHUNK_ROWS) for start in range(0, n_rows, CHUNK_ROWS))
