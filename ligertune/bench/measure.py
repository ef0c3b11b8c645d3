"""Benchmark runs: each implementation's error against float64, its peak memory, then the times of all in turn.

A provider that cannot be imported, does not support a size or runs out of memory becomes a row with its reason.
"""

from __future__ import annotations

import gc
import math
import random
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import asdict, dataclass, field
from typing import Any

import torch

from ligertune.bench import accuracy
from ligertune.bench.case import Case, Mode, OpBenchmark, Provider, Rates, Tensors
from ligertune.bench.cases import (
    attention_cases,
    decoding_cases,
    expert_cases,
    loss_cases,
    norm_cases,
    pointwise_cases,
    recurrence_cases,
)
from ligertune.bench.clock import Clock, Timing, clock_for, measured_rates
from ligertune.hardware import this_machine
from ligertune.report import versions

# What torch, torch.compile and the ops raise where they do not support a case (out of memory is a RuntimeError).
FAILURES = (RuntimeError, ValueError, TypeError, AttributeError, ImportError, AssertionError, LookupError)
SEED = 0
# By op; without arguments `ligertune bench` runs them in this order.
BENCHMARKS: dict[str, OpBenchmark] = {
    benchmark.op: benchmark
    for benchmark in (
        *loss_cases.LOSSES,
        *norm_cases.NORMS,
        pointwise_cases.ROPE,
        attention_cases.ATTENTION,
        attention_cases.OWN_KEYS,
        *decoding_cases.DECODING,
        *recurrence_cases.RECURRENCES,
        *pointwise_cases.GATED,
        expert_cases.EXPERTS,
        pointwise_cases.EMBEDDING,
        *loss_cases.DIVERGENCES,
        pointwise_cases.DEQUANTIZE_NF4,
        pointwise_cases.DEQUANTIZE_MXFP4,
        pointwise_cases.DEQUANTIZE_FLOAT8_BLOCKS,
        pointwise_cases.QUANTIZE_FLOAT8,
        pointwise_cases.SWIGLU_FLOAT8,
        pointwise_cases.INT2_MATMUL,
        pointwise_cases.ADAMW_STEP,
        pointwise_cases.SEEDED_DROPOUT,
    )
}


@dataclass(frozen=True)
class Repetitions:
    """Number of repetitions of a measurement."""

    warmup: int = 3
    repeats: int = 20
    seconds: float = 0.5  # a provider measured for longer gets no further repetition, but at least three


@dataclass(frozen=True)
class BenchSetup:
    """Device, dtype, clock and repetitions of a benchmark; `failures`: exceptions that become a row."""

    device: torch.device
    dtype: torch.dtype
    clock: Clock
    rates: Rates
    repetitions: Repetitions
    failures: tuple[type[Exception], ...] = FAILURES


def bench_setup(
    device: torch.device, dtype: torch.dtype, repetitions: Repetitions, failures: tuple[type[Exception], ...] = FAILURES
) -> BenchSetup:
    """Return a setup with the device's rates, which take some milliseconds to measure."""
    clock = clock_for(device)
    return BenchSetup(device, dtype, clock, measured_rates(device, clock, dtype), repetitions, failures)


def default_setup(dtype: str) -> BenchSetup:
    """Return the setup of `ligertune bench`: the first GPU, or the CPU. dtype: a name of torch's, or "auto"."""
    machine = this_machine()
    gpu = machine.vendor != "cpu"
    if dtype == "auto":
        dtype = ("bfloat16" if machine.has_bfloat16 else "float16") if gpu else "float32"
    repetitions = Repetitions(3, 30, 0.5) if gpu else Repetitions(1, 5, 0.2)
    return bench_setup(torch.device(machine.device), getattr(torch, dtype), repetitions)


