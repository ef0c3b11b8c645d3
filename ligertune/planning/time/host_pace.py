"""How fast this host launches operations, compared with the host on which the host time of layers was measured."""

from __future__ import annotations

import time
from functools import cache

import torch

from ligertune.hardware import Machine

# Seconds of a small operation with its backward where layers take what graph_choice.HOST_MS says. On a free host of an
# H200 it took 28 us, with a busy process on each core 55; a layer's launches took 1.3 to 1.9 times as long then.
REFERENCE = 40e-6
POWER = 0.75  # of the operation's time, for that of a layer's launches
OPERATIONS = 300
REPEATS = 5


def host_pace(machine: Machine) -> float:
    """Return the time of a launch on this host over that on the reference host.

    It is 1 for several processes, which must all make the same plan, and for a simulated GPU.
    """
    if machine.world_size > 1 or machine.device != "cuda" or not torch.cuda.is_available():
        return 1.0
    return (seconds_per_operation() / REFERENCE) ** POWER


@cache
def seconds_per_operation() -> float:
    """Return the host's time for a small operation and its backward on the CPU. Measuring takes 0.1 s.

    Of several means the lowest is kept: what disturbs a measurement makes it slower.
    """
    _mean_seconds()  # the first call is slower
    return min(_mean_seconds() for _ in range(REPEATS))


def _mean_seconds() -> float:
    inputs = torch.zeros(8)
    weight = torch.ones(8, requires_grad=True)
    start = time.perf_counter()
    for _ in range(OPERATIONS):
        (inputs * weight).sum().backward()
    return (time.perf_counter() - start) / OPERATIONS
