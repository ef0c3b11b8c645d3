"""A session: the time in which a run holds its output_dir, its processes and its model."""

from __future__ import annotations

import contextlib
import gc
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import numpy as np
import torch
from accelerate import Accelerator
from ligertune_kernels.precompile import KernelForm, Precompilation, launched_forms
from torch import Tensor

from ligertune.attention.torch_attention import prefer_flash
from ligertune.data.stream import StreamedExamples
from ligertune.errors import message_of
from ligertune.features.task import Task
from ligertune.files.storage import utc_now, write_json
from ligertune.hardware import usable_cores
from ligertune.launcher.signals import StopRequest
from ligertune.models.load import hide_loading_bars
from ligertune.models.shape import read_shape
from ligertune.planning.feature_spec import feature_of
from ligertune.planning.make_plan import check_host_memory
from ligertune.progress import Display, LogLine, Phases
from ligertune.training.build import Change, rehearsed_model, trained_model
from ligertune.training.checks import explain_out_of_memory
from ligertune.training.metrics.metrics_logger import open_trackers
from ligertune.training.output_dir import begin_output, output_dir_of
from ligertune.training.parallel.distributed import start_accelerator
from ligertune.training.setup import Custom, Job, Training, data_order, make_batchers, start

REHEARSED = 2  # micro-batches: the second one adds to the gradients of the first


@dataclass(frozen=True)
class Session:
    """A run whose model is loaded. phases: measures the time to the first step. began: by `time.perf_counter`."""

    training: Training
    stop: StopRequest
    phases: Phases
    started: str  # UTC
    began: float


@contextlib.contextmanager
def open_session(
    job: Job,
    show: LogLine,
    *,
    change: Change | None = None,
    phases: Phases | None = None,
    display: Display | None = None,
    custom: Custom | None = None,
) -> Iterator[Session]:
    """Lock output_dir, start the processes' group, and load the model and the checkpoint to resume from.

    All ranks call it. Arguments as in `run`. Raises UserError.
    """
    plan = job.plan
    check_host_memory(plan)
    stop = StopRequest(plan.output_dir, enabled=plan.checkpoint.save_on_signal, from_hold=custom is not None)
    with output_dir_of(plan), stop, contextlib.ExitStack() as at_the_end:
        started = utc_now()
        began = time.perf_counter()
        phases = phases or Phases()
        phases.begin("loading the model")
        at_the_end.callback(gc.unfreeze)
        gc.freeze()  # the garbage collection after the first step searches what this run makes, not imported modules
        hide_loading_bars()
        prefer_flash()
        accelerator = start_accelerator(plan)
        open_trackers(plan, accelerator)
        if accelerator.is_main_process:
            begin_output(plan)
        accelerator.wait_for_everyone()
        # ranks of a host share its cores
        threads = max(1, usable_cores() // max(1, plan.machine.device_count))
        rehearsal = partial(rehearse, job, accelerator) if is_rehearsed(job, accelerator.device) else None
        kernels = compile_ahead(rehearsal, accelerator.device, threads=threads)
        at_the_end.callback(kernels.cancel)
        model, plan = trained_model(plan, job.config, accelerator, change=change, loaded=kernels.wait)
        if plan is not job.plan and accelerator.is_main_process:
            write_json(plan.output_dir / "plan.json", plan.as_dict())
        job = replace(job, plan=plan)
        with explain_out_of_memory(plan):
            phases.begin("preparing to train")
            training = start(
                job, accelerator, model, show=show, display=display or Display(), custom=custom or Custom()
            )
        training.notes += kernels.notes
        yield Session(training, stop, phases, started, began)
        accelerator.wait_for_everyone()
        accelerator.end_training()


# ---- kernels of the first step, compiled by threads while the model is loaded
#
# A rehearsal of the step on the meta device takes no memory and tells which kernels it launches, and how Triton
# specialises them. It changes nothing in training: a kernel that it misses compiles in the first step, as before.


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


def is_rehearsed(job: Job, device: torch.device) -> bool:
    """Return whether a step on the meta device launches the run's kernels: of a language model, on texts in memory."""
    plan = job.plan
    feature = feature_of(plan.build.task)
    writes_text = feature.shape is None and not feature.scores_texts  # a model without added heads
    compiled = plan.build.execution.torch_compile  # inductor has its own launches
    plain = job.reader is None and plan.batching.cp_size == 1 and not isinstance(job.data.train, StreamedExamples)
    ours = plan.build.kernels.enabled is not False and not compiled
    return device.type == "cuda" and writes_text and plain and ours


def rehearse(job: Job, accelerator: Accelerator) -> None:
    """Run forward and backward of the first micro-batch on the meta device, with the loss of labels for any task."""
    model = rehearsed_model(job.plan, job.config)
    model.train()
    task = Task(read_shape(model))
    batch = _first_batch(job, accelerator, task)
    for _ in range(REHEARSED):
        task.loss(model, batch).backward()


def _first_batch(job: Job, accelerator: Accelerator, task: Task) -> dict[str, Any]:
    """Return the first micro-batch of this rank, with its tensors on the meta device."""
    order = data_order(job.plan, job.data.train, job.reader)
    batcher, _ = make_batchers(job, accelerator, order, task)
    batcher = replace(batcher, device=torch.device("meta"))
    batch = batcher(order.micro_batches(0, accelerator.process_index)[0])
    inputs = task.inputs(batcher.examples, np.concatenate(order.step(0)), step=0)
    values = {**batch, **inputs}
    return {name: value.to("meta") if isinstance(value, Tensor) else value for name, value in values.items()}
