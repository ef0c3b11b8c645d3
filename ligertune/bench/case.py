"""Benchmark definitions: an op at one size, its lower bound in traffic and FLOPs, and its implementations."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from typing import Any, Literal

import torch

Mode = Literal["forward", "backward", "both"]
Tensors = tuple[torch.Tensor, ...]
Outputs = torch.Tensor | Tensors
IN_PLACE = "ours, in place"  # provider whose results overwrite its arguments or the incoming gradient


@dataclass(frozen=True)
class Case:
    """One op at one size."""

    op: str
    sizes: tuple[int, ...]  # in the order of the benchmark's `dims`
    dtype: torch.dtype
    frozen_head: bool = False  # linear losses: the weight gets no gradient, as under LoRA
    ignored: float = 0.0  # losses: share of the labels that are ignore_index

    @property
    def label(self) -> str:
        words = ["x".join(map(str, self.sizes))]
        words += ["frozen head"] if self.frozen_head else []
        words += [f"{100 * self.ignored:.0f} % ignored"] if self.ignored else []
        return ", ".join(words)

    def as_dict(self) -> dict[str, Any]:
        """Return the case for JSON, without what only losses have."""
        return {"op": self.op, "sizes": self.sizes, "dtype": str(self.dtype).removeprefix("torch.")}

    def tensor_bytes(self) -> float:
        """Return the bytes of a tensor with the case's sizes."""
        return float(torch.Size(self.sizes).numel() * self.dtype.itemsize)


@dataclass(frozen=True)
class Rates:
    """Measured rates of a device: bytes/s of a copy (read and written), FLOP/s of a square matrix product."""

    copy: float
    matmul: float


@dataclass(frozen=True)
class Work:
    """The least that any implementation must move and compute: (forward, backward)."""

    traffic: tuple[float, float]  # bytes
    flops: tuple[float, float] = (0.0, 0.0)

    def floor(self, mode: Mode, rates: Rates) -> float:
        """Return the least time in seconds at these rates."""
        parts = {"forward": (0,), "backward": (1,), "both": (0, 1)}[mode]
        return max(sum(self.traffic[i] for i in parts) / rates.copy, sum(self.flops[i] for i in parts) / rates.matmul)


def elementwise_work(forward: int, backward: int) -> Callable[[Case], Work]:
    """Return the work of an op that reads or writes so many tensors of the case's size in each direction."""
    return lambda case: Work((forward * case.tensor_bytes(), backward * case.tensor_bytes()))


@dataclass(frozen=True)
class Provider:
    """One implementation of an op.

    `make` takes a case and its arguments and returns the function to time. What `make` itself does, such as building
    a module, is not timed.
    """

    name: str
    make: Callable[[Case, Tensors], Callable[[], Outputs]]
    overwrites: bool = False  # writes over its arguments, and therefore receives separate ones
    within: Callable[[], AbstractContextManager[Any]] = nullcontext  # context of all passes, not timed


def function(name: str, call: Callable[..., Outputs], *, overwrites: bool = False) -> Provider:
    """Return a provider that calls `call(*args)`."""
    return Provider(name, lambda case, args: lambda: call(*args), overwrites)


def providers_of(
    ours: Callable[..., Outputs] | Provider,
    *,
    in_place: Callable[..., Outputs] | None = None,
    **baselines: Callable[..., Outputs] | Provider | None,
) -> tuple[Provider, ...]:
    """Return our implementations, the baselines by name, and torch.compile of the first baseline, for one size."""
    named = {"ours": ours, IN_PLACE: in_place, **baselines}
    found = [
        call if isinstance(call, Provider) else function(name, call, overwrites=call is in_place)
        for name, call in named.items()
        if call is not None
    ]
    eager = found[2 if in_place else 1]

    def make(case: Case, args: Tensors) -> Callable[[], Outputs]:
        # Compilations for other sizes count towards torch's limit of recompilations.
        torch.compiler.reset()
        return torch.compile(eager.make(case, args), fullgraph=True, dynamic=False)

    return *found, Provider("torch.compile", make)


@dataclass(frozen=True)
class OpBenchmark:
    """The benchmark of one op: sizes, inputs, lower bound, reference and implementations."""

    op: str
    dims: tuple[str, ...]
    sizes: tuple[tuple[int, ...], ...]
    cpu_sizes: tuple[tuple[int, ...], ...]
    args: tuple[str, ...]
    inputs: Callable[[Case, torch.device], Tensors]  # leaves among them require a gradient
    work: Callable[[Case], Work]
    reference: Callable[[Case, Tensors], Callable[..., Outputs]]
    """Return a function in plain torch for any part of the rows, in any dtype. A loss that is a mean over the rows
    divides by their number in the whole case, so that the losses of the parts add up."""
    providers: tuple[Provider, ...]
    row_args: tuple[str, ...] = ()  # arguments that can be split along their first dimension, and outputs with them
    dtype: torch.dtype | None = None  # None: the user chooses
    modes: tuple[Mode, ...] = ("forward", "backward", "both")

    @property
    def axis(self) -> int:
        """The last dimension that varies over the sizes: the x axis of plots."""
        return max(i for i in range(len(self.dims)) if len({sizes[i] for sizes in self.sizes}) > 1)
