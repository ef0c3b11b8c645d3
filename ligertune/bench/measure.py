"""Benches cases: every provider's outputs against float64, its memory, then all providers' times in turn.

A provider that cannot be imported, does not serve a size or runs out of memory is a row with its reason.
"""

from __future__ import annotations

import gc
import math
import random
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import asdict, dataclass, field

import torch

from ligertune.bench import accuracy
from ligertune.bench.case import Case, Mode, Provider, Rates, Subject, Tensors
from ligertune.bench.clock import Clock, Timing, clock_for, measured_rates

# What torch, torch.compile and our ops raise where they do not serve a case (out of memory is a RuntimeError).
FAILURES = (RuntimeError, ValueError, TypeError, AttributeError, ImportError, AssertionError, LookupError)
SEED = 0


@dataclass(frozen=True)
class Effort:
    """How long a measurement may take."""

    warmup: int = 3
    repeats: int = 20
    seconds: float = 0.5  # of measured time, after which a provider gets no further repetition (three at the least)


@dataclass(frozen=True)
class Stage:
    """Where and how everything is measured. `failures` is what a provider may raise and be a row nonetheless."""

    device: torch.device
    dtype: torch.dtype
    clock: Clock
    rates: Rates
    effort: Effort
    failures: tuple[type[Exception], ...] = FAILURES


def stage(
    device: torch.device, dtype: torch.dtype, effort: Effort, failures: tuple[type[Exception], ...] = FAILURES
) -> Stage:
    """With the device's rates, which take some milliseconds to measure."""
    clock = clock_for(device)
    return Stage(device, dtype, clock, measured_rates(device, clock, dtype), effort, failures)


@dataclass
class Row:
    """One provider in one case. Seconds, bytes; `error` is relative, by output and gradient."""

    case: Case
    provider: str
    floors: dict[Mode, float]
    device: dict[Mode, Timing] = field(default_factory=dict)
    host: dict[Mode, Timing] = field(default_factory=dict)
    peak_bytes: int | None = None
    errors: dict[str, float] = field(default_factory=dict)
    failure: str | None = None
    notes: list[str] = field(default_factory=list)

    def share(self, mode: Mode) -> float | None:
        """Of the roofline: floor over time."""
        return self.floors[mode] / self.device[mode].median if mode in self.device else None

    @property
    def error(self) -> float | None:
        """The worst; NaN if any is."""
        return max(self.errors.values(), key=lambda error: (math.isnan(error), error), default=None)

    def as_dict(self) -> dict:
        """For JSON."""
        return {
            "op": self.case.op,
            "sizes": self.case.sizes,
            "dtype": str(self.case.dtype).removeprefix("torch."),
            "frozen_head": self.case.frozen_head,
            "ignored": self.case.ignored,
            "provider": self.provider,
            "floor_seconds": self.floors,
            "device_seconds": {mode: asdict(timing) for mode, timing in self.device.items()},
            "host_seconds": {mode: asdict(timing) for mode, timing in self.host.items()},
            "share_of_roofline": {mode: self.share(mode) for mode in self.device},
            "peak_bytes_above_inputs": self.peak_bytes,
            "relative_errors": self.errors,
            "failure": self.failure,
            "notes": self.notes,
        }


class Bound:
    """A provider with arguments: its passes."""

    def __init__(self, provider: Provider, case: Case, args: Tensors) -> None:
        self._case, self._run, self._within = case, provider.make(case, args), provider.within
        self.leaves = accuracy.leaves_of(args)
        self.upstream: list[torch.Tensor | None] = []

    def forward(self) -> Tensors:
        return accuracy.as_tuple(self._run())

    def backward(self, outputs: Tensors) -> Tensors:
        if not self.leaves:
            return ()
        return torch.autograd.grad(outputs, self.leaves, self.upstream)

    def first(self) -> tuple[Tensors, Tensors]:
        """Outputs and gradients; also what compiles, and what makes the upstream gradients."""
        outputs = self.forward()
        self.upstream = accuracy.like(accuracy.upstream_of(self._case, outputs), outputs)
        return outputs, self.backward(outputs)

    def both(self) -> tuple[Tensors, Tensors]:
        outputs = self.forward()
        return outputs, self.backward(outputs)

    def timed(self, mode: Mode, clock: Clock, ahead: float) -> tuple[float, float]:
        """(device, host) seconds of one repetition."""
        with self._within():
            if mode == "backward":
                outputs = self.forward()
                return clock.time(lambda: self.backward(outputs), ahead)
            return clock.time(self.forward if mode == "forward" else self.both, ahead)


