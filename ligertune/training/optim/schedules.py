"""Learning-rate schedules: those of transformers, by step, and those that follow the evaluation losses.

The five usual shapes are computed here: importing `transformers.get_scheduler` (5.24) imports peft and bitsandbytes,
which takes about 3 s. Its rates would change results: those of `linear` differ in the last bits in 11,331 of 30,525
steps, and `constant` has no warm-up there.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable
from functools import cache
from typing import Any, Protocol

import torch
from torch.optim.lr_scheduler import LambdaLR

from ligertune.planning.optimization import TrainSchedule


def _cosine(progress: float) -> float:
    return 0.5 * (1.0 + math.cos(math.pi * progress))


# lr_scheduler_type -> share of the peak rate, of (progress after the warm-up from 0 to 1, min_lr_ratio)
SHAPES: dict[str, Callable[[float, float], float]] = {
    "cosine": lambda progress, floor: _cosine(progress),
    "cosine_with_min_lr": lambda progress, floor: floor + (1.0 - floor) * _cosine(progress),
    "linear": lambda progress, floor: 1.0 - progress,
    "constant": lambda progress, floor: 1.0,
    "constant_with_warmup": lambda progress, floor: 1.0,
}


def learning_rate(schedule: TrainSchedule, step: int) -> float:
    """Return the learning rate of optimizer step `step`, counted from 0.

    The rate rises linearly over `warmup_steps`, then follows `type` over the remaining steps. The first step trains
    too: at step 0 of W warm-up steps the rate is 1/W of the peak, not 0.
    """
    if schedule.warmup_steps <= step + 1 and schedule.warmup_steps == schedule.total_steps:
        return schedule.learning_rate  # some formulas of transformers divide by the steps after the warm-up, here 0
    if schedule.type not in SHAPES or schedule.kwargs:
        # in the warm-up a step early, for the same reason; later steps have the rate that transformers gives them
        return schedule.learning_rate * _share_of_transformers(schedule)(step + (step < schedule.warmup_steps))
    if step < schedule.warmup_steps:
        return schedule.learning_rate * (step + 1) / schedule.warmup_steps
    remaining = max(1, schedule.total_steps - schedule.warmup_steps)
    progress = min(1.0, (step - schedule.warmup_steps) / remaining)
    return schedule.learning_rate * SHAPES[schedule.type](progress, schedule.min_lr_ratio)


class _LossScheduler(Protocol):
    """ReduceLROnPlateau of torch and GreedyLR of transformers, which have no class in common."""

    optimizer: torch.optim.Optimizer

    def step(self, metrics: float) -> None: ...


class LearningRates:
    """The learning rate of each step of a run. losses: those of the evaluations before a resume."""

    def __init__(self, schedule: TrainSchedule, losses: Iterable[float] = ()) -> None:
        self._schedule = schedule
        self._by_loss: _LossScheduler | None = _scheduler(schedule) if schedule.follows_evaluations else None
        for loss in losses:
            self.observe(loss)

    def at(self, step: int) -> float:
        """Return the rate of optimizer step `step`, counted from 0."""
        if self._by_loss is None:
            return learning_rate(self._schedule, step)
        return float(self._by_loss.optimizer.param_groups[0]["lr"])

    def observe(self, loss: float) -> None:
        """Take the loss of an evaluation, which changes the rates of reduce_lr_on_plateau and greedy."""
        if self._by_loss is not None:
            self._by_loss.step(loss)


@cache
def _share_of_transformers(schedule: TrainSchedule) -> Callable[[int], float]:
    """Return the function of transformers: step -> share of the peak rate."""
    scheduler: LambdaLR = _scheduler(schedule)
    return scheduler.lr_lambdas[0]


def _scheduler(schedule: TrainSchedule) -> Any:
    """Build the scheduler of transformers over one number, for its rates alone."""
    from transformers import get_scheduler  # imports peft, which takes seconds

    kwargs = dict(schedule.kwargs)
    # transformers requires exactly one of min_lr and min_lr_rate here
    if schedule.type in ("cosine_with_min_lr", "cosine_warmup_with_min_lr") and not kwargs.keys() & {
        "min_lr",
        "min_lr_rate",
    }:
        kwargs["min_lr_rate"] = schedule.min_lr_ratio
    optimizer = torch.optim.SGD([torch.zeros(())], lr=schedule.learning_rate)
    return get_scheduler(schedule.type, optimizer, schedule.warmup_steps, schedule.total_steps, kwargs)
