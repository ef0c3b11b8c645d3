"""Summary of trials: mean rates with standard errors, medians, slow steps, loss parity, and ratios to the reference.

Loss parity compares the losses of every step, and the gradient norm of the first. Losses alone would hide a wrong
gradient for many steps, since AdamW's update does not depend on the gradient's scale. The gradient norm shows it at
once. Only its first value is compared: later ones belong to weights that rounding has moved apart.
"""

from __future__ import annotations

import math
import statistics
from collections.abc import Iterable, Sequence
from dataclasses import asdict, dataclass
from typing import Any

from ligertune.compare.side import SIDE_OF, Side
from ligertune.compare.trial import Failure, Step, Trial, device_name

SLOW = 3.0  # steps slower than this many medians are reported: something other than training ran in them


@dataclass(frozen=True)
class Tolerance:
    """Largest relative differences between two exact computations that differ by rounding only.

    The first loss is computed from equal weights; later ones from weights that rounding has moved apart. The norm of
    bfloat16 gradients is a bfloat16 number, whose neighbour is up to 0.8 % away. float8 has 3 bits of mantissa, and 2
    for gradients, so that its products differ by more than rounding of bfloat16.
    """

    first_loss: float
    loss: float
    first_grad_norm: float


TOLERANCES = {
    "float32": Tolerance(first_loss=1e-5, loss=1e-4, first_grad_norm=1e-3),
    "bfloat16": Tolerance(first_loss=5e-4, loss=5e-3, first_grad_norm=2e-2),
    "float16": Tolerance(first_loss=5e-4, loss=5e-3, first_grad_norm=2e-2),
    "float8": Tolerance(first_loss=1e-2, loss=2e-2, first_grad_norm=1e-1),
}


@dataclass(frozen=True)
class Parity:
    """Comparison of a run with the reference. All differences are relative to the reference."""

    same: bool
    worst: float  # the largest difference of losses
    worst_step: int
    first_grad_norm: float
    tolerance: Tolerance
    failed_step: int | None  # the first step beyond the tolerance
    failed_in: str | None  # the value that differs in that step

    @property
    def sentence(self) -> str:
        allowed = self.tolerance.first_loss if self.worst_step == 1 else self.tolerance.loss
        verdict = "the same" if self.same else f"DIFFERENT in {self.failed_in} at step {self.failed_step}"
        return (
            f"{verdict}: largest relative difference of losses {self.worst:.1e} at step {self.worst_step} "
            f"(allowed {allowed:g}), of the first gradient norm {self.first_grad_norm:.1e} "
            f"(allowed {self.tolerance.first_grad_norm:g})"
        )


def parity(steps: Sequence[Step], reference: Sequence[Step], dtype: str) -> Parity:
    """Compare the steps of a run with those of the reference. NaN, inf and another number of steps are differences.

    dtype: a key of TOLERANCES.
    """
    tolerance = TOLERANCES[dtype]
    losses = [_difference(a.loss, b.loss) for a, b in zip(steps, reference, strict=False)]
    norm = _difference(steps[0].grad_norm, reference[0].grad_norm) if losses else math.inf
    failures = [(1, "the gradient norm")] if norm > tolerance.first_grad_norm else []
    allowed = [tolerance.first_loss, *[tolerance.loss] * len(losses[1:])]
    beyond = (step for step, (found, most) in enumerate(zip(losses, allowed, strict=False), 1) if found > most)
    failures += [(step, "the loss") for step in beyond][:1]
    if len(steps) != len(reference) or not losses:
        failures.append((len(losses) + 1, "the number of steps"))
    worst = max(losses, default=math.inf)
    failed_step, failed_in = min(failures, default=(None, None))
    return Parity(
        same=not failures,
        worst=worst,
        worst_step=losses.index(worst) + 1 if losses else 1,
        first_grad_norm=norm,
        tolerance=tolerance,
        failed_step=failed_step,
        failed_in=failed_in,
    )


def _difference(a: float | None, b: float | None) -> float:
    """Return |a - b| / |b|; 0 if both are None (neither clips, or both overflow), inf if one is None, NaN or inf."""
    if a is None or b is None:
        return 0.0 if a is b else math.inf
    found = abs(a - b) / max(abs(b), 1e-12)  # the loss or gradient norm of the reference may be 0
    return found if math.isfinite(found) else math.inf


@dataclass(frozen=True)
class Estimate:
    """Mean over the repeats. standard_error: None for a single repeat."""

    mean: float
    standard_error: float | None


