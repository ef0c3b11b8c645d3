"""Activations that our gated kernels compute, and how one is told by its values."""

from __future__ import annotations

import functools
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any, Literal

import torch
import torch.nn.functional as F
from ligertune_kernels.ops.mlp.gated_mlp import geglu_reference, reglu_reference, swiglu_reference
from torch import Tensor, nn

from ligertune.patching.probe import Refusal, answer

GatedKernel = Literal["swiglu", "geglu", "reglu"]
Approximate = Literal["none", "tanh"]
ActivationKind = tuple[GatedKernel, Approximate]

# the activation that a GatedSpec's kernel computes
ACTIVATIONS: dict[ActivationKind, Callable[[Tensor], Tensor]] = {
    ("swiglu", "none"): F.silu,
    ("geglu", "tanh"): functools.partial(F.gelu, approximate="tanh"),
    ("geglu", "none"): F.gelu,
}
# `squared` of the op `reglu` -> its activation
RELUS: dict[bool, Callable[[Tensor], Tensor]] = {False: F.relu, True: lambda x: F.relu(x).square()}
ACTIVATION_NAMES = ("act_fn", "activation_fn")  # of experts


@dataclass(frozen=True)
class OtherActivation(Refusal):
    """An activation that no gated kernel computes."""


def activation_of(module: nn.Module) -> tuple[str, ActivationKind] | Refusal | None:
    """Return the attribute that holds a module's activation, and its key in ACTIVATIONS, which its values tell.

    Returns None if it has no activation under a name we know.
    """
    name = next((name for name in ACTIVATION_NAMES if callable(getattr(module, name, None))), None)
    if name is None:
        return None
    kind = kind_of(getattr(module, name))
    return kind if isinstance(kind, Refusal) else (name, kind)


def kind_of(function: Callable[[Tensor], Tensor]) -> ActivationKind | Refusal:
    """Return the key in ACTIVATIONS of a function, which its values tell, or why there is none."""
    if isinstance(function, nn.Module) and next(function.parameters(), None) is not None:
        return Refusal(f"its activation {type(function).__name__} has parameters")
    found = _equal_to(function, ACTIVATIONS)
    name = getattr(function, "__name__", type(function).__name__)
    return OtherActivation(f"its activation {name} is neither SiLU nor GELU") if found is None else found


def relu_of(function: Callable[[Tensor], Tensor]) -> bool | Refusal:
    """Return the argument `squared` with which `reglu` has a function as its activation, or why there is none."""
    found = _equal_to(function, RELUS)
    return OtherActivation("its activation is no ReLU") if found is None else found


def _equal_to(function: Callable[[Tensor], Tensor], table: Mapping[Any, Callable[[Tensor], Tensor]]) -> Any | Refusal:
    """Return the key of the row of a table that has a function's values; None if there is none."""
    x = torch.cat(
        [torch.linspace(-20, 20, 801, device="cpu"), torch.tensor([-1e4, 1e4], device="cpu")]
    )  # the last two notice a clamp
    given = answer(function, x.clone())
    if isinstance(given, Refusal):
        return given
    # Activations of transformers 5.24 need 15 % of this tolerance, and the nearest other function 400 times as much.
    equal = (
        key
        for key, activation in table.items()
        if isinstance(given, Tensor) and torch.allclose(given, activation(x), rtol=1e-5, atol=1e-6)
    )
    return next(equal, None)


MAGNITUDES = (1.0, 30.0, 1e3, 1e4)  # one per row: a clamp anywhere below 1e4 is noticed


def waves(x: Tensor) -> Tensor:
    """The activation of a stub. No model has it, and it is unbounded, so that a clamp of its output is noticed."""
    return x * torch.cos(x)


FIRST = 64  # columns that are compared first: most activations differ there already


def computes(
    kind: ActivationKind,
    gate: Tensor,  # (..., F) float32
    up: Tensor,  # (..., F)
    product: Tensor,  # (..., F)
    options: Mapping[str, Any],  # keywords of the kernel
) -> bool:
    """Return whether a kernel makes `product` of gate and up."""
    for columns in (slice(FIRST), slice(None)):
        gates, ups, products = (t[..., columns] for t in (gate, up, product))
        if kind[0] == "swiglu":
            ours = swiglu_reference(gates, ups, **options)
        elif kind[0] == "reglu":
            ours = reglu_reference(gates, ups, **options)
        else:
            ours = geglu_reference(gates, ups, approximate=kind[1])
        # Where act(gate) is almost zero its rounding counts times up. The MLPs of transformers 5.24 have our bits; the
        # nearest other form needs 45 times this tolerance.
        if not bool(((products - ours).abs() <= 1e-5 * (ours.abs() + ups.abs()) + 1e-6).all()):
            return False
    return True
