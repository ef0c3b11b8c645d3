"""Numbers on their way from the device to the host, without the wait that `.item()` is.

A wait in each step leaves a GPU idle until the host has launched the next one's first kernels.
"""

from __future__ import annotations

import torch
from torch import Tensor


class HostCopy:
    """A copy of `values` as they are now in the device's order of work; `read` waits for them and no later work."""

    def __init__(self, values: Tensor) -> None:
        self._event = None
        if values.device.type != "cuda":
            self._host = values.detach().clone()
            return
        self._host = torch.empty(values.shape, dtype=values.dtype, pin_memory=True)
        self._host.copy_(values.detach(), non_blocking=True)
        self._event = torch.cuda.Event()
        self._event.record(torch.cuda.current_stream(values.device))

    def has_arrived(self) -> bool:
        """Whether `read` would not wait."""
        return self._event is None or self._event.query()

    def read(self) -> Tensor:
        """The values, on the CPU."""
        if self._event is not None:
            self._event.synchronize()
        return self._host
