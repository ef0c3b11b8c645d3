"""Time on the device and on the host, with a cold cache; and what the device can reach.

A repetition empties the device's cache by writing over 256 MB, which also keeps the device busy while the host issues
what is timed: the time between two events around it is then the device's own and not the host's. Where the host
takes longer than one such write, several are queued.
"""

from __future__ import annotations

import math
import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import Protocol

import torch

from ligertune.bench.case import Rates

FLUSH_BYTES = 256 << 20
MOST_FLUSHES = 16  # a host that takes longer waits for the device itself
COPY_BYTES = 512 << 20
MATMUL_SIZE = 8192
COPY_BYTES_CPU = 16 << 20
MATMUL_SIZE_CPU = 512


@dataclass(frozen=True)
class Timing:
    """Seconds: the median, and the bounds within which three of five repetitions lie."""

    median: float
    p20: float
    p80: float

    @classmethod
    def of(cls, seconds: list[float]) -> Timing:
        ordered = sorted(seconds)

        def quantile(share: float) -> float:
            place = share * (len(ordered) - 1)
            low = math.floor(place)
            high = min(low + 1, len(ordered) - 1)
            return ordered[low] + (place - low) * (ordered[high] - ordered[low])

        return cls(quantile(0.5), quantile(0.2), quantile(0.8))


class Clock(Protocol):
    """Runs something once: (seconds on the device, seconds until the host had issued it).

    `ahead` is what the host is expected to take.
    """

    def time(self, run: Callable[[], object], ahead: float = 0.0) -> tuple[float, float]: ...


class HostClock:
    """For a CPU, where both are one. The caches stay as they are."""

    def time(self, run: Callable[[], object], ahead: float = 0.0) -> tuple[float, float]:
        start = time.perf_counter()
        run()
        wall = time.perf_counter() - start
        return wall, wall


class DeviceClock:
    """For a GPU."""

    def __init__(self, device: torch.device) -> None:
        self._cache = torch.empty(FLUSH_BYTES, dtype=torch.int8, device=device)
        self._start, self._end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        self._flush_seconds = 1.0
        self._flush_seconds = min(self.time(self._cache.zero_)[0] for _ in range(3))

    def time(self, run: Callable[[], object], ahead: float = 0.0) -> tuple[float, float]:
        torch.cuda.synchronize()
        for _ in range(min(MOST_FLUSHES, 1 + math.ceil(ahead / self._flush_seconds))):
            self._cache.zero_()
        self._start.record()
        start = time.perf_counter()
        run()
        host = time.perf_counter() - start
        self._end.record()
        self._end.synchronize()
        return self._start.elapsed_time(self._end) / 1e3, host


def clock_for(device: torch.device) -> Clock:
    return DeviceClock(device) if device.type == "cuda" else HostClock()


def measured_rates(device: torch.device, clock: Clock, dtype: torch.dtype) -> Rates:
    """A copy of 512 MiB and a square product, the median of some tries after warming up."""
    gpu = device.type == "cuda"
    source = torch.empty(COPY_BYTES if gpu else COPY_BYTES_CPU, dtype=torch.int8, device=device)
    target = torch.empty_like(source)
    size = MATMUL_SIZE if gpu else MATMUL_SIZE_CPU
    factor = torch.randn(size, size, device=device).to(dtype)
    product = torch.empty_like(factor)

    def median(run: Callable[[], object]) -> float:
        return Timing.of([clock.time(run)[0] for _ in range(13)][3:]).median

    copy = median(lambda: target.copy_(source))
    matmul = median(lambda: torch.mm(factor, factor, out=product))
    return Rates(copy=2.0 * source.numel() / copy, matmul=2.0 * size**3 / matmul)
