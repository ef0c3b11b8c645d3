"""Run report: losses, throughput, MFU, peak memory, where the model was saved, and where the result comes from."""

from __future__ import annotations

import contextlib
import dataclasses
import functools
import hashlib
import importlib.metadata
import platform
import shlex
import subprocess
import sys
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

from ligertune.errors import format_bytes, format_duration
from ligertune.files.storage import mask_secrets, read_metrics, utc_now
from ligertune.recipe.feature import feature_parts

if TYPE_CHECKING:
    from ligertune.planning.plan import KernelLine, Plan
    from ligertune.training.metrics.meter import Counts
    from ligertune.training.metrics.train_result import TrainResult

PACKAGES = ("torch", "triton", "triton-rocm", "transformers", "accelerate", "peft", "datasets", "torchao", "ligertune")


@dataclass(frozen=True)
class Throughput:
    """Rates per second over all devices. `tokens_per_second` counts real tokens; padding is reported separately."""

    tokens_per_second: float
    padded_tokens_per_second: float
    trained_tokens_per_second: float
    padding_share: float  # padded slots / all computed slots
    steps: int  # measured steps
    warmup_steps_excluded: int
    images_per_second: float | None  # None without images
    image_tokens_per_second: float | None  # part of tokens_per_second
    step_seconds: float  # mean of the measured steps
    predicted_step_seconds: float | None  # by the plan; None: it predicts no time
    mfu: float | None  # model FLOP/s over the devices' dense peak; None if that is unknown


@dataclass(frozen=True, repr=False)
class Report:
    """Report of one run.

    loss_first, loss_last: means over the first and the last logged interval, also of a resumed run.
    loss_before_training: of the first step's batch, before its update; None if an earlier version began the run.
    tokens, trained_tokens, padded_tokens: of all steps, also of those before a resume. seconds: of this process, but
    not of a first try that ran out of memory.
    kernels: what ran; the plan's lines if the fused loss ran. losses: how many forwards of this process computed the
    loss without logits, from logits (by reason), or elsewhere; CUDA graphs that are replayed do not count.
    """

    status: Literal["completed", "interrupted"]
    stopped_by: str | None
    steps: int
    total_steps: int
    resumed_from: int
    loss_before_training: float | None
    loss_first: float | None
    loss_last: float | None
    eval_loss: float | None
    tokens: int
    trained_tokens: int
    padded_tokens: int
    throughput: Throughput | None
    peak_memory: dict[str, Any]  # its kind, and bytes; `Meter.peak_memory` says which
    kernels_backend: str
    kernels: tuple[KernelLine, ...]
    losses: dict[str, Any]
    model_family: str
    n_parameters: int
    n_trainable: int
    device: str
    world_size: int
    strategy: str
    dtype: str
    seconds: float
    output_dir: str
    model_path: str | None
    started: str  # of this process, in UTC; a resumed run has the dates of its earlier parts in metrics.jsonl
    ended: str
    host: str
    command: str
    git_commit: str | None  # of the working directory; None if it is in no git checkout
    recipe_sha256: str  # of resolved_recipe.yaml
    versions: dict[str, str]
    notes: tuple[str, ...]
    measured: dict[str, Any] | None = None  # by the feature, on what it trained; report.json names it by its feature
    task: str = "sft"
    seconds_to_first_step: dict[str, float] = dataclasses.field(default_factory=dict)  # by phase
    n_active: int | None = None  # parameters that one token uses, of a mixture of experts
    # of the task and of compute_metrics, in the last evaluation; None: not finite
    eval_measures: dict[str, float | None] = dataclasses.field(default_factory=dict)
    carried: dict[str, Any] | None = None  # tensors of the base that are saved unchanged: names, bytes, why not saved
    experts: dict[str, Any] | None = None  # ExpertLoad.report(): tokens per expert, in each layer of a mixture
    eval_loss_before_training: float | None = None  # None without an evaluation before the first step
    peak_over_predicted: float | None = None  # allocated_run over the plan's peak; None if one of them is not known

    def __str__(self) -> str:
        """Return the result in a few lines; `as_dict` has all of it."""
        lines = [f"run {self.status}: step {self.steps} of {self.total_steps}"]
        if self.loss_last is not None and self.loss_last == self.loss_first:
            lines.append(f"loss {self.loss_last:.4f} (logged once)")
        elif self.loss_last is not None:
            lines.append(f"loss {self.loss_first:.4f} -> {self.loss_last:.4f} (first and last logged interval)")
        if self.eval_loss is not None:
            lines.append(f"evaluation loss {self.eval_loss:.4f}")
        if self.throughput is not None:
            lines.append(f"{self.throughput.tokens_per_second:,.0f} tokens/s without padding")
        memory = "on the device" if self.peak_memory["kind"] == "device" else "of host memory, the whole process"
        lines.append(f"peak memory {format_bytes(self.peak_memory['allocated_run'])} {memory}")
        lines.append(f"{self.model_family} on {self.device} x {self.world_size}, {format_duration(self.seconds)}")
        lines.append(f"model {self.model_path or 'not written'}")
        return "\n".join([*lines, *(f"note: {note}" for note in self.notes)])

    __repr__ = __str__  # what a notebook or a Python prompt shows

    def as_dict(self) -> dict[str, Any]:
        """Return the report as plain values for report.json, with a key for each feature that measures something."""
        values = dataclasses.asdict(self)
        measured = {values.pop("task"): values.pop("measured")}
        return values | {key: measured.get(key) for part in feature_parts() for key in part.report_keys}


