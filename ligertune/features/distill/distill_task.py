"""The task distill: the student's loss is its divergence from a frozen teacher on the trained tokens."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

from torch import Tensor, nn

from ligertune.features.distill.divergence import CHUNK_ROWS, DistillLoss, Divergence, own_loss_error
from ligertune.features.distill.recipe import DistillSpec
from ligertune.features.distill.teacher import Teacher, load_teacher
from ligertune.features.task import Measures, Task
from ligertune.patching.fused_loss import head_loss
from ligertune.planning.memory.model_shape import ModelShape
from ligertune.planning.plan import Plan

if TYPE_CHECKING:
    from ligertune.data.batching.collate import Batcher


class DistillTask(Task):
    """Distil a teacher into the model. `prepare` loads the teacher, after the student and its checkpoint."""

    gives_predictions = False

    def __init__(self, shape: ModelShape, plan: Plan) -> None:
        super().__init__(shape)
        self._plan = plan
        self._divergence = Divergence.of(plan.build.section(DistillSpec))
        self.measures = Measures(self._divergence.measures)
        self._teacher: Teacher | None = None

    def prepare(self, model: nn.Module, batchers: Sequence[Batcher]) -> None:
        """Load the teacher to the device of the batches."""
        device = batchers[0].device
        self.measures = Measures(self._divergence.measures, device)
        self._teacher = load_teacher(self._plan, device)

    def loss(self, model: nn.Module, batch: dict[str, Any]) -> Tensor:
        """Return this batch's part of the loss: the teacher's forward first, then the student's."""
        teacher = self._teacher
        assert teacher is not None  # `prepare` has loaded it
        hidden = teacher.hidden_states(batch)
        of_batch = DistillLoss(self._divergence, teacher.head, hidden, self.measures)
        with head_loss(of_batch):
            loss = super().loss(model, batch)
        if not of_batch.ran:
            raise own_loss_error(self.shape.family)
        if of_batch.in_chunks and not self.notes:
            self.notes = (
                "distill: linear_jsd has no soft cap, and no two logit scales; the logits of "
                f"{CHUNK_ROWS:,} tokens are made at a time, with the same numbers",
            )
        return loss
