"""How long ranks wait for each other before they give one up and end.

Within a step they differ by a batch's work, so `parallel.timeout` (a minute) is long; a rank that hangs must not cost
hours. Elsewhere one may work alone for minutes: kernels are compiled in the first step, rank 0 writes checkpoints and
answers prompts. There the patience is half an hour.

gloo then raises an error in the waiting ranks, NCCL's watchdog ends them; either way their launcher ends the hung one.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from datetime import timedelta

from accelerate import Accelerator
from torch import nn
from torch.distributed import ProcessGroup
from torch.distributed.distributed_c10d import _set_pg_timeout  # torch has no other way to change it; torchtitan's, too

from ligertune.data.batching.context_parallel_rows import RowParts

LONG = timedelta(minutes=30)


class Patience:
    """Of the groups that a prepared model's ranks talk in. It begins long; `steps` makes it short."""

    def __init__(
        self, accelerator: Accelerator, model: nn.Module, *, seconds: int, parts: RowParts | None = None
    ) -> None:
        self._accelerator, self._short = accelerator, timedelta(seconds=seconds)
        self._groups = _groups_of(model) if accelerator.num_processes > 1 else []
        self._groups += [] if parts is None else [parts.group]
        self._in_steps = False
        self._set(LONG)  # the groups of a mesh begin with torch's ten minutes

    def steps(self) -> None:
        """From now on, ranks wait as long as a step needs. All ranks call it."""
        self._in_steps = True
        self._set(self._short)

    @contextlib.contextmanager
    def long(self) -> Iterator[None]:
        """In here a rank may work alone, and afterwards all go on together. All ranks call it."""
        self._set(LONG)
        yield
        if self._in_steps:
            self._set(self._short)

    def end(self) -> None:
        """The steps are over."""
        self._in_steps = False
        self._set(LONG)

    def _set(self, timeout: timedelta) -> None:
        if not self._groups:
            return
        if timeout != LONG:  # a rank that is ahead would give up one that is still at work under the old one
            self._accelerator.wait_for_everyone()
        for group in self._groups:
            _set_pg_timeout(timeout, group)


def _groups_of(model: nn.Module) -> list[ProcessGroup | None]:
    """The default group, and that of sharded parameters where they have their own."""
    meshes = {p.device_mesh for p in model.parameters() if hasattr(p, "device_mesh")}
    return [None, *(mesh.get_group(dim) for mesh in meshes for dim in range(mesh.ndim))]
