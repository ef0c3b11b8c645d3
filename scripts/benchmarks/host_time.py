"""Host time of a training run: GPU busy time and launches of its last steps, and its first step without a kernel cache.

Called by benchmarks/training.py for tables with `profiled` steps. The run does its warm-up and the measured steps, then
torch.profiler traces the last ones (`report.profile_steps`). What is found becomes values of the report's throughput.
"""

from __future__ import annotations

import contextlib
import json
import os
import re
import tempfile
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from benchmarks.sides.training import TrainingSide
from ligertune.compare.trial import Step, Trial, TrialOptions
from ligertune.recipe import load_recipe

UNTRACED = 1  # steps between the measured and the traced ones, in which the profiler warms up
ON_DEVICE = ("kernel", "gpu_memcpy", "gpu_memset")  # categories of a trace's events
ON_HOST = ("cuda_runtime", "cuda_driver")
# cudaLaunchKernel, cudaLaunchKernelExC, cuLaunchKernelEx, cudaGraphLaunch, hipLaunchKernel, hipGraphLaunch
LAUNCH = re.compile(r"^(cuda|cu|hip\w*)(LaunchKernel|LaunchCooperativeKernel|GraphLaunch)")
GRAPHS = re.compile(r"CUDA graphs: \d+ recorded, (\d+) micro batches by them")


@dataclass(frozen=True)
class TracedSteps:
    """What a trace says about the steps in it, on average. busy_seconds: some kernel or copy ran on the device."""

    busy_seconds: float
    launches: float


def measure(side: TrainingSide, recipe: Path, repeat: int, effort: TrialOptions, folder: Path) -> Trial:
    """Run a trial without cached kernels. Its result has the measured steps and the values of `host_values`."""
    report = load_recipe(recipe).report
    warmup = report.warmup_steps - effort.steps
    with empty_kernel_cache():
        trial = side.measure(recipe, repeat, replace(effort, steps=UNTRACED + report.profile_steps), folder)
    steps = trial.steps[: report.warmup_steps]
    if trial.report is None:
        return replace(trial, warmup=warmup, steps=steps)
    traced = read_trace(folder / "run" / "profile" / "trace.json", report.profile_steps)
    throughput = host_values(trial.report, steps[warmup:], traced)
    return replace(trial, warmup=warmup, steps=steps, report={**trial.report, "throughput": throughput})


@contextlib.contextmanager
def empty_kernel_cache() -> Iterator[None]:
    """Let the processes that start here compile all kernels."""
    before = os.environ.get("TRITON_CACHE_DIR")
    with tempfile.TemporaryDirectory(prefix="ligertune-triton-", ignore_cleanup_errors=True) as folder:
        os.environ["TRITON_CACHE_DIR"] = folder
        try:
            yield
        finally:
            del os.environ["TRITON_CACHE_DIR"]
            if before is not None:
                os.environ["TRITON_CACHE_DIR"] = before


def host_values(report: dict[str, Any], steps: Sequence[Step], traced: TracedSteps | None) -> dict[str, Any]:
    """Return the report's throughput for the measured steps: the run's own is that of the traced ones.

    traced: None where nothing ran on a GPU.
    """
    throughput = dict(report["throughput"] or {})
    rate = sum(step.tokens for step in steps) / sum(step.seconds for step in steps)
    if throughput.get("mfu"):
        throughput["mfu"] *= rate / throughput["tokens_per_second"]
    throughput["tokens_per_second"] = rate
    phases = report["seconds_to_first_step"]
    throughput["cold_first_step"] = phases["first step"]
    throughput["cold_start"] = sum(phases.values())
    throughput["graphs"] = "yes" if replayed(report["notes"]) else "no"
    if traced is not None:
        seconds = sorted(step.seconds for step in steps)
        throughput["gpu_busy"] = traced.busy_seconds / seconds[len(seconds) // 2]
        throughput["launches"] = traced.launches
    return throughput


def replayed(notes: Sequence[str]) -> bool:
    """Return whether a note of the report counts micro-batches that ran as CUDA graphs."""
    found = [GRAPHS.search(note) for note in notes]
    return any(match is not None and int(match[1]) > 0 for match in found)


def read_trace(path: Path, steps: int) -> TracedSteps | None:
    """Read a trace of torch.profiler; None if nothing ran on a GPU.

    Only what the traced steps launched counts: the device may still run the step before when the trace begins.
    """
    events = json.loads(path.read_text(encoding="utf-8"))["traceEvents"]
    calls = [event for event in events if event.get("cat") in ON_HOST]
    launched = {event["args"].get("correlation") for event in calls}
    intervals = []
    for event in events:
        if event.get("cat") in ON_DEVICE and event["args"].get("correlation") in launched:
            intervals.append((event["ts"], event["ts"] + event["dur"]))
    if not intervals:
        return None
    n_launches = sum(LAUNCH.match(event["name"]) is not None for event in calls)
    return TracedSteps(1e-6 * union_of(intervals) / steps, n_launches / steps)  # a trace counts microseconds


def union_of(intervals: Sequence[tuple[float, float]]) -> float:
    """Return the length of the union of intervals (begin, end)."""
    length = 0.0
    reached = float("-inf")
    for begin, end in sorted(intervals):
        length += max(0.0, end - max(begin, reached))
        reached = max(reached, end)
    return length
