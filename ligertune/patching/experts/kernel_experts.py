"""Compute experts of a mixture by the op `experts`: as a patch of modules, and as transformers' implementation.

    register_experts()
    model = AutoModelForCausalLM.from_pretrained(name, experts_implementation="ligertune")

`patch` recognises experts whatever their implementation is, and needs no registration.
"""

from __future__ import annotations

import warnings
import weakref
from dataclasses import dataclass
from typing import Any

from ligertune_kernels.ops.moe.expert_passes import ExpertLora, ExpertProjection
from ligertune_kernels.ops.moe.experts import experts
from ligertune_kernels.ops.moe.quantised_weight import as_weight
from ligertune_kernels.tracing import constant_while_tracing
from torch import Tensor, nn
from transformers.integrations.moe import ALL_EXPERTS_FUNCTIONS

from ligertune.errors import UserError
from ligertune.patching.experts.recognise_experts import (
    BIASES,
    OUR_IMPLEMENTATION,
    WEIGHTS,
    ExpertsSpec,
    recognise_class,
    unreadable,
)
from ligertune.patching.module_patch import ModulePatch
from ligertune.patching.probe import Refusal


@dataclass(frozen=True)
class ExpertWeights:
    """What the op `experts` reads of a module: weights and biases in the layout of its spec, and their LoRA."""

    gate_up: ExpertProjection
    down: ExpertProjection


def weights_of(module: nn.Module) -> ExpertWeights | Refusal:
    """Return the weights of a module for this forward, or why kernels cannot read them.

    FSDP2, expert parallelism and parametrizations may have changed them since the module was recognised.
    """
    # once: a parametrization computes them
    held: dict[str, Any] = {name: getattr(module, name, None) for name in (*WEIGHTS, *BIASES)}
    for name, weight in held.items():
        why = None if weight is None else unreadable(weight)
        if why is not None:
            return Refusal(f"{name} {why}")
    gate_up, down, gate_up_bias, down_bias = held.values()
    return ExpertWeights(
        ExpertProjection(as_weight(gate_up), gate_up_bias), ExpertProjection(as_weight(down), down_bias)
    )


def run_experts(
    spec: ExpertsSpec,
    weights: ExpertWeights,
    hidden_states: Tensor,  # (N, E)
    top_k_index: Tensor,  # (N, K); an index of no expert, as expert parallelism writes for other ranks, adds nothing
    top_k_weights: Tensor,  # (N, K)
) -> Tensor:  # (N, E)
    """Return the weighted sum of the outputs of each token's experts."""
    return experts(
        hidden_states,
        top_k_index,
        top_k_weights,
        weights.gate_up,
        weights.down,
        activation=spec.activation,
        layout=spec.layout,
    )


# ---- the patch


class KernelExperts(ModulePatch):
    """Mixin of a mixture's experts: the op computes everything between the router and the sum of the outputs."""

    patch_spec: ExpertsSpec

    def forward(
        self,
        hidden_states: Tensor,
        top_k_index: Tensor,
        top_k_weights: Tensor,
        gate_up_lora: ExpertLora | None = None,
        down_lora: ExpertLora | None = None,
    ) -> Tensor:
        """Pass adapters only for weights that `weights_of` reads."""
        weights = weights_of(self)
        if isinstance(weights, Refusal):
            warnings.warn(
                f"{type(self).__name__}: {weights.reason}, so the kernel `experts` does not run; "
                "transformers' own code computes these experts.",
                stacklevel=2,
            )
            return super().forward(hidden_states, top_k_index, top_k_weights)
        adapted = ExpertWeights(weights.gate_up._replace(lora=gate_up_lora), weights.down._replace(lora=down_lora))
        return run_experts(self.patch_spec, adapted, hidden_states, top_k_index, top_k_weights)


# ---- transformers' `experts_implementation`


def register_experts() -> None:
    """Register experts_implementation="ligertune" with transformers; again changes nothing.

    Models load with it in any trainer: from_pretrained(..., experts_implementation="ligertune"). Their forward raises
    UserError for experts that the op does not compute. The recipe and `patch` do not need it.
    """
    ALL_EXPERTS_FUNCTIONS.register(OUR_IMPLEMENTATION, experts_forward)


def experts_forward(
    module: nn.Module,
    hidden_states: Tensor,  # (N, E)
    top_k_index: Tensor,  # (N, K)
    top_k_weights: Tensor,  # (N, K)
) -> Tensor:  # (N, E)
    """Compute an experts module, as transformers calls its implementations.

    Raises UserError if the op does not compute these experts, or cannot read their weights.
    """
    spec = _spec_of(module)
    if isinstance(spec, Refusal):
        raise _not_computed(module, spec)
    weights = weights_of(module)
    if isinstance(weights, Refusal):
        raise _not_computed(module, weights)
    return run_experts(spec, weights, hidden_states, top_k_index, top_k_weights)


def _not_computed(module: nn.Module, refusal: Refusal) -> UserError:
    return UserError(
        f"experts_implementation='ligertune' does not compute {type(module).__name__}: {refusal.reason}.",
        hint="Write experts_implementation='grouped_mm'.",
    )


_SPECS: weakref.WeakKeyDictionary[nn.Module, ExpertsSpec | Refusal] = weakref.WeakKeyDictionary()


@constant_while_tracing
def _spec_of(module: nn.Module) -> ExpertsSpec | Refusal:
    """Return the spec of a module, recognised in its first forward."""
    if module not in _SPECS:
        _SPECS[module] = recognise_class(module)
    return _SPECS[module]
