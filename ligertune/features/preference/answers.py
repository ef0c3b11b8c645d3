"""Answers of a batch: which tokens belong to which answer, and sums of token log-probabilities over answers.

Answer j of a batch is document j of packed rows, or row j of a padded batch. Answers 2i and 2i + 1 are the chosen and
the rejected one of pair i.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from ligertune_kernels import TokenLogProbs, labelled_rows, linear_log_probs
from torch import Tensor, nn

from ligertune.data.batching.collate import ROWS_MULTIPLE_OF
from ligertune.data.templates.label_masking import IGNORE_INDEX
from ligertune.patching.deferred_logits import loss_only, next_tokens
from ligertune.patching.fused_loss import head_loss

# fields of a batch that `answer_fields` and `train_on_chosen_prompts` add
FIELDS = ("answer_lengths", "answer_tokens", "token_weights", "answer_mask")


def answer_fields(batch: dict[str, Any], answers: int, *, ld_alpha: float | None = None) -> dict[str, Tensor]:
    """Return FIELDS of a collated batch on the CPU whose first `answers` documents or rows are answers.

    answer_lengths (D,): positions of each document or row, trained or not, which add up to all N positions.
    answer_tokens (answers,): trained tokens. token_weights (N,), only with ld_alpha: 1 for the first tokens of a pair's
    answers, as many as the shorter one has, and ld_alpha for the others (LD-DPO, Liu 2024).
    """
    labels = batch["labels"]
    lengths = torch.tensor(batch.get("document_lengths") or [labels.shape[1]] * labels.shape[0])
    trained = (next_tokens(labels, IGNORE_INDEX) != IGNORE_INDEX).flatten().to(torch.float32)
    tokens = torch.segment_reduce(trained, "sum", lengths=lengths)[:answers]
    fields = {"answer_lengths": lengths, "answer_tokens": tokens}
    if ld_alpha is not None:
        shorter = tokens.view(-1, 2).amin(1).repeat_interleave(2)
        shorter = torch.cat([shorter, shorter.new_zeros(len(lengths) - answers)]).repeat_interleave(lengths)
        before = trained.cumsum(0) - trained
        place = before - before[lengths.cumsum(0) - lengths].repeat_interleave(lengths)  # trained tokens before it
        fields["token_weights"] = torch.where(place < shorter, 1.0, ld_alpha)
    return fields


def train_on_chosen_prompts(batch: dict[str, Any], fields: dict[str, Tensor]) -> dict[str, Tensor]:
    """Return fields of a batch of pairs with labels at the prompts of chosen sequences, too, as ORPO's cross-entropy
    needs them.

    fields: of `answer_fields`. token_weights and answer_mask (N,) are 0 at the prompts. The chosen sequences of padded
    rows end at their last label.
    """
    labels = batch["labels"].flatten().clone()
    ids = batch["input_ids"].flatten()
    in_answer = next_tokens(batch["labels"], IGNORE_INDEX).flatten() != IGNORE_INDEX
    starts = (fields["answer_lengths"].cumsum(0) - fields["answer_lengths"])[: len(fields["answer_tokens"])]
    for start, length in zip(starts.tolist()[::2], fields["answer_lengths"].tolist()[::2], strict=False):
        labelled = torch.nonzero(labels[start : start + length] != IGNORE_INDEX)
        if len(labelled):  # a rank without rows has an untrained pair
            span = slice(start + 1, start + int(labelled[-1]) + 1)
            labels[span] = ids[span]
    found = {**fields, "labels": labels.view(batch["labels"].shape), "answer_mask": in_answer}
    if "labelled_rows" in batch:
        found["labelled_rows"] = labelled_rows(found["labels"], shift=(1,), multiple_of=ROWS_MULTIPLE_OF)
    return {**found, "token_weights": in_answer.float()}


@dataclass(frozen=True)
class AnswerSums:
    """Sums over the tokens of each of A answers. The last two are None unless statistics are computed."""

    weighted: Tensor  # (A,) log-probabilities times token_weights
    plain: Tensor  # (A,) log-probabilities
    entropy: Tensor | None  # (A,)
    correct: Tensor | None  # (A,) tokens whose label has the highest probability


class AnswerLogProbs:
    """A HeadLoss that sums token log-probabilities over answers. Subclasses make a loss of the sums.

    fields: FIELDS of the batch, on the device. statistics: also compute entropy and argmax of each token.
    """

    def __init__(self, fields: dict[str, Tensor], *, statistics: bool = False) -> None:
        self.fields = fields
        self.statistics = statistics
        self.sums: AnswerSums | None = None  # of the forward

    def fused(
        self, hidden: Tensor, weight: Tensor, bias: Tensor | None, labels: Tensor, options: dict[str, Any]
    ) -> Tensor:
        """Return the loss from hidden states (N, E), without logits."""
        kept = {name: value for name, value in options.items() if name != "num_items_in_batch"}
        return self._loss(linear_log_probs(hidden, weight, labels, bias, statistics=self.statistics, **kept), labels)

    def dense(self, logits: Tensor, labels: Tensor, num_items_in_batch: int | Tensor | None) -> Tensor:
        """Return the loss from logits (N, V)."""
        log_probs = torch.log_softmax(logits.float() if logits.dtype.itemsize < 4 else logits, -1)
        ignored = labels == IGNORE_INDEX
        found = log_probs.gather(-1, labels.masked_fill(ignored, 0)[:, None])[:, 0].masked_fill(ignored, 0.0)
        if not self.statistics:
            return self._loss(TokenLogProbs(found), labels)
        detached = log_probs.detach()
        entropy = -(detached.exp() * detached).sum(-1).masked_fill(ignored, 0.0)
        return self._loss(TokenLogProbs(found, entropy, logits.argmax(-1).masked_fill(ignored, 0)), labels)

    def _loss(self, tokens: TokenLogProbs, labels: Tensor) -> Tensor:
        lengths, weights = self.fields["answer_lengths"], self.fields.get("token_weights")
        answers = len(self.fields["answer_tokens"])

        def summed(values: Tensor) -> Tensor:
            # Unlike index_add, it adds in a fixed order on a GPU. unsafe: without a check of lengths, which would
            # synchronise; they are the documents of the batch.
            return torch.segment_reduce(values, "sum", lengths=lengths, unsafe=True)[:answers]

        plain = summed(tokens.logprob)
        weighted = plain if weights is None else summed(tokens.logprob * weights)
        entropy = correct = None
        if tokens.entropy is not None:
            counted = self.fields.get("answer_mask", labels != IGNORE_INDEX)
            hits = (tokens.argmax == labels) & counted
            entropy = summed(tokens.entropy * counted)
            correct = summed(hits.to(tokens.entropy.dtype))
        self.sums = AnswerSums(weighted, plain, entropy, correct)
        return self.loss_of(self.sums)

    def loss_of(self, sums: AnswerSums) -> Tensor:
        """Return the loss () of a batch."""
        return sums.weighted.sum()


def answer_log_probs(model: nn.Module, batch: dict[str, Any]) -> Tensor:
    """Return the weighted log-probability of each answer (A,) of a batch with FIELDS, without gradients."""
    batch = dict(batch)
    loss = AnswerLogProbs({name: batch.pop(name) for name in FIELDS if name in batch})
    with torch.no_grad(), loss_only(), head_loss(loss):
        model(**batch, use_cache=False)
    assert loss.sums is not None  # the forward has computed the loss
    return loss.sums.weighted
