"""The task draft: sizes and FLOPs of a model with a draft head, divisors of the loss, and expected acceptance."""

from __future__ import annotations

import dataclasses
import itertools
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from torch import Tensor, nn

from ligertune.features.draft.training.draft_memory import DraftLayersShape
from ligertune.features.draft.training.draft_model import DraftModel
from ligertune.features.draft.training.state_cache import StateCache
from ligertune.features.task import Measures, Task, TaskExamples, count_labels_ahead
from ligertune.models.shape import parameter_kinds, read_shape
from ligertune.planning.memory.model_shape import ModelShape

if TYPE_CHECKING:
    from ligertune.data.batching.collate import Batcher

ACCEPTED_LENGTH = "accepted_length"


@dataclasses.dataclass(frozen=True)
class DraftShape(ModelShape):
    """Sizes of a frozen model and the draft head that trains next to it."""

    @staticmethod
    def of_model(model: DraftModel) -> DraftShape:
        """Read the sizes of a built model, which may be on the meta device."""
        base = read_shape(model.base_model, DraftShape)
        assert isinstance(base, DraftShape)  # as asked for
        size = sum(p.numel() for p in model.draft_head.parameters())
        return dataclasses.replace(
            base,
            family=f"{base.family} with a draft head",
            n_parameters=base.n_parameters + size,
            n_trainable=size,
            n_active=None if base.n_active is None else base.n_active + size,
            parameters=parameter_kinds(model),
            heads=DraftLayersShape(
                number=0,
                blocks=0,
                joint=False,
                own_projection=True,
                draft=model.draft_head.config,
                steps=model.spec.steps,
                loss=model.spec.loss,
                recomputes=model.recompute,
            ),
        )

    def flops(self, *, tokens: int, squared_lengths: int) -> float:
        """Return model FLOPs as `ModelShape.flops` does: the model's forward, and the head's steps for every token.

        A weight of the head costs 6 per token and step; `fc` runs once and gives no gradient to its input, 4.
        """
        heads = self.heads
        assert isinstance(heads, DraftLayersShape)  # of every model with a head: see `of_model`
        draft = heads.draft
        attention_layers = self.num_hidden_layers - self.linear_layers
        base = (2 * self.n_matmul + self.mixers * self.recurrence) * tokens
        base += 2 * attention_layers * self.attention_width * squared_lengths
        queries = draft.num_attention_heads * draft.head_dim
        keys = draft.num_key_value_heads * draft.head_dim
        projections = (draft.num_layers + 1) * draft.hidden_size * (queries + 2 * keys)  # the first layer reads 2 E
        layer = draft.hidden_size * (queries + 3 * draft.intermediate_size)
        per_step = projections + draft.num_layers * layer + draft.draft_vocab_size * draft.hidden_size
        combine = len(draft.layer_ids) * draft.hidden_size**2
        attention = 6 * draft.num_layers * queries * squared_lengths
        return float(base + (4 * combine + 6 * heads.steps * per_step) * tokens + heads.steps * attention)


class AcceptanceMeasures(Measures):
    """The mean acceptance of each step, `alpha_1` to `alpha_K`, and the accepted length that follows from them."""

    def __init__(self, steps: int, drafts: int, device: torch.device | str = "cpu") -> None:
        """drafts: tokens that a server drafts at a time, for the accepted length."""
        super().__init__([f"alpha_{step + 1}" for step in range(steps)], device)
        self._drafts = drafts

    def means(self, taken: Tensor) -> dict[str, float]:
        """Return the means, and the expected accepted length 1 + sum_j prod_{i <= j} alpha_i."""
        found = super().means(taken)
        alphas = [found.get(name, 0.0) for name in self.names[: self._drafts]]
        return {**found, ACCEPTED_LENGTH: accepted_length(alphas)} if found else found


def accepted_length(alphas: Sequence[float]) -> float:
    """Return the expected tokens of one step of a server that drafts as many tokens as there are alphas."""
    return 1.0 + sum(itertools.accumulate(alphas, lambda kept, alpha: kept * alpha))


class DraftTask(Task):
    """Train a draft head on a frozen model."""

    gives_predictions = False
    measures: AcceptanceMeasures

    def __init__(self, model: DraftModel, cache: StateCache | None = None) -> None:
        """cache: of the target's states; None: the target runs in each step."""
        spec = model.spec
        device = model.draft_head.fc.weight.device
        super().__init__(
            DraftShape.of_model(model), AcceptanceMeasures(spec.steps, spec.num_speculative_tokens, device)
        )
        self._shifts = tuple(range(2, spec.steps + 2))  # row i predicts token i + 2 + k at step k
        self._cache = cache

    def prepare(self, model: nn.Module, batchers: Sequence[Batcher]) -> None:
        """Open the cache."""
        if self._cache is not None:
            self._cache.open()

    def batch_fields(self, examples: TaskExamples, indices: Sequence[int], batch: dict[str, Any]) -> dict[str, Any]:
        """Return the stored states of the target, or how to store them."""
        return {} if self._cache is None else self._cache.batch_fields([examples[i] for i in indices], batch)

    def inputs(self, examples: TaskExamples, indices: np.ndarray, *, step: int | None = None) -> dict[str, Any]:
        """Return the number of labels that each step predicts, which divide its loss."""
        labels = [examples[int(i)].labels for i in indices]
        return {"num_items_in_batch": count_labels_ahead(labels, examples.trained[indices], self._shifts)}

    def loss(self, model: nn.Module, batch: dict[str, Any]) -> Tensor:
        """Return this batch's part of the loss, and measure acceptance."""
        found = model(**batch, use_cache=False)
        for name, accepted, count in zip(self.measures.names, found.accepted, found.counts, strict=True):
            self.measures.add(name, accepted, count)
        return found.loss
