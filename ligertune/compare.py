"""With and without the kernels: the same recipe in fresh processes, interleaved, with loss parity step by step.

Each side is `ligertune train` in its own interpreter: neither inherits the other's allocator, caches or imports.
"""

from __future__ import annotations

import json
import math
import statistics
import subprocess
import sys
from collections.abc import Callable
from dataclasses import asdict, dataclass
from pathlib import Path

import ligertune
from ligertune.errors import UserError
from ligertune.metrics import read_metrics
from ligertune.recipe import Recipe, dump_recipe

SIDES = {"with": True, "without": False}  # kernels.enabled of each side

# How far two exact computations of one curve may drift apart by rounding: (each step, last step), relative
TOLERANCES = {"float32": (1e-3, 1e-3), "bfloat16": (1e-2, 5e-3), "float16": (1e-2, 5e-3)}


@dataclass(frozen=True)
class Trial:
    """One run of one side. `failure` is its sentence where it did not finish."""

    side: str
    losses: tuple[float, ...]
    tokens_per_second: float | None
    peak_memory: dict[str, int]
    report: dict | None
    failure: str | None


@dataclass(frozen=True)
class Side:
    """The trials of one side together. Rates: mean and standard error over repeats; memory: the highest."""

    name: str
    tokens_per_second: float | None
    standard_error: float | None
    peak_memory: dict[str, int]
    loss_first: float | None
    loss_last: float | None
    failure: str | None


@dataclass(frozen=True)
class Parity:
    """Whether the two loss curves are one. `worst` is relative, at `worst_step`."""

    same: bool
    worst: float
    worst_step: int
    last: float
    tolerance_each: float
    tolerance_last: float


@dataclass(frozen=True)
class Comparison:
    """Both sides (or one), and what the kernels bought."""

    sides: tuple[Side, ...]
    parity: Parity | None
    speed_ratio: float | None
    memory_ratio: float | None
    repeats: int
    steps: int
    dtype: str | None
    device: str | None
    kernels: str | None
    versions: dict[str, str]

    @property
    def good(self) -> bool:
        """Both sides finished, and their losses agree."""
        return not any(side.failure for side in self.sides) and (self.parity is None or self.parity.same)

    def as_dict(self) -> dict:
        return asdict(self)


def bundled_recipe() -> Path:
    """The quickstart's recipe: in the wheel, or in a checkout."""
    package = Path(ligertune.__file__).parent
    found = [
        home / "configs" / "quickstart" / "stories260k.yaml"
        for home in (package, package.parent)
        if (home / "configs" / "quickstart").is_dir()
    ]
    if not found:
        raise UserError(
            "The bundled quickstart recipe is not installed.", hint="Name a recipe: ligertune compare RECIPE."
        )
    return found[0]


def compare(
    recipe: Recipe, *, sides: tuple[str, ...], steps: int, repeats: int, folder: Path, show: Callable[[str], None]
) -> Comparison:
    """Run the sides in turn, `repeats` times, each time in the other order. `show` is told what runs."""
    trials = []
    for repeat in range(repeats):
        for side in sides if repeat % 2 == 0 else tuple(reversed(sides)):
            show(f"repeat {repeat + 1} of {repeats}: {side} the kernels, {steps} steps")
            trials.append(_trial(recipe, side, steps, folder / f"{side}-{repeat + 1}"))
    return summarise(trials, sides=sides, steps=steps, repeats=repeats)


def _trial(recipe: Recipe, side: str, steps: int, folder: Path) -> Trial:
    """Train in a fresh process; read what it left."""
    folder.mkdir(parents=True, exist_ok=True)
    path = folder / "recipe.yaml"
    path.write_text(dump_recipe(_short(recipe, side, steps, folder / "run")), encoding="utf-8")
    command = [sys.executable, "-m", "ligertune", "train", str(path), "--overwrite", "--json"]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    (folder / "log.txt").write_text(done.stderr, encoding="utf-8")
    if done.returncode != 0:
        said = [line for line in done.stderr.splitlines() if line.strip()] or [f"exit code {done.returncode}"]
        return Trial(side, (), None, {}, None, failure=said[-1].removeprefix("Error: "))
    report = json.loads(done.stdout)
    speed = report["throughput"] or {}
    return Trial(
        side=side,
        losses=tuple(line["loss"] for line in read_metrics(folder / "run" / "metrics.jsonl") if "loss" in line),
        tokens_per_second=speed.get("tokens_per_second"),
        peak_memory=report["peak_memory"],
        report=report,
        failure=None,
    )


