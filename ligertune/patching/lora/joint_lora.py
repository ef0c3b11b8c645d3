"""LoRA layers with the same input (q, k, v; gate, up), computed together.

    y_i = x W_i^T + (s_i x A_i^T) B_i^T        dx = sum_i dy_i W_i + [s_1 dy_1 B_1, s_2 dy_2 B_2, ...] [A_1; A_2; ...]

Each layer alone reads x for its x A^T and its gradient of A, and autograd sums the gradients of x in passes over them.
Together they read x once for both, the products add up the gradient of x, and one product adds its low-rank terms.

With dropout each adapter reads an x that lacks other elements, by one seed for all. The seed is all that is kept of
them: the backward drops the same elements again, of x and of the gradient of what the adapter has read.

The first layer that is called computes the outputs of all; the others return theirs when they get the same tensor.
"""

from __future__ import annotations

import inspect
import math
import weakref
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

import torch
from ligertune_kernels import draw_seed, seeded_dropout
from ligertune_kernels.autograd import no_double_backward
from ligertune_kernels.known_results import KnownResults, known_results
from torch import Tensor, nn

from ligertune.any_types import AnyModule

SIBLINGS = (("q_proj", "k_proj", "v_proj"), ("gate_proj", "up_proj"))


class PackedWeight(Protocol):
    """A frozen weight that is stored in another form."""

    def dequantize(self) -> Tensor: ...


@dataclass(frozen=True)
class LoraTerms:
    """What a LoRA layer computes: x W^T + bias + scale (drop(x) A^T) B^T.

    a: (R, E). b: (F, R). weight: (F, E), frozen. dropout: probability with which an element of x is dropped.
    """

    a: Tensor
    b: Tensor
    scale: float
    weight: Tensor | PackedWeight
    bias: Tensor | None
    dropout: float = 0.0


def joint_update(x: Tensor, layers: Sequence[LoraTerms], known: KnownResults | None = None) -> tuple[Tensor, ...]:
    """Return the output (..., F) of each layer for x (..., E). known: may know the outputs."""
    adapters = (*(one.a for one in layers), *(one.b for one in layers))
    factors: list[tuple[Tensor, Tensor]] = []
    handles = _LowRankFactors.apply(x, tuple(layers), factors, *adapters)
    return _Outputs.apply(x.detach(), tuple(layers), factors, known, *handles)


