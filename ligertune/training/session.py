"""A session: the time in which a run holds its output_dir, its processes and its model."""

from __future__ import annotations

import contextlib
import gc
import time
from collections.abc import Iterator
from dataclasses import dataclass, replace
from functools import partial

import torch
from accelerate import Accelerator

from ligertune.attention.torch_attention import prefer_flash
from ligertune.features.task import Task
from ligertune.files.storage import utc_now, write_json
from ligertune.hardware import usable_cores
from ligertune.launcher.signals import StopRequest
from ligertune.models.load import hide_loading_bars
from ligertune.models.read_config import read_config
from ligertune.models.shape import read_shape
from ligertune.planning.make_plan import check_host_memory
from ligertune.planning.preflight import clear_run, has_trained
from ligertune.planning.time.settings_choice import settings_that_fit
from ligertune.progress import Display, LogLine, Phases
from ligertune.training.build import Change, rehearsed_model, trained_model
from ligertune.training.checkpoint.output_dir import begin_output, output_dir_of
from ligertune.training.checks import OutOfDeviceMemory, explain_out_of_memory
from ligertune.training.compile_ahead import compile_ahead, rehearse
from ligertune.training.metrics.metrics_logger import open_trackers
from ligertune.training.parallel.distributed import start_accelerator
from ligertune.training.setup import Custom, Job, Training, first_batch_on_meta, is_rehearsed, start


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
        if job.is_second_try:  # modules and hooks of the first one refer to each other
            gc.collect()
            torch.cuda.empty_cache()
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
        rehearsal = partial(rehearse_step, job, accelerator) if is_rehearsed(job, accelerator.device) else None
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


@dataclass
class SecondTry:
    """The job of a second try, or None if the first one needs none."""

    job: Job | None = None


@contextlib.contextmanager
def second_try(job: Job, session: Session) -> Iterator[SecondTry]:
    """Plan once more if memory runs out inside, before the first step is finished.

    Raises OutOfDeviceMemory where no second try is possible.
    """
    second = SecondTry()
    try:
        with explain_out_of_memory(session.training.plan):
            yield second
    except OutOfDeviceMemory:
        second.job = second_job(job, session)
        if second.job is None:
            raise


def second_job(job: Job, session: Session) -> Job | None:
    """Return the job of a second try with other settings, after `session` ran out of memory, or None.

    What the first try wrote is removed. None: no other settings fit, or the recipe gave them all; the job is a second
    try; a step was trained before; a signal was received; or there are several processes, because those with enough
    memory wait in a collective operation for the one without.
    """
    plan = job.plan
    if job.is_second_try or plan.batching.world_size > 1 or session.stop.received or has_trained(plan.output_dir):
        return None
    meter = session.training.meter
    measured = meter.peak_memory()["allocated_run"] if meter.memory_kind == "device" else None
    fitting = settings_that_fit(plan, measured)
    if not fitting:
        return None
    second = job.plan_with(fitting[0])
    failed = plan.settings_tried[0]
    note = f"the first step ran out of memory with {failed}: the run began again with {fitting[0]}"
    second = replace(second, settings_tried=fitting, notes=(*second.notes, note))
    accelerator = session.training.accelerator
    accelerator.end_training()
    accelerator.trackers.clear()  # they are finished
    clear_run(plan.output_dir)
    # building a model changes its configuration
    return replace(job, plan=second, config=read_config(plan.build.model), is_second_try=True)


def rehearse_step(job: Job, accelerator: Accelerator) -> None:
    """Run the job's first micro-batch on the meta device."""
    model = rehearsed_model(job.plan, job.config)
    task = Task(read_shape(model))
    rehearse(model, task, first_batch_on_meta(job, accelerator, task))
