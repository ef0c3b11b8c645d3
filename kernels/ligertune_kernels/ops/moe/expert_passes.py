"""Forward and backward of `experts` on rows sorted by expert: two projections with LoRA, and what is between them.

Before the passes stand their parameters: weights, biases and LoRA of all experts, and the options of a call.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import NamedTuple

import torch

from ligertune_kernels.launcher import chip_of
from ligertune_kernels.ops.moe.grouped_product import PairRows, Rows, multiply_experts, multiply_rows
from ligertune_kernels.ops.moe.kernels import (
    ActivationBackward,
    GatedActivation,
    Routing,
    activate_rows,
    route,
    sum_expert_rows,
    sum_pairs,
)
from ligertune_kernels.ops.moe.tiles import Products, is_aligned, loop_pays, product_for

Weight = torch.Tensor | Callable[[], torch.Tensor]
"""A weight, or a function without arguments that returns it: then it is frozen, made in the forward and again in the
backward, and not kept in between (a weight that is stored in 4 bits)."""


class ExpertLora(NamedTuple):
    """LoRA of a projection of all experts: y += scale · (x aᵀ) bᵀ. a is (X, R, inputs), b is (X, outputs, R)."""

    a: torch.Tensor
    b: torch.Tensor
    scale: float = 1.0


class ExpertProjection(NamedTuple):
    """A linear layer of all experts: weight (X, outputs, inputs), bias (X, outputs), and LoRA."""

    weight: Weight
    bias: torch.Tensor | None = None
    lora: ExpertLora | None = None


class ExpertLayout(NamedTuple):
    """How the weights are stored.

    transposed: gate_up is (X, E, 2F) and down (X, F, E). interleaved: the 2F columns are gate 0, up 0, gate 1, up 1, …
    """

    transposed: bool = False
    interleaved: bool = False


class ExpertOptions(NamedTuple):
    """Arguments of `experts` that are not tensors."""

    activation: GatedActivation = GatedActivation()
    layout: ExpertLayout = ExpertLayout()
    products: Products | None = None
    gate_up_scale: float | None = None  # of LoRA
    down_scale: float | None = None
    gate_up_function: Callable[[], torch.Tensor] | None = None
    down_function: Callable[[], torch.Tensor] | None = None


class ExpertTensors(NamedTuple):
    """The parameters of all experts; a weight is None where a function makes it."""

    gate_up: torch.Tensor | None  # (X, 2F, E)
    down: torch.Tensor | None  # (X, E, F)
    gate_up_bias: torch.Tensor | None  # (X, 2F)
    down_bias: torch.Tensor | None  # (X, E)
    gate_up_a: torch.Tensor | None  # (X, R, E)
    gate_up_b: torch.Tensor | None  # (X, 2F, R)
    down_a: torch.Tensor | None  # (X, R, F)
    down_b: torch.Tensor | None  # (X, E, R)

    def to(self, dtype: torch.dtype) -> ExpertTensors:
        """Return the tensors in another dtype."""
        return ExpertTensors(*(None if t is None else t.to(dtype) for t in self))


@dataclass(frozen=True)
class ExpertParameters:
    """Parameters of all experts, and how they are used."""

    tensors: ExpertTensors
    options: ExpertOptions

    @property
    def gate_up(self) -> ExpertProjection:
        tensors = self.tensors
        scale = self.options.gate_up_scale
        lora = None if scale is None else ExpertLora(tensors.gate_up_a, tensors.gate_up_b, scale)
        return ExpertProjection(self.options.gate_up_function or tensors.gate_up, tensors.gate_up_bias, lora)

    @property
    def down(self) -> ExpertProjection:
        tensors = self.tensors
        scale = self.options.down_scale
        lora = None if scale is None else ExpertLora(tensors.down_a, tensors.down_b, scale)
        return ExpertProjection(self.options.down_function or tensors.down, tensors.down_bias, lora)


def parameters_of(gate_up: ExpertProjection, down: ExpertProjection, options: ExpertOptions) -> ExpertParameters:
    """Return the parameters with tensors and functions apart: autograd keeps the tensors."""
    projections = (gate_up, down)
    weights = (None if callable(each.weight) else each.weight for each in projections)
    low_rank = (t for each in projections for t in (each.lora or (None, None))[:2])
    options = options._replace(
        gate_up_scale=None if gate_up.lora is None else float(gate_up.lora.scale),
        down_scale=None if down.lora is None else float(down.lora.scale),
        gate_up_function=gate_up.weight if callable(gate_up.weight) else None,
        down_function=down.weight if callable(down.weight) else None,
    )
    return ExpertParameters(ExpertTensors(*weights, gate_up.bias, down.bias, *low_rank), options)


class Needs(NamedTuple):
    """Which gradients are needed; the last eight in the order of ExpertTensors."""

    hidden: bool
    weights: bool
    gate_up: bool
    down: bool
    gate_up_bias: bool
    down_bias: bool
    gate_up_a: bool
    gate_up_b: bool
    down_a: bool
    down_b: bool

    @property
    def z(self) -> bool:
        """Whether the gradient of the pre-activations is needed."""
        return self.hidden or self.gate_up or self.gate_up_bias or self.gate_up_a or self.gate_up_b


@dataclass(frozen=True)
class Projection:
    """A linear layer of all experts: Y = X Wᵀ + T Bᵀ with T = scale · X Aᵀ."""

    weight: torch.Tensor | None  # (X, outputs, inputs), or (X, inputs, outputs) if transposed; None: not needed
    transposed: bool
    lora: ExpertLora | None
    routing: Routing
    products: Products | None  # None: as `product_for` chooses

    @property
    def _by_input(self) -> torch.Tensor:  # (X, inputs, outputs)
        return self.weight if self.transposed else self.weight.transpose(1, 2)

    def _choice(self, dtype: torch.dtype) -> Products:
        shape = tuple(self.weight.shape[1:])
        if self.products == "grouped_mm" and not is_aligned(shape, dtype):
            raise ValueError(
                f"experts: products='grouped_mm' with weights of {shape} per expert in {dtype}: expected sizes that "
                "are multiples of 16 bytes; write products=None"
            )
        chip = chip_of(self.weight.device)
        return self.products or product_for(shape, dtype, chip, has_ends=self.routing.ends is not None)

    @property
    def _low_rank(self) -> Products:
        # Products with a narrow matrix read and write rows at memory speed, and add to a result in the same pass.
        return "loop" if self.products == "loop" else "triton"

    def forward(self, x: Rows) -> tuple[torch.Tensor, torch.Tensor | None]:
        """Return Y (S, outputs) and T (S, R), None without LoRA."""
        by_input = self._by_input
        low_rank = None
        y = multiply_rows(x, by_input, self.routing, self._choice(by_input.dtype))
        if self.lora is not None:
            low_rank = multiply_rows(x, self.lora.a.transpose(1, 2), self.routing, self._low_rank)
            low_rank.mul_(self.lora.scale)
            multiply_rows(low_rank, self.lora.b.transpose(1, 2), self.routing, self._low_rank, add_to=y)
        return y, low_rank

    def input_gradient(self, dy: Rows) -> tuple[torch.Tensor, torch.Tensor | None]:
        """Return dX (S, inputs), and dT times the scale (S, R), None without LoRA."""
        by_output = self._by_input.transpose(1, 2)
        dx = multiply_rows(dy, by_output, self.routing, self._choice(by_output.dtype))
        d_low_rank = self.low_rank_gradient(dy)
        if d_low_rank is not None:
            multiply_rows(d_low_rank, self.lora.a, self.routing, self._low_rank, add_to=dx)
        return dx, d_low_rank

    def low_rank_gradient(self, dy: Rows) -> torch.Tensor | None:
        """Return dT times the scale (S, R), None without LoRA."""
        if self.lora is None:
            return None
        return multiply_rows(dy, self.lora.b, self.routing, self._low_rank).mul_(self.lora.scale)

    def parameter_gradients(
        self,
        dy: Rows,
        x: Rows,
        low_rank: torch.Tensor | None,
        d_low_rank: torch.Tensor | None,
        needs: tuple[bool, bool, bool],  # weight, a, b
    ) -> tuple[torch.Tensor | None, ...]:
        """Return dW, dA and dB, None where they are not needed."""
        pair = (x, dy) if self.transposed else (dy, x)
        d_weight = d_a = d_b = None
        if needs[0]:
            d_weight = multiply_experts(*pair, self.routing, self._choice(self.weight.dtype))
        if needs[1]:
            d_a = multiply_experts(d_low_rank, x, self.routing, self._low_rank)
        if needs[2]:
            d_b = multiply_experts(dy, low_rank, self.routing, self._low_rank)
        return d_weight, d_a, d_b


class Kept(NamedTuple):
    """What the forward keeps for the backward, in addition to its inputs and the routing."""

    z: torch.Tensor  # (S, 2F): pre-activations, without the bias
    gate_up_low_rank: torch.Tensor | None  # (S, R)
    down_low_rank: torch.Tensor | None  # (S, R)


def _weight(projection: ExpertProjection, like: torch.Tensor, transposed: bool) -> torch.Tensor:
    """Return the weight in the dtype of `like` (·, inputs), made by its function if it is one."""
    if not callable(projection.weight):
        return projection.weight
    weight = projection.weight().detach().to(like.dtype)
    _check_made_weight(weight, like.shape[1], transposed)
    return weight


def _check_made_weight(weight: torch.Tensor, n_inputs: int, transposed: bool) -> None:
    """Raise ValueError if a weight that a function has made does not have n_inputs inputs."""
    if weight.dim() != 3 or weight.shape[1 if transposed else 2] != n_inputs:
        expected = f"(X, {n_inputs}, outputs)" if transposed else f"(X, outputs, {n_inputs})"
        raise ValueError(f"experts: a function made a weight of {tuple(weight.shape)}; expected {expected}")


def run_forward(
    hidden: torch.Tensor,  # (N, E)
    expert_index: torch.Tensor,  # (N, K)
    weights: torch.Tensor,  # (N, K)
    parameters: ExpertParameters,
) -> tuple[torch.Tensor, Kept, Routing]:  # (N, E)
    """Return the outputs, and what is kept for the backward."""
    options = parameters.options
    given = parameters.gate_up
    given_down = parameters.down
    transposed = options.layout.transposed
    products = options.products
    weight = _weight(given, hidden, transposed)
    routing = route(expert_index, len(weight), hidden.dtype)
    if products == "loop" or (products is None and loop_pays(len(routing.pairs), weight.shape, chip_of(hidden.device))):
        routing = routing.with_ends()
    gate_up = Projection(weight, transposed, given.lora, routing, products)
    z, gate_up_low_rank = gate_up.forward(PairRows(hidden, routing))
    del weight, gate_up  # one made weight at a time is in memory
    a = activate_rows(z, given.bias, weights, routing, options.activation, options.layout.interleaved)
    down = Projection(_weight(given_down, a, transposed), transposed, given_down.lora, routing, products)
    y, down_low_rank = down.forward(a)
    return sum_pairs(y, routing, weights, given_down.bias), Kept(z, gate_up_low_rank, down_low_rank), routing


def run_backward(
    dout: torch.Tensor,  # (N, E)
    hidden: torch.Tensor,  # (N, E)
    weights: torch.Tensor,  # (N, K)
    parameters: ExpertParameters,
    kept: Kept,
    routing: Routing,
    needs: Needs,
    *,
    over_z: bool,
) -> tuple[torch.Tensor | None, ...]:
    """Return the gradients of hidden, weights and the parameters' tensors, None where they are not needed.

    over_z: write the gradient of the pre-activations over `kept.z`.
    """
    dz, d_weights, (d_down, d_down_a, d_down_b) = _down_backward(
        dout, weights, parameters, kept, routing, needs, over_z=over_z
    )
    d_down_bias = sum_expert_rows(dout, routing, weights) if needs.down_bias else None
    d_hidden = d_gate_up = d_gate_up_bias = d_gate_up_a = d_gate_up_b = None
    if needs.z:
        d_hidden, (d_gate_up, d_gate_up_a, d_gate_up_b) = _gate_up_backward(
            dz, hidden, parameters, kept, routing, needs
        )
        d_gate_up_bias = sum_expert_rows(dz, routing) if needs.gate_up_bias else None
    return (
        d_hidden, d_weights, d_gate_up, d_down, d_gate_up_bias, d_down_bias,
        d_gate_up_a, d_gate_up_b, d_down_a, d_down_b,
    )  # fmt: skip


def _gate_up_backward(
    dz: torch.Tensor,  # (S, 2F)
    hidden: torch.Tensor,  # (N, E)
    parameters: ExpertParameters,
    kept: Kept,
    routing: Routing,
    needs: Needs,
) -> tuple[torch.Tensor | None, tuple[torch.Tensor | None, ...]]:
    """Return the gradient of hidden, and those of the gate and up projection."""
    options = parameters.options
    transposed = options.layout.transposed
    given = parameters.gate_up
    weight = _weight(given, hidden, transposed) if needs.hidden else parameters.tensors.gate_up
    gate_up = Projection(weight, transposed, given.lora, routing, options.products)
    d_hidden = d_low_rank = None
    if needs.hidden:
        dx, d_low_rank = gate_up.input_gradient(dz)
        d_hidden = sum_pairs(dx, routing)
        del dx
    elif needs.gate_up_a:
        d_low_rank = gate_up.low_rank_gradient(dz)
    needed = (needs.gate_up, needs.gate_up_a, needs.gate_up_b)
    x = PairRows(hidden, routing)
    return d_hidden, gate_up.parameter_gradients(dz, x, kept.gate_up_low_rank, d_low_rank, needed)


def _down_backward(
    dout: torch.Tensor,  # (N, E)
    weights: torch.Tensor,  # (N, K)
    parameters: ExpertParameters,
    kept: Kept,
    routing: Routing,
    needs: Needs,
    *,
    over_z: bool,
) -> tuple[torch.Tensor | None, torch.Tensor | None, tuple[torch.Tensor | None, ...]]:
    """Return dz (S, 2F), the gradient of the router's weights (N, K), and those of the down projection."""
    options = parameters.options
    bias = parameters.tensors.gate_up_bias
    down_bias = parameters.tensors.down_bias
    dys = PairRows(dout, routing)
    needs_a = needs.down or needs.down_a
    needs_da = needs.z or needs.weights
    transposed = options.layout.transposed
    given = parameters.down
    half = kept.z[:, : kept.z.shape[1] // 2]
    weight = _weight(given, half, transposed) if needs_da else parameters.tensors.down
    down = Projection(weight, transposed, given.lora, routing, options.products)
    dz = None
    d_weights = None
    d_low_rank = None
    activation = options.activation
    interleaved = options.layout.interleaved
    if needs_da:
        a, d_low_rank = down.input_gradient(dys)
        context = ActivationBackward(kept.z, bias, weights, dout, down_bias, activation, interleaved)
        # a is written over da.
        dz, d_weights = context.run(a, routing, needs_a=needs_a, needs_dz=needs.z, over_z=over_z)
    elif needs_a or needs.down_b:
        d_low_rank = down.low_rank_gradient(dys) if needs.down_a else None
        a = activate_rows(kept.z, bias, weights, routing, activation, interleaved)
    else:
        a = None
    needed = (needs.down, needs.down_a, needs.down_b)
    gradients = down.parameter_gradients(dys, a, kept.down_low_rank, d_low_rank, needed)
    return dz, d_weights if needs.weights else None, gradients
