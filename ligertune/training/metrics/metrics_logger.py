"""Logging: lines of metrics.jsonl, accelerate's trackers, torch's profiler, GPU memory snapshots."""

from __future__ import annotations

import contextlib
import math
import shutil
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from types import TracebackType
from typing import Any

import torch
from accelerate import Accelerator
from torch import Tensor

from ligertune.errors import UserError, message_of
from ligertune.features.task import Measures
from ligertune.files.storage import MetricsFile, check_replaceable, utc_now
from ligertune.patching.host_copy import HostCopy
from ligertune.planning.plan import Plan
from ligertune.training.callbacks import Callbacks
from ligertune.training.checks import FiniteLossCheck
from ligertune.training.metrics.meter import Lap, Meter
from ligertune.training.parallel.distributed import full_tensor, reduce_sum

PROFILE_FOLDER = "profile"


@dataclass(frozen=True)
class _Record:
    """A line of metrics.jsonl whose numbers the device still computes."""

    step: int
    learning_rate: float
    numbers: HostCopy  # the loss and (2, M) measures, summed over steps and ranks, and grad_norm if there is one
    lap: Lap
    peak_memory: dict[str, int | str]


@dataclass(eq=False)
class MetricsLogger(contextlib.AbstractContextManager["MetricsLogger"]):
    """Write metrics without a GPU synchronisation: `record` at the end of a step, `flush` one step later.

    As a context manager it also writes the last record of a run that ends by an exception, if its numbers have arrived.
    """

    plan: Plan
    accelerator: Accelerator
    meter: Meter
    loss_check: FiniteLossCheck
    file: MetricsFile
    show: Callable[[dict[str, Any]], None]
    measures: Measures
    callbacks: Callbacks
    _pending: _Record | None = None

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        if error is None or self._pending is None:
            return
        with contextlib.suppress(RuntimeError):  # the device may have failed
            pending = self._pending
            if pending.numbers.has_arrived() and math.isfinite(float(pending.numbers.read()[0])):
                self.log(self._line(pending))

    def log(self, line: dict[str, Any]) -> None:
        """Send a line to metrics.jsonl, the trackers and the terminal. Only the main rank does."""
        if self.accelerator.is_main_process:
            self.file.write({**line, "time": utc_now()})
            numbers = {name: value for name, value in line.items() if isinstance(value, int | float) and name != "step"}
            self.accelerator.log(numbers, step=line["step"])
            self.show(line)
            self.callbacks.logged(self.plan, line)

    def record_first_loss(self, loss_sum: Tensor) -> None:
        """Write the loss before training, at step 0: the first step's loss, which is computed before its update.

        loss_sum (): this rank's losses of the first step. All ranks call it, after the step.
        """
        loss = float(reduce_sum(self.accelerator, loss_sum))
        if math.isfinite(loss):
            self.file.write({"step": 0, "loss_before_training": loss, "time": utc_now()})

    def record(
        self, step: int, loss_sum: Tensor, grad_norm: Tensor | None, learning_rate: float, measured: Tensor
    ) -> None:
        """Start a line for the steps since the last one, up to `step`. All ranks call it.

        loss_sum (): this rank's losses in them. measured (2, M): what `Measures.take` returned.
        """
        # one tensor, so that ranks exchange all numbers in one reduction
        sums = torch.cat([loss_sum[None], measured.flatten().to(loss_sum)])
        numbers = [reduce_sum(self.accelerator, sums)]
        numbers += [] if grad_norm is None else [full_tensor(grad_norm).to(loss_sum)[None]]
        lap = self.meter.lap()
        peak: dict[str, int | str] = {"kind": self.meter.memory_kind, **self.meter.peak_memory()}
        self._pending = _Record(step, learning_rate, HostCopy(torch.cat(numbers)), lap, peak)
        if loss_sum.device.type == "cpu":  # the host does not run ahead of a CPU
            self.flush()

    def flush(self) -> None:
        """Write the recorded line, if there is one. Raises UserError if its loss is not finite."""
        if self._pending is None:
            return
        pending = self._pending
        self._pending = None
        if not math.isfinite(float(pending.numbers.read()[0])):
            raise self.loss_check.error()
        self.loss_check.forget()
        self.log(self._line(pending))

    def _line(self, record: _Record) -> dict[str, Any]:
        """Return the line of metrics.jsonl for the steps of a lap."""
        numbers = record.numbers.read()
        n_measures = len(self.measures.names)
        loss_sum = float(numbers[0])
        norm = numbers[1 + 2 * n_measures :].tolist()
        measured = numbers[1 : 1 + 2 * n_measures].view(2, n_measures)
        plan = self.plan
        step = record.step
        counts = record.lap.counts
        seconds = record.lap.seconds()
        rows = plan.rows.count
        per_second = counts.images / seconds
        images = {"images": counts.images, "image_tokens": counts.image_tokens, "images_per_second": per_second}
        return {
            "step": step,
            "epoch": round(step * plan.batching.global_batch_size / rows, 4) if rows else None,
            "loss": loss_sum / counts.steps,
            "grad_norm": norm[0] if norm else None,
            **self.measures.means(measured),
            "learning_rate": record.learning_rate,
            "tokens": counts.tokens,
            "padded_tokens": counts.padded_tokens,
            "trained_tokens": counts.trained_tokens,
            **(images if counts.images else {}),
            "tokens_per_second": counts.tokens / seconds,
            "seconds": seconds,
            "peak_memory": record.peak_memory,
            "remaining_seconds": (plan.schedule.total_steps - step) * seconds / counts.steps,
        }


