"""Gates of checkpointed MLPs that wait in host memory instead of being computed again.

A checkpointed layer is run again in the backward, and of that a gated MLP's two products are two thirds (Llama-3-8B).
The gate's product, (T, F) of T tokens, can be copied to the host and back while the layers compute: 0.9 GB a layer at
32,768 tokens, 14 ms over the link of one H200. When the layer is run again, the gate is what it was, to the bit, and
2 T E F operations fewer are done. Where the link is slower, some of the layers keep theirs and the others compute it
again (`host_pace`).
"""

from __future__ import annotations

import contextlib
import threading
from collections.abc import Iterable, Iterator
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from ligertune.activations.offload import HostStore, Waiting
from ligertune.errors import UserError
from ligertune.patching.module_patch import Patch, swap, unswap
from ligertune.patching.recognise import is_gated_mlp
from ligertune.patching.recompute import RebuildingLinear, is_linear

_thread = threading.local()  # a backward has a thread of its own


class LayerRun:
    """One checkpointed layer, from its forward to where it is run again: the gates between the two."""

    def __init__(self, store: HostStore) -> None:
        self.store = store
        self._gates: list[Waiting | None] = []
        self._again = False
        self._next = 0

    @contextlib.contextmanager
    def running(self, *, again: bool) -> Iterator[None]:
        """What runs inside is this layer."""
        outer, self._again, self._next = getattr(_thread, "run", None), again, 0
        _thread.run = self
        try:
            yield
        finally:
            _thread.run = outer

    def gate(self, x: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
        """The product, or the one that waits. That is given once: what reads it may write over it."""
        if not self._again:
            product = F.linear(x, weight, bias)
            self._gates.append(self.store.put_if_fast(product))
            return product
        waiting, self._gates[self._next] = self._gates[self._next], None
        self._next += 1
        if waiting is not None:
            return waiting.take()
        self.store.passed()
        return F.linear(x, weight, bias)


class _Gate(torch.autograd.Function):
    """x W^T + b, of which the first is looked up. x: (..., E), W: (F, E), b: (F,) or None."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor, bias: Tensor | None, run: LayerRun) -> Tensor:
        ctx.save_for_backward(x if weight.requires_grad else None, weight if x.requires_grad else None)
        return run.gate(x, weight, bias)

    @staticmethod
    def backward(ctx: Any, dy: Tensor) -> tuple[Tensor | None, ...]:
        x, weight = ctx.saved_tensors
        needs_dx, needs_dw, needs_db, _ = ctx.needs_input_grad
        rows = dy.flatten(0, -2)
        dx = dy @ weight if needs_dx else None
        dw = rows.t() @ x.flatten(0, -2) if needs_dw else None
        return dx, dw, rows.sum(0) if needs_db else None, None


class KeptGate(Patch):
    """Mixin of a plain linear layer whose output a checkpointed layer's second run finds."""

    def forward(self, input: Tensor) -> Tensor:
        run = getattr(_thread, "run", None)
        if run is None or not torch.is_grad_enabled() or torch.is_autocast_enabled(input.device.type):
            return super().forward(input)
        return _Gate.apply(input, self.weight, self.bias, run)


def check_gates(count: int, family: str, *, asked: str = "offload_gate") -> None:
    """A UserError where there is nothing to keep."""
    if count == 0:
        raise UserError(
            f"train.gradient_checkpointing: {asked} keeps the gates of MLPs, and {family} has none of its own.",
            hint=f"Write train.gradient_checkpointing: {'offload' if asked == 'offload_both' else 'true'}.",
        )


def keep_gates(model: nn.Module, *, but: Iterable[nn.Module] = ()) -> int:
    """Let the plain `gate_proj` of each gated MLP keep its product, outside the layers `but`; how many do.

    One that would make its input again does not any more: in a checkpointed layer it would not have either.
    """
    others = {id(module) for layer in but for module in layer.modules()}
    gates = [getattr(m, "gate_proj", None) for m in model.modules() if is_gated_mlp(m) and id(m) not in others]
    plain = [gate for gate in gates if _is_plain(gate)]
    for gate in plain:
        if isinstance(gate, RebuildingLinear):
            unswap(gate)
        swap(gate, KeptGate, None)
    return len(plain)


def _is_plain(gate: nn.Module | None) -> bool:
    return is_linear(gate) and "forward" not in vars(gate)
