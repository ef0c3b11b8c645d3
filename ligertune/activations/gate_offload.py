"""Offload the gates of checkpointed MLPs to the host instead of recomputing them.

A checkpointed layer runs again in the backward, and two thirds of that time are the two products of its gated MLP
(Llama-3-8B). The output of the gate projection, (T, F), can be copied to the host and back while the layers compute:
0.9 GB per layer at 32,768 tokens, 14 ms over the link of one H200. The layer's second run then reads the gate, bit for
bit, and saves 2 T E F operations. Where the link is too slow for all layers, the others recompute their gate
(`OffloadPace`).
"""

from __future__ import annotations

import contextlib
import threading
from collections.abc import Iterable, Iterator
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from ligertune.activations.offload import ActivationOffloader, OffloadedTensor
from ligertune.errors import UserError
from ligertune.patching.mlps.recognise_mlps import gate_of
from ligertune.patching.module_patch import patch_module, unpatch_module
from ligertune.patching.recompute import LinearPatch, RecomputingLinear, is_linear

_thread = threading.local()  # the running layer: a backward runs in its own thread


class CheckpointedLayer:
    """The gates of one checkpointed layer between its two runs."""

    def __init__(self, offloader: ActivationOffloader) -> None:
        self.offloader = offloader
        self._gates: list[OffloadedTensor | None] = []
        self._again = False
        self._next = 0

    @contextlib.contextmanager
    def running(self, *, again: bool) -> Iterator[None]:
        """Make this the running layer. again: it is the second run, in the backward."""
        outer = getattr(_thread, "layer", None)
        self._again = again
        self._next = 0
        _thread.layer = self
        try:
            yield
        finally:
            _thread.layer = outer

    def gate(self, x: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
        """Return the product, or the offloaded one: that only once, since its reader may write over it."""
        if not self._again:
            product = F.linear(x, weight, bias)
            self._gates.append(self.offloader.store_if_fast(product))
            return product
        offloaded = self._gates[self._next]
        self._gates[self._next] = None
        self._next += 1
        if offloaded is not None:
            return offloaded.take()
        self.offloader.flush()
        return F.linear(x, weight, bias)


class _Gate(torch.autograd.Function):
    """x W^T + b, whose value comes from the running layer. x: (..., E), W: (F, E), b: (F,) or None."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor, bias: Tensor | None, layer: CheckpointedLayer) -> Tensor:
        ctx.save_for_backward(x if weight.requires_grad else None, weight if x.requires_grad else None)
        return layer.gate(x, weight, bias)

    @staticmethod
    def backward(ctx: Any, dy: Tensor) -> tuple[Tensor | None, ...]:
        x, weight = ctx.saved_tensors
        needs_dx, needs_dw, needs_db, _ = ctx.needs_input_grad
        rows = dy.flatten(0, -2)
        dx = dy @ weight if needs_dx else None
        dw = rows.t() @ x.flatten(0, -2) if needs_dw else None
        return dx, dw, rows.sum(0) if needs_db else None, None


class OffloadedGate(LinearPatch):
    """Mixin of a plain linear layer whose output a checkpointed layer's second run reads back."""

    def forward(self, input: Tensor) -> Tensor:
        layer = getattr(_thread, "layer", None)
        # Under autocast the gradient of the product would have another dtype than x and the weight, its factors.
        if layer is None or not torch.is_grad_enabled() or torch.is_autocast_enabled(input.device.type):
            return super().forward(input)
        return _Gate.apply(input, self.weight, self.bias, layer)


def require_gates(count: int, family: str, *, asked: str = "offload_gate") -> None:
    """Raise UserError if a model has no gates to offload."""
    if count == 0:
        raise UserError(
            f"train.gradient_checkpointing: {asked} offloads the gates of MLPs, and {family} has no separate ones.",
            hint=f"Write train.gradient_checkpointing: {'offload' if asked == 'offload_both' else 'true'}.",
        )


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
