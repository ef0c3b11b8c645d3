"""The task dpo with loss_type kto: single answers that are desirable or not.

    loss of an answer   1 - sigmoid(beta (s - kl)) or 1 - sigmoid(beta (kl - s)), s = log p - log p_ref
    kl                  max(0, mean of log p - log p_ref over mismatched answers), without gradients

A mismatched answer is the prompt of an example with the answer of another one: of the example before it, within blocks
of examples as large as a global batch, as TRL builds them. They are the same in each epoch, so their reference
log-probabilities can be computed once. kl is estimated once per step on those of all examples of the global batch, so
it depends neither on ranks nor on micro-batches.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
import torch.distributed as dist
from torch import Tensor, nn

from ligertune.data.batching.order import RowOrder
from ligertune.data.examples import Example, Examples
from ligertune.data.templates.label_masking import IGNORE_INDEX
from ligertune.features.preference.answers import FIELDS, AnswerLogProbs, AnswerSums, answer_fields, answer_log_probs
from ligertune.features.preference.preference_losses import kto_losses
from ligertune.features.preference.recipe import PreferenceSpec
from ligertune.features.preference.reference import Reference, ReferenceRows, indices_of, rank_batches
from ligertune.features.task import Measures, Task, examples_in_memory
from ligertune.patching.fused_loss import head_loss
from ligertune.planning.memory.model_shape import ModelShape
from ligertune.planning.plan import Plan

if TYPE_CHECKING:
    from ligertune.data.batching.collate import Batcher

MEASURES = ("rewards/chosen", "rewards/rejected", "logps/chosen", "logps/rejected", "kl", "entropy")


class KtoMeasures(Measures):
    """Measures of desirable ("chosen") and undesirable ("rejected") answers, and the margin between their means."""

    def means(self, taken: Tensor) -> dict[str, float]:
        found = super().means(taken)
        if {"rewards/chosen", "rewards/rejected"} <= found.keys():
            found["rewards/margins"] = found["rewards/chosen"] - found["rewards/rejected"]
        return found


def mismatched_examples(examples: Examples, *, block: int, max_length: int) -> Iterator[Example]:
    """Yield each example's prompt with the answer of the example before it; the first of a block gets the last one's.

    Answers begin at the first trained token. Longer sequences than max_length are cut at the end.
    """

    def answer_start(example: Example) -> int:
        return int(np.argmax(example.labels != IGNORE_INDEX))

    for index in range(len(examples)):
        first = index // block * block
        last = min(first + block, len(examples)) - 1
        prompt = examples[index]
        other = examples[index - 1 if index > first else last]
        end = answer_start(prompt)
        start = answer_start(other)
        ids = np.concatenate([prompt.input_ids[:end], other.input_ids[start:]])[:max_length]
        labels = np.concatenate([prompt.labels[:end], other.labels[start:]])[:max_length]
        yield Example(ids, labels, prompt.source)


@dataclass(frozen=True)
class MismatchedOrder:
    """The batches in which `KtoTask` computes the mismatched answers of a training step."""

    plan: Plan
    order: RowOrder  # of training
    lengths: np.ndarray  # (N,) of the mismatched answers

    def step(self, step: int) -> list[np.ndarray]:
        return self.order.step(step)

    def micro_batches(self, step: int, rank: int) -> list[list[np.ndarray]]:
        indices = indices_of(self.step(step))
        size = self.plan.batching.micro_batch_size
        return list(rank_batches(self.plan, self.lengths, indices, size=size, rank=rank))


class KtoTask(Task):
    """Raise the probability of desirable answers and lower that of others. The loss is the mean over answers."""

    gives_predictions = False

    def __init__(self, shape: ModelShape, plan: Plan, reference: Reference, device: torch.device) -> None:
        super().__init__(shape)
        self.options = plan.build.section(PreferenceSpec)
        self._plan = plan
        self._reference = reference
        self.measures = KtoMeasures(MEASURES, device)
        self._model: nn.Module | None = None
        self._mismatched: dict[int, Batcher] = {}  # by the id of the examples that they are made from

    def prepare(self, model: nn.Module, batchers: Sequence[Batcher]) -> None:
        self._model = model
        # in a block of one example, its prompt would get its own answer
        block = max(self._plan.batching.global_batch_size, 2)
        longest = self._plan.data_options.max_length
        rows = []
        for batcher, order in zip(batchers, [self.order, None], strict=False):  # of training, and of an evaluation
            made = Examples(mismatched_examples(examples_in_memory(batcher.examples), block=block, max_length=longest))
            mismatched = replace(batcher, examples=made)
            self._mismatched[id(batcher.examples)] = mismatched
            shuffled = None if order is None else MismatchedOrder(self._plan, order, made.lengths)
            rows += [ReferenceRows(batcher, order), ReferenceRows(mismatched, shuffled)]
        self._reference.prepare(model, rows, resumed=self.resumed, say=self.say)

    def inputs(self, examples: Examples, indices: np.ndarray, *, step: int | None = None) -> dict[str, Any]:
        """Return the divisor of the loss, the number of answers, and kl (). All ranks call it."""
        return {"num_items_in_batch": max(len(indices), 1), "kl": self._kl(examples, indices, trains=step is not None)}

    def _kl(self, examples: Examples, indices: np.ndarray, *, trains: bool) -> Tensor:
        """Return the estimate of kl over the mismatched answers of the examples at `indices`."""
        model = self._model
        assert model is not None  # `prepare` came first
        batcher = self._mismatched[id(examples)]
        lengths = examples_in_memory(batcher.examples).lengths
        batching = self._plan.batching
        size = batching.micro_batch_size if trains else batching.eval_batch_size
        total = torch.zeros((), device=batcher.device)
        was_training = model.training
        model.train(trains and was_training)
        with torch.no_grad():
            for rows in rank_batches(self._plan, lengths, indices, size=size):
                batch = batcher(rows)
                del batch["desirable"]
                difference = -self._reference.log_probs(model, batch) + answer_log_probs(model, batch)
                total += difference.sum() * bool(rows)  # a rank without rows computes an untrained answer
        model.train(was_training)
        if dist.is_initialized():
            dist.all_reduce(total)
        return (total / len(indices)).clamp(min=0)

    def batch_fields(self, examples: Examples, indices: Sequence[int], batch: dict[str, Any]) -> dict[str, Any]:
        desirable = torch.from_numpy(examples.desirable[list(indices)] == 1)
        fields = {**answer_fields(batch, len(indices)), "desirable": desirable}
        return {**fields, **self._reference.fields(examples, indices)}

    def loss(self, model: nn.Module, batch: dict[str, Any]) -> Tensor:
        batch = dict(batch)
        kl, divisor, desirable = (batch.pop(name) for name in ("kl", "num_items_in_batch", "desirable"))
        reference = self._reference.log_probs(model, batch)
        fields = {name: batch.pop(name) for name in FIELDS if name in batch}
        with head_loss(KtoHeadLoss(self, fields, reference, desirable, kl, divisor)):
            return model(**batch, use_cache=False).loss

    def measure(self, sums: AnswerSums, rewards: Tensor, desirable: Tensor, counts: Tensor, kl: Tensor) -> None:
        """Add to the measures. rewards, desirable, counts: (A,)."""
        for name, chosen in (("chosen", desirable & counts), ("rejected", ~desirable & counts)):
            self.measures.add(f"rewards/{name}", rewards.masked_fill(~chosen, 0.0), chosen.sum())
            self.measures.add(f"logps/{name}", sums.plain.masked_fill(~chosen, 0.0), chosen.sum())
        self.measures.add("kl", kl)


class KtoHeadLoss(AnswerLogProbs):
    """The HeadLoss of one batch of single answers."""

    def __init__(
        self,
        task: KtoTask,
        fields: dict[str, Tensor],
        reference: Tensor,  # (A,)
        desirable: Tensor,  # (A,) bool
        kl: Tensor,  # ()
        divisor: int,
    ) -> None:
        super().__init__(fields, statistics=True)
        self._task = task
        self._reference = reference
        self._desirable = desirable
        self._kl = kl
        self._divisor = divisor

    def loss_of(self, sums: AnswerSums) -> Tensor:
        tokens = self.fields["answer_tokens"]
        options = self._task.options
        counts = tokens > 0  # not the untrained answer of a rank without rows
        scores = sums.plain - self._reference
        losses = kto_losses(scores, self._desirable, self._kl, options).masked_fill(~counts, 0.0)
        self._task.measure(sums, options.beta * scores.detach(), self._desirable, counts, self._kl)
        assert sums.entropy is not None  # of `statistics`
        self._task.measures.add("entropy", sums.entropy, tokens.sum())
        return losses.sum() / self._divisor
