r"""Gated experts of a mixture: each token (E,) goes through K of X gated MLPs, whose outputs are weighted and added.

    (g, u) = x W1ᵀ + b1      a = act(g) · (u + offset)      y = sum over the token's experts of p (a W2ᵀ + b2)

p are the router's weights. W1 (X, 2F, E) holds gate and up of every expert, W2 (X, E, F) its down projection.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Literal, NamedTuple

import torch
from torch.nn import functional

Weight = torch.Tensor | Callable[[], torch.Tensor]
"""A weight, or a function without arguments that returns it: then it is frozen, made in the forward and again in the
backward, and not kept in between (a weight that is stored in 4 bits)."""


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


def experts_reference(
    hidden: torch.Tensor,  # (N, E)
    expert_index: torch.Tensor,  # (N, K) integers; outside [0, X): no expert
    expert_weights: torch.Tensor,  # (N, K)
    gate_up: Weight,  # (X, 2F, E)
    down: Weight,  # (X, E, F)
    gate_up_bias: torch.Tensor | None = None,  # (X, 2F)
    down_bias: torch.Tensor | None = None,  # (X, E)
    *,
    activation: GatedActivation = GatedActivation(),  # noqa: B008 (immutable)
    layout: ExpertLayout = ExpertLayout(),  # noqa: B008 (immutable)
    gate_up_lora: ExpertLora | None = None,
    down_lora: ExpertLora | None = None,
) -> torch.Tensor:  # (N, E)
    """Compute `experts` in plain torch, one expert after the other."""
    gate_up, down = (weight() if callable(weight) else weight for weight in (gate_up, down))
    result = torch.zeros_like(hidden, dtype=torch.promote_types(hidden.dtype, torch.float32))
    for expert in range(len(down)):
        token, slot = (expert_index == expert).nonzero(as_tuple=True)
        if len(token) == 0:
            continue
        both = _project(hidden[token], gate_up, expert, layout.transposed, gate_up_bias, gate_up_lora)
        gate, up = (both[:, 0::2], both[:, 1::2]) if layout.interleaved else both.chunk(2, dim=-1)
        product = activate(gate, up, activation)
        out = _project(product, down, expert, layout.transposed, down_bias, down_lora)
        result = result.index_add(0, token, (out * expert_weights[token, slot].unsqueeze(1)).to(result.dtype))
    return result.to(hidden.dtype)


def activate(gate: torch.Tensor, up: torch.Tensor, activation: GatedActivation) -> torch.Tensor:
    """Return act(gate) · (up + offset) (..., F), in plain torch."""
    if activation.limit is not None:
        gate, up = gate.clamp(max=activation.limit), up.clamp(-activation.limit, activation.limit)
    if activation.function == "silu":
        gate = gate * torch.sigmoid(activation.alpha * gate)
    else:
        gate = functional.gelu(gate, approximate="tanh" if activation.function == "gelu_tanh" else "none")
    return gate * (up + activation.up_offset)


def _project(
    x: torch.Tensor,  # (M, inputs)
    weight: torch.Tensor,  # (X, outputs, inputs)
    expert: int,
    transposed: bool,
    bias: torch.Tensor | None,  # (X, outputs)
    lora: ExpertLora | None,
) -> torch.Tensor:  # (M, outputs)
    one = weight[expert].T if transposed else weight[expert]
    y = functional.linear(x, one.to(x.dtype), None if bias is None else bias[expert].to(x.dtype))
    if lora is not None:
        y = y + lora.scale * functional.linear(
            functional.linear(x, lora.a[expert].to(x.dtype)), lora.b[expert].to(x.dtype)
        )
    return y


def experts(
    hidden: torch.Tensor,  # (N, E)
    expert_index: torch.Tensor,  # (N, K) integers; outside [0, X): no expert
    expert_weights: torch.Tensor,  # (N, K)
    gate_up: Weight,  # (X, 2F, E)
    down: Weight,  # (X, E, F)
    gate_up_bias: torch.Tensor | None = None,  # (X, 2F)
    down_bias: torch.Tensor | None = None,  # (X, E)
    *,
    activation: GatedActivation = GatedActivation(),  # noqa: B008 (immutable)
    layout: ExpertLayout = ExpertLayout(),  # noqa: B008 (immutable)
    gate_up_lora: ExpertLora | None = None,
    down_lora: ExpertLora | None = None,
) -> torch.Tensor:  # (N, E)
    """Send each token through its experts, and add their outputs by the router's weights."""
    return experts_reference(
        hidden, expert_index, expert_weights, gate_up, down, gate_up_bias, down_bias,
        activation=activation, layout=layout, gate_up_lora=gate_up_lora, down_lora=down_lora,
    )  # fmt: skip
