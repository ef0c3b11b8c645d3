"""Medusa heads: head k of hidden state h_t predicts token t + k + 1, where the model's own head predicts t + 1.

    head(h) = W (block_L ∘ ... ∘ block_1)(h)        block(x) = x + SiLU(U x + b)        U: (E, E), b: (E,), W: (V, E)

U and b start as zeros, so that every head starts as the model's own; SiLU'(0) = 1/2 lets the gradient through. W is
the model's output head, shared by all, or a copy of it that trains. Modules and their names are those of Cai et al.
2024 (https://arxiv.org/abs/2401.10774): `{head}.{block}.linear.weight`, and a projection as `{head}.{blocks}.weight`.
"""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor, nn


class ResidualBlock(nn.Module):
    """x + SiLU(U x + b): (..., E) -> (..., E); the identity until it is trained."""

    def __init__(self, hidden_size: int, **factory: object) -> None:
        super().__init__()
        self.linear = nn.Linear(hidden_size, hidden_size, **factory)
        nn.init.zeros_(self.linear.weight)
        nn.init.zeros_(self.linear.bias)

    def forward(self, x: Tensor) -> Tensor:
        return x + F.silu(self.linear(x))


class MedusaHeads(nn.ModuleList):
    """K sequences of L residual blocks, each with a projection of its own behind them where heads have one."""

    def __init__(self, num_heads: int, num_layers: int, weight: Tensor, *, own_lm_head: bool) -> None:
        """weight (V, E): that of the model's output head, whose dtype and device the heads take, or a copy of it."""
        vocab_size, hidden_size = weight.shape
        factory = {"dtype": weight.dtype, "device": weight.device}
        heads = []
        for _ in range(num_heads):
            layers: list[nn.Module] = [ResidualBlock(hidden_size, **factory) for _ in range(num_layers)]
            if own_lm_head:
                projection = nn.utils.skip_init(nn.Linear, hidden_size, vocab_size, bias=False, **factory)
                with torch.no_grad():
                    projection.weight.copy_(weight)
                layers.append(projection)
            heads.append(nn.Sequential(*layers))
        super().__init__(heads)
        self.num_layers, self.own_lm_head = num_layers, own_lm_head

    def hidden(self, hidden: Tensor) -> list[Tensor]:
        """What each head's projection is given, K times (..., E), of the model's last hidden state (..., E)."""
        return [head[: self.num_layers](hidden) for head in self]

    def projections(self, weight: Tensor) -> list[Tensor]:
        """Each head's W (V, E): its own, or `weight`."""
        return [head[self.num_layers].weight if self.own_lm_head else weight for head in self]
