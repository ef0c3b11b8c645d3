"""Recognise RMS norms with a gate, of linear attention and state-space layers, that `gated_rms_norm` can compute.

The module's own forward runs on a few numbers and a gate, and has to equal exactly one form: the gate before or after
the norm, SiLU or sigmoid, where it rounds, and over how many columns it normalises.
"""

from __future__ import annotations

import functools
import itertools
from dataclasses import dataclass, replace
from typing import Any, Literal, get_args

import torch
from ligertune_kernels.ops.norms.gated_rms_norm import Activation, gated_rms_norm_reference
from torch import Tensor, nn

from ligertune.patching.norms.recognise_norms import (
    PROBE_EPS,
    SAME_DTYPES,
    Parameters,
    eps_candidates,
    is_norm_leaf,
    norm_parameters,
    other_rounding,
    probe_rows,
    refuse_parameters,
    reported_as,
)
from ligertune.patching.probe import (
    Definition,
    Refusal,
    Settings,
    answer,
    close,
    definition_of,
    numbers,
    refuse_replaced_forward,
    settings_of,
    stub,
)

GatedCast = Literal["llama", "gemma"]

FP32 = torch.float32
BF16 = torch.bfloat16
MIXED = ((FP32, BF16, BF16), (BF16, FP32, FP32), (BF16, BF16, FP32), (BF16, FP32, BF16))  # weight, hidden states, gate
OTHER_NUMBERS = "its numbers are not those of an RMS norm with a SiLU or sigmoid gate before or after it"


@dataclass(frozen=True)
class GatedNormSpec:
    """The arguments with which `gated_rms_norm` equals a norm. eps_name and mixed: as in NormSpec."""

    norm_before_gate: bool
    activation: Activation
    cast: GatedCast
    group_size: int | None
    eps_name: str | float = ""
    mixed: bool = True
    kernel = "gated_rms_norm"

    def options(self) -> dict[str, Any]:
        """Return the keyword arguments of `gated_rms_norm`."""
        return {
            "norm_before_gate": self.norm_before_gate,
            "activation": self.activation,
            "cast": self.cast,
            "group_size": self.group_size,
        }


def is_gated_norm(module: nn.Module) -> bool:
    """Return whether a module is a norm whose forward takes the hidden states and a gate."""
    return is_norm_leaf(module) and reported_as(module) == "gated_rms_norm"


def recognise_gated_norm(module: nn.Module) -> GatedNormSpec | Refusal:
    """Return the `gated_rms_norm` that equals this norm bit for bit in half precision, or why there is none."""
    refusal = refuse_parameters(module) or refuse_replaced_forward(module)
    if refusal:
        return refusal
    parameters = norm_parameters(module)
    if not parameters.weight or parameters.bias:
        return Refusal("it has a bias" if parameters.bias else "it has a gate and no weight")
    cls: type = type(module)
    return _recognise_class(cls, definition_of(cls), settings_of(module), parameters)


@functools.cache
def _recognise_class(
    cls: type, definition: Definition, settings: Settings, parameters: Parameters
) -> GatedNormSpec | Refusal:
    specs = [
        GatedNormSpec(before, activation, cast, size)
        for before, activation, cast, size in itertools.product(
            (True, False), get_args(Activation), get_args(GatedCast), _group_sizes(settings, parameters.width)
        )
    ]
    found = [_match(cls, settings, parameters, eps, specs) for eps in eps_candidates(settings)]
    return next((spec for spec in found if not isinstance(spec, Refusal)), found[0])


def _group_sizes(settings: Settings, width: int) -> list[int | None]:
    """Return the sizes that groups may have by the module's settings, each a size or a number of groups."""
    whole = [value for _, value in settings if type(value) is int and 0 < value < width and width % value == 0]
    return [None, *sorted({size for value in whole for size in (value, width // value) if size < width})]


def _match(
    cls: type, settings: Settings, parameters: Parameters, eps: str | float, specs: list[GatedNormSpec]
) -> GatedNormSpec | Refusal:
    def given_and_matching(
        weight_dtype: torch.dtype, dtype: torch.dtype, gate_dtype: torch.dtype
    ) -> tuple[object, list[GatedNormSpec]]:
        x = probe_rows(parameters.width, eps, dtype)
        gate = 2.0 * numbers(*x.shape, seed=3, dtype=gate_dtype)
        members = parameters.numbers(weight_dtype)
        weight = members["weight"]
        assert weight is not None  # `recognise_gated_norm` refuses norms without one
        value, held = (PROBE_EPS, {eps: PROBE_EPS}) if isinstance(eps, str) else (eps, {})
        given = answer(lambda: stub(cls, settings, **held, **members).forward(x, gate))
        if isinstance(given, Refusal):
            return given, []
        return given, [spec for spec in remaining if _equals(given, x, gate, weight, value, spec)]

    remaining = specs
    for dtype in SAME_DTYPES:
        given, remaining = given_and_matching(dtype, dtype, dtype)
        if isinstance(given, Refusal):
            return given
        if not remaining:
            return Refusal(OTHER_NUMBERS if dtype is torch.float32 else other_rounding(dtype))
    if len(remaining) != 1:
        return Refusal(OTHER_NUMBERS)
    results = [given_and_matching(*dtypes) for dtypes in MIXED]
    mixed = all(found or isinstance(given, Refusal) for given, found in results)
    return replace(remaining[0], eps_name=eps, mixed=mixed)


def _equals(given: object, x: Tensor, gate: Tensor, weight: Tensor, eps: float, spec: GatedNormSpec) -> bool:
    """Compare exactly in half precision, and up to the order of summation in fp32."""
    ours = gated_rms_norm_reference(x, gate, weight, eps, **spec.options())
    # The norms of transformers 5.24 have our bits; the nearest other form needs 48,000 times this tolerance.
    rtol, atol = (2e-6, 1e-7) if ours.dtype == torch.float32 else (0.0, 0.0)
    return close(given, ours, rtol=rtol, atol=atol)
