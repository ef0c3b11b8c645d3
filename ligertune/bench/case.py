"""The nouns of a bench: an op at one size, what it must cost at the least, and who computes it."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from typing import Literal

import torch

Mode = Literal["forward", "backward", "both"]
Tensors = tuple[torch.Tensor, ...]
Outputs = torch.Tensor | Tensors


@dataclass(frozen=True)
class Case:
    """One op at one size."""

    op: str
    sizes: tuple[int, ...]  # what they are says the subject's `dims`
    dtype: torch.dtype
    frozen_head: bool = False  # linear losses: the weight gets no gradient, as under LoRA
    ignored: float = 0.0  # losses: the share of the labels that are not trained on

    @property
    def label(self) -> str:
        words = ["x".join(map(str, self.sizes))]
        words += ["frozen head"] if self.frozen_head else []
        words += [f"{100 * self.ignored:.0f} % ignored"] if self.ignored else []
        return ", ".join(words)


@dataclass(frozen=True)
class Rates:
    """What this device reached just now: bytes/s of a copy (read + written), FLOP/s of a square matrix product."""

    copy: float
    matmul: float


@dataclass(frozen=True)
class Work:
    """The least that any implementation moves and computes: (forward, backward)."""

    traffic: tuple[float, float]  # bytes
    flops: tuple[float, float] = (0.0, 0.0)

    def floor(self, mode: Mode, rates: Rates) -> float:
        """Seconds below which this device cannot go at its measured rates."""
        parts = {"forward": (0,), "backward": (1,), "both": (0, 1)}[mode]
        return max(sum(self.traffic[i] for i in parts) / rates.copy, sum(self.flops[i] for i in parts) / rates.matmul)


@dataclass(frozen=True)
class Provider:
    """Somebody's implementation of an op.

    `make` gets a case and its arguments and returns what computes the outputs from them; what it does before that
    (building a module, importing a library) is not timed.
    """

    name: str
    make: Callable[[Case, Tensors], Callable[[], Outputs]]
    overwrites: bool = False  # its backward or forward writes over an argument: it gets arguments of its own
    within: Callable[[], AbstractContextManager] = nullcontext  # stands around all it runs, untimed: settings on trial


@dataclass(frozen=True)
class Subject:
    """How one op is benched."""

    op: str
    dims: tuple[str, ...]
    axis: str  # the dimension over which `sizes` run: the x axis of plots
    sizes: tuple[tuple[int, ...], ...]
    small: tuple[tuple[int, ...], ...]  # for a CPU
    args: tuple[str, ...]
    inputs: Callable[[Case, torch.device], Tensors]  # the leaves among them require a gradient
    rows: tuple[str, ...]  # the arguments that can be cut along their first dimension, and the outputs with them
    work: Callable[[Case], Work]
    plain: Callable[[Case, Tensors], Callable[..., Outputs]]
    """Plain torch on other arguments than the whole case's: rows of them, in float64. A loss that is a mean over the
    rows divides by their number in the whole case, so that parts add up."""
    providers: tuple[Provider, ...]
    dtype: torch.dtype | None = None  # where it is not the user's choice
    modes: tuple[Mode, ...] = ("forward", "backward", "both")


def ours(name: str, call: Callable[..., Callable[[], Outputs]], overwrites: bool = False) -> Provider:
    """A provider from this project; `call(kernels, case, *args)` computes, `kernels` being the package."""

    def make(case: Case, args: Tensors) -> Callable[[], Outputs]:
        import ligertune_kernels

        return lambda: call(ligertune_kernels, case, *args)

    return Provider(name, make, overwrites)


def function(name: str, call: Callable[..., Outputs]) -> Provider:
    """A provider that is `call(*args)`."""
    return Provider(name, lambda case, args: lambda: call(*args))


def compiled(eager: Provider) -> Provider:
    """torch.compile of the eager form, for this one size."""

    def make(case: Case, args: Tensors) -> Callable[[], Outputs]:
        # what was compiled for other sizes counts against the limit of recompilations
        torch.compiler.reset()
        return torch.compile(eager.make(case, args), fullgraph=True, dynamic=False)

    return Provider("torch.compile", make)
