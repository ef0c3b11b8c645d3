"""Medusa heads: head k of hidden state h_t predicts token t + k + 1; the model's own head predicts t + 1.

    head(h) = W (block_L ∘ ... ∘ block_1)(h)        block(x) = x + SiLU(U x + b)        U: (E, E), b: (E,), W: (V, E)

U and b start as zeros, so every head starts equal to the model's own; SiLU'(0) = 1/2 lets gradients through. W is the
model's output head, shared by all heads, or a trainable copy for each. Modules are named as in Cai et al. 2024
(https://arxiv.org/abs/2401.10774): `{head}.{block}.linear.weight`, and a head's own W `{head}.{blocks}.weight`.
"""

from __future__ import annotations

from collections.abc import Iterable

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from ligertune.any_types import AnyModule

# what to say about a model with another output head
NEEDS_PLAIN_HEAD = "Medusa needs a linear output head without a bias on the last hidden state, as in Llama."


class ResidualBlock(nn.Module):
    """x + SiLU(U x + b): (..., E) -> (..., E); starts as the identity."""

    def __init__(self, weight: Tensor) -> None:
        """weight (V, E): the output head's, which gives size, dtype and device."""
        super().__init__()
        hidden_size = weight.shape[1]
        self.linear = nn.Linear(hidden_size, hidden_size, dtype=weight.dtype, device=weight.device)
        nn.init.zeros_(self.linear.weight)
        nn.init.zeros_(self.linear.bias)

    def forward(self, x: Tensor) -> Tensor:
        return x + F.silu(self.linear(x))


class MedusaHeads(nn.ModuleList):
    """K sequences of L residual blocks, each with its own projection if `own_lm_head`."""

    def __init__(self, num_heads: int, num_layers: int, weight: Tensor, *, own_lm_head: bool) -> None:
        """weight (V, E): of the model's output head; own projections start as copies of it."""
        heads = []
        for _ in range(num_heads):
            layers: list[nn.Module] = [ResidualBlock(weight) for _ in range(num_layers)]
            if own_lm_head:
                projection = nn.utils.skip_init(
                    nn.Linear, *weight.shape[::-1], bias=False, dtype=weight.dtype, device=weight.device
                )
                with torch.no_grad():
                    projection.weight.copy_(weight)
                layers.append(projection)
            heads.append(nn.Sequential(*layers))
        super().__init__(heads)
        self.num_layers = num_layers
        self.own_lm_head = own_lm_head

    def hidden(self, hidden: Tensor) -> list[Tensor]:
        """Return each head's blocks applied to the model's last hidden state (..., E): K tensors (..., E)."""
        return [self.blocks(k)(hidden) for k in range(len(self))]

    def blocks(self, k: int) -> nn.Module:
        """Return the residual blocks of head k + 1, without its own projection."""
        head: AnyModule = self[k]
        return head[: self.num_layers]

    def projections(self, weight: Tensor) -> list[Tensor]:
        """Return each head's W (V, E): its own, or the shared `weight`."""
        if not self.own_lm_head:
            return [weight] * len(self)
        heads: Iterable[AnyModule] = self
        return [head[self.num_layers].weight for head in heads]
