"""The learning rate as a pure function of the step: nothing to save, nothing to restore."""

from __future__ import annotations

import math

from ligertune.planning.plan import Schedule


def learning_rate(schedule: Schedule, step: int) -> float:
    """The rate of optimizer step `step`, counted from 0.

    Linear warm-up from 0 over `warmup_steps`, then by type over the steps that remain. The first step trains too:
    at step 0 of a warm-up of W steps the rate is 1/W of the peak, not 0.
    """
    if step < schedule.warmup_steps:
        return schedule.learning_rate * (step + 1) / schedule.warmup_steps
    remaining = max(1, schedule.total_steps - schedule.warmup_steps)
    progress = min(1.0, (step - schedule.warmup_steps) / remaining)
    return schedule.learning_rate * SHAPES[schedule.type](progress, schedule.min_lr_ratio)


def _cosine(progress: float, floor: float) -> float:
    return 0.5 * (1.0 + math.cos(math.pi * progress))


def _cosine_with_min_lr(progress: float, floor: float) -> float:
    return floor + (1.0 - floor) * _cosine(progress, floor)


def _linear(progress: float, floor: float) -> float:
    return 1.0 - progress


def _constant(progress: float, floor: float) -> float:
    return 1.0


# lr_scheduler_type -> share of the peak at a progress from 0 to 1 after the warm-up
SHAPES = {
    "cosine": _cosine,
    "cosine_with_min_lr": _cosine_with_min_lr,
    "linear": _linear,
    "constant": _constant,
    "constant_with_warmup": _constant,
}
