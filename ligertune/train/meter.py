"""Throughput and peak memory, measured between device synchronisations.

`tokens` are real: padding is never counted as throughput, only named beside it. The first `warmup_steps` of a process
are left out (compilation, allocator, caches); a run shorter than that is measured whole and says so.
"""

from __future__ import annotations

import contextlib
import sys
import time
from collections.abc import Iterator
from dataclasses import asdict, dataclass

import torch

if sys.platform != "win32":
    import resource

Moment = float | torch.cuda.Event


@dataclass
class Counts:
    """Work done, over all ranks."""

    steps: int = 0
    tokens: int = 0
    padded_tokens: int = 0
    trained_tokens: int = 0
    images: int = 0
    image_tokens: int = 0  # of `tokens`, those that stand for images
    flops: float = 0.0

    @property
    def padding_share(self) -> float:
        """Of the slots that were computed, those that held no token."""
        return 1 - self.tokens / max(self.padded_tokens, 1)

    def add(self, other: Counts) -> None:
        for name, value in asdict(other).items():
            setattr(self, name, getattr(self, name) + value)


class Lap:
    """Work between two moments, and its seconds. On a GPU these are the device's, which may not be there yet."""

    def __init__(self, counts: Counts, start: Moment, end: Moment, paused: float) -> None:
        self.counts, self._start, self._end, self._paused = counts, start, end, paused

    def seconds(self) -> float:
        """Without what was paused; the caller has waited for the device to come to the end."""
        if isinstance(self._start, float):
            return self._end - self._start - self._paused
        return self._start.elapsed_time(self._end) / 1000 - self._paused  # torch gives milliseconds


class Meter:
    """Counts work and time. `lap()` gives what was done since the last lap; `total()` the run without its warm-up."""

    def __init__(self, device: torch.device, *, warmup_steps: int) -> None:
        self._device = device
        self._warmup_steps = warmup_steps
        self._all, self._steady, self._lap = Counts(), Counts(), Counts()
        self._start = self._steady_start = time.perf_counter()
        self._paused = self._steady_paused = self._lap_paused = 0.0
        self._lap_start = self._now()
        self._peak_before_reset = {"allocated": 0, "reserved": 0}
        self._uncounted = 0
        if device.type == "cuda":
            torch.cuda.reset_peak_memory_stats(device)

    def add(self, counts: Counts) -> None:
        """One finished step (of launching: the device may still be at it)."""
        for total in (self._all, self._lap):
            total.add(counts)
        if self._all.steps > self._warmup_steps:
            self._steady.add(counts)
        elif self._all.steps == self._warmup_steps:
            self._end_warmup()

    def _end_warmup(self) -> None:
        synchronize(self._device)
        self._steady_start = time.perf_counter()
        self._steady_paused = 0.0
        if self._device.type == "cuda":
            self._peak_before_reset = _cuda_peak(self._device)
            torch.cuda.reset_peak_memory_stats(self._device)

    @contextlib.contextmanager
    def paused(self) -> Iterator[None]:
        """Saving and evaluating, which are no training throughput."""
        synchronize(self._device)
        start = time.perf_counter()
        yield
        synchronize(self._device)
        seconds = time.perf_counter() - start
        self._paused += seconds
        self._steady_paused += seconds
        self._lap_paused += seconds

    def lap(self) -> Lap:
        """What was done since the last lap. It waits for nothing."""
        now = self._now()
        lap = Lap(self._lap, self._lap_start, now, self._lap_paused)
        self._lap, self._lap_start, self._lap_paused = Counts(), now, 0.0
        return lap

    def _now(self) -> Moment:
        """This moment in the device's work; on a CPU, of the clock."""
        if self._device.type != "cuda":
            return time.perf_counter()
        event = torch.cuda.Event(enable_timing=True)
        event.record(torch.cuda.current_stream(self._device))
        return event

    def total(self) -> tuple[Counts, float, bool]:
        """(work, seconds, whether the warm-up was left out) of the run so far."""
        synchronize(self._device)
        now = time.perf_counter()
        if self._steady.steps:
            return self._steady, now - self._steady_start - self._steady_paused, True
        return self._all, now - self._start - self._paused, False

    def peaked(self, allocated: int) -> None:
        """Bytes that were once in use, and are since without being counted: replayed graphs allocate nothing."""
        self._uncounted = max(self._uncounted, allocated)

    def peak_memory(self) -> dict[str, int]:
        """Bytes on this rank's device after the warm-up and over the whole run; on a CPU the resident peak."""
        if self._device.type != "cuda":
            return {"resident_run": resident_peak_bytes()}
        peak = _cuda_peak(self._device)
        peak["allocated"] = max(peak["allocated"], self._uncounted)
        steady = {f"{kind}_steady": size for kind, size in peak.items()}
        run = {f"{kind}_run": max(size, self._peak_before_reset[kind]) for kind, size in peak.items()}
        return {**steady, **run}


def synchronize(device: torch.device) -> None:
    """Wait until the device has done what was asked of it; nothing on a CPU."""
    if device.type == "cuda":
        torch.cuda.synchronize(device)


def resident_peak_bytes() -> int:
    """The most host memory this process has held; 0 where the system does not say."""
    if sys.platform == "win32":
        return 0
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    return peak if sys.platform == "darwin" else peak * 1024  # kilobytes on Linux, bytes on macOS


def _cuda_peak(device: torch.device) -> dict[str, int]:
    return {
        "allocated": torch.cuda.max_memory_allocated(device),
        "reserved": torch.cuda.max_memory_reserved(device),
    }
