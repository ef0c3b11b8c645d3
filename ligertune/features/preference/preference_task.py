"""The task dpo: fields of a batch, the loss of pairs inside the output head, and TRL's measures."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from torch import Tensor, nn

from ligertune.data.templates.label_masking import IGNORE_INDEX
from ligertune.features.preference.answers import (
    FIELDS,
    AnswerLogProbs,
    AnswerSums,
    answer_fields,
    train_on_chosen_prompts,
)
from ligertune.features.preference.preference_losses import CHOSEN, REJECTED, PairLogProbs, pair_losses, sft_weight_of
from ligertune.features.preference.recipe import PreferenceSpec
from ligertune.features.preference.reference import Reference, ReferenceRows
from ligertune.features.task import Measures, Task
from ligertune.patching.fused_loss import head_loss
from ligertune.planning.memory.model_shape import ModelShape

if TYPE_CHECKING:
    from ligertune.data.batching.collate import Batcher
    from ligertune.data.examples import Examples

MEASURES = (
    "rewards/chosen", "rewards/rejected", "rewards/accuracies", "rewards/margins", "logps/chosen", "logps/rejected",
    "entropy", "mean_token_accuracy",
)  # fmt: skip


class PreferenceTask(Task):
    """Prefer the chosen answer of each pair. The loss of a step is the mean over the pairs of the global batch."""

    gives_predictions = False

    def __init__(
        self, shape: ModelShape, options: PreferenceSpec, reference: Reference | None, device: torch.device
    ) -> None:
        super().__init__(shape)
        self.options = options
        self._reference = reference
        self.measures = Measures(MEASURES, device)

    def prepare(self, model: nn.Module, batchers: Sequence[Batcher]) -> None:
        if self._reference is not None:
            orders = [self.order, None]  # of training, and of an evaluation
            rows = [ReferenceRows(batcher, order) for batcher, order in zip(batchers, orders, strict=False)]
            self._reference.prepare(model, rows, resumed=self.resumed, say=self.say)

    def inputs(self, examples: Examples, indices: np.ndarray, *, step: int | None = None) -> dict[str, Any]:
        """Return the divisors of the loss: pairs, and trained tokens of chosen answers."""
        found: dict[str, Any] = {"num_items_in_batch": max(len(indices), 1)}
        if self.options.loss_type == "orpo":  # its cross-entropy counts the prompts
            found["chosen_tokens"] = max(int((examples.first_lengths[indices] - 1).sum()), 1)
        elif self.options.sft_weight:
            labels = (examples[i].labels[1 : examples[i].first_length] for i in indices.tolist())
            found["chosen_tokens"] = max(sum(int((part != IGNORE_INDEX).sum()) for part in labels), 1)
        return found

    def batch_fields(self, examples: Examples, indices: Sequence[int], batch: dict[str, Any]) -> dict[str, Any]:
        fields = answer_fields(batch, 2 * len(indices), ld_alpha=self.options.ld_alpha)
        if self.options.loss_type == "orpo":
            fields = train_on_chosen_prompts(batch, fields)
        return fields if self._reference is None else {**fields, **self._reference.fields(examples, indices)}

    def loss(self, model: nn.Module, batch: dict[str, Any]) -> Tensor:
        batch = dict(batch)
        divisors: dict[str, int] = {
            name: batch.pop(name) for name in ("num_items_in_batch", "chosen_tokens") if name in batch
        }
        reference = None if self._reference is None else self._reference.log_probs(model, batch)
        fields = {name: batch.pop(name) for name in FIELDS if name in batch}
        with head_loss(PairHeadLoss(self, fields, reference, divisors)):
            return model(**batch, use_cache=False).loss

    def loss_of_pairs(
        self, sums: AnswerSums, tokens: Tensor, reference: Tensor | None, divisors: dict[str, int]
    ) -> Tensor:
        """Return the part of the loss () of a batch with 2P answers, and add to the measures.

        tokens, reference (2P,): trained tokens and reference log-probabilities of the answers.
        """
        tokens = tokens.view(-1, 2)
        # A rank without rows computes a pair without trained tokens, which must not count. Its log-probabilities of 0
        # would have infinite odds.
        counts = tokens.sum(1) > 0
        policy = sums.weighted.view(-1, 2).masked_fill(~counts[:, None], -1.0)
        losses, rewards = pair_losses(
            PairLogProbs(policy, None if reference is None else reference.view(-1, 2), tokens), self.options
        )
        loss = losses.masked_fill(~counts, 0.0).sum() / divisors["num_items_in_batch"]
        if weight := sft_weight_of(self.options):
            loss = loss - weight * sums.plain.view(-1, 2)[:, CHOSEN].sum() / divisors["chosen_tokens"]
        self._measure(sums, policy.detach(), rewards, tokens)
        return loss

    def _measure(self, sums: AnswerSums, policy: Tensor, rewards: Tensor, tokens: Tensor) -> None:
        """Add to the measures. policy, rewards, tokens: (P, 2)."""
        counts = tokens.sum(1) > 0
        margins = rewards[:, CHOSEN] - rewards[:, REJECTED]
        pairs = counts.sum()
        of_pairs = {
            "rewards/chosen": rewards[:, CHOSEN],
            "rewards/rejected": rewards[:, REJECTED],
            "rewards/accuracies": (margins > 0).float(),
            "rewards/margins": margins,
            "logps/chosen": policy[:, CHOSEN],
            "logps/rejected": policy[:, REJECTED],
        }
        for name, values in of_pairs.items():
            self.measures.add(name, values.masked_fill(~counts, 0.0), pairs)
        assert sums.entropy is not None and sums.correct is not None  # `PairHeadLoss` asks for statistics
        self.measures.add("entropy", sums.entropy, tokens.sum())
        correct = sums.correct.view(-1, 2)[:, CHOSEN]
        self.measures.add("mean_token_accuracy", correct, tokens[:, CHOSEN].sum())


class PairHeadLoss(AnswerLogProbs):
    """The HeadLoss of one batch of pairs."""

    def __init__(
        self, task: PreferenceTask, fields: dict[str, Tensor], reference: Tensor | None, divisors: dict[str, int]
    ) -> None:
        super().__init__(fields, statistics=True)
        self._task = task
        self._reference = reference
        self._divisors = divisors

    def loss_of(self, sums: AnswerSums) -> Tensor:
        return self._task.loss_of_pairs(sums, self.fields["answer_tokens"], self._reference, self._divisors)
