"""Kernels of the first step, compiled by threads while the model is loaded.

A rehearsal of the step on the meta device takes no memory and tells which kernels it launches, and how Triton
specialises them. It changes nothing in training: a kernel that it misses compiles in the first step. Llama-3.2-1B, full
training, H200: the first step takes 0.8 s in place of 12.6, from the start of loading 8.9 s in place of 16.4
(`scripts/bench host_time`).
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from ligertune_kernels.precompile import KernelForm, Precompilation, launched_forms
from torch import nn

from ligertune.errors import message_of
from ligertune.features.task import Task

REHEARSED = 2  # micro-batches: the second one adds to the gradients of the first


class KernelsAhead:
    """Kernels that are compiled while the model is loaded. notes: for the report, known after `wait`."""

    def __init__(self, forms: Sequence[KernelForm], device: torch.device, *, threads: int, note: str | None) -> None:
        self.notes: tuple[str, ...] = () if note is None else (note,)
        self._compilation = Precompilation(forms, device, threads=threads)

    def wait(self) -> None:
        """Wait for all kernels. One that failed is a note, and compiles again where it is launched."""
        failed = self._compilation.wait()
        if failed:
            self.notes += (f"kernels that were not compiled while the model was loaded: {'; '.join(failed)}",)

    def cancel(self) -> None:
        """Compile no further kernel."""
        self._compilation.cancel()


def compile_ahead(rehearse: Callable[[], object] | None, device: torch.device, *, threads: int) -> KernelsAhead:
    """Start to compile what `rehearse` launches on meta tensors. None: compile nothing. Its error becomes a note."""
    forms: list[KernelForm] = []
    note = None
    if rehearse is not None:
        try:
            # the model that trains draws its random weights as it would without a rehearsal
            with torch.random.fork_rng(devices=[device] if device.type == "cuda" else []):
                forms = launched_forms(rehearse, device)
        except Exception as error:  # whatever it is, the run may train well without a rehearsal
            note = f"kernels compile in the first step, one after the other: the rehearsal failed: {message_of(error)}"
    return KernelsAhead(forms, device, threads=threads, note=note)


def rehearse(model: nn.Module, task: Task, batch: dict[str, Any]) -> None:
    """Run forward and backward of a micro-batch on the meta device, with the loss of labels for any task."""
    model.train()
    for _ in range(REHEARSED):
        task.loss(model, batch).backward()