def make_report(
    plan: Plan,
    fitted: TrainResult,
    *,
    model_path: str | None,
    measured: dict[str, Any] | None,
    started: str,
    seconds: float,
    seconds_to_first_step: dict[str, float],
    notes: tuple[str, ...],
) -> Report:
    """Return the report of a run. measured: by the feature. notes: added to those of plan and training."""
    lines = read_metrics(plan.output_dir / "metrics.jsonl")
    evaluations = [line for line in lines if "eval_loss" in line]
    return Report(
        status="interrupted" if fitted.stopped_by else "completed",
        stopped_by=fitted.stopped_by,
        steps=fitted.step,
        total_steps=plan.schedule.total_steps,
        resumed_from=fitted.resumed_from,
        loss_before_training=_first_value(lines, "loss_before_training"),
        loss_first=_first_value(lines, "loss"),
        loss_last=_first_value(reversed(lines), "loss"),
        eval_loss=fitted.last_eval_loss,
        eval_loss_before_training=next((line["eval_loss"] for line in evaluations if line["step"] == 0), None),
        eval_measures=_eval_measures(evaluations),
        tokens=fitted.work.tokens,
        trained_tokens=fitted.work.trained_tokens,
        padded_tokens=fitted.work.padded_tokens,
        throughput=throughput(plan, *fitted.measured),
        peak_memory=fitted.peak_memory,
        peak_over_predicted=peak_over_predicted(plan, fitted.peak_memory),
        kernels_backend=plan.kernels_backend,
        kernels=fitted.kernels,
        losses=fitted.losses,
        model_family=plan.model_family,
        n_parameters=plan.n_parameters,
        n_trainable=plan.n_trainable,
        device=plan.machine.name,
        world_size=plan.batching.world_size,
        strategy=plan.strategy,
        dtype="float16" if plan.precision.autocast == "fp16" else plan.precision.weights,
        seconds=seconds,
        output_dir=str(plan.output_dir),
        model_path=model_path,
        started=started,
        ended=utc_now(),
        host=platform.node(),
        command=command_line(),
        git_commit=git_commit(),
        recipe_sha256=hashlib.sha256(mask_secrets(plan.recipe_text).encode()).hexdigest(),
        versions=versions(),
        notes=(*plan.notes, *(f"{name}: {words}" for name, words in plan.choice.items()), *fitted.notes, *notes),
        measured=measured,
        task=plan.build.task,
        seconds_to_first_step=seconds_to_first_step,
        n_active=plan.n_active,
        carried=dataclasses.asdict(plan.carried) if plan.carried is not None and plan.carried.names else None,
        experts=fitted.experts,
    )


