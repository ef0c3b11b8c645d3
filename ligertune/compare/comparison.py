"""Measurement of a comparison: for each setting, the sides in turn, repeated."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

from ligertune.compare.side import SIDE_OF, Side, kernels_of
from ligertune.compare.summary import Comparison, Point, summarise_trials
from ligertune.compare.trial import Trial, TrialOptions, run_trial
from ligertune.errors import UserError
from ligertune.recipe.read import load_recipe
from ligertune.recipe.schema import KernelsSpec, Recipe
from ligertune.report import model_title

# axis of --sweep -> recipe key
AXES = {"batch": "train.per_device_train_batch_size", "length": "data.max_length"}
# default repeats and measured steps; on a CPU two sides of the quickstart take two minutes on two cores
GPU_DEFAULTS = (5, 20)
CPU_DEFAULTS = (3, 8)


@dataclass(frozen=True)
class Setting:
    """A recipe to compare the sides on, and its label in the report; "" without a sweep."""

    label: str
    recipe: Recipe


def load_settings(path: Path, overrides: Sequence[str], sweep: str | None) -> tuple[Setting, ...]:
    """Load the recipe, once per value of the sweep ("batch=4,8,16"). Raises UserError if either is invalid."""
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


def carriers_of(recipe: Recipe, kernels: KernelsSpec) -> str | None:
    """Return the layers that carry state between documents of a packed row with these kernels, in words, or None."""
    # they import what building a model takes
    from ligertune.models.read_config import read_config
    from ligertune.planning.options import RunOptions
    from ligertune.training.checks import carried_state

    build = RunOptions.of(recipe.model_copy(update={"kernels": kernels})).build
    return carried_state(build, read_config(recipe.model))


def kernels_in_use(recipe: Recipe, arch: str) -> tuple[str, ...]:
    """Return the kernels that a recipe uses on a device, for `choose_sides(ablate=...)`. arch: "sm90", "x86_64"."""
    kernels = recipe.kernels
    adapts = recipe.method.type in ("lora", "qlora")

    def taken(value: bool | str) -> bool:
        return value is True or (value == "auto" and arch == "sm90")

    in_use = {"rope": kernels.rope, "norm": kernels.norm, "mlp": kernels.mlp, "loss": kernels.loss != "torch",
              "attention": taken(kernels.attention), "lora": adapts and taken(kernels.lora),
              "optimizer": kernels.optimizer is True or (not adapts and taken(kernels.optimizer))}  # fmt: skip
    in_use["mixer"] = kernels.mixer and carriers_of(recipe, kernels_of(recipe, SIDE_OF["without"])) is not None
    return tuple(name for name, used in in_use.items() if used)


def compare(
    settings: Sequence[Setting],
    sides: Sequence[Side],
    options: TrialOptions,
    *,
    target: dict[str, str],
    show: Callable[[str], None],
) -> Comparison:
    """Measure every side at every setting. show: called with one line per finished trial."""
    alike = [packed_alike(setting, sides, show) for setting in settings]
    points = tuple(_measure(setting, sides, options, show) for setting in alike)
    first = settings[0].recipe
    return Comparison(
        target=target,
        model=model_title(first.model_dump(mode="json")),
        date=time.strftime("%Y-%m-%d %H:%M"),
        recipe=str(first.source or ""),
        steps=options.steps,
        repeats=options.repeats,
        warmup=first.report.warmup_steps,
        processes=options.processes,
        points=points,
    )


def packed_alike(setting: Setting, sides: Sequence[Side], show: Callable[[str], None]) -> Setting:
    """Return a setting without packing if `auto` would pack the rows of some sides and not of others."""
    recipe = setting.recipe
    if recipe.data.packing != "auto":
        return setting
    carriers = [carriers_of(recipe, kernels_of(recipe, side)) for side in sides]
    if None not in carriers or not any(carriers):
        return setting
    side, layers = next((side, layers) for side, layers in zip(sides, carriers, strict=True) if layers)
    show(f"packing is off on all sides: in {side.label}, {layers} layers carry state between documents")
    data = recipe.data.model_copy(update={"packing": False})
    return replace(setting, recipe=recipe.model_copy(update={"data": data}))


def _measure(setting: Setting, sides: Sequence[Side], options: TrialOptions, show: Callable[[str], None]) -> Point:
    """Run all repeats at one setting. A side that failed is not repeated."""
    trials: list[Trial] = []
    for repeat in range(1, options.repeats + 1):
        # every second repeat runs in reverse, so that a device that grows warmer favours no side
        for side in sides if repeat % 2 else tuple(reversed(sides)):
            if any(trial.side == side.name and trial.failure for trial in trials):
                continue
            folder = options.folder / setting.label.replace(" ", "-") / f"{side.name}-{repeat}"
            trial = run_trial(setting.recipe, side, repeat, options, folder)
            trials.append(trial)
            show(f"{f'{setting.label}, ' if setting.label else ''}repeat {repeat}: {side.label}: {_outcome(trial)}")
    return summarise_trials(trials, sides=sides, label=setting.label)


def _outcome(trial: Trial) -> str:
    if trial.failure:
        return str(trial.failure) if trial.failure.kind == "error" else "out of memory"
    speed = trial.result["throughput"]
    return f"{speed['tokens_per_second']:,.0f} tokens/s" if speed else "done"
