"""Throughput and peak memory, measured between device synchronisations.

`tokens` are real tokens: padding is counted separately. The first `warmup_steps` of a process are excluded
(compilation, allocator, caches). A run that is shorter is measured as a whole, and its report says so.
"""

from __future__ import annotations

import contextlib
import sys
import time
from collections.abc import Iterator
from dataclasses import asdict, dataclass, field
from typing import Literal

import torch

if sys.platform != "win32":
    import resource

Timestamp = float | torch.cuda.Event


@dataclass
class Counts:
    """Work done by all ranks together."""

    steps: int = 0
    tokens: int = 0
    padded_tokens: int = 0
    trained_tokens: int = 0
    images: int = 0
    image_tokens: int = 0  # the part of `tokens` that is replaced by image features
    flops: float = 0.0

    @property
    def padding_share(self) -> float:
        """Return the share of computed token slots that are padding."""
        return 1 - self.tokens / max(self.padded_tokens, 1)

    def add(self, other: Counts) -> None:
        for name, value in asdict(other).items():
            setattr(self, name, getattr(self, name) + value)


@dataclass
class Lap:
    """Work between two timestamps, and its duration. On a GPU the timestamps are events that may not be reached yet."""

    start: Timestamp
    end: Timestamp | None = None
    counts: Counts = field(default_factory=Counts)
    paused: float = 0.0  # seconds

    def seconds(self) -> float:
        """Return the duration without pauses. The caller has waited for the device to reach the end."""
        if isinstance(self.start, float):
            assert isinstance(self.end, float)  # `Meter` takes both from one clock
            return self.end - self.start - self.paused
        assert isinstance(self.end, torch.cuda.Event)
        return self.start.elapsed_time(self.end) / 1000 - self.paused  # elapsed_time is in milliseconds


class Meter:
    """Measure work and time. `lap()` returns those since the last lap, `total()` those after the warm-up."""

    def __init__(self, device: torch.device, *, warmup_steps: int) -> None:
        self._device = device
        self._warmup_steps = warmup_steps
        # `_all` and `_steady`, after the warm-up, are measured on the host's clock.
        self._all, self._steady, self._lap = Lap(time.perf_counter()), Lap(time.perf_counter()), Lap(self._now())
        self._peak_before_reset = {"allocated": 0, "reserved": 0}
        self._uncounted = 0
        if device.type == "cuda":
            # cuBLAS keeps a workspace per stream, also of streams on which an earlier run recorded its graphs
            torch._C._cuda_clearCublasWorkspaces()
            torch.cuda.reset_peak_memory_stats(device)

    def add(self, counts: Counts) -> None:
        """Count a step that the host has launched; the device may still compute it."""
        for lap in (self._all, self._steady, self._lap):
            lap.counts.add(counts)
        if self._all.counts.steps == self._warmup_steps:
            synchronize(self._device)
            self._steady = Lap(time.perf_counter())
            if self._device.type == "cuda":
                self._peak_before_reset = _cuda_peak(self._device)
                torch.cuda.reset_peak_memory_stats(self._device)

    @contextlib.contextmanager
    def paused(self) -> Iterator[None]:
        """Exclude what happens inside (saving, evaluation) from the throughput."""
        synchronize(self._device)  # steps that the host has launched belong to the time before
        start = time.perf_counter()
        yield
        synchronize(self._device)
        seconds = time.perf_counter() - start
        for lap in (self._all, self._steady, self._lap):
            lap.paused += seconds

    def lap(self) -> Lap:
        """Return the work since the last lap, without a synchronisation."""
        lap = self._lap
        self._lap = Lap(self._now())
        lap.end = self._lap.start
        return lap

    def _now(self) -> Timestamp:
        """Return an event in the device's current stream, or on a CPU the clock's time in seconds."""
        if self._device.type != "cuda":
            return time.perf_counter()
        event = torch.cuda.Event(enable_timing=True)
        event.record(torch.cuda.current_stream(self._device))
        return event

    @property
    def counts(self) -> Counts:
        """Return the work of this process, warm-up included."""
        return self._all.counts

    def total(self) -> tuple[Counts, float, bool]:
        """Return (work, seconds, whether the warm-up is excluded) of the run so far."""
        synchronize(self._device)
        warmup_excluded = self._all.counts.steps > self._warmup_steps
        measured = self._steady if warmup_excluded else self._all
        measured.end = time.perf_counter()
        return measured.counts, measured.seconds(), warmup_excluded

    def include_peak(self, allocated: int) -> None:
        """Raise the allocated peak to `allocated` bytes: torch does not count what replayed CUDA graphs use."""
        self._uncounted = max(self._uncounted, allocated)

    @property
    def memory_kind(self) -> Literal["device", "resident"]:
        """Return what `peak_memory` counts: memory of the GPU, or on a CPU the resident memory of the process."""
        return "device" if self._device.type == "cuda" else "resident"

    def peak_memory(self) -> dict[str, int]:
        """Return this rank's peak bytes over the whole run ("allocated_run"), and on a GPU after the warm-up too.

        A CPU has only the first: torch does not count its allocations, and a process's peak cannot be reset.
        """
        if self._device.type != "cuda":
            return {"allocated_run": resident_peak_bytes()}
        peak = _cuda_peak(self._device)
        peak["allocated"] = max(peak["allocated"], self._uncounted)
        steady = {f"{kind}_steady": size for kind, size in peak.items()}
        run = {f"{kind}_run": max(size, self._peak_before_reset[kind]) for kind, size in peak.items()}
        return {**steady, **run}


def synchronize(device: torch.device) -> None:
    """Wait until the device has finished all launched work; do nothing on a CPU."""
    if device.type == "cuda":
        torch.cuda.synchronize(device)


def resident_peak_bytes() -> int:
    """Return the peak resident memory of this process in bytes; 0 on Windows, which does not report it."""
    if sys.platform == "win32":
        return 0
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    return peak if sys.platform == "darwin" else peak * 1024  # Linux reports KiB, macOS bytes


def _cuda_peak(device: torch.device) -> dict[str, int]:
    return {"allocated": torch.cuda.max_memory_allocated(device), "reserved": torch.cuda.max_memory_reserved(device)}
