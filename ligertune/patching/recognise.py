"""Recognise gated MLPs that one of our kernels can compute.

There is no table of models. A module is recognised if its own forward, run on a few numbers, equals exactly one row of
a table of kernel specs: a new model family needs no code, and an upstream class that changes is left alone instead of
being patched wrongly. `norms` recognises norms, `rope_patch` rotary functions, `experts` the experts of a mixture.
"""

from __future__ import annotations

import functools
from dataclasses import dataclass
from typing import Literal

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from ligertune.patching.probe import (
    Definition,
    Refusal,
    Settings,
    answer,
    close,
    definition_of,
    numbers,
    refuse_forward,
    settings_of,
    stub,
)

# ---- gated MLPs: down(act(gate(x)) * up(x))


@dataclass(frozen=True)
class GatedSpec:
    """The kernel that multiplies act(gate) by up. packed: one projection computes both (`gate_up_proj`)."""

    kernel: Literal["swiglu", "geglu"]
    approximate: Literal["none", "tanh"]
    packed: bool


# (kernel, approximate) of a GatedSpec -> the activation that it computes
ACTIVATIONS = {
    ("swiglu", "none"): F.silu,
    ("geglu", "tanh"): functools.partial(F.gelu, approximate="tanh"),
    ("geglu", "none"): F.gelu,
}
ACTIVATION_NAMES = ("act_fn", "activation_fn")
SPLIT, PACKED = {"gate_proj", "up_proj", "down_proj"}, {"gate_up_proj", "down_proj"}


def is_gated_mlp(module: nn.Module) -> bool:
    """Return whether a module has gate, up and down projections as submodules. The report counts these."""
    names = {name for name, _ in module.named_children()}
    return names >= SPLIT or names >= PACKED


def recognise_mlp(module: nn.Module) -> GatedSpec | Refusal:
    """Return the gated kernel that equals this MLP between its projections, or why there is none."""
    packed = "gate_up_proj" in dict(module.named_children())

    activation = activation_of(module)
    if activation is None:
        return Refusal(f"it has no activation under a name we know ({', '.join(ACTIVATION_NAMES)})")
    if isinstance(activation, Refusal):
        return activation
    name, kind = activation
    cls = type(module)
    refusal = refuse_forward(module) or _refuse_mlp(cls, definition_of(cls), settings_of(module), name, packed)
    return refusal or GatedSpec(*kind, packed)


def activation_of(module: nn.Module) -> tuple[str, tuple[str, str]] | Refusal | None:
    """Return the attribute that holds a module's activation, and its key in ACTIVATIONS, which its values tell.

    Returns None if it has no activation under a name we know.
    """
    name = next((name for name in ACTIVATION_NAMES if callable(getattr(module, name, None))), None)
    if name is None:
        return None
    function = getattr(module, name)
    if isinstance(function, nn.Module) and next(function.parameters(), None) is not None:
        return Refusal(f"its activation {type(function).__name__} has parameters")
    x = torch.cat(
        [torch.linspace(-20, 20, 801, device="cpu"), torch.tensor([-1e4, 1e4], device="cpu")]
    )  # the last two notice a clamp
    given = answer(function, x.clone())
    if isinstance(given, Refusal):
        return given
    for kind, activation in ACTIVATIONS.items():
        if isinstance(given, Tensor) and torch.allclose(given, activation(x), rtol=1e-5, atol=1e-6):
            return name, kind
    return Refusal(f"its activation {getattr(function, '__name__', type(function).__name__)} is neither SiLU nor GELU")


class _Affine(nn.Module):
    """Replacement of a projection in a stub: x * scale + shift, so that each use of it changes the result."""

    def __init__(self, *terms: tuple[float, float]) -> None:
        super().__init__()
        self.terms = terms

    def forward(self, x: Tensor) -> Tensor:
        return torch.cat([x * scale + shift for scale, shift in self.terms], dim=-1)


def waves(x: Tensor) -> Tensor:
    """The activation of a stub. No model has it, and it is unbounded, so that a clamp of its output is noticed."""
    return x * torch.cos(x)


GATE, UP, DOWN = (0.6, 0.1), (1.9, -0.2), (1.7, 0.3)
MAGNITUDES = (1.0, 30.0, 1e3, 1e4)  # one per row: a clamp anywhere below 1e4 is noticed


@functools.cache
def _refuse_mlp(
    cls: type, definition: Definition, settings: Settings, activation_name: str, packed: bool
) -> Refusal | None:
    projections = {"down_proj": _Affine(DOWN)}
    projections |= (
        {"gate_up_proj": _Affine(GATE, UP)} if packed else {"gate_proj": _Affine(GATE), "up_proj": _Affine(UP)}
    )
    x = numbers(len(MAGNITUDES), 3, 8) * torch.tensor(MAGNITUDES, device="cpu").view(-1, 1, 1)
    gate, up = x * GATE[0] + GATE[1], x * UP[0] + UP[1]
    expected = waves(gate) * up * DOWN[0] + DOWN[1]
    for training in (True, False):
        members = {**projections, activation_name: waves, "training": training}
        given = answer(lambda: cls.forward(stub(cls, settings, **members), x))  # noqa: B023  called at once
        if isinstance(given, Refusal):
            return given
        if not close(given, expected, rtol=1e-5, atol=1e-5):
            return Refusal("it computes something else than down(act(gate(x)) * up(x))")
    return None
