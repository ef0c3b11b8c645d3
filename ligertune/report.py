"""The report: what a run did, at what speed, in how much memory, and where the model is."""

from __future__ import annotations

import dataclasses
import importlib.metadata
import json
import os
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

from ligertune.planning.plan import KernelLine, Plan

PACKAGES = ("torch", "triton", "triton-rocm", "transformers", "accelerate", "peft", "datasets", "torchao", "ligertune")


@dataclass(frozen=True)
class Throughput:
    """Over all devices, per second. `tokens` are real ones; padding is named beside them, never billed."""

    tokens_per_second: float
    padded_tokens_per_second: float
    trained_tokens_per_second: float
    padding_share: float  # of the slots that were computed
    steps: int  # measured
    warmup_steps_excluded: int
    images_per_second: float | None  # None of a model of text
    image_tokens_per_second: float | None  # of tokens_per_second, those that stand for images
    mfu: float | None  # model FLOPs over the devices' dense peak; None where the peak is unknown


@dataclass(frozen=True)
class Report:
    """One run. Losses are means over the first and the last logged interval of the whole run, resumed or not."""

    status: Literal["completed", "interrupted"]
    stopped_by: str | None
    steps: int
    total_steps: int
    resumed_from: int
    loss_first: float | None
    loss_last: float | None
    eval_loss: float | None
    throughput: Throughput | None
    peak_memory: dict[str, int]
    kernels_backend: str
    kernels: tuple[KernelLine, ...]
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
    versions: dict[str, str]
    notes: tuple[str, ...]
    medusa: dict | None = None  # MedusaReport.as_dict() of a run that trained heads
    seconds_to_first_step: dict[str, float] = dataclasses.field(default_factory=dict)  # by what was done

    def as_dict(self) -> dict:
        return dataclasses.asdict(self)


def versions() -> dict[str, str]:
    """Installed versions of what a result depends on."""
    found = {}
    for package in PACKAGES:
        try:
            found[package] = importlib.metadata.version(package)
        except importlib.metadata.PackageNotFoundError:
            continue
    return found


def throughput(plan: Plan, work: object, seconds: float, *, warmup_excluded: bool) -> Throughput | None:
    """From the meter's counts; None where no step was measured."""
    if not work.steps or seconds <= 0:
        return None
    peak, dtype = plan.machine.peak_flops, plan.precision
    sees = work.images > 0  # then a part of the FLOPs is the tower's, which are not counted
    known = (
        not sees
        and not plan.build.execution.fp8  # some products in float8 and some not: there is no one peak
        and peak is not None
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
        images_per_second=work.images / seconds if sees else None,
        image_tokens_per_second=work.image_tokens / seconds if sees else None,
        mfu=work.flops / seconds / (peak * plan.batching.world_size) if known else None,
    )


def write_json(path: Path, content: dict) -> None:
    """Complete or absent: written aside, then renamed."""
    aside = path.with_name(path.name + ".partial")
    aside.write_text(json.dumps(content, indent=1, default=str) + "\n", encoding="utf-8")
    os.replace(aside, path)
