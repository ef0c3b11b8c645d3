"""The task medusa: sizes and FLOPs of a model with heads, divisors of the loss, and the warm-up of the heads."""

from __future__ import annotations

import dataclasses
from typing import TYPE_CHECKING, Any

import numpy as np

from ligertune.features.task import Task, TaskExamples, count_labels_ahead
from ligertune.models.shape import parameter_kinds, read_shape
from ligertune.planning.memory.model_shape import AddedHeadsShape, ModelShape

if TYPE_CHECKING:
    from ligertune.features.medusa.medusa_model import MedusaModel


class MedusaShape(ModelShape):
    """Sizes of a model and its heads. A frozen model has no backward, and only the heads use its output head."""

    @staticmethod
    def of_heads(model: MedusaModel) -> MedusaShape:
        """Read the sizes of a built model, which may be on the meta device."""
        base = read_shape(model.base_model, MedusaShape)
        assert isinstance(base, MedusaShape)  # as asked for
        heads = model.medusa_head
        n_heads = sum(p.numel() for p in heads.parameters())
        n_teacher = 0 if model.teacher is None else base.n_parameters
        return dataclasses.replace(
            base,
            family=f"{base.family} with {len(heads)} Medusa heads",
            n_parameters=base.n_parameters + n_heads + n_teacher,
            n_trainable=base.n_trainable + n_heads,
            n_active=None if base.n_active is None else base.n_active + n_heads + n_teacher,
            parameters=parameter_kinds(model),
            layer=None if model.teacher is not None else base.layer,  # memory with a teacher is not predicted
            heads=AddedHeadsShape(
                len(heads), heads.num_layers, joint=model.trains_model, own_projection=heads.own_lm_head
            ),
        )

    def flops(self, *, tokens: int, squared_lengths: int) -> float:
        """Return model FLOPs as `ModelShape.flops` does, with the heads. Each head is counted for every token.

        A block costs 6 per weight and token, a projection 4, or 6 if it trains. With a frozen model a weight costs 2,
        attention runs forward only, and the first blocks give no gradient to their input.
        """
        heads = self.heads
        assert heads is not None and self.head is not None  # of every model with heads: see `of_heads`
        block = self.hidden_size**2
        projection = self.hidden_size * self.vocab_size
        trains_projection = heads.own_projection or self.head.head_trains
        per_head = 6 * heads.blocks * block + (6 if trains_projection else 4) * projection
        if heads.joint:
            return super().flops(tokens=tokens, squared_lengths=squared_lengths) + float(
                heads.number * per_head * tokens
            )
        per_token = 2 * (self.n_matmul - projection) + heads.number * (per_head - 2 * block)
        per_token += self.mixers * self.recurrence
        attention_layers = self.num_hidden_layers - self.linear_layers
        return float(per_token * tokens + 2 * attention_layers * self.attention_width * squared_lengths)


class MedusaTask(Task):
    """Train Medusa heads, which predict `label_shifts` tokens ahead.

    heads_coefficient rises linearly from 0 over warmup_steps: the first gradients of new heads would damage the model.
    """

    gives_predictions = False

    def __init__(
        self, shape: ModelShape, label_shifts: tuple[int, ...], *, heads_coefficient: float, warmup_steps: int
    ) -> None:
        super().__init__(shape)
        self.label_shifts = label_shifts
        self._heads_coefficient = heads_coefficient
        self._warmup_steps = warmup_steps

    def inputs(self, examples: TaskExamples, indices: np.ndarray, *, step: int | None = None) -> dict[str, Any]:
        """Return the number of targets of each part, which divide the parts, and the weight of the heads' losses."""
        warmed = 1.0 if step is None or step >= self._warmup_steps else (step + 1) / self._warmup_steps
        labels = [examples[int(i)].labels for i in indices]
        return {
            "num_items_in_batch": count_labels_ahead(labels, examples.trained[indices], self.label_shifts),
            "heads_coefficient": self._heads_coefficient * warmed,
        }