class _LowRankFactors(torch.autograd.Function):
    """Compute s x A^T of each layer, keep what the backward reads, and have the backward of the outputs.

    It returns a handle per layer, which has an output's shape and no memory. Since all is kept before the outputs are
    computed, a checkpointed layer that runs again stops here if it ends with these layers: torch stops as soon as it
    has what the backward reads. In a Llama-3-8B layer, down_proj is 9 % of the products of forward, second run and
    backward.
    """

    @staticmethod
    def forward(
        ctx: Any, x: Tensor, layers: tuple[LoraTerms, ...], factors: list[tuple[Tensor, Tensor]], *adapters: Tensor
    ) -> tuple[Tensor, ...]:
        count = len(layers)
        ranks = [a.shape[0] for a in adapters[:count]]
        scales = [one.scale for one in layers]
        narrow_a, *narrow_b = _narrowed(adapters[:count], adapters[count:], x.dtype)
        low = x.new_empty(math.prod(x.shape[:-1]), sum(ranks))
        drops = DroppedInputs.of(x, [one.dropout for one in layers])
        if drops is None:
            _scaled_products(low, rows_of(x), narrow_a, ranks, scales)
        else:
            for i, (part, one) in enumerate(zip(low.split(ranks, 1), narrow_a.split(ranks), strict=True)):
                _scaled_product(part, drops.applied(i, rows_of(x)), one.t(), scales[i])
        factors += zip(low.split(ranks, 1), narrow_b, strict=True)
        weights = [one.weight for one in layers]
        kept = [weight if isinstance(weight, Tensor) else None for weight in weights]
        ctx.save_for_backward(x, narrow_a, low, *narrow_b, *kept)
        ctx.drops = drops
        ctx.packed = [None if isinstance(weight, Tensor) else weight for weight in weights]
        ctx.scales = scales
        ctx.ranks = ranks
        ctx.dtypes = [a.dtype for a in adapters]
        ctx.set_materialize_grads(False)
        return tuple(x.new_empty(()).expand(*x.shape[:-1], len(b)) for b in narrow_b)

    @staticmethod
    @no_double_backward
    def backward(ctx: Any, *gradients: Tensor | None) -> tuple[Tensor | None, ...]:
        count = len(gradients)
        ranks = ctx.ranks
        x, narrow_a, low, *rest = ctx.saved_tensors
        weights = [packed if kept is None else kept for kept, packed in zip(rest[count:], ctx.packed, strict=True)]
        needs_dx, _, _, *needs = ctx.needs_input_grad
        d_bs: list[Tensor | None] = [None] * count
        d_low = torch.empty_like(low)
        d_parts = d_low.split(ranks, 1)
        for i, (dy, b, part) in enumerate(zip(gradients, rest[:count], low.split(ranks, 1), strict=True)):
            if dy is None:  # the loss does not depend on this output
                d_parts[i].zero_()
                continue
            d_rows = rows_of(dy)
            _scaled_product(d_parts[i], d_rows, b, ctx.scales[i])
            if needs[count + i]:
                d_bs[i] = (d_rows.t() @ part).to(ctx.dtypes[count + i])
        dx = None
        if needs_dx:
            dx = d_low @ narrow_a if ctx.drops is None else ctx.drops.gradient(d_parts, narrow_a.split(ranks))
            for dy, weight in zip(gradients, weights, strict=True):
                if dy is not None:
                    dx.addmm_(rows_of(dy), dense(weight))
            dx = dx.view(x.shape)
        d_as: Sequence[Tensor | None] = [None] * count
        if any(needs[:count]) and ctx.drops is None:
            d_as = (d_low.t() @ rows_of(x)).to(ctx.dtypes[0]).split(ranks)
        elif any(needs[:count]):
            d_as = [part.t() @ ctx.drops.applied(i, rows_of(x)) for i, part in enumerate(d_parts)]
        d_as = [d_a.to(dtype) if d_a is not None and need else None
                for d_a, dtype, need in zip(d_as, ctx.dtypes[:count], needs[:count], strict=True)]  # fmt: skip
        return dx, None, None, *d_as, *d_bs


@dataclass(frozen=True)
class DroppedInputs:
    """Which elements of x (N, E) the adapters of some layers do not read. seed: () int64, one for all layers."""

    seed: Tensor
    shares: tuple[float, ...]  # probability of each layer

    @staticmethod
    def of(x: Tensor, shares: Sequence[float]) -> DroppedInputs | None:
        """Draw which elements are dropped; None if no layer drops any."""
        return DroppedInputs(draw_seed(x.device), tuple(shares)) if any(shares) else None

    def applied(self, layer: int, rows: Tensor, *, add_to: Tensor | None = None) -> Tensor:
        """Return rows (N, E) as the adapter of a layer reads them, added to others (N, E)."""
        return seeded_dropout(rows, self.seed, self.shares[layer], stream=layer, add_to=add_to)

    def gradient(self, d_parts: Sequence[Tensor], a: Sequence[Tensor]) -> Tensor:
        """Return the gradient (N, E) of x from the adapters. d_parts: (N, R) of each layer. a: (R, E) of each layer."""
        total = None
        for layer, (part, one) in enumerate(zip(d_parts, a, strict=True)):
            total = self.applied(layer, part @ one, add_to=total)
        assert total is not None
        return total


def rows_of(x: Tensor) -> Tensor:
    """Return x (..., E) as (N, E)."""
    return x.reshape(-1, x.shape[-1])


