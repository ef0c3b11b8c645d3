"""A device that ran out of memory: what was asked of it, and what to write instead."""

from __future__ import annotations

import contextlib
import re
from collections.abc import Iterator

import torch

from ligertune.errors import UserError
from ligertune.planning.memory.fit import advice
from ligertune.planning.plan import Plan


class OutOfDeviceMemory(UserError):
    """Told apart from other sentences by whoever sweeps over sizes until one does not fit."""


@contextlib.contextmanager
def explained(plan: Plan) -> Iterator[None]:
    """Turns torch's error into a sentence that names the keys to change, with this plan's numbers."""
    try:
        yield
    except torch.OutOfMemoryError as error:
        raise explanation(plan, error) from error


def explanation(plan: Plan, error: torch.OutOfMemoryError) -> OutOfDeviceMemory:
    """The sentence for an error of torch's allocator."""
    asked = re.search(r"Tried to allocate [\d.]+ \w+", str(error))
    peak = plan.peak
    expected = (
        ""
        if peak is None
        else f" The plan expects {peak.total / 2**30:.2f} GiB: "
        + ", ".join(f"{kind} {size / 2**30:.2f}" for kind, size in peak.parts().items() if size)
        + "."
    )
    return OutOfDeviceMemory(
        f"{plan.machine.name} with {plan.machine.memory_bytes / 2**30:.1f} GiB ran out of memory"
        f"{': ' + asked[0].replace('Tried', 'tried') if asked else ''}.{expected}",
        hint=advice(plan),
        exit_code=1,
    )
