"""The lines of metrics.jsonl: what a step came to, read when the device has come that far."""

from __future__ import annotations

import contextlib
import math
from collections.abc import Callable
from dataclasses import dataclass
from types import TracebackType

import torch
from accelerate import Accelerator

from ligertune.planning.plan import Plan
from ligertune.train.distributed import reduce_sum
from ligertune.train.host_copy import HostCopy
from ligertune.train.loss_check import LossWatch
from ligertune.train.meter import Counts, Lap, Meter


@dataclass(frozen=True)
class _Pending:
    """A line whose numbers the device still works on."""

    step: int
    rate: float
    numbers: HostCopy  # the losses' sum over steps and ranks, and the gradients' norm if there is one
    lap: Lap
    peak_memory: dict[str, int]


class Lines:
    """`mark` notes a line at a step's end, and `flush` logs it: a step later, when reading it makes no GPU wait.

    As a context it logs the last line of a run that ends by an exception, if its numbers are there.
    """

    def __init__(
        self, plan: Plan, accelerator: Accelerator, meter: Meter, watch: LossWatch, log: Callable[[dict], None]
    ) -> None:
        self._plan, self._accelerator, self._meter, self._watch, self._log = plan, accelerator, meter, watch, log
        self._pending: _Pending | None = None

    def __enter__(self) -> Lines:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, _: TracebackType | None) -> None:
        if error is None or self._pending is None:
            return
        with contextlib.suppress(RuntimeError):  # a device that has failed says nothing any more
            if self._pending.numbers.has_arrived():
                loss, *norm = self._pending.numbers.read().tolist()
                if math.isfinite(loss):
                    self._log(self._line(self._pending, loss, *norm))

    def mark(self, step: int, loss_sum: torch.Tensor, grad_norm: torch.Tensor | None, rate: float) -> None:
        """A line of the steps up to `step`. loss_sum: of this rank's steps since the line before. All ranks call it."""
        numbers = [reduce_sum(self._accelerator, loss_sum)]
        numbers += [] if grad_norm is None else [whole(grad_norm).to(loss_sum)]
        lap = self._meter.lap()
        self._pending = _Pending(step, rate, HostCopy(torch.stack(numbers)), lap, self._meter.peak_memory())
        if loss_sum.device.type == "cpu":  # nothing runs ahead
            self.flush()

    def flush(self) -> None:
        """Log the line that was marked, if there is one. A loss that is no number ends the run."""
        if self._pending is None:
            return
        pending, self._pending = self._pending, None
        loss, *norm = pending.numbers.read().tolist()
        if not math.isfinite(loss):
            raise self._watch.complaint()
        self._watch.forget()
        self._log(self._line(pending, loss, *norm))

    def _line(self, pending: _Pending, loss: float, grad_norm: float | None = None) -> dict:
        """What metrics.jsonl says of the steps of a lap, `loss` being the sum of theirs."""
        plan, step, counts, seconds = self._plan, pending.step, pending.lap.counts, pending.lap.seconds()
        rows = plan.rows.count
        return {
            "step": step,
            "epoch": round(step * plan.batching.global_batch_size / rows, 4) if rows else None,
            "loss": loss / counts.steps,
            "grad_norm": grad_norm,
            "learning_rate": pending.rate,
            "tokens": counts.tokens,
            "padded_tokens": counts.padded_tokens,
            "trained_tokens": counts.trained_tokens,
            **_seen(counts, seconds),
            "tokens_per_second": counts.tokens / seconds,
            "seconds": seconds,
            "peak_memory": pending.peak_memory,
            "remaining_seconds": (plan.schedule.total_steps - step) * seconds / counts.steps,
        }


def _seen(counts: Counts, seconds: float) -> dict:
    """What a line says of images, if there were any."""
    if not counts.images:
        return {}
    return {
        "images": counts.images,
        "image_tokens": counts.image_tokens,
        "images_per_second": counts.images / seconds,
    }


def whole(value: torch.Tensor) -> torch.Tensor:
    """A scalar that FSDP may hold as a DTensor."""
    return value.full_tensor() if hasattr(value, "full_tensor") else value
