"""Sides of the training benchmarks. Each measures one recipe in new processes, and returns a `Trial`.

Sides of `ligertune compare` run in ligertune's training loop: ligertune and parts of it, Hugging Face, torch.compile,
liger-kernel, torchao. Sides named trainer train with the trainer that transformers or TRL has for the recipe's task,
unsloth with its own model, AutoModel with its own recipe. Peers may have sites: folders of packages in the versions
that they need.
"""

from __future__ import annotations

import importlib.util
import sys
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from importlib.machinery import PathFinder
from pathlib import Path

from benchmarks import processes
from ligertune.compare.side import RENAMED, SIDE_OF, Side
from ligertune.compare.trial import Failure, Step, Trial, TrialOptions, run_trial
from ligertune.recipe import load_recipe

# task -> how its trainer is called
TRAINERS = {"dpo": "TRL", "distill": "TRL", "reward": "RewardTrainer", "classification": "Trainer"}
TRAINER_LIMIT = 1800.0  # seconds of a trainer's process
# No side asks the hub, and progress bars of trainers would hide their errors.
SILENT = {"HF_HUB_OFFLINE": "1", "TRL_EXPERIMENTAL_SILENCE": "1", "TOKENIZERS_PARALLELISM": "false",
          "UNSLOTH_DISABLE_STATISTICS": "1"}  # fmt: skip


@dataclass(frozen=True)
class Peer:
    """Another tool. module: in this folder, also the name of the site in --site. tasks: what it is measured for."""

    label: str
    module: str
    package: str
    tasks: tuple[str, ...]


# name of a side -> tool
PEERS = {
    "unsloth": Peer("unsloth", module="unsloth", package="unsloth", tasks=("sft", "dpo")),
    "automodel": Peer("AutoModel", module="automodel", package="nemo_automodel", tasks=("sft",)),
    "automodel_fused": Peer("AutoModel, fused loss", module="automodel", package="nemo_automodel", tasks=("sft",)),
}


@dataclass(frozen=True)
class TrainingSide:
    """A side and how it is measured. needs: packages that must be installed. site: where they are looked for first."""

    side: Side
    measure: Callable[[Path, int, TrialOptions, Path], Trial]
    needs: tuple[str, ...] = ()
    site: Path | None = None

    @property
    def missing(self) -> str | None:
        """Return the first package that is not installed."""
        return next((name for name in self.needs if not self._has(name)), None)

    def _has(self, package: str) -> bool:
        in_site = self.site is not None and PathFinder.find_spec(package, [str(self.site)]) is not None
        return in_site or importlib.util.find_spec(package) is not None


def in_our_loop(side: Side, recipe: Path, repeat: int, effort: TrialOptions, folder: Path) -> Trial:
    return run_trial(load_recipe(recipe), side, repeat, effort, folder)


def by_trainer(
    side: Side, recipe: Path, repeat: int, effort: TrialOptions, folder: Path, *, site: Path | None = None
) -> Trial:
    """Train with transformers, TRL or another tool in a new process."""
    module = PEERS[side.name].module if side.name in PEERS else "trainers"
    command = [sys.executable, "-m", f"benchmarks.sides.{module}", side.name, str(recipe)]
    compiled = str(folder / "unsloth_compiled_cache")  # of the working directory by default
    environment = processes.environment(site=site, UNSLOTH_COMPILE_LOCATION=compiled, **SILENT)
    points, reason = processes.run(command, limit=TRAINER_LIMIT, environment=environment)
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


def _peer(name: str, peer: Peer) -> TrainingSide:
    side = Side(name, peer.label, {})
    return TrainingSide(side, partial(by_trainer, side), (peer.package,))


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
        *(_peer(name, peer) for name, peer in PEERS.items()),
    )
}


def has_site(side: TrainingSide) -> bool:
    """Return whether a side is another tool, which may have its own versions of packages."""
    return side.side.name not in SIDE_OF


def side_of(name: str) -> TrainingSide:
    """Return a side by its name. Raises ValueError for an unknown one."""
    side = SIDES.get(RENAMED.get(name, name))
    if side is None:
        raise ValueError(f"there is no side {name}; there are hf, {', '.join(SIDES)}")
    return side


def sides_of(names: Sequence[str], task: str, sites: Mapping[str, Path] | None = None) -> list[TrainingSide]:
    """Return the sides of a table. Raises ValueError for an unknown one, or for a trainer that the task has not.

    sites: name of a side, and the folder of its packages. Sides of one tool share its site.
    """
    sites = sites or {}
    found = []
    for name in names:
        side = side_of(name)
        peer = PEERS.get(name)
        site = sites.get(peer.module if peer else name)
        if peer:
            if task not in peer.tasks:
                raise ValueError(f"side {name}: it is not measured for task {task}")
            found.append(replace(side, measure=partial(by_trainer, side.side, site=site), site=site))
            continue
        if not has_site(side):
            found.append(side)
            continue
        if task not in TRAINERS:
            raise ValueError(f"side {name}: no trainer is known for task {task}")
        labelled = replace(side.side, label=side.side.label.format(TRAINERS[task]))
        needs = side.needs if task == "classification" else ("trl", *side.needs)
        found.append(TrainingSide(labelled, partial(by_trainer, labelled, site=site), needs, site))
    return found