def _narrowed(a: Sequence[Tensor], b: Sequence[Tensor], dtype: torch.dtype) -> list[Tensor]:
    """Return [A_1; A_2; ...] and each B in a dtype, cast in one launch."""
    memory = a[0].new_empty(sum(one.numel() for one in (*a, *b)), dtype=dtype)
    parts = memory.split([one.numel() for one in (*a, *b)])
    torch._foreach_copy_([part.view(one.shape) for part, one in zip(parts, (*a, *b), strict=True)], [*a, *b])
    joint_a = memory[: sum(one.numel() for one in a)].view(-1, a[0].shape[1])
    return [joint_a, *(part.view(one.shape) for part, one in zip(parts[len(a) :], b, strict=True))]


def _scaled_products(low: Tensor, x: Tensor, a: Tensor, ranks: Sequence[int], scales: Sequence[float]) -> None:
    """Write [s_1 x A_1^T, s_2 x A_2^T, ...] to low (N, sum of R): x (N, E), a (sum of R, E)."""
    if len(set(scales)) == 1:
        _scaled_product(low, x, a.t(), scales[0])
        return
    for part, one, scale in zip(low.split(ranks, 1), a.split(ranks), scales, strict=True):
        _scaled_product(part, x, one.t(), scale)


def _scaled_product(out: Tensor, x: Tensor, y: Tensor, scale: float) -> None:
    """Write scale * x y to out, rounded once."""
    out.addmm_(x, y, beta=0, alpha=scale)  # beta 0: what `out` holds is not read


class _Outputs(torch.autograd.Function):
    """Compute x W^T + bias + (s low) B^T of each layer. Its backward hands the gradients to the handles."""

    @staticmethod
    def forward(
        ctx: Any,
        x: Tensor,
        layers: tuple[LoraTerms, ...],
        factors: list[tuple[Tensor, Tensor]],
        known: KnownResults | None,
        *handles: Tensor,
    ) -> tuple[Tensor, ...]:
        def computed() -> tuple[Tensor, ...]:
            rows = rows_of(x)
            outputs = []
            for one, (low, b) in zip(layers, factors, strict=True):
                y = x.new_empty(*x.shape[:-1], len(b))  # no view: kernels may overwrite it
                _write_output(rows_of(y), rows, dense(one.weight), one.bias, low, b)
                outputs.append(y)
            return tuple(outputs)

        ctx.set_materialize_grads(False)
        return computed() if known is None else known.result(computed)

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor | None) -> tuple[Tensor | None, ...]:
        return None, None, None, None, *gradients


def _write_output(y: Tensor, x: Tensor, weight: Tensor, bias: Tensor | None, low: Tensor, b: Tensor) -> None:
    """Write x weight^T + low b^T + bias to y: x (N, E), weight (F, E), low (N, R), b (F, R), y (N, F).

    The product that comes second also reads y. The large one reads it while it computes; the small one mostly reads.
    If F < E, y is small, and the small product comes second.
    """
    first, second = [(low, b), (x, weight)] if weight.shape[0] >= weight.shape[1] else [(x, weight), (low, b)]
    if bias is None:
        torch.mm(first[0], first[1].t(), out=y)
    else:
        torch.addmm(bias, first[0], first[1].t(), out=y)
    y.addmm_(second[0], second[1].t())


def dense(weight: Tensor | PackedWeight) -> Tensor:
    """Return a weight as a tensor. Use it at once: of a packed weight, only the last one is kept."""
    return weight if isinstance(weight, Tensor) else weight.dequantize()


@dataclass(frozen=True)
class _Waiting:
    """The output of a layer that has not been called yet, and what it was computed from."""

    output: Tensor
    terms: LoraTerms
    state: tuple[Any, ...]

    def still_holds(self, layer: AnyModule, x: Tensor) -> bool:
        """Return whether the layer would compute this output from x now."""
        return self.state == _state_of(layer, x, self.terms)


