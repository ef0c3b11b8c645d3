"""Autocast: the dtype that matrix products compute in, and a context in which they keep their inputs' dtype."""

from __future__ import annotations

import contextlib

import torch


def autocast_dtype(device: torch.device) -> torch.dtype | None:
    """Return the dtype that autocast computes in on this device, None where autocast is off."""
    # The type is compared because torch.compile does not trace torch.amp.is_autocast_available.
    if device.type not in ("cuda", "cpu") or not torch.is_autocast_enabled(device.type):
        return None
    return torch.get_autocast_dtype(device.type)


def without_autocast(device: torch.device) -> contextlib.AbstractContextManager:
    """Return a context without autocast on this device."""
    if autocast_dtype(device) is None:
        return contextlib.nullcontext()
    return torch.autocast(device.type, enabled=False)
