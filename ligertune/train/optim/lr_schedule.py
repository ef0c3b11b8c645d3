"""Learning-rate schedules: the rate as a pure function of the step, so there is no state to save."""

from __future__ import annotations

import math

import torch

from ligertune.planning.optimization import TrainSchedule


def learning_rate(schedule: TrainSchedule, step: int) -> float:
    """Return the learning rate of optimizer step `step`, counted from 0.

    The rate rises linearly over `warmup_steps`, then follows `type` over the remaining steps. The first step trains
    too: at step 0 of W warm-up steps the rate is 1/W of the peak, not 0.
    """
    if step < schedule.warmup_steps:
        return schedule.learning_rate * (step + 1) / schedule.warmup_steps
    remaining = max(1, schedule.total_steps - schedule.warmup_steps)
    progress = min(1.0, (step - schedule.warmup_steps) / remaining)
    return schedule.learning_rate * SHAPES[schedule.type](progress, schedule.min_lr_ratio)


def set_learning_rate(optimizer: torch.optim.Optimizer, rate: float) -> None:
    """Set the rate of every group, times the group's `lr_multiplier`."""
    for group in optimizer.param_groups:
        own = rate * group.get("lr_multiplier", 1.0)
        if isinstance(group["lr"], torch.Tensor):
            group["lr"].fill_(own)  # torchao's compiled step reads this tensor, so it must stay the same one
        else:
            group["lr"] = own


def _cosine(progress: float) -> float:
    return 0.5 * (1.0 + math.cos(math.pi * progress))


# lr_scheduler_type -> share of the peak rate, of (progress after the warm-up from 0 to 1, min_lr_ratio)
SHAPES = {
    "cosine": lambda progress, floor: _cosine(progress),
    "cosine_with_min_lr": lambda progress, floor: floor + (1.0 - floor) * _cosine(progress),
    "linear": lambda progress, floor: 1.0 - progress,
    "constant": lambda progress, floor: 1.0,
    "constant_with_warmup": lambda progress, floor: 1.0,
}
