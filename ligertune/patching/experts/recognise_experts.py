"""Recognise experts of a mixture that `ligertune_kernels`' op `experts` computes.

As in `recognise_mlps`, there is no table of models: the module's own forward runs on a few numbers, with few and small
experts, and must equal the op for exactly one activation and layout. Experts that do more than the op, but multiply
gate and up in `_apply_gate`, are recognised by that method alone.
"""

from __future__ import annotations

import functools
import inspect
import itertools
import math
from collections.abc import Iterator
from dataclasses import dataclass
from types import SimpleNamespace
from typing import Any

import torch
from ligertune_kernels.ops.moe.expert_passes import ExpertLayout, ExpertProjection
from ligertune_kernels.ops.moe.experts import experts_reference
from ligertune_kernels.ops.moe.kernels import GatedActivation
from ligertune_kernels.ops.moe.quantised_weight import QuantisedWeight
from torch import Tensor, nn
from torch.nn.utils import parametrize
from transformers.integrations.moe import ALL_EXPERTS_FUNCTIONS

from ligertune.patching.mlps.activations import ACTIVATIONS, MAGNITUDES, ActivationKind, activation_of, waves
from ligertune.patching.mlps.recognise_mlps import GatedSpec, is_mlp
from ligertune.patching.probe import (
    Definition,
    Refusal,
    Settings,
    answer,
    close,
    definition_of,
    numbers,
    settings_of,
    stub,
)

OUR_IMPLEMENTATION = "ligertune"  # value of transformers' `experts_implementation`
WEIGHTS = ("gate_up_proj", "down_proj")
BIASES = ("gate_up_proj_bias", "down_proj_bias")


@dataclass(frozen=True)
class ExpertsSpec:
    """The arguments with which the op `experts` equals a module."""

    activation: GatedActivation
    layout: ExpertLayout
    kernel = "experts"


def is_experts(module: nn.Module) -> bool:
    """Return whether a module holds the weights of several experts. The report counts these."""
    gate_up = module._parameters.get("gate_up_proj")
    if gate_up is not None and gate_up.ndim == 3:
        return True
    named = "experts" in type(module).__name__.lower()
    return named and not isinstance(module, nn.ModuleList | nn.ModuleDict) and not is_mlp(module)


def recognise_experts(module: nn.Module) -> ExpertsSpec | GatedSpec | Refusal:
    """Return the arguments of `experts` that equal this module, the kernel that equals its `_apply_gate`, or why none.

    The whole module comes first. It is recognised whatever its `experts_implementation` is.
    """
    replaced = "forward" in vars(module)
    whole = Refusal("its forward was replaced on the instance") if replaced else recognise_class(module)
    if isinstance(whole, Refusal):
        gate = _recognise_gate(module)
        return whole if isinstance(gate, Refusal) else gate
    return whole


def recognise_class(module: nn.Module) -> ExpertsSpec | Refusal:
    """Return the arguments of `experts` that equal the forward of the module's class, or why there are none."""
    if "_apply_gate" in vars(module):
        return Refusal("its _apply_gate was replaced on the instance")
    if len(inspect.signature(type(module).forward).parameters) != 4:  # with self
        return Refusal("its forward does not take hidden states, expert indices and router weights")
    sizes = _sizes_of(module)
    if isinstance(sizes, Refusal):
        return sizes
    activation = activation_of(module)
    if isinstance(activation, Refusal):
        return activation
    implementation = _probed_implementation(module)
    if implementation == "deepgemm_megamoe":
        return Refusal("experts_implementation 'deepgemm_megamoe' stores the weights in another layout")
    cls = parametrize.type_before_parametrizations(module)
    cls = getattr(cls, "patch_original", cls)
    return _experts_spec(
        cls,
        (*definition_of(cls), ALL_EXPERTS_FUNCTIONS.get(implementation, None)),
        settings_of(module),
        implementation,
        activation,
        sizes,
    )


# ---- the weights


@dataclass(frozen=True)
class _Sizes:
    """Sizes of an experts module: X experts, hidden size E, width F."""

    experts: int
    hidden: int
    width: int
    transposed: bool
    biased: bool

    def shapes(self) -> dict[str, tuple[int, ...]]:
        gate_up = (self.experts, 2 * self.width, self.hidden)
        down = (self.experts, self.hidden, self.width)
        if self.transposed:
            gate_up = (gate_up[0], gate_up[2], gate_up[1])
            down = (down[0], down[2], down[1])
        biases = (self.experts, 2 * self.width), (self.experts, self.hidden)
        return dict(zip(WEIGHTS, (gate_up, down), strict=True)) | (
            dict(zip(BIASES, biases, strict=True)) if self.biased else {}
        )


