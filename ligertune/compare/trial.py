"""One run of one side in a process of its own: neither inherits the other's allocator, caches or imports."""

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
    """Why a trial has no result. Memory that ran out is a result of its own."""

    kind: Literal["out of memory", "error"]
    sentence: str


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
    """What a run left. `steps` holds all of them, the first `warmup` of which count for nothing but parity."""

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
    """Train `steps` measured steps after the recipe's warm-up; read what the process left in `folder`."""
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
    found = read_metrics(folder / "run" / "metrics.jsonl")
    return Trial(
        side=side.name,
        repeat=repeat,
        warmup=warmup,
        steps=tuple(
            Step(line["step"], line["loss"], line["grad_norm"], line["tokens"], line["seconds"])
            for line in found
            if "loss" in line
        ),
        report=None if failure else json.loads((folder / RESULT).read_text(encoding="utf-8")),
        failure=failure,
    )


def trial_recipe(recipe: Recipe, side: Side, steps: int, output_dir: Path) -> Recipe:
    """The recipe of one trial: so many steps, every step logged, nothing saved or evaluated on the way.

    Without the recipe's full_determinism, which compiled layers refuse and no other tool turns on.
    """
    kernels = KernelsSpec.model_validate({**recipe.kernels.model_dump(), **side.kernels})
    # without our kernels, and under a compiler, batches are padded as those libraries run
    pads = side.change or side.train.keys() & {"torch_compile", "cuda_graphs"} or not kernels.enabled
    layout = {"padding_free": False} if pads else {}
    # and their layers are run again whole, all of them
    whole = {"offload_gate": True, "offload_both": "offload"}.get(recipe.train.gradient_checkpointing)
    checkpoints = {"gradient_checkpointing": whole} if pads and whole else {}
    if side.change or not kernels.enabled:
        checkpoints["gradient_checkpointing_layers"] = "all"
    return recipe.model_copy(
        update={
            "kernels": kernels,
            "data": recipe.data.model_copy(update=layout),
            "train": recipe.train.model_copy(
                update={
                    "max_steps": steps,
                    "num_train_epochs": None,
                    "full_determinism": False,
                    **checkpoints,
                    **side.train,
                }
            ),
            "eval": recipe.eval.model_copy(update={"eval_strategy": "no"}),
            "logging": recipe.logging.model_copy(update={"logging_steps": 1}),
            "checkpoint": recipe.checkpoint.model_copy(
                update={
                    "output_dir": str(output_dir),
                    "overwrite": True,
                    "save_strategy": "no",
                    "save_on_signal": False,
                    "save_model": False,
                    "resume_from_checkpoint": "never",
                }
            ),
        }
    )


def _failure(folder: Path, code: int) -> Failure:
    """What a rank wrote down; else the last line of the log, or the signal that ended it."""
    written = [json.loads(path.read_text(encoding="utf-8")) for path in sorted(folder.glob("failure-*.json"))]
    if written:
        worst = next((failure for failure in written if failure["kind"] == "out of memory"), written[0])
        return Failure(**worst)
    if code == -signal.SIGKILL:
        return Failure("error", "killed by the system, as it does where the host's memory runs out")
    said = [line for line in (folder / "log.txt").read_text(encoding="utf-8").splitlines() if line.strip()]
    return Failure("error", said[-1] if said else f"exit code {code}")