def report_header(setup: BenchSetup) -> dict[str, Any]:
    """Return device, measured rates, versions and date, and all of them in one `line`."""
    name = this_machine().name
    date = time.strftime("%Y-%m-%d")
    installed = versions()
    rates = f"copy {setup.rates.copy / 1e12:.3g} TB/s, matmul {setup.rates.matmul / 1e12:.3g} TFLOP/s"
    named = ", ".join(f"{package} {version}" for package, version in installed.items())
    line = f"{name}, {date}; {rates}; {named}"
    return {"device": name, "date": date, "versions": installed, "rates": asdict(setup.rates), "line": line}


@dataclass
class Row:
    """Measurements of one provider in one case, in seconds and bytes; `errors` are relative, by tensor."""

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
        """Return the share of the roofline: lower bound over time."""
        return self.floors[mode] / self.device[mode].median if mode in self.device else None

    @property
    def error(self) -> float | None:
        """The largest error; NaN if any is NaN."""
        return max(self.errors.values(), key=lambda error: (math.isnan(error), error), default=None)

    def as_dict(self) -> dict[str, Any]:
        """Return the row for JSON."""
        return {
            **self.case.as_dict(),
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


class BoundProvider:
    """A provider with its arguments: forward and backward passes."""

    def __init__(self, provider: Provider, case: Case, args: Tensors) -> None:
        self._case = case
        self._run = provider.make(case, args)
        self._within = provider.within
        self.leaves = accuracy.leaves_of(args)
        self.upstream: accuracy.Upstream = []

    def forward(self) -> Tensors:
        return accuracy.as_tuple(self._run())

    def backward(self, outputs: Tensors) -> Tensors:
        return torch.autograd.grad(outputs, self.leaves, self.upstream) if self.leaves else ()

    def both(self) -> tuple[Tensors, Tensors]:
        """Return outputs and gradients. The first call makes the upstream gradients, and must come first of all."""
        outputs = self.forward()
        self.upstream = self.upstream or accuracy.like(accuracy.upstream_of(self._case, outputs), outputs)
        return outputs, self.backward(outputs)

    def timed(self, mode: Mode, clock: Clock, expected_host_seconds: float) -> tuple[float, float]:
        """Return device and host seconds of one repetition."""
        with self._within():
            if mode == "backward":
                outputs = self.forward()
                return clock.time(lambda: self.backward(outputs), expected_host_seconds)
            return clock.time(self.forward if mode == "forward" else self.both, expected_host_seconds)


def bench(
    cases: Iterable[Case],
    setup: BenchSetup,
    *,
    benchmarks: dict[str, OpBenchmark] = BENCHMARKS,
    modes: Sequence[Mode] = ("forward", "backward", "both"),
    chosen: Callable[[Provider], bool] = lambda provider: True,
    extra: dict[str, tuple[Provider, ...]] | None = None,
) -> Iterator[list[Row]]:
    """Yield the rows of each case. extra: further providers by op. An op with a single mode is timed in that mode."""
    for case in cases:
        benchmark = benchmarks[case.op]
        providers = [p for p in (*benchmark.providers, *(extra or {}).get(case.op, ())) if chosen(p)]
        wanted = [mode for mode in benchmark.modes if mode in modes or len(benchmark.modes) == 1]
        yield _bench_case(benchmark, case, providers, wanted, setup)
        gc.collect()
        if setup.device.type == "cuda":
            torch.cuda.empty_cache()


def cases_of(op: str, *, dtype: torch.dtype, small: bool) -> list[Case]:
    """Return an op at all its sizes; small: those for a CPU."""
    benchmark = BENCHMARKS[op]
    return [Case(op, sizes, benchmark.dtype or dtype) for sizes in (benchmark.cpu_sizes if small else benchmark.sizes)]


def bench_op(op: str, setup: BenchSetup, *, without: Sequence[str] = ()) -> list[Row]:
    """Return the rows of an op at all its sizes: those of models on a GPU, small ones on a CPU."""
    cases = cases_of(op, dtype=setup.dtype, small=setup.device.type == "cpu")
    return [row for rows in bench(cases, setup, chosen=lambda p: p.name not in without) for row in rows]


def _bench_case(
    benchmark: OpBenchmark, case: Case, providers: list[Provider], modes: list[Mode], setup: BenchSetup
) -> list[Row]:
    work = benchmark.work(case)
    floors = {mode: work.floor(mode, setup.rates) for mode in modes}
    args = seeded_inputs(benchmark, case, setup.device)
    true: dict[str, torch.Tensor] | None = None
    notes = []
    try:
        true = accuracy.truth(benchmark, case, args)
    except torch.OutOfMemoryError:
        notes.append("no error: float64 does not fit in memory")
    rows = []
    bound = []
    for provider in providers:
        rows.append(Row(case, provider.name, floors, notes=list(notes)))
        bound.append(_checked(rows[-1], provider, benchmark, args, true, setup))
    del true
    for mode in modes:
        _time(rows, bound, mode, setup)
    return rows


def seeded_inputs(benchmark: OpBenchmark, case: Case, device: torch.device) -> Tensors:
    """Return the same inputs in each call."""
    torch.manual_seed(SEED)
    return benchmark.inputs(case, device)


def _checked(
    row: Row,
    provider: Provider,
    benchmark: OpBenchmark,
    args: Tensors,
    true: dict[str, torch.Tensor] | None,
    setup: BenchSetup,
) -> BoundProvider | None:
    """Fill in the row's errors and memory; return None where the provider fails."""
    try:
        own = seeded_inputs(benchmark, row.case, setup.device) if provider.overwrites else args
        with provider.within():
            bound = BoundProvider(provider, row.case, own)
            outputs, gradients = bound.both()
            if true is not None:
                found = accuracy.results(benchmark, own, outputs, gradients)
                row.errors = {name: accuracy.error_of(found[name], true[name]) for name in true}
                del found
            del outputs, gradients
            row.peak_bytes = _peak(bound.both, setup.device)
    except setup.failures as problem:
        row.failure = first_line(problem)
        return None
    return bound


def _peak(run: Callable[[], object], device: torch.device) -> int | None:
    """Return the peak of device memory above what is allocated before: outputs, gradients and temporary tensors."""
    if device.type != "cuda":
        return None
    torch.cuda.synchronize(device)
    before = torch.cuda.memory_allocated(device)
    torch.cuda.reset_peak_memory_stats(device)
    run()
    torch.cuda.synchronize(device)
    return torch.cuda.max_memory_allocated(device) - before


def _time(rows: list[Row], bound: list[BoundProvider | None], mode: Mode, setup: BenchSetup) -> None:
    """Time all providers in turn, in another order each round.

    A device that slows down then slows down all of them, and no provider always follows the same other one.
    """
    warmup = setup.repetitions.warmup
    repeats = setup.repetitions.repeats
    seconds = setup.repetitions.seconds
    taken: list[list[tuple[float, float]]] = [[] for _ in rows]
    turns = list(zip(rows, bound, taken, strict=True))
    order = random.Random(SEED)
    for _ in range(warmup + repeats):
        order.shuffle(turns)
        for row, provider, times in turns:
            measured = times[warmup:]
            if provider is None or row.failure:
                continue
            if len(measured) >= 3 and sum(device for device, _ in measured) > seconds:
                continue
            try:
                times.append(provider.timed(mode, setup.clock, times[-1][1] if times else 0.0))
            except setup.failures as problem:
                row.failure = first_line(problem)
    for row, times in zip(rows, taken, strict=True):
        if row.failure is None and len(times) > warmup:
            row.device[mode], row.host[mode] = (Timing.of(list(each)) for each in zip(*times[warmup:], strict=True))


def first_line(problem: BaseException) -> str:
    """Return the type and the first line of an exception."""
    lines = [line.strip() for line in str(problem).splitlines() if line.strip()]
    return f"{type(problem).__name__}: {lines[0] if lines else ''}"[:200]
