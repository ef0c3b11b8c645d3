"""A bench as `ligertune bench` runs it: on the device that is here, an op at all its sizes."""

from __future__ import annotations

import dataclasses
import time
from collections.abc import Iterator

import torch

from ligertune.bench.case import Subject
from ligertune.bench.cases.case_table import SUBJECT_OF, cases_of
from ligertune.bench.measure import Effort, Row, Stage, bench, stage
from ligertune.hardware import this_machine
from ligertune.report import versions

GPU_EFFORT = Effort(warmup=3, repeats=30, seconds=0.5)
CPU_EFFORT = Effort(warmup=1, repeats=5, seconds=0.2)


def open_stage(dtype: str) -> Stage:
    """The first GPU, or the CPU; its rates are measured in the dtype that will be benched."""
    machine = this_machine()
    gpu = machine.vendor != "cpu"
    if dtype == "auto":
        low = "bfloat16" if machine.has_bfloat16 else "float16"
        dtype = low if gpu else "float32"
    return stage(torch.device(machine.device), getattr(torch, dtype), GPU_EFFORT if gpu else CPU_EFFORT)


def header_of(stage: Stage) -> dict:
    """Where and when: the device, its measured rates, versions, the date; `line` says it in one line."""
    name, date, installed = this_machine().name, time.strftime("%Y-%m-%d"), versions()
    rates = f"copy {stage.rates.copy / 1e12:.3g} TB/s, matmul {stage.rates.matmul / 1e12:.3g} TFLOP/s"
    named = ", ".join(f"{package} {version}" for package, version in installed.items())
    return {
        "device": name,
        "date": date,
        "versions": installed,
        "rates": dataclasses.asdict(stage.rates),
        "line": f"{name}, {date}; {rates}; {named}",
    }


def rows_of(subject: Subject, stage: Stage, *, without: tuple[str, ...] = ()) -> Iterator[list[Row]]:
    """An op's rows, size by size: the sizes of models on a GPU, small ones on a CPU."""
    cases = cases_of(subject, dtype=stage.dtype, small=stage.device.type == "cpu")
    return bench(cases, SUBJECT_OF, stage, chosen=lambda provider: provider.name not in without)
