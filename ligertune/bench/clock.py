"""Timing of benchmarks: time on the device and on the host with cold caches, and the rates that a device reaches.

Before each repetition, 256 MB are written to empty the device's cache. This also keeps the device busy while the host
launches the work: the time between two events around it is then the device's own. Where the host takes longer than one
such write, several are queued.
"""

from __future__ import annotations

import math
import time
from collections.abc import Callable
from dataclasses import dataclass

import torch

from ligertune.bench.case import Rates

FLUSH_BYTES = 256 << 20  # the largest cache of the GPUs in hardware.PEAKS, that of MI300X, holds as many
MOST_FLUSHES = 16  # a slower host waits for the device first
COPY_BYTES = {"cuda": 512 << 20, "cpu": 16 << 20}
MATMUL_SIZE = {"cuda": 8192, "cpu": 512}


@dataclass(frozen=True)
class Timing:
    """Median, and the 20 % and 80 % quantiles, in seconds."""

    median: float
    p20: float
    p80: float

    @classmethod
    def of(cls, seconds: list[float]) -> Timing:
        quantiles = torch.tensor([0.5, 0.2, 0.8], dtype=torch.float64)
        return cls(*torch.tensor(seconds, dtype=torch.float64).quantile(quantiles).tolist())


class HostClock:
    """Clock of a CPU: device and host times are the same. Caches stay as they are."""

    def time(self, run: Callable[[], object], expected_host_seconds: float = 0.0) -> tuple[float, float]:
        """Run once; return seconds on the device, and seconds until the host had launched it."""
        start = time.perf_counter()
        run()
        wall = time.perf_counter() - start
        return wall, wall


class DeviceClock:
    """Clock of a GPU, by events around the call."""

    def __init__(self, device: torch.device) -> None:
        self._cache = torch.empty(FLUSH_BYTES, dtype=torch.int8, device=device)
        self._start = torch.cuda.Event(enable_timing=True)
        self._end = torch.cuda.Event(enable_timing=True)
        self._flush_seconds = 1.0
        self._flush_seconds = min(self.time(self._cache.zero_)[0] for _ in range(3))

    def time(self, run: Callable[[], object], expected_host_seconds: float = 0.0) -> tuple[float, float]:
        """Run once, as HostClock does, behind enough device work to cover the host's time."""
        torch.cuda.synchronize()
        for _ in range(min(MOST_FLUSHES, 1 + math.ceil(expected_host_seconds / self._flush_seconds))):
            self._cache.zero_()
        self._start.record()
        start = time.perf_counter()
        run()
        host = time.perf_counter() - start
        self._end.record()
        self._end.synchronize()
        return self._start.elapsed_time(self._end) / 1e3, host


Clock = HostClock | DeviceClock


def clock_for(device: torch.device) -> Clock:
    """Return the clock of a GPU or a CPU."""
    return DeviceClock(device) if device.type == "cuda" else HostClock()


def measured_rates(device: torch.device, clock: Clock, dtype: torch.dtype) -> Rates:
    """Measure a copy of 512 MiB and a square matrix product: the median of ten, after three to warm up."""
    source = torch.empty(COPY_BYTES[device.type], dtype=torch.int8, device=device)
    target = torch.empty_like(source)
    size = MATMUL_SIZE[device.type]
    factor = torch.randn(size, size, device=device).to(dtype)
    product = torch.empty_like(factor)

    def median(run: Callable[[], object]) -> float:
        return Timing.of([clock.time(run)[0] for _ in range(13)][3:]).median

    copy = median(lambda: target.copy_(source))
    matmul = median(lambda: torch.mm(factor, factor, out=product))
    return Rates(copy=2.0 * source.numel() / copy, matmul=2.0 * size**3 / matmul)