def peak_over_predicted(plan: Plan, measured: dict[str, Any]) -> float | None:
    """Return the measured peak over the predicted one; None on a CPU, where all memory of the process is measured."""
    if plan.peak is None or measured["kind"] != "device":
        return None
    return float(measured["allocated_run"] / plan.peak.total)


def _first_value(lines: Iterable[dict[str, Any]], name: str) -> float | None:
    return next((line[name] for line in lines if name in line), None)


def _eval_measures(evaluations: list[dict[str, Any]]) -> dict[str, float | None]:
    """Return the task's measures of the last evaluation after a step, without the prefix `eval_`."""
    last = [line for line in evaluations if line["step"] > 0][-1:]
    named = [(name, value) for line in last for name, value in line.items() if name.startswith("eval_")]
    return {name.removeprefix("eval_"): value for name, value in named if name != "eval_loss"}


def throughput(plan: Plan, work: Counts, seconds: float, warmup_excluded: bool) -> Throughput | None:
    """Return the rates of the metered work, or None if no step was measured."""
    if not work.steps or seconds <= 0:
        return None
    peak = plan.machine.peak_flops
    dtype = plan.precision
    has_images = work.images > 0
    mfu_known = (
        not has_images  # the tower's FLOPs are not counted
        and not plan.build.execution.fp8  # float8 and bfloat16 products have different peaks
        and plan.measurement.mfu
        and (dtype.weights == "bfloat16" or dtype.autocast == "fp16")
    )
    return Throughput(
        tokens_per_second=work.tokens / seconds,
        padded_tokens_per_second=work.padded_tokens / seconds,
        trained_tokens_per_second=work.trained_tokens / seconds,
        padding_share=work.padding_share,
        steps=work.steps,
        warmup_steps_excluded=plan.measurement.warmup_steps if warmup_excluded else 0,
        images_per_second=work.images / seconds if has_images else None,
        image_tokens_per_second=work.image_tokens / seconds if has_images else None,
        step_seconds=seconds / work.steps,
        predicted_step_seconds=None if plan.time is None else plan.time.total,
        mfu=work.flops / seconds / (peak * plan.batching.world_size) if mfu_known and peak is not None else None,
    )


# ---- where a result comes from


def command_line() -> str:
    """Return the command, quoted for a shell. Ranks are started with the arguments of the user's command."""
    name, *arguments = sys.argv
    if Path(name).parts[-1:] == ("ligertune",) or Path(name).parts[-2:] == ("ligertune", "__main__.py"):
        name = "ligertune"
    return shlex.join([name, *arguments])


def git_commit() -> str | None:
    """Return the commit of the git checkout that the working directory is in, or None."""
    with contextlib.suppress(OSError, subprocess.SubprocessError):
        command = ["git", "rev-parse", "--verify", "--quiet", "HEAD"]
        done = subprocess.run(command, capture_output=True, text=True, check=False, timeout=5)
        return done.stdout.strip() or None
    return None


def versions() -> dict[str, str]:
    """Return the installed versions of packages that affect a result."""
    found = {package: _installed_version(package) for package in PACKAGES}
    return {package: version for package, version in found.items() if version is not None}


@functools.cache
def _installed_version(package: str) -> str | None:
    """Return a package's version, or None without it. Reading it takes 3 ms, and a process may train many runs."""
    try:
        return importlib.metadata.version(package)
    except importlib.metadata.PackageNotFoundError:
        return None
