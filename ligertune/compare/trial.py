"""Trials of a comparison: each run of a side in new processes, since runs share no allocator, caches or imports.

The processes run `trial_rank.py`. The comparison itself holds no device.
"""

from __future__ import annotations

import contextlib
import json
import os
import signal
import subprocess
import sys
import time
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any, Literal

from ligertune.compare.side import Side, kernels_of
from ligertune.errors import UserError
from ligertune.files.checked_files import DamagedFileError, read_fields
from ligertune.files.storage import open_to_append, read_metrics, write_text
from ligertune.launcher.signals import before_leaving
from ligertune.recipe.read import dump_recipe
from ligertune.recipe.schema import Recipe

MODULE = ["-m", "ligertune.compare.trial_rank"]
RESULT = "result.json"
ENDING = 10.0  # seconds that a trial has to end after Ctrl-C
VENDORS = {"nvidia": "NVIDIA", "amd": "AMD", "cpu": "CPU"}


@dataclass(frozen=True)
class TrialOptions:
    """How each side is measured: runs, steps of each run after its warm-up, and processes (GPUs) of each run."""

    repeats: int
    steps: int
    processes: int
    folder: Path


@dataclass(frozen=True)
class Failure:
    """Why a trial has no result. A comparison reports "out of memory" as a result, not as an error."""

    kind: Literal["out of memory", "error"]
    sentence: str

    def __str__(self) -> str:
        return f"{self.kind}: {self.sentence}"


@dataclass(frozen=True)
class Step:
    """One optimizer step. seconds: between two synchronisations of the device."""

    step: int
    loss: float
    grad_norm: float | None
    tokens: int
    seconds: float


@dataclass(frozen=True)
class Trial:
    """Result of a run. The first `warmup` of its steps are compared for parity, but not timed."""

    side: str
    repeat: int
    warmup: int
    steps: tuple[Step, ...]
    report: dict[str, Any] | None  # None if it failed
    failure: Failure | None

    @property
    def measured(self) -> tuple[Step, ...]:
        return self.steps[self.warmup :]

    @property
    def result(self) -> dict[str, Any]:
        """The report of a run that did not fail."""
        assert self.report is not None  # callers have looked at `failure`
        return self.report


def run_trial(recipe: Recipe, side: Side, repeat: int, options: TrialOptions, folder: Path) -> Trial:
    """Train the recipe's warm-up and the measured steps in new processes that write to `folder`."""
    for place in (folder.parent, folder, folder / "run"):  # run/ is cleared: it must not be someone's run elsewhere
        if place.is_symlink() and place != options.folder:
            place.unlink()
    folder.mkdir(parents=True, exist_ok=True)
    path = folder / "recipe.yaml"
    warmup = recipe.report.warmup_steps
    write_text(path, dump_recipe(trial_recipe(recipe, side, warmup + options.steps, folder / "run")))
    write_text(folder / "log.txt", "")
    module = [*MODULE, str(path), str(folder), *([side.change] if side.change else [])]
    launcher = ["-m", "torch.distributed.run", "--standalone", "--nproc-per-node", str(options.processes)]
    with open_to_append(folder / "log.txt") as log:
        process = subprocess.Popen(
            [sys.executable, *(launcher if options.processes > 1 else []), *module], stdout=log, stderr=log
        )
        with before_leaving(partial(_end, process.pid)):
            code = process.wait()
    failure = None if code == 0 else _failure(folder, code)
    logged = [line for line in read_metrics(folder / "run" / "metrics.jsonl") if "loss" in line]
    names = ("step", "loss", "grad_norm", "tokens", "seconds")
    return Trial(
        side=side.name,
        repeat=repeat,
        warmup=warmup,
        steps=tuple(Step(*(line[name] for name in names)) for line in logged),
        report=None if failure else json.loads((folder / RESULT).read_text(encoding="utf-8")),
        failure=failure,
    )


