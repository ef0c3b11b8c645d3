"""Sides of the training benchmarks. Each measures one recipe in new processes, and returns a `Trial`.

Sides of `ligertune compare` run in ligertune's training loop: ligertune and parts of it, Hugging Face, torch.compile,
liger-kernel, torchao. Sides named trainer train with the trainer that transformers or TRL has for the recipe's task.
"""

from __future__ import annotations

import importlib.util
import sys
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path

from benchmarks import processes
from ligertune.compare.side import RENAMED, SIDE_OF, Side
from ligertune.compare.trial import Failure, Step, Trial, TrialOptions, run_trial
from ligertune.recipe import load_recipe

# task -> how its trainer is called
TRAINERS = {"dpo": "TRL", "distill": "TRL", "reward": "RewardTrainer", "classification": "Trainer"}
TRAINER_LIMIT = 1800.0  # seconds of a trainer's process
# No side asks the hub, and progress bars of trainers would hide their errors.
SILENT = {"HF_HUB_OFFLINE": "1", "TRL_EXPERIMENTAL_SILENCE": "1", "TOKENIZERS_PARALLELISM": "false"}


@dataclass(frozen=True)
class TrainingSide:
    """A side and how it is measured. needs: packages that must be installed."""

    side: Side
    measure: Callable[[Path, int, TrialOptions, Path], Trial]
    needs: tuple[str, ...] = ()

    @property
    def missing(self) -> str | None:
        """Return the first package that is not installed."""
        return next((name for name in self.needs if importlib.util.find_spec(name) is None), None)


def in_our_loop(side: Side, recipe: Path, repeat: int, effort: TrialOptions, folder: Path) -> Trial:
    return run_trial(load_recipe(recipe), side, repeat, effort, folder)


def by_trainer(side: Side, recipe: Path, repeat: int, effort: TrialOptions, folder: Path) -> Trial:
    """Train with transformers or TRL in a new process."""
    command = [sys.executable, "-m", "benchmarks.sides.trainers", side.name, str(recipe)]
    points, reason = processes.run(command, limit=TRAINER_LIMIT, environment=processes.environment(**SILENT))
    point = points[0] if points else {"failed": reason or "it printed no result"}
    warmup = load_recipe(recipe).report.warmup_steps
    if "failed" in point:
        kind = "out of memory" if point["failed"] == "out of memory" else "error"
        return Trial(side.name, repeat, warmup, (), None, Failure(kind, point["failed"]))
    steps = tuple(Step(grad_norm=None, **step) for step in point["steps"])
    return Trial(side.name, repeat, warmup, steps, point["report"], None)


def without_grad_norms(trial: Trial) -> Trial:
    """Return a trial to compare with a trainer's, which has no gradient norms."""
    return replace(trial, steps=tuple(replace(step, grad_norm=None) for step in trial.steps))


def _trainer(name: str, words: str, *needs: str) -> TrainingSide:
    side = Side(name, words, {})
    return TrainingSide(side, partial(by_trainer, side), needs)


SIDES = {name: TrainingSide(side, partial(in_our_loop, side), (side.needs,) if side.needs else ())
         for name, side in SIDE_OF.items()}  # fmt: skip
SIDES |= {
    one.side.name: one
    for one in (
        _trainer("trainer", "{}"),
        _trainer("trainer_liger", "{}, liger-kernel", "liger_kernel"),
        _trainer("trainer_patched", "{}, ligertune kernels"),
        _trainer("trainer_offload", "{}, offloaded"),
    )
}


def sides_of(names: Sequence[str], task: str) -> list[TrainingSide]:
    """Return the sides of a table. Raises ValueError for an unknown one, or for a trainer that the task has not."""
    found = []
    for name in names:
        side = SIDES.get(RENAMED.get(name, name))
        if side is None:
            raise ValueError(f"there is no side {name}; there are hf, {', '.join(SIDES)}")
        if not name.startswith("trainer"):
            found.append(side)
            continue
        if task not in TRAINERS:
            raise ValueError(f"side {name}: no trainer is known for task {task}")
        labelled = replace(side.side, label=side.side.label.format(TRAINERS[task]))
        needs = side.needs if task == "classification" else ("trl", *side.needs)
        found.append(TrainingSide(labelled, partial(by_trainer, labelled), needs))
    return found
