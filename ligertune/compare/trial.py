"""One training run of one side, in a new process: runs share no allocator, caches or imports."""

from __future__ import annotations

import json
import signal
import subprocess
import sys
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

from ligertune.compare.side import Side
from ligertune.recipe import KernelsSpec, Recipe, dump_recipe
from ligertune.storage import read_metrics

RESULT = "result.json"


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
    report: dict | None
    failure: Failure | None

    @property
    def measured(self) -> tuple[Step, ...]:
        return self.steps[self.warmup :]


def run_trial(recipe: Recipe, side: Side, *, repeat: int, steps: int, processes: int, folder: Path) -> Trial:
    """Train the recipe's warm-up and `steps` measured steps in new processes that write to `folder`."""
    folder.mkdir(parents=True, exist_ok=True)
    path, warmup = folder / "recipe.yaml", recipe.report.warmup_steps
    path.write_text(dump_recipe(trial_recipe(recipe, side, warmup + steps, folder / "run")), encoding="utf-8")
    module = ["-m", "ligertune.compare.worker", str(path), str(folder), *([side.change] if side.change else [])]
    launcher = ["-m", "torch.distributed.run", "--standalone", "--nproc-per-node", str(processes)]
    with (folder / "log.txt").open("w", encoding="utf-8") as log:
        done = subprocess.run(
            [sys.executable, *(launcher if processes > 1 else []), *module], stdout=log, stderr=log, check=False
        )
    failure = None if done.returncode == 0 else _failure(folder, done.returncode)
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


def trial_recipe(recipe: Recipe, side: Side, steps: int, output_dir: Path) -> Recipe:
    """Return the recipe of one trial: `steps` steps, every step logged, nothing saved or evaluated.

    full_determinism is off: compiled layers do not support it, and no other library turns it on.
    """
    kernels = KernelsSpec.model_validate({**recipe.kernels.model_dump(), **side.kernels})
    train = {"max_steps": steps, "num_train_epochs": None, "full_determinism": False}
    # Hugging Face and liger-kernel pad their batches, and torch.compile and CUDA graphs need fixed shapes.
    pads = side.change or side.train.keys() & {"torch_compile", "cuda_graphs"} or not kernels.enabled
    # Gate offloading needs our MLP kernel, and so does checkpointing some layers only: others checkpoint whole layers.
    whole = {"offload_gate": True, "offload_both": "offload"}.get(recipe.train.gradient_checkpointing)
    if pads and whole:
        train["gradient_checkpointing"] = whole
    if side.change or not kernels.enabled:
        train["gradient_checkpointing_layers"] = "all"
    changes = {
        "data": {"padding_free": False} if pads else {},
        "train": {**train, **side.train},
        "eval": {"eval_strategy": "no"},
        "logging": {"logging_steps": 1},
        "checkpoint": {
            "output_dir": str(output_dir),
            "overwrite": True,
            "save_strategy": "no",
            "save_on_signal": False,
            "save_model": False,
            "resume_from_checkpoint": "never",
        },
    }
    sections = {name: getattr(recipe, name).model_copy(update=values) for name, values in changes.items()}
    return recipe.model_copy(update={"kernels": kernels, **sections})


def _failure(folder: Path, code: int) -> Failure:
    """Return the failure that a rank wrote to a file; else the signal, or the last line of the log."""
    written = [json.loads(path.read_text(encoding="utf-8")) for path in sorted(folder.glob("failure-*.json"))]
    if written:
        # the other ranks fail later, with an error of the communication library
        return Failure(**next((failure for failure in written if failure["kind"] == "out of memory"), written[0]))
    if code == -signal.SIGKILL:
        return Failure("error", "killed by SIGKILL; the system does so if host memory runs out")
    lines = [line for line in (folder / "log.txt").read_text(encoding="utf-8").splitlines() if line.strip()]
    return Failure("error", lines[-1] if lines else f"exit code {code}")
