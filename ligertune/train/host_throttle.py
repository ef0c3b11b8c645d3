"""How far the host runs ahead of its device, and the step after which all ranks stop."""

from __future__ import annotations

import torch
from accelerate import Accelerator

from ligertune.train.distributed import reduce_sum
from ligertune.train.host_copy import HostCopy


class Pace:
    """Called between steps, or batches of an evaluation: the host waits for the one before, and so stays one ahead.

    No further: who sends SIGTERM waits for what was launched. One process hears of a signal at once; several hear of it
    one step late, since an answer in the same step would be a wait in each.
    """

    def __init__(self, accelerator: Accelerator) -> None:
        self._accelerator = accelerator
        self._before: HostCopy | None = None

    def __call__(self, stop: bool) -> bool:
        """Whether all ranks stop after this step. stop: this rank was told to."""
        # full is a kernel; torch.tensor would copy from the host, which waits
        wish = torch.full((), float(stop), device=self._accelerator.device)
        before, self._before = self._before, HostCopy(reduce_sum(self._accelerator, wish))
        late = before is not None and bool(before.read() > 0)
        return late if self._accelerator.num_processes > 1 else stop
