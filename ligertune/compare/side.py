"""Sides of a comparison: our kernels, parts of them, Hugging Face without them, and other libraries."""

from __future__ import annotations

import importlib.util
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

from ligertune.errors import UserError, pip_install
from ligertune.recipe.feature import part_of_task
from ligertune.recipe.schema import KernelsSpec, Recipe


@dataclass(frozen=True)
class Side:
    """One way to run the recipe.

    kernels, train: values that replace those of these sections of the recipe.
    ours: its losses must equal the reference's, or the comparison fails.
    change: change of the built model, a name that `change_model` knows.
    needs: package that must be installed.
    removes: the kernel of ours that this side does without, to measure what that kernel gains.
    """

    name: str
    label: str
    kernels: dict[str, Any] = field(hash=False)
    ours: bool = False
    change: str | None = None
    needs: str | None = None
    train: dict[str, Any] = field(default_factory=dict, hash=False)
    removes: str | None = None


ON = {"enabled": True}
OFF = {"enabled": False, "recompute": False}
COMPILED = {"torch_compile": True}
INPUTS, GATES, BOTH = ({"gradient_checkpointing": kept} for kept in ("offload", "offload_gate", "offload_both"))

SIDES = (
    Side("with", "ligertune", ON, ours=True),
    Side("no-rope", "ligertune without rope", {**ON, "rope": False}, ours=True, removes="rope"),
    Side("no-norm", "ligertune without norms", {**ON, "norm": False}, ours=True, removes="norm"),
    Side("no-mlp", "ligertune without mlp", {**ON, "mlp": False}, ours=True, removes="mlp"),
    Side("no-fused-loss", "ligertune without fused loss", {**ON, "loss": "torch"}, ours=True, removes="loss"),
    Side("no-attention", "ligertune without attention", {**ON, "attention": False}, ours=True, removes="attention"),
    Side("no-lora", "ligertune without fused LoRA", {**ON, "lora": False}, ours=True, removes="lora"),
    Side("no-mixer", "ligertune without mixer", {**ON, "mixer": False}, ours=True, removes="mixer"),
    Side("no-optimizer", "ligertune without AdamW", {**ON, "optimizer": False}, ours=True, removes="optimizer"),
    Side("with-recompute", "ligertune, recompute", {**ON, "recompute": True}, ours=True),
    Side("with-recompute-norms", "ligertune, recompute: norms", {**ON, "recompute": "norms"}, ours=True),
    Side("with-recompute-mlps", "ligertune, recompute: mlps", {**ON, "recompute": "mlps"}, ours=True),
    Side("with-attention", "ligertune, attention", {**ON, "attention": True}, ours=True),
    Side("with-lora", "ligertune, lora", {**ON, "lora": True}, ours=True),
    Side("with-offload", "ligertune, offload", ON, ours=True, train=INPUTS),
    Side("with-offload-gate", "ligertune, offload_gate", ON, ours=True, train=GATES),
    Side("with-offload-both", "ligertune, offload_both", ON, ours=True, train=BOTH),
    Side("with-compile", "ligertune + torch.compile", ON, ours=True, train=COMPILED),
    Side("with-cuda-graphs", "ligertune, CUDA graphs", ON, ours=True, train={"cuda_graphs": True}),
    Side("with-fp8", "ligertune, fp8", ON, ours=True, train={"fp8": True}),
    Side(
        "with-torchao",
        "ligertune, torchao fp8 + compile",
        ON,
        ours=True,
        needs="torchao",
        train={"fp8": "torchao", **COMPILED},
    ),
    Side("without", "Hugging Face", OFF),
    Side("hf-chunked", "Hugging Face, loss in chunks", OFF, change="hf-chunked"),
    Side("compile", "Hugging Face + torch.compile", OFF, change="compile"),
    Side("liger", "liger-kernel", OFF, change="liger", needs="liger_kernel"),
)
SIDE_OF = {side.name: side for side in SIDES}
BASELINES = ("hf", "hf-chunked", "compile", *(name for name in SIDE_OF if name.startswith(("with-", "no-"))))
PEERS = ("liger",)
# other names of sides: Hugging Face's, and those of earlier versions
RENAMED = {"hf": "without", "with-rebuild": "with-recompute", "with-rebuild-norms": "with-recompute-norms"}


def kernels_of(recipe: Recipe, side: Side) -> KernelsSpec:
    """Return the kernels of the recipe as a side changes them."""
    return KernelsSpec.model_validate({**recipe.kernels.model_dump(), **side.kernels})


def check_losses(sides: Sequence[Side], task: str) -> None:
    """Raise UserError for a side that can only compute the cross-entropy, if the recipe trains for another loss."""
    for side in sides:
        if not part_of_task(task).loss_of_labels and side.change in ("hf-chunked", "liger"):
            option = "--peer" if side.name in PEERS else "--baseline"
            raise UserError(
                f"{option} {side.name}: its loss is the cross-entropy of the labels, and the recipe's task is {task}.",
                hint=f"Leave {option} out.",
            )


def choose_sides(
    *,
    only: str | None = None,
    ablate: Sequence[str] = (),
    baselines: Sequence[str] = ("hf",),
    peers: Sequence[str] = (),
) -> tuple[Side, ...]:
    """Return the chosen sides in the order of SIDES.

    only: name of the single side to run. ablate: names of kernels; each adds a side without that kernel.
    Raises UserError for an unknown side, or if its package is not installed.
    """
    if only is not None:
        return (SIDE_OF[only],)
    for option, given, known in (("--baseline", baselines, BASELINES), ("--peer", peers, PEERS)):
        for name in given:
            if name not in known and name not in RENAMED:
                raise UserError(f"{option}: there is no {name}.", hint=f"Write {' or '.join(known)}.")
    names = {"with", *(RENAMED.get(name, name) for name in baselines), *peers}
    names |= {side.name for side in SIDES if side.removes in ablate} | ({"without"} if ablate else set())
    chosen = tuple(side for side in SIDES if side.name in names)
    for side in chosen:
        if side.needs and importlib.util.find_spec(side.needs) is None:
            name = side.needs.replace("_", "-")
            option = "--peer" if side.name in PEERS else "--baseline"
            raise UserError(
                f"{option} {side.name}: {name} is not installed.",
                hint=f"Run {pip_install(name)}, or leave {option} out.",
            )
    return chosen