def bench(
    cases: Iterable[Case],
    subjects: dict[str, Subject],
    stage: Stage,
    *,
    modes: Sequence[Mode] = ("forward", "backward", "both"),
    chosen: Callable[[Provider], bool] = lambda provider: True,
    extra: dict[str, tuple[Provider, ...]] | None = None,
) -> Iterator[list[Row]]:
    """The rows of each case as it is done. `extra` holds further providers by op; an op of one mode is timed in it."""
    for case in cases:
        subject = subjects[case.op]
        providers = [p for p in (*subject.providers, *(extra or {}).get(case.op, ())) if chosen(p)]
        wanted = [mode for mode in subject.modes if mode in modes or len(subject.modes) == 1]
        yield _bench_case(subject, case, providers, wanted, stage)
        gc.collect()
        if stage.device.type == "cuda":
            torch.cuda.empty_cache()


def _bench_case(subject: Subject, case: Case, providers: list[Provider], modes: list[Mode], stage: Stage) -> list[Row]:
    work = subject.work(case)
    floors = {mode: work.floor(mode, stage.rates) for mode in modes}
    args = _inputs(subject, case, stage.device)
    try:
        true: dict[str, torch.Tensor] | None = accuracy.truth(subject, case, args)
        notes = []
    except torch.OutOfMemoryError:
        true, notes = None, ["no error: float64 does not fit in memory"]
    rows, bounds = [], []
    for provider in providers:
        rows.append(Row(case, provider.name, floors, notes=list(notes)))
        bounds.append(_checked(rows[-1], provider, subject, args, true, stage))
    del true
    for mode in modes:
        _time(rows, bounds, mode, stage)
    return rows


def _inputs(subject: Subject, case: Case, device: torch.device) -> Tensors:
    torch.manual_seed(SEED)
    return subject.inputs(case, device)


def _checked(
    row: Row,
    provider: Provider,
    subject: Subject,
    args: Tensors,
    true: dict[str, torch.Tensor] | None,
    stage: Stage,
) -> Bound | None:
    """Fills in error and memory; None where the provider fails."""
    try:
        own = _inputs(subject, row.case, stage.device) if provider.overwrites else args
        with provider.within():
            bound = Bound(provider, row.case, own)
            outputs, gradients = bound.first()
            if true is not None:
                found = accuracy.results(subject, own, outputs, gradients)
                row.errors = {name: accuracy.error_of(found[name], true[name]) for name in true}
                del found
            del outputs, gradients
            row.peak_bytes = _peak(bound.both, stage.device)
    except stage.failures as problem:
        row.failure = sentence(problem)
        return None
    return bound


def _peak(run: Callable[[], object], device: torch.device) -> int | None:
    """Device memory above what was there before: outputs, gradients and everything in between."""
    if device.type != "cuda":
        return None
    torch.cuda.synchronize(device)
    before = torch.cuda.memory_allocated(device)
    torch.cuda.reset_peak_memory_stats(device)
    run()
    torch.cuda.synchronize(device)
    return torch.cuda.max_memory_allocated(device) - before


def _time(rows: list[Row], bounds: list[Bound | None], mode: Mode, stage: Stage) -> None:
    """In turn, so that a device that slows down slows down all, and each round in another order.

    So nobody always runs behind the same other, whatever that one leaves behind.
    """
    effort = stage.effort
    taken: list[list[tuple[float, float]]] = [[] for _ in rows]
    turns, order = list(zip(rows, bounds, taken, strict=True)), random.Random(SEED)
    for _ in range(effort.warmup + effort.repeats):
        order.shuffle(turns)
        for row, bound, times in turns:
            measured = times[effort.warmup :]
            if bound is None or row.failure:
                continue
            if len(measured) >= 3 and sum(device for device, _ in measured) > effort.seconds:
                continue
            try:
                times.append(bound.timed(mode, stage.clock, ahead=times[-1][1] if times else 0.0))
            except stage.failures as problem:
                row.failure = sentence(problem)
    for row, times in zip(rows, taken, strict=True):
        if row.failure is None and len(times) > effort.warmup:
            row.device[mode] = Timing.of([device for device, _ in times[effort.warmup :]])
            row.host[mode] = Timing.of([host for _, host in times[effort.warmup :]])


def sentence(problem: BaseException) -> str:
    """The first line of what went wrong."""
    lines = [line.strip() for line in str(problem).splitlines() if line.strip()]
    return f"{type(problem).__name__}: {lines[0] if lines else ''}"[:200]
