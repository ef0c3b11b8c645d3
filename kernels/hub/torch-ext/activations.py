"""Activations of MLPs and experts, told by their values: a layer must compute what its module does."""

import weakref
from collections.abc import Callable

import torch
from torch import nn

from .ops.moe.experts import GatedActivation, activate
from .tracing import constant_while_tracing

PROBE = 10 * torch.sin(torch.arange(96, dtype=torch.float32) ** 1.5).view(2, 48)  # beyond the limits of clamped gates
_FOUND: weakref.WeakKeyDictionary[nn.Module, GatedActivation | None] = weakref.WeakKeyDictionary()


@constant_while_tracing
def activation_of(mlp: nn.Module, expected: tuple[str, ...]) -> str:
    """Return which of silu, gelu_tanh and gelu_erf an MLP's `act_fn` is.

    Raises ValueError for another one than those expected.
    """
    ones = torch.ones_like(PROBE)
    found = _find(mlp, lambda: mlp.act_fn(PROBE), [(GatedActivation(name), PROBE, ones) for name in FUNCTIONS])
    if found is None or found.function not in expected:
        raise ValueError(
            f"the activation of {type(mlp).__name__} is not {' or '.join(expected)}: map another layer to it, or none"
        )
    return found.function


FUNCTIONS = ("silu", "gelu_tanh", "gelu_erf")


@constant_while_tracing
def gate_of(experts: nn.Module) -> GatedActivation:
    """Return the options of the op `experts` with which it multiplies gate and up as the module's `_apply_gate`.

    Raises ValueError where there are none.
    """
    limit = getattr(experts, "limit", getattr(experts, "swiglu_limit", None))
    options = [GatedActivation(name) for name in FUNCTIONS]
    if limit is not None:
        options += [GatedActivation("silu", limit=float(limit))]
        options += [GatedActivation("silu", float(getattr(experts, "alpha", 1.0)), float(limit), up_offset=1.0)]
    gate, up = PROBE.chunk(2, dim=-1) if getattr(experts, "is_concatenated", True) else (PROBE[:, ::2], PROBE[:, 1::2])
    found = _find(experts, lambda: experts._apply_gate(PROBE), [(one, gate, up) for one in options])
    if found is None:
        raise ValueError(
            f"the gate of {type(experts).__name__} is none that the op `experts` computes: "
            "write experts_implementation='grouped_mm'"
        )
    return found


def _find(
    module: nn.Module,
    compute: Callable[[], torch.Tensor],
    candidates: list[tuple[GatedActivation, torch.Tensor, torch.Tensor]],
) -> GatedActivation | None:
    """Return the candidate that equals what the module computes. The first call of a module finds it."""
    if module not in _FOUND:
        with torch.no_grad(), torch.device("cpu"):
            values = compute()
            equal = (one for one, gate, up in candidates if torch.allclose(activate(gate, up, one), values, atol=1e-5))
            _FOUND[module] = next(equal, None)
    return _FOUND[module]
