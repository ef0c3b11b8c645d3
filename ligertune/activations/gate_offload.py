"""Offload the gates of checkpointed MLPs to the host instead of recomputing them.

A checkpointed layer runs again in the backward, and two thirds of that time are the two products of its gated MLP
(Llama-3-8B). The output of the gate projection, (T, F), can be copied to the host and back while the layers compute:
0.9 GB per layer at 32,768 tokens, 14 ms over the link of one H200. The layer's second run then reads the gate, bit for
bit, and saves 2 T E F operations. Where the link is too slow for all layers, the others recompute their gate
(`OffloadPace`).
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import NoReturn

import torch
from ligertune_kernels.known_results import known_results
from torch import Tensor, nn

from ligertune.activations.second_run import CheckpointedLayer, KnownProduct
from ligertune.errors import UserError
from ligertune.patching.mlps.recognise_mlps import gate_of
from ligertune.patching.module_patch import patch_module, unpatch_module
from ligertune.patching.recompute import LinearPatch, RecomputingLinear, is_linear

OFFLOADED_GATES = ("offload_gate", "offload_both")  # values of train.gradient_checkpointing


class OffloadedGate(LinearPatch):
    """Mixin of a plain linear layer whose output a checkpointed layer's second run reads back."""

    def forward(self, input: Tensor) -> Tensor:
        layer = known_results()
        # Under autocast the gradient of the product would have another dtype than x and the weight, its factors.
        if not isinstance(layer, CheckpointedLayer) or torch.is_autocast_enabled(input.device.type):
            return super().forward(input)
        return KnownProduct.apply(input, self.weight, self.bias, layer.gate)


def require_gates(count: int, family: str, *, asked: str = "offload_gate") -> None:
    """Raise UserError if a model has no gates to offload."""
    if count == 0:
        raise UserError(
            f"train.gradient_checkpointing: {asked} offloads the gates of MLPs, and {family} has no separate ones.",
            hint=f"Write train.gradient_checkpointing: {_without_gates(asked)}.",
        )


def refuse_fused_gates(asked: str) -> NoReturn:
    """Raise the UserError of a model whose gates are computed together with their adapters."""
    raise UserError(
        f"train.gradient_checkpointing: {asked} needs gate projections that run by themselves, and kernels.lora runs "
        "those of this model together with their adapters.",
        hint=f"Write train.gradient_checkpointing: {_without_gates(asked)}, or kernels.lora: false.",
    )


def _without_gates(asked: str) -> str:
    """Return the kind of checkpointing that differs in the gates only."""
    return "offload" if asked == "offload_both" else "true"


def offload_gates(model: nn.Module, *, but: Iterable[nn.Module] = ()) -> int:
    """Let the plain gate projection of each gated MLP outside the layers `but` offload its output; return their number.

    It no longer recomputes its input: in a checkpointed layer nothing is recomputed by itself.
    """
    others = {id(module) for layer in but for module in layer.modules()}
    gates = [gate_of(module) for module in model.modules() if id(module) not in others]
    plain = [gate for gate in gates if gate is not None and is_linear(gate) and "forward" not in vars(gate)]
    for gate in plain:
        if isinstance(gate, RecomputingLinear):  # a module takes one patch
            unpatch_module(gate)
        patch_module(gate, OffloadedGate)
    return len(plain)