SMALL = {"experts": 4, "hidden": 32, "width": 24}  # sizes of the probe: 2F differs from E, and both suit grouped_mm


def _sizes_of(module: nn.Module) -> _Sizes | Refusal:
    """Return the sizes that a module's parameters have, or why the op cannot take them."""
    held = {
        name: parameter for name, parameter in module.named_parameters() if not name.startswith("parametrizations.")
    }
    # PEFT's target_parameters are parametrizations while the experts run; it caches their values, with gradients
    held |= {name: getattr(module, name) for name in getattr(module, "parametrizations", ())}
    if {"up_proj", "down_proj"} <= held.keys() and not {"gate_up_proj", "gate_proj"} & held.keys():
        return Refusal("its experts have no gate")
    if not held.keys() >= set(WEIGHTS):
        return Refusal("its weights are not gate_up_proj and down_proj of all experts")
    others = held.keys() - {*WEIGHTS, *BIASES}
    if others:
        return Refusal(f"it has {', '.join(sorted(others))}")
    for name, parameter in held.items():
        why = unreadable(parameter)
        if why is not None:
            return Refusal(f"{name} {why}")
    shapes = {name: tuple(parameter.shape) for name, parameter in held.items()}
    if len(shapes["gate_up_proj"]) == len(shapes["down_proj"]) == 3:
        experts, first, last = shapes["down_proj"]
        for transposed, hidden, width in ((False, first, last), (True, last, first)):
            sizes = _Sizes(experts, hidden, width, transposed, biased=len(held) > len(WEIGHTS))
            if sizes.shapes() == shapes:
                return sizes
    return Refusal("the shapes of its weights are not (X, 2F, E) and (X, E, F), in this or the transposed order")


def unreadable(weight: Tensor) -> str | None:
    """Return why kernels cannot read a weight: "is a DTensor"; None if they can."""
    if type(weight) not in (Tensor, nn.Parameter, QuantisedWeight):
        return f"is a {type(weight).__name__}"
    if weight.dtype not in (torch.float32, torch.bfloat16, torch.float16, torch.float64):
        return f"has dtype {str(weight.dtype).removeprefix('torch.')}"
    return None


# ---- the whole module

# (dtype, tolerance of a row's largest value, training). In fp32 the classes of transformers 5.24 need 6 % of the
# tolerance, and the nearest other form 70 times as much. Half precision shows the dtype of the result only: models and
# kernels round in other places.
PROBES = ((torch.float32, 2e-6, True), (torch.float32, 2e-6, False), (torch.bfloat16, 5e-2, True))
ON_GPU_ONLY = ("deepgemm", "sonicmoe")  # transformers' kernels that compute what the class's own loop does


def _probed_implementation(module: nn.Module) -> str:
    """Return the implementation that is probed: the one in use, or the class's own loop where it needs a GPU."""
    chosen = getattr(getattr(module, "config", None), "_experts_implementation", None)
    return "eager" if chosen in (None, OUR_IMPLEMENTATION, *ON_GPU_ONLY) else chosen


@functools.cache
def _experts_spec(
    cls: type,
    definition: Definition,
    settings: Settings,
    implementation: str,
    activation: tuple[str, ActivationKind] | None,
    sizes: _Sizes,
) -> ExpertsSpec | Refusal:
    """Compare a class's forward with `experts_reference`."""
    small = _Sizes(**SMALL, transposed=sizes.transposed, biased=sizes.biased)
    members: dict[str, Any] = {
        "config": SimpleNamespace(_experts_implementation=implementation),
        "_is_expert_parallel": False,
    }
    if activation is not None:
        members[activation[0]] = ACTIVATIONS[activation[1]]
    settings = _small_settings(settings, sizes)
    found = list(_candidates(settings, sizes.transposed))
    for dtype, tolerance, training in PROBES:
        weights = {
            name: numbers(*shape, seed=seed, dtype=dtype) / 3
            for seed, (name, shape) in enumerate(small.shapes().items(), 1)
        }
        parameters = {name: nn.Parameter(weight, requires_grad=False) for name, weight in weights.items()}
        x = (numbers(2 * len(MAGNITUDES), small.hidden) * _magnitudes()).to(dtype)
        index, router = _routes(len(x), small.experts)
        routed = (x, index, router)
        given = answer(
            lambda: stub(cls, settings, **members, **parameters, training=training).forward(  # noqa: B023  called at once
                *(tensor.clone() for tensor in routed)  # noqa: B023
            )
        )
        if isinstance(given, Refusal):
            return given
        gate_up, down = (ExpertProjection(weights[w], weights.get(b)) for w, b in zip(WEIGHTS, BIASES, strict=True))
        arguments = (*routed, gate_up, down)
        found = [
            spec
            for spec in found
            if _same_rows(
                given, experts_reference(*arguments, activation=spec.activation, layout=spec.layout), tolerance
            )
        ]
    if len(found) != 1:
        return Refusal(
            "its forward computes something else than the sum of down(act(gate(x)) * up(x)) over the experts"
        )
    return found[0]


