"""What the tasks classification and reward share: the fields of a batch, and the forward to its scores."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn

from ligertune.data.templates.label_masking import IGNORE_INDEX
from ligertune.features.scores.document_scores import ROWS, last_tokens, set_pad_token
from ligertune.features.task import Task

if TYPE_CHECKING:
    import numpy as np

    from ligertune.data.batching.collate import Batcher
    from ligertune.data.examples import Examples

DOCUMENTS = 1  # sequences of an example; a pair has 2


class ScoreTask(Task):
    """A task whose loss is a function of the scores of documents.

    documents: sequences of an example.
    """

    documents = DOCUMENTS
    _pad_token_id: int

    def prepare(self, model: nn.Module, batchers: Sequence[Batcher]) -> None:
        self._pad_token_id = batchers[0].pad_token_id
        set_pad_token(model, self._pad_token_id)

    def inputs(self, examples: Examples, indices: np.ndarray, *, step: int | None = None) -> dict[str, Any]:
        """Return the divisor of the loss: the number of examples."""
        return {"num_items_in_batch": max(len(indices), 1)}

    def batch_fields(self, examples: Examples, indices: Sequence[int], batch: dict[str, Any]) -> dict[str, Any]:
        """Return the rows of the scores, whether each example counts (a rank without rows has one that does not), and
        `target_fields`.
        """
        shape = batch["input_ids"].shape
        lengths = batch.get("document_lengths") or [shape[1]] * shape[0]
        rows = last_tokens(
            batch["input_ids"], lengths[: self.documents * len(indices)], pad_token_id=self._pad_token_id
        )
        counts = torch.full((len(indices),), bool((batch["labels"] != IGNORE_INDEX).any()))
        targets = [tuple(map(float, examples[index].targets)) for index in indices]  # ids stand for names by now
        return {ROWS: rows, "counts": counts, "targets": self.target_tensor(targets)}

    def target_tensor(self, targets: Sequence[tuple[float, ...]]) -> Tensor:
        """Return the labels of D examples as the loss reads them. Each task defines it."""
        raise NotImplementedError

    def predictions(self, model: nn.Module, batch: dict[str, Any]) -> tuple[Tensor, Tensor]:
        """Return the scores (D, labels) of the documents that count, and their targets (D, ...)."""
        batch = dict(batch)
        counts = batch.pop("counts")
        targets = batch.pop("targets")
        del batch["labels"]
        scores = model(**batch, use_cache=False).logits[0]
        return scores[counts.repeat_interleave(self.documents)], targets[counts]

    def loss(self, model: nn.Module, batch: dict[str, Any]) -> Tensor:
        batch = dict(batch)
        del batch["labels"]
        divisor, counts, targets = (batch.pop(name) for name in ("num_items_in_batch", "counts", "targets"))
        scores = model(**batch, use_cache=False).logits[0]
        return self.loss_of_scores(scores.float(), targets, counts, divisor)

    def loss_of_scores(self, scores: Tensor, targets: Tensor, counts: Tensor, divisor: int) -> Tensor:
        """Return this batch's part of the loss (), and add to the measures. Each task defines it.

        scores: (documents, labels) float32. counts: (D,) bool, whether an example counts.
        """
        raise NotImplementedError