def _state_of(layer: AnyModule, x: Tensor, terms: LoraTerms) -> tuple[Any, ...]:
    """Return what may change between the calls of two siblings with one tensor.

    An adapter is switched off, a tensor is written over, a no_grad block ends.
    """
    modes = torch.is_grad_enabled(), torch.is_inference_mode_enabled()
    versions = (None if tensor.is_inference() else tensor._version for tensor in (x, terms.a, terms.b))
    adapters = layer.disable_adapters, layer.merged, tuple(layer.active_adapters), layer.training
    return (*modes, *adapters, *versions)


class Siblings:
    """LoRA layers of one module that share their input.

    What they compute depends on the calls since the last new input only, so that a checkpointed layer saves the same
    tensors in its second forward.
    """

    def __init__(self, layers: Sequence[nn.Module]) -> None:
        self._layers = [weakref.ref(layer) for layer in layers]
        self._input: Tensor | None = None
        self._waiting: dict[int, _Waiting] = {}  # outputs that are computed, by the position of their layer

    def output(
        self, layer: nn.Module, x: Tensor, terms_of: Callable[[nn.Module, Tensor], LoraTerms | None]
    ) -> Tensor | None:
        """Return the layer's output, and compute those of its siblings. None: the layer computes it alone."""
        place = next(i for i, one in enumerate(self._layers) if one() is layer)
        if self._input is x and place in self._waiting:
            waiting = self._waiting.pop(place)
            if not self._waiting:
                self._input = None
            if waiting.still_holds(layer, x):
                return waiting.output
        # drop the unused outputs of an earlier input
        self._input = None
        self._waiting = {}
        siblings = []
        terms = []
        for reference in self._layers:
            sibling = reference()
            found = None if sibling is None else terms_of(sibling, x)
            if sibling is None or found is None:
                return None
            siblings.append(sibling)
            terms.append(found)
        outputs = joint_update(x, terms)
        self._input = x
        for i, (y, one, sibling) in enumerate(zip(outputs, terms, siblings, strict=True)):
            if i != place:
                self._waiting[i] = _Waiting(y, one, _state_of(sibling, x, one))
        return outputs[place]


_SIBLINGS_OF: weakref.WeakKeyDictionary[nn.Module, Siblings] = weakref.WeakKeyDictionary()


def join_siblings(model: nn.Module, kind: type[nn.Module]) -> None:
    """Let the LoRA layers of `kind` compute jointly that share their input. Cross attention has two inputs."""
    for parent in model.modules():
        inputs = [name for name in inspect.signature(parent.forward).parameters if name.endswith("_states")]
        for names in SIBLINGS if len(inputs) < 2 else ():
            found = [getattr(parent, name, None) for name in names]
            layers = [layer for layer in found if isinstance(layer, kind)]
            if len(layers) == len(names):
                joint = Siblings(layers)
                for layer in layers:
                    _SIBLINGS_OF[layer] = joint


def leave_siblings(layer: nn.Module) -> None:
    """Let a layer compute its output alone.

    A tiled layer runs all its tiles before the next sibling runs. Each tile would compute the outputs of all siblings,
    and the unused outputs would keep the layer's input in memory.
    """
    _SIBLINGS_OF.pop(layer, None)


def siblings_of(layer: nn.Module) -> Siblings | None:
    """Return the siblings of a layer that `join_siblings` found."""
    return _SIBLINGS_OF.get(layer)


_KEPT: weakref.WeakSet[nn.Module] = weakref.WeakSet()


def keep_result(layer: nn.Module) -> None:
    """Let a checkpointed layer know the result of this adapted layer in its second run."""
    _KEPT.add(layer)


def known_of(layer: nn.Module) -> KnownResults | None:
    """Return what may know the result of `layer`."""
    return known_results() if layer in _KEPT else None
