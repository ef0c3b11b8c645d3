"""Options and parameters of `experts`: activation, layout of the weights, LoRA, choice of the products."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Literal, NamedTuple

import torch

Weight = torch.Tensor | Callable[[], torch.Tensor]
"""A weight, or a function without arguments that returns it: then it is frozen, made in the forward and again in the
backward, and not kept in between (a weight that is stored in 4 bits)."""

Products = Literal["grouped_mm", "triton", "loop"]
"""What computes the grouped products: torch's grouped_mm, kernels of this package, or one product per expert, which
waits for the GPU to read the number of rows of each."""

ACTIVATIONS = ("silu", "gelu_tanh", "gelu_erf")


class GatedActivation(NamedTuple):
    """How the gate and up halves of an expert are combined: act(gate) · (up + up_offset).

    alpha: silu is gate · sigmoid(alpha · gate). limit: gate is at most limit, and up within ±limit, before all else.
    """

    function: Literal["silu", "gelu_tanh", "gelu_erf"] = "silu"
    alpha: float = 1.0
    limit: float | None = None
    up_offset: float = 0.0


class ExpertLora(NamedTuple):
    """LoRA of a projection of all experts: y += scale · (x aᵀ) bᵀ. a is (X, R, inputs), b is (X, outputs, R)."""

    a: torch.Tensor
    b: torch.Tensor
    scale: float = 1.0


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
    def gate_up(self) -> Weight:
        return self.options.gate_up_function or self.tensors.gate_up

    @property
    def down(self) -> Weight:
        return self.options.down_function or self.tensors.down

    @property
    def gate_up_lora(self) -> ExpertLora | None:
        scale = self.options.gate_up_scale
        return None if scale is None else ExpertLora(self.tensors.gate_up_a, self.tensors.gate_up_b, scale)

    @property
    def down_lora(self) -> ExpertLora | None:
        scale = self.options.down_scale
        return None if scale is None else ExpertLora(self.tensors.down_a, self.tensors.down_b, scale)


def parameters_of(
    gate_up: Weight,
    down: Weight,
    biases: tuple[torch.Tensor | None, torch.Tensor | None],
    loras: tuple[ExpertLora | None, ExpertLora | None],
    options: ExpertOptions,
) -> ExpertParameters:
    """Return the parameters with tensors and functions apart: autograd keeps the tensors."""
    made = [callable(weight) for weight in (gate_up, down)]
    weights = (None if is_made else weight for is_made, weight in zip(made, (gate_up, down), strict=True))
    low_rank = (t for lora in loras for t in (lora or (None, None))[:2])
    options = options._replace(
        gate_up_scale=None if loras[0] is None else float(loras[0].scale),
        down_scale=None if loras[1] is None else float(loras[1].scale),
        gate_up_function=gate_up if made[0] else None,
        down_function=down if made[1] else None,
    )
    return ExpertParameters(ExpertTensors(*weights, *biases, *low_rank), options)
