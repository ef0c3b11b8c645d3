"""Probe what a class computes: run its own forward on a few numbers.

The result decides whether one of our kernels can replace it (`recognise`, `rope`). Probing leaves the global
random state alone, runs on the CPU whatever the default device is, and gives the same result in every process. Results
are cached by class and by its `definition_of`, so that a method replaced later is probed again.
"""

from __future__ import annotations

import inspect
import types
import warnings
from collections.abc import Callable, Hashable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from ligertune.any_types import AnyModule


@dataclass(frozen=True)
class Refusal:
    """Why a module is left as it is. The patch report prints the reason."""

    reason: str


@dataclass(frozen=True)
class NotNeeded(Refusal):
    """Why a kernel would gain nothing. The report names such modules and does not count them as left."""


def answer(function: Callable[..., Any], *args: Any) -> Any | Refusal:
    """Return the result of unknown code for `args`, or a refusal with its error."""
    with (
        warnings.catch_warnings(),
        torch.no_grad(),
        torch.random.fork_rng(devices=[]),
        torch.device("cpu"),
        torch.autocast("cpu", enabled=False),
    ):
        warnings.simplefilter("ignore")  # of numbers and dtypes that no model has
        try:
            return function(*args)
        except Exception as error:  # whatever a stub without most members of the real module leads to
            first_line = str(error).partition("\n")[0]
            return Refusal(f"trying it out raised {type(error).__name__}: {first_line}")


def numbers(*shape: int, seed: int = 0, dtype: torch.dtype = torch.float32) -> Tensor:
    """Return the same normally distributed numbers every time, on the CPU."""
    generator = torch.Generator(device="cpu").manual_seed(seed)
    return torch.randn(shape, generator=generator, device="cpu", dtype=torch.float32).to(dtype)


def close(given: Any, expected: Tensor, *, rtol: float, atol: float) -> bool:
    """Return whether a result is a tensor of the same shape and dtype as `expected`, with its values."""
    same_form = isinstance(given, Tensor) and given.dtype == expected.dtype and given.shape == expected.shape
    return same_form and torch.allclose(given, expected, rtol=rtol, atol=atol)


Definition = tuple[Hashable, ...]
METHODS = (types.FunctionType, staticmethod, classmethod, property)


def definition_of(cls: type) -> Definition:
    """Return what a class computes with: its methods, and the functions and classes of their file that they name.

    Two results are equal as long as none of these was replaced. nn.Module's own methods are not among them.
    """
    methods = [
        value
        for base in cls.__mro__
        if base not in (nn.Module, object)
        for value in vars(base).values()
        if isinstance(value, METHODS)
    ]
    named = []
    for method in methods:
        function = inspect.unwrap(method) if isinstance(method, types.FunctionType) else None
        if isinstance(function, types.FunctionType):
            found = (function.__globals__.get(name) for name in function.__code__.co_names)
            named += [value for value in found if isinstance(value, types.FunctionType | type)]
    return (*methods, *named)


Settings = tuple[tuple[str, Any], ...]


def settings_of(module: nn.Module) -> Settings:
    """Return the plain values a module was built with (widths, switches, factors), which a stub gets too."""
    # not `training`: a probe chooses the mode
    plain = (bool, int, float, str, type(None))
    return tuple(
        sorted(
            (name, value)
            for name, value in vars(module).items()
            if isinstance(value, plain) and not name.startswith("_") and name != "training"
        )
    )


def stub(cls: type[nn.Module], settings: Settings, **members: Any) -> AnyModule:
    """Return a `cls` that was never initialised, with these settings and members only: other dependences then fail."""
    hollow = cls.__new__(cls)
    nn.Module.__init__(hollow)
    vars(hollow).update(settings)
    for name, member in members.items():
        setattr(hollow, name, member)
    return hollow


def uses_stored_statistics(module: nn.Module) -> bool:
    """Return whether a module without parameters is an affine function of each number, given by its buffers.

    Such is the normalisation of Phi-4's audio features.
    """
    buffers = dict(module.named_buffers())
    if not buffers or next(module.parameters(), None) is not None or any(b.ndim != 1 for b in buffers.values()):
        return False
    stored = {name: numbers(len(b), seed=seed) for seed, (name, b) in enumerate(buffers.items())}
    cls = type(module)
    width = len(next(iter(stored.values())))
    a, b, c = (numbers(3, width, seed=seed) for seed in (7, 8, 9))
    given = [answer(cls.forward, stub(cls, settings_of(module), **stored), x) for x in (a + b, c, a, b + c)]
    results = [y for y in given if isinstance(y, Tensor) and y.shape == a.shape]
    if len(results) != len(given):
        return False
    # f(a + b) + f(c) = f(a) + f(b + c) holds for affine functions only
    return close(results[0] + results[1], results[2] + results[3], rtol=1e-5, atol=1e-5)


def refuse_forward(module: nn.Module) -> Refusal | None:
    """Return why a forward cannot be replaced as a whole by one that takes the hidden states, or None."""
    refusal = refuse_replaced_forward(module)
    if refusal is None and len(inspect.signature(type(module).forward).parameters) != 2:  # self and the hidden states
        return Refusal("its forward takes more than the hidden states")
    return refusal


def refuse_replaced_forward(module: nn.Module) -> Refusal | None:
    """Return why a forward is not the one of the module's class alone, or None."""
    if "forward" in vars(module):
        return Refusal("its forward was replaced on the instance")
    if hasattr(type(module).forward, "__wrapped__"):
        return Refusal("its forward is wrapped by a decorator")
    return None
