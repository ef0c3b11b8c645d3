"""The trial task: its loss, its measure, and its lines of plan and report."""

from __future__ import annotations

from typing import Any

import torch.nn.functional as F
from torch import Tensor, nn

from ligertune.features.task import Measures, Task
from ligertune.features.trial.recipe import TrialSpec
from ligertune.models.shape import read_shape
from ligertune.planning.feature_spec import FeatureSpec
from ligertune.planning.plan import Plan


class TrialTask(Task):
    """Cross-entropy with smoothed labels."""

    def __init__(self, plan: Plan, model: nn.Module) -> None:
        super().__init__(read_shape(model), Measures(("plain_loss",)))
        self._smoothing = plan.build.section(TrialSpec).smoothing

    def loss(self, model: nn.Module, batch: dict[str, Any]) -> Tensor:
        logits, labels = self.predictions(model, batch)
        logits = logits[:, :-1].flatten(0, 1).float()
        labels = labels[:, 1:].flatten()
        plain = F.cross_entropy(logits.detach(), labels, reduction="sum")
        self.measures.add("plain_loss", plain, (labels != -100).sum())
        total = F.cross_entropy(logits, labels, reduction="sum", label_smoothing=self._smoothing)
        return total / batch["num_items_in_batch"]


SPECS = {
    "trial": FeatureSpec(
        task=TrialTask,
        loss_kernel="",
        own_loss=True,
        title=lambda settings, words: f"trial, {words}",
        loss_unit=lambda settings: "nats, smoothed",
        plan_rows=lambda plan: [("smoothing", f"{plan.build.section(TrialSpec).smoothing:g}")],
    )
}
