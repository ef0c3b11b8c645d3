"""TrainResult: the trained model, and the measurements that a report is made of."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from torch import Tensor, nn

from ligertune.planning.plan import KernelLine
from ligertune.training.metrics.meter import Counts


@dataclass(frozen=True)
class TrainResult:
    """The trained model and what a report needs. `step` is the last finished one."""

    model: nn.Module
    step: int
    resumed_from: int
    stopped_by: str | None
    last_eval_loss: float | None
    measured: tuple[Counts, float, bool]  # work, its seconds, whether they exclude the warm-up
    peak_memory: dict[str, int | str]
    work: Counts  # of all steps, also of those before a resume
    kernels: tuple[KernelLine, ...]  # as they ran
    losses: dict[str, Any]  # LossCounts.as_dict() of this process
    notes: tuple[str, ...] = ()
    experts: dict[str, Any] | None = None  # ExpertLoad.report() of all ranks
    best_weights: dict[str, Tensor] | None = None  # of the best model, under ZeRO-3
