"""Recognise norms that one of our kernels can compute.

As in `recognise`, there is no table of models: the module's own forward runs on a few numbers, in every dtype that
shows where it rounds, and has to equal exactly one row of a table of kernel specs.
"""

from __future__ import annotations

import functools
from dataclasses import dataclass
from typing import Literal

import torch
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