def run_name(plan: Plan) -> str:
    """Return `logging.run_name`, or the name of output_dir."""
    return plan.logging.run_name or plan.output_dir.resolve().name


def open_trackers(plan: Plan, accelerator: Accelerator) -> None:
    """Start a run in each of `logging.report_to` on the main rank, with the recipe as its configuration.

    They start before anything else is written: a missing login must not be found after a large model was loaded.
    """
    trackers = [name for name in plan.logging.report_to if name != "jsonl"]
    if not trackers or not accelerator.is_main_process:
        return
    name = run_name(plan)
    folder = plan.output_dir / "trackers"
    was_there = folder.exists()
    try:
        named = {"wandb": {"name": name}, "trackio": {"name": name}, "swanlab": {"experiment_name": name}}
        accelerator.init_trackers(name, config=_flatten(plan.settings), init_kwargs=named)
        started = {tracker.name for tracker in accelerator.trackers}
        if missing := [name for name in trackers if name not in started]:  # accelerate only warns
            raise ImportError(f"the installed package {' or '.join(missing)} is incomplete")
        if "comet_ml" in started:
            accelerator.get_tracker("comet_ml", unwrap=True).set_name(name)
    except Exception as problem:  # each tracker has its own, from a missing package to a refused login
        if not was_there:
            shutil.rmtree(folder, ignore_errors=True)
        reason = message_of(problem)
        raise UserError(
            f"logging.report_to: {' or '.join(trackers)} could not be started: {reason.rstrip('.')}.",
            hint="Repair its installation or log in, or leave it out; metrics.jsonl holds the same numbers.",
        ) from problem


def _flatten(tree: dict[str, Any], prefix: str = "") -> dict[str, str | int | float | bool]:
    """Return {"a.b": 1} for {"a": {"b": 1}}; values that trackers refuse become strings."""
    flat: dict[str, Any] = {}
    for key, value in tree.items():
        if isinstance(value, dict):
            flat |= _flatten(value, f"{prefix}{key}.")
        else:
            flat[prefix + key] = value if isinstance(value, str | int | float) else str(value)
    return flat


@contextlib.contextmanager
def profiled(plan: Plan, accelerator: Accelerator) -> Iterator[Callable[[], None]]:
    """Profile the main process as `report.profile_steps` and `report.memory_snapshot` ask; yield a function to call
    after each step.

    `profile/trace.json` opens in Perfetto and chrome://tracing. `profile/memory.pickle` is written on CUDA only.
    """
    options = plan.measurement
    folder = plan.output_dir / PROFILE_FOLDER
    snapshot = options.memory_snapshot and accelerator.device.type == "cuda"
    if not accelerator.is_main_process or not (options.profile_steps or snapshot):
        yield lambda: None
        return
    folder.mkdir(exist_ok=True)
    for name in ("trace.json", "memory.pickle"):  # torch writes through a link
        check_replaceable(folder / name)
        (folder / name).unlink(missing_ok=True)
    if snapshot:
        # torch's default keeps every event: host memory would grow with the run. Full, it keeps the last ones.
        torch.cuda.memory._record_memory_history(max_entries=200_000)
    with contextlib.ExitStack() as stack:
        step = _start_profiler(plan, stack, folder / "trace.json") if options.profile_steps else lambda: None
        try:
            yield step
        finally:
            if snapshot:
                torch.cuda.memory._dump_snapshot(str(folder / "memory.pickle"))
                torch.cuda.memory._record_memory_history(enabled=None)


def _start_profiler(plan: Plan, stack: contextlib.ExitStack, path: Path) -> Callable[[], None]:
    skipped = plan.measurement.warmup_steps
    active = plan.measurement.profile_steps
    activities = [torch.profiler.ProfilerActivity.CPU]
    activities += [torch.profiler.ProfilerActivity.CUDA] if torch.cuda.is_available() else []
    profiler = torch.profiler.profile(
        activities=activities,
        schedule=torch.profiler.schedule(skip_first=skipped, wait=0, warmup=1, active=active, repeat=1),
        on_trace_ready=lambda finished: finished.export_chrome_trace(str(path)),
    )
    return stack.enter_context(profiler).step