def _small_settings(settings: Settings, sizes: _Sizes) -> Settings:
    """Return the settings of the module with the sizes of the probe."""

    def small(name: str, value: Any) -> Any:
        for part, size, ours in (
            ("expert", sizes.experts, SMALL["experts"]),
            ("hidden", sizes.hidden, SMALL["hidden"]),
            ("intermediate", sizes.width, SMALL["width"]),
        ):
            if part in name and type(value) is int and value == size:
                return ours
        return value

    return tuple((name, small(name, value)) for name, value in settings)


def _candidates(settings: Settings, transposed: bool) -> Iterator[ExpertsSpec]:
    """Yield every activation with the limits and factors among the module's settings, in both orders of the halves."""
    values = {name: float(value) for name, value in settings if type(value) in (int, float) and math.isfinite(value)}
    limits = [None, *sorted({value for name, value in values.items() if "limit" in name})]
    alphas = sorted({1.0} | {value for name, value in values.items() if "alpha" in name})
    gates = [GatedActivation("silu", alpha) for alpha in alphas]
    gates += [GatedActivation("gelu_tanh"), GatedActivation("gelu_erf")]
    for gate, limit, offset, interleaved in itertools.product(gates, limits, (0.0, 1.0), (False, True)):
        activation = gate._replace(limit=limit, up_offset=offset)
        yield ExpertsSpec(activation, ExpertLayout(transposed, interleaved))


def _magnitudes() -> Tensor:
    """Return the magnitude of each row of the probe (2M, 1): a clamp anywhere below 1e4 is noticed."""
    return torch.tensor(MAGNITUDES * 2, device="cpu").unsqueeze(1)


def _routes(rows: int, experts: int) -> tuple[Tensor, Tensor]:
    """Return two experts for each row (rows, 2), and their weights; the last expert gets no token."""
    first = torch.arange(rows, device="cpu") % (experts - 1)
    index = torch.stack([first, (first + 1) % (experts - 1)], dim=1)
    return index, numbers(rows, 2, seed=9)


def _same_rows(given: Any, ours: Tensor, tolerance: float) -> bool:
    """Compare each row with a tolerance relative to its largest value: the rows have different magnitudes."""
    largest = ours.abs().amax(dim=-1, keepdim=True).clamp(min=1e-30)
    if not isinstance(given, Tensor) or given.shape != ours.shape or given.dtype != ours.dtype:
        return False
    return close(given.float() / largest.float(), ours.float() / largest.float(), rtol=0.0, atol=tolerance)


# ---- `_apply_gate`, which the fast implementations call, computes act(gate) * up

EXPERTS_WITH_GATE = ("grouped_mm", "batched_mm", "deepgemm")  # "eager" multiplies in its own loop


def _recognise_gate(module: nn.Module) -> GatedSpec | Refusal:
    """Return the packed kernel that equals the `_apply_gate` of these experts, or why there is none."""
    implementation = getattr(getattr(module, "config", None), "_experts_implementation", None)
    cls: type = type(module)
    if implementation not in EXPERTS_WITH_GATE or not hasattr(cls, "_apply_gate"):
        return Refusal(f"experts_implementation {implementation!r} does not call _apply_gate")
    if "_apply_gate" in vars(module):
        return Refusal("its _apply_gate was replaced on the instance")
    activation = activation_of(module)
    if activation is None or isinstance(activation, Refusal):
        return activation or Refusal("it has no activation")
    name, kind = activation
    return _refuse_gate(cls, definition_of(cls), settings_of(module), name) or GatedSpec(*kind, packed=True)


@functools.cache
def _refuse_gate(cls: type, definition: Definition, settings: Settings, activation_name: str) -> Refusal | None:
    gate_up = numbers(len(MAGNITUDES), 16) * torch.tensor(MAGNITUDES, device="cpu").view(-1, 1)
    gate, up = gate_up.chunk(2, dim=-1)
    probed = stub(cls, settings)
    setattr(probed, activation_name, waves)
    given = answer(lambda: probed._apply_gate(gate_up))
    if isinstance(given, Refusal):
        return given
    if not close(given, waves(gate) * up, rtol=1e-5, atol=1e-5):
        return Refusal("its _apply_gate computes something else than act(gate) * up")
    return None
