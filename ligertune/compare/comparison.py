"""A comparison from its recipe to its numbers: points in order, and at each the sides in turn, repeat by repeat."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path

from ligertune.compare.side import Side
from ligertune.compare.summary import Comparison, Point, summarise
from ligertune.compare.trial import Trial, run_trial
from ligertune.errors import UserError
from ligertune.recipe import Recipe, load_recipe

# What a sweep is called, and the recipe's key that it moves
AXES = {"batch": "train.per_device_train_batch_size", "length": "data.max_length"}


@dataclass(frozen=True)
class Effort:
    """How much is measured: runs of each side, and steps of each after its warm-up."""

    repeats: int
    steps: int


GPU_EFFORT = Effort(repeats=5, steps=20)
CPU_EFFORT = Effort(repeats=3, steps=8)  # two sides of the quickstart in two minutes on two cores


@dataclass(frozen=True)
class Setting:
    """A point before it is measured: what it is called, and the recipe it runs."""

    label: str
    recipe: Recipe


def settings_of(path: Path, overrides: Sequence[str], sweep: str | None) -> tuple[Setting, ...]:
    """The recipe, or one for each value of `sweep` ("batch=4,8,16")."""
    if sweep is None:
        return (Setting("", load_recipe(path, overrides=overrides)),)
    axis, _, values = sweep.partition("=")
    chosen = [value.strip() for value in values.split(",") if value.strip()]
    if axis not in AXES or not chosen:
        raise UserError(
            f"--sweep: {sweep} is not a sweep.", hint="Write --sweep batch=4,8,16 or --sweep length=512,1024."
        )
    return tuple(
        Setting(f"{axis} {value}", load_recipe(path, overrides=[*overrides, f"{AXES[axis]}={value}"]))
        for value in chosen
    )


def compare(
    settings: Sequence[Setting],
    sides: Sequence[Side],
    effort: Effort,
    *,
    target: dict[str, str],
    processes: int,
    folder: Path,
    show: Callable[[str], None],
) -> Comparison:
    """Measure every side at every setting. `show` is told what runs and what it came to."""
    points = tuple(
        _point(setting, sides, effort, processes=processes, folder=folder, show=show) for setting in settings
    )
    first = settings[0].recipe
    return Comparison(
        target=target,
        date=time.strftime("%Y-%m-%d %H:%M"),
        recipe=str(first.source or ""),
        steps=effort.steps,
        repeats=effort.repeats,
        warmup=first.report.warmup_steps,
        processes=processes,
        points=points,
    )


def _point(
    setting: Setting,
    sides: Sequence[Side],
    effort: Effort,
    *,
    processes: int,
    folder: Path,
    show: Callable[[str], None],
) -> Point:
    """All repeats at one setting, each in the other order. A side that failed is not tried again there."""
    trials: list[Trial] = []
    for repeat in range(1, effort.repeats + 1):
        for side in sides if repeat % 2 else tuple(reversed(sides)):
            if any(trial.side == side.name and trial.failure for trial in trials):
                continue
            place = folder / setting.label.replace(" ", "-") / f"{side.name}-{repeat}"
            trial = run_trial(
                setting.recipe, side, repeat=repeat, steps=effort.steps, processes=processes, folder=place
            )
            trials.append(trial)
            show(f"{f'{setting.label}, ' if setting.label else ''}repeat {repeat}: {side.label}: {_came_to(trial)}")
    return summarise(trials, sides=sides, label=setting.label)


def _came_to(trial: Trial) -> str:
    if trial.failure:
        return f"{trial.failure.kind}: {trial.failure.sentence}" if trial.failure.kind == "error" else "out of memory"
    speed = trial.report["throughput"]
    return f"{speed['tokens_per_second']:,.0f} tokens/s" if speed else "done"