def _short(recipe: Recipe, side: str, steps: int, output_dir: Path) -> Recipe:
    """The recipe of one trial: so many steps, every step logged, nothing saved or evaluated on the way."""
    warmup = min(recipe.report.warmup_steps, max(0, steps // 3))
    return recipe.model_copy(
        update={
            "kernels": recipe.kernels.model_copy(update={"enabled": SIDES[side]}),
            "train": recipe.train.model_copy(update={"max_steps": steps, "num_train_epochs": None}),
            "eval": recipe.eval.model_copy(update={"eval_strategy": "no"}),
            "logging": recipe.logging.model_copy(update={"logging_steps": 1}),
            "report": recipe.report.model_copy(update={"warmup_steps": warmup}),
            "checkpoint": recipe.checkpoint.model_copy(
                update={"output_dir": str(output_dir), "save_strategy": "no", "resume_from_checkpoint": "never"}
            ),
        }
    )


def summarise(trials: list[Trial], *, sides: tuple[str, ...], steps: int, repeats: int) -> Comparison:
    """Put the trials side by side."""
    summaries = tuple(_side(name, [t for t in trials if t.side == name]) for name in sides)
    by_name = {side.name: side for side in summaries}
    reports = {t.side: t.report for t in trials if t.report}
    any_report = next(iter(reports.values()), None)
    dtype = any_report["dtype"] if any_report else None
    both = len(summaries) == 2 and not any(side.failure for side in summaries)
    first = {name: next(t.losses for t in trials if t.side == name and not t.failure) for name in sides} if both else {}
    patched = reports.get("with")
    return Comparison(
        sides=summaries,
        parity=parity(first["with"], first["without"], dtype) if both else None,
        speed_ratio=_ratio(by_name, lambda side: side.tokens_per_second) if both else None,
        memory_ratio=_ratio(by_name, lambda side: peak_of(side.peak_memory)) if both else None,
        repeats=repeats,
        steps=steps,
        dtype=dtype,
        device=any_report["device"] if any_report else None,
        kernels=", ".join(f"{k['kernel']} x {k['applied']}" for k in patched["kernels"] if k["applied"])
        if patched
        else None,
        versions=any_report["versions"] if any_report else {},
    )


def parity(ours: tuple[float, ...], theirs: tuple[float, ...], dtype: str) -> Parity:
    """Relative difference of two loss curves, step by step; a curve that is not finite or not as long differs."""
    each, last = TOLERANCES[dtype]
    if len(ours) != len(theirs) or not ours:
        return Parity(False, math.inf, min(len(ours), len(theirs)) + 1, math.inf, each, last)
    differences = [abs(a - b) / max(abs(b), 1e-12) for a, b in zip(ours, theirs, strict=True)]
    finite = [d if math.isfinite(d) else math.inf for d in differences]
    worst = max(finite)
    same = worst <= each and finite[-1] <= last
    return Parity(same, worst, finite.index(worst) + 1, finite[-1], each, last)


def peak_of(peak: dict[str, int]) -> int:
    """What two sides are compared by: allocated device memory after warm-up, or the process's host memory."""
    return peak.get("allocated_steady", peak.get("resident_run", 0))


def _side(name: str, trials: list[Trial]) -> Side:
    failure = next((t.failure for t in trials if t.failure), None)
    rates = [t.tokens_per_second for t in trials if t.tokens_per_second]
    losses = next((t.losses for t in trials if t.losses), ())
    return Side(
        name=name,
        tokens_per_second=statistics.fmean(rates) if rates else None,
        standard_error=statistics.stdev(rates) / math.sqrt(len(rates)) if len(rates) > 1 else None,
        peak_memory=max((t.peak_memory for t in trials), key=peak_of, default={}),
        loss_first=losses[0] if losses else None,
        loss_last=losses[-1] if losses else None,
        failure=failure,
    )


def _ratio(sides: dict[str, Side], value: Callable[[Side], float | None]) -> float | None:
    ours, theirs = value(sides["with"]), value(sides["without"])
    return ours / theirs if ours and theirs else None
