"""Trials to a comparison: means with their standard errors, medians, slow steps, parity, and what each side gains."""

from __future__ import annotations

import math
import statistics
from collections.abc import Callable, Iterable, Sequence
from dataclasses import asdict, dataclass

from ligertune.compare.parity import Parity, parity
from ligertune.compare.side import SIDE_OF, Side
from ligertune.compare.trial import Failure, Trial

SLOW = 3.0  # a step that takes so many times the side's median is named: something ran that is not training


@dataclass(frozen=True)
class Estimate:
    """A mean over repeats. standard_error: None where there was one."""

    mean: float
    standard_error: float | None


@dataclass(frozen=True)
class SlowStep:
    """A measured step that took many times the median of its side, as one does in which a kernel is compiled."""

    repeat: int
    step: int
    seconds: float
    times_median: float


@dataclass(frozen=True)
class SideResult:
    """The trials of one side at one point. Memory: the highest of its repeats, bytes a device."""

    name: str
    label: str
    tokens_per_second: Estimate | None  # real tokens, all devices, of the measured steps together
    median_tokens_per_second: float | None  # of the measured steps taken one by one
    median_step_seconds: float | None
    slow_steps: tuple[SlowStep, ...]
    peak_memory: dict[str, int]
    mfu: float | None
    kernels: str | None
    parity: Parity | None  # with the reference; None for the reference itself
    failure: Failure | None
    trials: tuple[Trial, ...]

    @property
    def peak(self) -> int | None:
        """What sides are compared by: allocated device memory after warm-up, or the process's host memory."""
        return self.peak_memory.get("allocated_steady", self.peak_memory.get("resident_run"))


@dataclass(frozen=True)
class Point:
    """All sides at one batch size or length. `reference` names the side that parity and ratios are against."""

    label: str
    sides: tuple[SideResult, ...]
    reference: str | None

    def side(self, name: str) -> SideResult | None:
        return next((side for side in self.sides if side.name == name), None)

    def gain(self, side: SideResult) -> tuple[float, float] | None:
        """(tokens/s, peak memory) of the side over those of the reference; None where there is nothing to divide."""
        other = self.side(self.reference) if self.reference else None
        if other is None or other is side or not (side.tokens_per_second and other.tokens_per_second):
            return None
        memory = side.peak / other.peak if side.peak and other.peak else math.nan
        return side.tokens_per_second.mean / other.tokens_per_second.mean, memory


@dataclass(frozen=True)
class Comparison:
    """Everything that was measured, and on what."""

    target: dict[str, str]
    date: str
    recipe: str
    steps: int
    repeats: int
    warmup: int
    processes: int
    points: tuple[Point, ...]

    @property
    def problems(self) -> tuple[str, ...]:
        """One sentence for each thing that makes the comparison fail; memory that ran out is a result, not a failure.

        A peer whose losses differ is shown, and is its own affair.
        """
        found = []
        for point in self.points:
            at = f" at {point.label}" if point.label else ""
            for side in point.sides:
                if side.failure and side.failure.kind == "error":
                    found.append(f"{side.label}{at} failed: {side.failure.sentence}")
                if side.parity and not side.parity.same and SIDE_OF[side.name].ours:
                    found.append(f"{side.label}{at} does not train the same. Losses {side.parity.sentence}")
            if not found and not any(side.tokens_per_second for side in point.sides) and len(self.points) == 1:
                found.append("Every side ran out of memory.")
        return tuple(found)

    @property
    def good(self) -> bool:
        return not self.problems

    def as_dict(self) -> dict:
        """For JSON: also the ratios, which are not stored, and every step of every trial."""
        plain = asdict(self)
        for point, found in zip(self.points, plain["points"], strict=True):
            for side, entry in zip(point.sides, found["sides"], strict=True):
                gain = point.gain(side)
                entry["speed_ratio"], entry["memory_ratio"] = gain or (None, None)
        return {**plain, "good": self.good, "problems": list(self.problems)}


def summarise(trials: Sequence[Trial], *, sides: Sequence[Side], label: str) -> Point:
    """One point of the comparison. The reference is the plain baseline, or the first that finished without kernels."""
    of = {side.name: tuple(trial for trial in trials if trial.side == side.name) for side in sides}
    finished = [side for side in sides if any(not trial.failure for trial in of[side.name])]
    others = [side for side in finished if not side.ours]
    reference = next((side for side in others if side.name == "without"), next(iter(others or finished), None))
    against = next((t for t in of[reference.name] if not t.failure), None) if reference else None
    return Point(
        label=label,
        sides=tuple(_side(side, of[side.name], against) for side in sides),
        reference=reference.name if reference else None,
    )


def _side(side: Side, trials: tuple[Trial, ...], reference: Trial | None) -> SideResult:
    whole = [trial for trial in trials if not trial.failure]
    rates = _found(whole, lambda report: (report["throughput"] or {}).get("tokens_per_second"))
    mfus = _found(whole, lambda report: (report["throughput"] or {}).get("mfu"))
    measured = [step for trial in whole for step in trial.measured]
    median = statistics.median(step.seconds for step in measured) if measured else None
    compared = reference if reference and reference.side != side.name else None
    return SideResult(
        name=side.name,
        label=side.label,
        tokens_per_second=estimate(rates),
        median_tokens_per_second=statistics.median(s.tokens / s.seconds for s in measured) if measured else None,
        median_step_seconds=median,
        slow_steps=tuple(slow_steps(whole, median)) if median else (),
        peak_memory=_highest(trial.report["peak_memory"] for trial in whole),
        mfu=statistics.fmean(mfus) if mfus else None,
        kernels=_kernels(whole[0].report) if whole else None,
        parity=_worst_parity(whole, compared) if whole and compared else None,
        failure=next((trial.failure for trial in trials if trial.failure), None),
        trials=trials,
    )


def estimate(values: Sequence[float]) -> Estimate | None:
    """Mean and standard error of the mean; None of nothing."""
    if not values:
        return None
    error = statistics.stdev(values) / math.sqrt(len(values)) if len(values) > 1 else None
    return Estimate(statistics.fmean(values), error)


def slow_steps(trials: Iterable[Trial], median: float) -> list[SlowStep]:
    """Measured steps of more than SLOW medians."""
    return [
        SlowStep(trial.repeat, step.step, step.seconds, step.seconds / median)
        for trial in trials
        for step in trial.measured
        if step.seconds > SLOW * median
    ]


def _worst_parity(trials: Sequence[Trial], reference: Trial) -> Parity:
    """Of all repeats the one that differs, or else the one that differs most."""
    in_float8 = any(trial.report["fp8"] for trial in (*trials, reference))
    dtype = "float8" if in_float8 else reference.report["dtype"]
    found = [parity(trial.steps, reference.steps, dtype) for trial in trials]
    return max(found, key=lambda each: (not each.same, each.worst))


def _found(trials: Iterable[Trial], value: Callable[[dict], float | None]) -> list[float]:
    return [found for trial in trials if (found := value(trial.report)) is not None]


def _highest(peaks: Iterable[dict[str, int]]) -> dict[str, int]:
    highest: dict[str, int] = {}
    for peak in peaks:
        for kind, size in peak.items():
            highest[kind] = max(size, highest.get(kind, 0))
    return highest


def _kernels(report: dict) -> str | None:
    applied = [f"{line['kernel']} x {line['applied']}" for line in report["kernels"] if line["applied"]]
    how = "Triton" if report["kernels_backend"] == "triton" else "PyTorch reference"
    layout = "; padding-free batches" if report["padding_free"] else ""
    return f"{', '.join(applied)} ({how}){layout}" if applied else None
