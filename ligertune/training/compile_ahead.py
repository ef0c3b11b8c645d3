"""Kernels of the first step, compiled by threads while the model is loaded.

A rehearsal of the first step on the meta device takes no memory and tells which kernels it launches, and how Triton
specialises them. It changes nothing in training: a kernel that it misses compiles in the first step, as before.
"""

from __future__ import annotations

import copy
from collections.abc import Sequence

import numpy as np
import torch
from accelerate import Accelerator
from ligertune_kernels.precompile import KernelForm, Precompilation, launched_forms
from torch import Tensor

from ligertune.data.stream import StreamedExamples
from ligertune.errors import message_of
from ligertune.features.task import Task
from ligertune.hardware import usable_cores
from ligertune.models.shape import read_shape
from ligertune.planning.plan import Plan
from ligertune.recipe.feature import part_of_task
from ligertune.training.build import rehearsed_model
from ligertune.training.setup import Job, data_order, make_batchers

REHEARSED = 2  # micro-batches: the second one adds to the gradients of the first


class KernelsAhead:
    """Kernels that are compiled while the model is loaded. notes: for the report, known after `wait`."""

    def __init__(self, forms: Sequence[KernelForm], device: torch.device, *, threads: int, note: str | None) -> None:
        self.notes: tuple[str, ...] = () if note is None else (note,)
        self._compilation = Precompilation(forms, device, threads=threads)

    def wait(self) -> None:
        """Wait for all kernels; the second call does nothing."""
        failed = self._compilation.wait()
        self._compilation = Precompilation((), torch.device("cpu"), threads=1)
        if failed:
            self.notes += (f"kernels that were not compiled while the model was loaded: {'; '.join(failed)}",)

    def cancel(self) -> None:
        """Compile no further kernel."""
        self._compilation.cancel()


def compile_ahead(job: Job, accelerator: Accelerator) -> KernelsAhead:
    """Start to compile what the first step launches. An error of the rehearsal becomes a note."""
    plan = job.plan
    device = accelerator.device
    # ranks of a host share its cores
    threads = max(1, usable_cores() // max(1, plan.machine.device_count))
    forms: list[KernelForm] = []
    note = None
    if is_rehearsed(job, device):
        try:
            # the model that trains draws its random weights as it would without a rehearsal
            with torch.random.fork_rng(devices=[device] if device.type == "cuda" else []):
                forms = launched_forms(lambda: rehearse(job, accelerator), device)
        except Exception as error:  # whatever it is, it must not end a run that may train well
            note = f"kernels compile in the first step, one after the other: the rehearsal failed: {message_of(error)}"
    return KernelsAhead(forms, device, threads=threads, note=note)


def is_rehearsed(job: Job, device: torch.device) -> bool:
    """Return whether a step can run without weights and values: of texts in memory, with the loss of labels."""
    plan = job.plan
    compiled = plan.build.execution.torch_compile  # whose graphs hold the kernels
    plain = job.reader is None and plan.batching.cp_size == 1 and not isinstance(job.data.train, StreamedExamples)
    ours = plan.build.kernels.enabled is not False and part_of_task(plan.build.task).loss_of_labels
    return device.type == "cuda" and plain and ours and not compiled


def rehearse(job: Job, accelerator: Accelerator) -> None:
    """Run forward and backward of the first micro-batch on the meta device."""
    model = rehearsed_model(job.plan, job.config)
    model.train()
    task = Task(read_shape(model))
    batch = first_batch(job, accelerator, task)
    for _ in range(REHEARSED):
        task.loss(model, batch).backward()


def first_batch(job: Job, accelerator: Accelerator, task: Task) -> dict[str, object]:
    """Return the first micro-batch of this rank, with its tensors on the meta device."""
    plan = job.plan
    order = data_order(plan, job.data.train, job.reader)
    batcher, _ = make_batchers(job, accelerator, order, task)
    batcher = copy.copy(batcher)
    batcher.device = torch.device("meta")
    rank = accelerator.process_index // plan.batching.cp_size
    batch = batcher(order.micro_batches(0, rank)[0])
    inputs = task.inputs(batcher.examples, np.concatenate(order.step(0)), step=0)
    return {
        name: value.to("meta") if isinstance(value, Tensor) else value for name, value in {**batch, **inputs}.items()
    }
