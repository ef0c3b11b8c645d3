"""A causal language model with Medusa heads, as the training loop calls it: a batch in, the loss out."""

from __future__ import annotations

import copy
from typing import TYPE_CHECKING, Any, NamedTuple

import torch
from torch import Tensor, nn

from ligertune.tasks.medusa.head_form import HeadForm, backbone_of
from ligertune.tasks.medusa.head_targets import shifted_targets, shifts
from ligertune.tasks.medusa.heads import MedusaHeads
from ligertune.tasks.medusa.heads_loss import Teacher, coefficients, fused_loss, naive_loss

if TYPE_CHECKING:
    from transformers import PreTrainedConfig, PreTrainedModel

    from ligertune.planning.options import MedusaOptions


class MedusaOutput(NamedTuple):
    """The loss, and each part's own mean (S,): the model's next-token loss first in stage 2, then the heads'.

    Not a dataclass: FSDP2 looks for tensors in what a forward returns, to know when the backward begins, and older ones
    look with pytree, which finds none there. A frozen model's layers tell it nothing either.
    """

    loss: Tensor
    part_losses: Tensor


class MedusaModel(nn.Module):
    """`base_model` and `medusa_head`. In stage 1 the model is frozen and runs without a graph.

    The loss is computed in this forward, on the output head's weight itself: under FSDP2 both belong to the root, which
    has gathered them by then. The output head is never called.
    """

    def __init__(
        self, base_model: PreTrainedModel, heads: MedusaHeads, spec: MedusaOptions, *, form: HeadForm, fused: bool
    ) -> None:
        super().__init__()
        self.base_model, self.medusa_head = base_model, heads
        self.spec, self.form, self.fused = spec, form, fused
        self._no_split_modules = base_model._no_split_modules  # what FSDP wraps
        self.teacher = frozen_copy(base_model) if spec.stage == 2 and spec.self_distillation else None
        if spec.stage == 1:
            base_model.requires_grad_(False)

    @property
    def config(self) -> PreTrainedConfig:
        return self.base_model.config

    def get_input_embeddings(self) -> nn.Module:
        return self.base_model.get_input_embeddings()

    def get_output_embeddings(self) -> nn.Module:
        return self.base_model.get_output_embeddings()

    @property
    def trains_model(self) -> bool:
        return self.spec.stage == 2

    @property
    def shifts(self) -> tuple[int, ...]:
        """How far ahead each part of the loss predicts."""
        return shifts(len(self.medusa_head), with_model=self.trains_model)

    def train(self, mode: bool = True) -> MedusaModel:
        """A frozen model has no dropout."""
        super().train(mode)
        for frozen in (None if self.trains_model else self.base_model, self.teacher):
            if frozen is not None:
                frozen.eval()
        return self

    def last_hidden_state(self, input_ids: Tensor, **inputs: Any) -> Tensor:
        """(B, T) -> (B, T, E), behind the final norm."""
        with torch.set_grad_enabled(torch.is_grad_enabled() and self.trains_model):
            return backbone_of(self.base_model)(input_ids=input_ids, **inputs)[0]

    def teach(self, input_ids: Tensor, **inputs: Any) -> Teacher | None:
        """What the frozen copy makes of the batch, where there is one."""
        if self.teacher is None:
            return None
        with torch.no_grad():
            hidden = backbone_of(self.teacher)(input_ids=input_ids, **inputs)[0]
        return Teacher(hidden, self.teacher.get_output_embeddings().weight)

    def forward(
        self,
        input_ids: Tensor,
        labels: Tensor,
        *,
        position_ids: Tensor | None = None,
        num_items_in_batch: list[int] | None = None,
        labelled_rows: Tensor | None = None,
        heads_coefficient: float | None = None,
        **inputs: Any,
    ) -> MedusaOutput:
        """input_ids, labels (B, T), not shifted; num_items_in_batch (S,): what each part's sum is divided by.

        labelled_rows: the rows of (B, T) that have a target, if whoever made the batch knows them. heads_coefficient
        stands in for the recipe's while that warms up.
        """
        positions = {} if position_ids is None else {"position_ids": position_ids}
        hidden = self.last_hidden_state(input_ids, **positions, **inputs)
        spec = self.spec
        whole = spec.heads_coefficient if heads_coefficient is None else heads_coefficient
        loss_of = fused_loss if self.fused else naive_loss
        found = loss_of(
            hidden,
            self.medusa_head,
            self.get_output_embeddings().weight,
            shifted_targets(labels, position_ids, self.shifts),
            coefficients(len(self.medusa_head), spec.decay_coefficient, whole, with_model=self.trains_model),
            num_items_in_batch,
            form=self.form,
            rows=labelled_rows,
            teacher=self.teach(input_ids, **positions, **inputs),
        )
        return MedusaOutput(found.loss, found.parts)


def frozen_copy(model: PreTrainedModel) -> PreTrainedModel:
    """`model` as it is now, which will not train."""
    return copy.deepcopy(model).requires_grad_(False).eval()
