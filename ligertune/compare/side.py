"""The sides of a comparison: the kernels, parts of them, and what they are held against. One row for each."""

from __future__ import annotations

import importlib.util
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

from ligertune.errors import UserError


@dataclass(frozen=True)
class Side:
    """One way to run the recipe. `kernels` and `train` are what it says there; `change` names a row of `changes`."""

    name: str
    label: str
    kernels: dict[str, Any] = field(hash=False)
    ours: bool = False  # its losses must be those of the reference, or the comparison fails
    change: str | None = None  # what is done to the model once it is built
    needs: str | None = None  # a package that must be importable
    train: dict[str, Any] = field(default_factory=dict, hash=False)

    def check_installed(self) -> None:
        """A UserError where the side needs a package that is not here."""
        if self.needs and importlib.util.find_spec(self.needs) is None:
            name, option = self.needs.replace("_", "-"), "--peer" if self.name in PEERS else "--baseline"
            raise UserError(
                f"{option} {self.name}: {name} is not installed.",
                hint=f"Run pip install {name}, or leave {option} out.",
            )


ON, OFF = {"enabled": True}, {"enabled": False, "recompute": False}
COMPILED = {"torch_compile": True}
FLOAT8 = {"fp8": True, **COMPILED}
INPUTS, GATES, BOTH = ({"gradient_checkpointing": kept} for kept in ("offload", "offload_gate", "offload_both"))

SIDES = (
    Side("with", "ligertune", ON, ours=True),
    Side("no-fused-loss", "ligertune without its fused loss", {**ON, "loss": "torch"}, ours=True),
    Side("with-recompute", "ligertune, recompute", {**ON, "recompute": True}, ours=True),
    Side("with-recompute-norms", "ligertune, recompute: norms", {**ON, "recompute": "norms"}, ours=True),
    Side("with-attention", "ligertune, attention", {**ON, "attention": True}, ours=True),
    Side("with-lora", "ligertune, lora", {**ON, "lora": True}, ours=True),
    Side("with-offload", "ligertune, offload", ON, ours=True, train=INPUTS),
    Side("with-offload-gate", "ligertune, offload_gate", ON, ours=True, train=GATES),
    Side("with-offload-both", "ligertune, offload_both", ON, ours=True, train=BOTH),
    Side("with-compile", "ligertune + torch.compile", ON, ours=True, train=COMPILED),
    Side("with-cuda-graphs", "ligertune, CUDA graphs", ON, ours=True, train={"cuda_graphs": True}),
    Side("with-fp8", "ligertune, fp8 + compile", ON, ours=True, needs="torchao", train=FLOAT8),
    Side("without", "Hugging Face", OFF),
    Side("hf-chunked", "Hugging Face, loss in chunks", OFF, change="hf-chunked"),
    Side("compile", "Hugging Face + torch.compile", OFF, change="compile"),
    Side("liger", "liger-kernel", OFF, change="liger", needs="liger_kernel"),
)
SIDE_OF = {side.name: side for side in SIDES}
OURS = ("with-recompute", "with-recompute-norms", "with-attention", "with-lora", "with-offload", "with-offload-gate",
        "with-offload-both", "with-compile", "with-cuda-graphs", "with-fp8")  # fmt: skip
BASELINES = {"hf": "without", **{name: name for name in ("hf-chunked", "compile", *OURS)}}
RENAMED = {"with-rebuild": "with-recompute", "with-rebuild-norms": "with-recompute-norms"}  # still accepted
PEERS = ("liger",)


def choose_sides(
    *, only: str | None = None, ablate: bool = False, baselines: Sequence[str] = ("hf",), peers: Sequence[str] = ()
) -> tuple[Side, ...]:
    """The sides in the order of the table. `only` is the name of the one side that is to run.

    An ablation is of all kernels, all but the fused loss, and none: it brings the plain baseline along.
    """
    if only is not None:
        return (SIDE_OF[only],)
    baselines = [RENAMED.get(name, name) for name in baselines]
    for option, given, known in (("--baseline", baselines, BASELINES), ("--peer", peers, PEERS)):
        for name in given:
            if name not in known:
                raise UserError(f"{option}: there is no {name}.", hint=f"Write {' or '.join(known)}.")
    names = {"with", *(BASELINES[name] for name in baselines), *peers}
    names |= {"no-fused-loss", "without"} if ablate else set()
    chosen = tuple(side for side in SIDES if side.name in names)
    for side in chosen:
        side.check_installed()
    return chosen