@dataclass(frozen=True)
class SlowStep:
    """A measured step that took many times the median of its side, such as one in which a kernel was compiled."""

    repeat: int
    step: int
    seconds: float
    times_median: float


@dataclass(frozen=True)
class SideResult:
    """The trials of one side at one setting. peak_memory: kind, and bytes of the highest repeat per device."""

    name: str
    label: str
    tokens_per_second: Estimate | None  # without padding, over all devices
    median_tokens_per_second: float | None  # of single steps
    median_step_seconds: float | None
    slow_steps: tuple[SlowStep, ...]
    peak_memory: dict[str, Any]
    mfu: float | None
    kernels: str | None
    parity: Parity | None  # None for the reference itself
    failure: Failure | None
    trials: tuple[Trial, ...]

    @property
    def peak(self) -> int | None:
        """Peak bytes to compare: allocated device memory after the warm-up, or host memory of the process."""
        return self.peak_memory.get("allocated_steady", self.peak_memory.get("allocated_run"))

    @property
    def first_run(self) -> tuple[Step, ...]:
        """The steps of the first trial that did not fail."""
        return next((trial.steps for trial in self.trials if not trial.failure), ())


@dataclass(frozen=True)
class Ablation:
    """What one kernel gains: the side with all kernels against the side without this one.

    speed: ratio of tokens/s, with its standard error if each side ran more than once. memory: bytes of peak that the
    kernel saves. All are None if a side did not finish.
    """

    kernel: str
    side: str
    speed: float | None
    speed_error: float | None
    memory: int | None


@dataclass(frozen=True)
class Point:
    """All sides at one batch size or length. reference: the side that parity and ratios refer to."""

    label: str
    batch: str | None  # as the runs had it; None if none finished
    sides: tuple[SideResult, ...]
    reference: str | None

    def side(self, name: str) -> SideResult | None:
        return next((side for side in self.sides if side.name == name), None)

    @property
    def reference_side(self) -> SideResult | None:
        """The measurements of the reference; None if no side finished."""
        return self.side(self.reference) if self.reference else None

    def gain(self, side: SideResult) -> tuple[float, float] | None:
        """Return the ratios of (tokens/s, peak memory) to the reference's; None if one of them was not measured."""
        other = self.reference_side
        if other is None or other is side or not (side.tokens_per_second and other.tokens_per_second):
            return None
        memory = side.peak / other.peak if side.peak and other.peak else math.nan
        return side.tokens_per_second.mean / other.tokens_per_second.mean, memory

    @property
    def ablations(self) -> tuple[Ablation, ...]:
        """What each kernel gains, for the sides that do without one."""
        whole = self.side("with")
        removed = [(side, SIDE_OF[side.name].removes) for side in self.sides]
        return tuple(_ablation(kernel, whole, side) for side, kernel in removed if kernel and whole)


def _ablation(kernel: str, whole: SideResult, side: SideResult) -> Ablation:
    ours = whole.tokens_per_second
    without = side.tokens_per_second
    speed = None
    error = None
    if ours is not None and without is not None:
        speed = ours.mean / without.mean
        if ours.standard_error is not None and without.standard_error is not None:
            error = speed * math.hypot(ours.standard_error / ours.mean, without.standard_error / without.mean)
    memory = side.peak - whole.peak if side.peak and whole.peak else None
    return Ablation(kernel, side.name, speed, error, memory)