def _end(pid: int) -> None:
    """End a trial, and wait for it: torch's launcher ends its processes first."""
    with contextlib.suppress(OSError):  # it has ended
        os.kill(pid, signal.SIGTERM)
        # not Popen.wait, whose lock the interrupted code holds
        for _ in range(round(ENDING / 0.05)):
            if os.waitpid(pid, os.WNOHANG)[0]:
                return
            time.sleep(0.05)
        os.kill(pid, signal.SIGKILL)


def trial_recipe(recipe: Recipe, side: Side, steps: int, output_dir: Path) -> Recipe:
    """Return the recipe of one trial: `steps` steps, every step logged, nothing saved or evaluated.

    full_determinism is off: compiled layers do not support it, and no other library turns it on.
    """
    kernels = kernels_of(recipe, side)
    train: dict[str, Any] = {"max_steps": steps, "num_train_epochs": None, "full_determinism": False}
    # Hugging Face and liger-kernel pad their batches, and torch.compile and CUDA graphs need fixed shapes.
    pads = side.change or side.train.keys() & {"torch_compile", "cuda_graphs"} or not kernels.enabled
    # Gate offloading needs our MLP kernel, and so does checkpointing some layers only: others checkpoint whole layers.
    of_whole_layers: dict[str | bool, str | bool] = {"offload_gate": True, "offload_both": "offload"}
    whole = of_whole_layers.get(recipe.train.gradient_checkpointing)
    if (pads or not kernels.mlp) and whole:
        train["gradient_checkpointing"] = whole
    if side.change or not kernels.enabled:
        train["gradient_checkpointing_layers"] = "all"
    changes = {
        "data": {"padding_free": False} if pads else {},
        "train": {**train, **side.train},
        "eval": {"eval_strategy": "no"},
        "logging": {"logging_steps": 1},
        "checkpoint": {
            "output_dir": str(output_dir), "overwrite": True, "save_strategy": "no", "save_on_signal": False,
            "save_model": False, "resume_from_checkpoint": "never",
        },
    }  # fmt: skip
    sections = {name: getattr(recipe, name).model_copy(update=values) for name, values in changes.items()}
    return recipe.model_copy(update={"kernels": kernels, **sections})


def _failure(folder: Path, code: int) -> Failure:
    """Return the failure that a rank wrote to a file; else the signal, or the last line of the log."""
    written = []
    for path in sorted(folder.glob("failure-*.json")):
        with contextlib.suppress(DamagedFileError):  # of a rank that was killed
            written.append(read_fields(Failure, path))
    if written:
        # the other ranks fail later, with an error of the communication library
        return next((failure for failure in written if failure.kind == "out of memory"), written[0])
    if code == -signal.SIGKILL:
        return Failure("error", "killed by SIGKILL; the system does so if host memory runs out")
    lines = [line for line in (folder / "log.txt").read_text(encoding="utf-8").splitlines() if line.strip()]
    return Failure("error", lines[-1] if lines else f"exit code {code}")


def read_target() -> dict[str, str]:
    """Return vendor, name, arch, CUDA or ROCm, and package versions. Raises UserError if the device is unusable."""
    done = subprocess.run([sys.executable, *MODULE], capture_output=True, text=True, check=False)
    if done.returncode:
        message = done.stderr.strip().splitlines() or [f"exit code {done.returncode}"]
        raise UserError(
            f"This machine's device cannot be used: {message[-1]}", hint="Try ligertune doctor.", exit_code=1
        )
    return json.loads(done.stdout.splitlines()[-1])


def device_name(target: dict[str, str], *, processes: int = 1) -> str:
    """Return "NVIDIA H100 80GB HBM3 (sm90) x 1"."""
    vendor = VENDORS[target["vendor"]]
    name = target["name"] if vendor.lower() in target["name"].lower() else f"{vendor} {target['name']}"
    return f"{name} ({target['arch']}) x {processes}"


def label(target: dict[str, str], *, processes: int = 1) -> str:
    """Return one line: "NVIDIA H100 80GB HBM3 (sm90) x 1, CUDA 13.0, torch 2.11.0, ..."."""
    versions = ", ".join(f"{name} {target[name]}" for name in target if name not in ("vendor", "name", "arch"))
    return f"{device_name(target, processes=processes)}, {versions}"
