"""Recognise norms and gated MLPs that one of our kernels can compute.

There is no table of models. A module is recognised if its own forward, run on a few numbers, equals exactly one row of
a table of kernel specs: a new model family needs no code, and an upstream class that changes is left alone instead of
being patched wrongly. `rope_patch` recognises rotary functions, `experts` the experts of a mixture.
"""

from __future__ import annotations

import functools
from dataclasses import dataclass
from typing import Literal

import torch
import torch.nn.functional as F
from ligertune_kernels.ops.norms.rms_norm import rms_norm_reference
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

# ---- norms


@dataclass(frozen=True)
class NormSpec:
    """The arguments with which `rms_norm` equals a norm. eps_name: the attribute that holds its eps.

    cast: "none" for a norm without a weight, which rounds only once.
    """

    cast: Literal["llama", "gemma", "none"]
    offset: float
    eps_name: str
    kernel = "rms_norm"


NORMS = (("llama", 0.0), ("gemma", 1.0), ("gemma", 0.0))  # (cast, offset): Llama; Gemma; OLMo 2
WEIGHTLESS_NORMS = (("none", 0.0),)  # the value norms of Gemma 3n and 4, the query and key norms of Llama 4
EPS_NAMES = ("variance_epsilon", "eps")
WEIGHTLESS_WIDTH = 64
PROBE_EPS = 0.37  # as large as the variance, so that an eps in another place, or a missing one, is noticed
DTYPES = (  # (weight, hidden states): rounding and the dtype of the result must be equal, too
    (torch.float32, torch.float32),
    (torch.bfloat16, torch.bfloat16),
    (torch.float16, torch.float16),
    (torch.float32, torch.bfloat16),
)


def is_layer_norm(module: nn.Module) -> bool:
    """Return whether a module is torch's layer norm, patched or not."""
    return type(module) is nn.LayerNorm or getattr(type(module), "patch_original", None) is nn.LayerNorm


@dataclass(frozen=True)
class LayerNormSpec:
    """torch.nn.LayerNorm needs no probe: the class says what it computes."""

    kernel = "layer_norm"


def recognise_layer_norm(module: nn.LayerNorm) -> LayerNormSpec | Refusal:
    """Accept a layer norm over the last dimension whose forward was not replaced."""
    if len(module.normalized_shape) != 1:
        return Refusal("it normalises over more than the last dimension")
    return refuse_forward(module) or LayerNormSpec()


def is_norm(module: nn.Module) -> bool:
    """Return whether a module is a leaf with "norm" in its class name. The report counts these."""
    named = "norm" in type(module).__name__.lower() and next(module.children(), None) is None
    return named and not is_layer_norm(module)


def recognise_norm(module: nn.Module) -> NormSpec | Refusal:
    """Return the `rms_norm` that equals this norm bit for bit in half precision, or why there is none."""
    others = [name for name, _ in module.named_parameters() if name != "weight"]
    weight = getattr(module, "weight", None)
    if others or not (weight is None or (isinstance(weight, Tensor) and weight.ndim == 1)):
        return Refusal(f"it has {', '.join(others)}" if others else "its weight is not a tensor of one dimension")
    eps_name = next((name for name in EPS_NAMES if isinstance(getattr(module, name, None), float)), None)
    if eps_name is None:
        return Refusal(f"it has no eps under a name we know ({', '.join(EPS_NAMES)})")
    cls, width = type(module), None if weight is None else weight.shape[0]
    return refuse_forward(module) or _norm_spec(cls, definition_of(cls), settings_of(module), eps_name, width)


@functools.cache
def _norm_spec(
    cls: type, definition: Definition, settings: Settings, eps_name: str, width: int | None
) -> NormSpec | Refusal:
    """Compare with `rms_norm`. width: size of the weight, None if there is none."""
    candidates = list(NORMS if width else WEIGHTLESS_NORMS)
    for weight_dtype, dtype in DTYPES if width else {(dtype, dtype) for _, dtype in DTYPES}:
        weight = numbers(width, seed=1, dtype=weight_dtype) if width else None
        n_cols = width or WEIGHTLESS_WIDTH
        x = numbers(max(3, 1024 // n_cols), n_cols, dtype=dtype)  # enough elements for every rounding to show
        members = {eps_name: PROBE_EPS}
        if weight is not None:
            members["weight"] = nn.Parameter(weight, requires_grad=False)
        given = answer(lambda: cls.forward(stub(cls, settings, **members), x))  # noqa: B023  called at once
        if isinstance(given, Refusal):
            return given
        candidates = [
            (cast, offset)
            for cast, offset in candidates
            if _same(given, rms_norm_reference(x, weight, PROBE_EPS, offset=offset, cast=cast))
        ]
    if len(candidates) != 1:
        return Refusal("its numbers are not those of an RMS norm we have")
    return NormSpec(*candidates[0], eps_name)


def _same(given: object, ours: Tensor) -> bool:
    """Compare exactly in half precision, and up to the order of summation in fp32."""
    rtol, atol = (2e-6, 1e-7) if ours.dtype == torch.float32 else (0.0, 0.0)
    return close(given, ours, rtol=rtol, atol=atol)


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
