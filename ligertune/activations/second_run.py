"""What a checkpointed layer's second run, in the backward, reads from its first run instead of computing it.

Gates of MLPs are stored one by one (`gate_offload`). Results are those of attention and of its output projection. They
are stored together when the first run ends, and come back together: the second run needs them one right after another.
In Llama-3-8B they are twice the size of the layer's input. QLoRA of 16 of its layers, 4,096 tokens, H200: 152 ms of
kernels in a micro-batch in place of 160.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator
from typing import Any

import torch
from ligertune_kernels.known_results import Result, knowing
from torch import Tensor
from torch.nn import functional as F

from ligertune.activations.offload import ActivationOffloader, OffloadedTensors


class CheckpointedLayer:
    """The stored tensors of one checkpointed layer between its two runs. results: None stores no results."""

    def __init__(self, gates: ActivationOffloader, results: ActivationOffloader | None = None) -> None:
        self._gate_offloader = gates
        self._gates: list[OffloadedTensors | None] = []
        self._result_offloader = results
        self._made: list[Result] = []  # by the running first run, or left to read for the second one
        self._versions: list[int] = []  # of the first tensor of each, when it was made
        self._results: OffloadedTensors | None = None  # the first tensor of each result
        self._small: list[Result] = []  # the other tensors of each result
        self._again = False
        self._next = 0

    @contextlib.contextmanager
    def running(self, *, again: bool) -> Iterator[None]:
        """Make this the running layer. again: it is the second run, in the backward."""
        self._again = again
        self._next = 0
        self._made = []
        self._versions = []
        try:
            with knowing(self):
                yield
            if not again:
                # What the layer has written over, such as by `mul_`, is computed again.
                self._gates = [gate if gate is not None and not gate.written_over else None for gate in self._gates]
                self._store_results()
        finally:
            self._made = []

    def gate(self, compute: Callable[[], Tensor]) -> Tensor:
        """Return the product, or the offloaded one: that only once, since its reader may write over it."""
        if not self._again:
            product = compute()
            self._gates.append(self._gate_offloader.store_if_fast(product))
            return product
        offloaded = self._gates[self._next]
        self._gates[self._next] = None
        self._next += 1
        if offloaded is not None:
            return offloaded.take()[0]
        self._gate_offloader.flush()
        return compute()

    def result(self, compute: Callable[[], Result]) -> Result:
        """Return what `compute` returns, or returned in the first run: then the first tensor was offloaded."""
        if self._result_offloader is None:
            return compute()
        if not self._again:
            made = compute()
            self._made.append(tuple(tensor.detach() for tensor in made))
            self._versions.append(made[0]._version)
            return made
        if self._results is not None:
            large = self._results.take(prefetches=len(self._small) == 1)  # `attended` does otherwise
            self._made = [(one, *rest) for one, rest in zip(large, self._small, strict=True)]
            self._results = None  # once: a reader may write over it
            self._small = []
        if self._made:
            return self._made.pop(0)
        self._result_offloader.flush()
        return compute()

    def attended(self, out: Tensor) -> None:
        """Let the results of the layer before come back once the gradient of this layer's attention is known.

        The backward of the MLP, where a step needs the most memory, is then over, and that of attention hides the copy.
        The second run only computes saved tensors: gradients pass through what the first run has computed.
        """
        offloader = self._result_offloader
        if not self._again and offloader is not None and out.requires_grad:
            out.register_hook(lambda gradient: offloader.prefetch_last())

    def _store_results(self) -> None:
        if not self._made or self._versions != [made[0]._version for made in self._made]:
            return
        assert self._result_offloader is not None  # or there are none
        self._results = self._result_offloader.store_if_fast(*(made[0] for made in self._made))
        if self._results is not None:
            self._small = [made[1:] for made in self._made]


class KnownProduct(torch.autograd.Function):
    """x W^T + b, which `known` computes, or knows. x: (..., E), W: (F, E), b: (F,) or None."""

    @staticmethod
    def forward(
        ctx: Any, x: Tensor, weight: Tensor, bias: Tensor | None, known: Callable[[Callable[[], Tensor]], Tensor]
    ) -> Tensor:
        ctx.save_for_backward(x if weight.requires_grad else None, weight if x.requires_grad else None)
        return known(lambda: F.linear(x, weight, bias))

    @staticmethod
    def backward(ctx: Any, dy: Tensor) -> tuple[Tensor | None, ...]:
        x, weight = ctx.saved_tensors
        needs_dx, needs_dw, needs_db, _ = ctx.needs_input_grad
        rows = dy.flatten(0, -2)
        dx = dy @ weight if needs_dx else None
        dw = rows.t() @ x.flatten(0, -2) if needs_dw else None
        return dx, dw, rows.sum(0) if needs_db else None, None
