"""Ask a class what it computes: run its own forward on a few numbers, sheltered from everything else.

The answer decides whether one of our kernels may stand in for it (`recognise`, `rope`). Probing draws nothing from
the global random state, runs on the CPU whatever the default device is, and is the same in every process.
"""

from __future__ import annotations

import contextlib
import inspect
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn


@dataclass(frozen=True)
class Refusal:
    """Why a module is left as it is; the sentence goes into the patch report."""

    reason: str


# What code we do not know may raise on a stub that lacks most of what the real module holds: a missing attribute or
# key, a shape, dtype or argument it did not expect, an import it makes on first use. Anything else (out of memory,
# an interrupt, a defect of the interpreter) is not an answer and goes up.
FOREIGN_ERRORS = (
    AssertionError,
    ArithmeticError,
    AttributeError,
    ImportError,
    LookupError,
    RuntimeError,
    TypeError,
    ValueError,
)


def answer(function: Callable[..., Any], *args: Any) -> Any | Refusal:
    """What unknown code returns for `args`, or the refusal that says how it failed."""
    with _sheltered():
        try:
            return function(*args)
        except FOREIGN_ERRORS as error:
            first_line = str(error).partition("\n")[0]
            return Refusal(f"trying it out raised {type(error).__name__}: {first_line}")


@contextlib.contextmanager
def _sheltered() -> Iterator[None]:
    with (
        torch.no_grad(),
        torch.random.fork_rng(devices=[]),
        torch.device("cpu"),
        torch.autocast("cpu", enabled=False),
    ):
        yield


def numbers(*shape: int, seed: int = 0, dtype: torch.dtype = torch.float32) -> Tensor:
    """The same normally distributed numbers every time, on the CPU."""
    generator = torch.Generator(device="cpu").manual_seed(seed)
    return torch.randn(shape, generator=generator, device="cpu", dtype=torch.float32).to(dtype)


Settings = tuple[tuple[str, Any], ...]


def settings_of(module: nn.Module) -> Settings:
    """The plain values a module was built with (widths, switches, factors): with its class, all that a stub knows."""
    plain = (bool, int, float, str, type(None))
    return tuple(
        sorted(
            (name, value)
            for name, value in vars(module).items()
            if isinstance(value, plain) and not name.startswith("_") and name != "training"
        )
    )


def stub(cls: type[nn.Module], settings: Settings, **members: Any) -> nn.Module:
    """A `cls` that was never built: its settings and `members`, nothing else, so that any other dependence shows."""
    hollow = cls.__new__(cls)
    nn.Module.__init__(hollow)
    vars(hollow).update(settings)
    for name, member in members.items():
        setattr(hollow, name, member)
    return hollow


def refuse_forward(module: nn.Module) -> Refusal | None:
    """Why a forward cannot be replaced as a whole, or None."""
    if "forward" in vars(module):
        return Refusal("its forward was replaced on the instance")
    forward = type(module).forward
    if hasattr(forward, "__wrapped__"):
        return Refusal("its forward is wrapped by a decorator")
    if len(inspect.signature(forward).parameters) != 2:  # self and the hidden states
        return Refusal("its forward takes more than the hidden states")
    return None