@dataclass(frozen=True)
class Comparison:
    """All measurements, and what they were made on. points: one per setting."""

    target: dict[str, str]
    model: str  # and the method: "stories260K, full fine-tuning"
    date: str
    recipe: str
    steps: int
    repeats: int
    warmup: int
    processes: int
    points: tuple[Point, ...]

    @property
    def title(self) -> str:
        """Model, batch and device. A sweep has its batches in the titles of its points."""
        batch = self.points[0].batch if len(self.points) == 1 else None
        device = device_name(self.target, processes=self.processes)
        return f"{self.model}, {batch}, on {device}" if batch else f"{self.model}, on {device}"

    @property
    def on_cpu(self) -> bool:
        """Whether the kernels ran as PyTorch references, whose speed says nothing about the kernels."""
        return self.target["vendor"] == "cpu"

    @property
    def problems(self) -> tuple[str, ...]:
        """One sentence per reason to fail: an error, a side of ours with other losses, or no side that ran at all.

        Running out of memory is a result, and so are other losses of another library.
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

    def as_dict(self) -> dict[str, Any]:
        """Return everything for compare.json: every step of every trial, and the ratios."""
        plain = asdict(self)
        for point, found in zip(self.points, plain["points"], strict=True):
            found["ablations"] = [asdict(one) for one in point.ablations]
            for side, entry in zip(point.sides, found["sides"], strict=True):
                entry["speed_ratio"], entry["memory_ratio"] = point.gain(side) or (None, None)
        return {
            **plain,
            "title": self.title,
            "reference_kernels": self.on_cpu,
            "good": not self.problems,
            "problems": list(self.problems),
        }


def summarise_trials(trials: Sequence[Trial], *, sides: Sequence[Side], label: str) -> Point:
    """Summarise the trials of one setting.

    The reference is the side `without`; if it failed, the first side that finished without our kernels, or else the
    first that finished.
    """
    of = {side.name: tuple(trial for trial in trials if trial.side == side.name) for side in sides}
    finished = [side for side in sides if any(not trial.failure for trial in of[side.name])]
    others = [side for side in finished if not side.ours]
    reference = next((side for side in others if side.name == "without"), next(iter(others or finished), None))
    against = next((t for t in of[reference.name] if not t.failure), None) if reference else None
    return Point(
        label=label,
        batch=next((trial.report["batch"] for trial in trials if trial.report), None),
        sides=tuple(_summarise_side(side, of[side.name], against) for side in sides),
        reference=reference.name if reference else None,
    )


def _summarise_side(side: Side, trials: tuple[Trial, ...], reference: Trial | None) -> SideResult:
    whole = [trial for trial in trials if not trial.failure]
    measured = [step for trial in whole for step in trial.measured]
    median = statistics.median(step.seconds for step in measured) if measured else None
    peaks = [trial.result["peak_memory"] for trial in whole]
    mfus = _throughputs(whole, "mfu")
    compared = reference if reference and reference.side != side.name else None
    return SideResult(
        name=side.name,
        label=side.label,
        tokens_per_second=_estimate(_throughputs(whole, "tokens_per_second")),
        median_tokens_per_second=statistics.median(s.tokens / s.seconds for s in measured) if measured else None,
        median_step_seconds=median,
        slow_steps=() if median is None else _slow_steps(whole, median),
        peak_memory={kind: max(peak.get(kind, 0) for peak in peaks) for peak in peaks for kind in peak},
        mfu=statistics.fmean(mfus) if mfus else None,
        kernels=_kernels(whole[0].result) if whole else None,
        parity=_worst_parity(whole, compared) if whole and compared else None,
        failure=next((trial.failure for trial in trials if trial.failure), None),
        trials=trials,
    )


def _slow_steps(trials: Sequence[Trial], median: float) -> tuple[SlowStep, ...]:
    """Return the measured steps that took far longer than the median of their side."""
    return tuple(
        SlowStep(trial.repeat, step.step, step.seconds, step.seconds / median)
        for trial in trials
        for step in trial.measured
        if step.seconds > SLOW * median
    )


def _estimate(values: Sequence[float]) -> Estimate | None:
    if not values:
        return None
    error = statistics.stdev(values) / math.sqrt(len(values)) if len(values) > 1 else None
    return Estimate(statistics.fmean(values), error)


def _throughputs(trials: Iterable[Trial], key: str) -> list[float]:
    """Return one value of each report's throughput; a report without measured steps has none."""
    found = [(trial.result["throughput"] or {}).get(key) for trial in trials]
    return [value for value in found if value is not None]


def _worst_parity(trials: Sequence[Trial], reference: Trial) -> Parity:
    """Return the parity of the repeat that differs most; one that is beyond its tolerance comes first."""
    in_float8 = any(trial.result["fp8"] for trial in (*trials, reference))
    dtype = "float8" if in_float8 else reference.result["dtype"]
    found = [parity(trial.steps, reference.steps, dtype) for trial in trials]
    return max(found, key=lambda each: (not each.same, each.worst))


def _kernels(report: dict[str, Any]) -> str | None:
    applied = [f"{line['kernel']} x {line['applied']}" for line in report["kernels"] if line["applied"]]
    how = "Triton" if report["kernels_backend"] == "triton" else "PyTorch reference"
    layout = "; padding-free batches" if report["padding_free"] else ""
    return f"{', '.join(applied)} ({how}){layout}" if applied else None
