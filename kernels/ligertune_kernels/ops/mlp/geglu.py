r"""GeGLU: y = gelu(gate) · up, with the normal distribution function Φ or its tanh approximation
(σ is the logistic function).

    none    gelu(g) = g Φ(g)                                gelu'(g) = Φ(g) + g φ(g)
    tanh    gelu(g) = g (1 + tanh(i)) / 2 = g s             gelu'(g) = s + g s (1 - s) 2 i'
            s = σ(2i), i = √(2/π) (g + 0.044715 g³)         i' = √(2/π) (1 + 0.134145 g²)

    d_gate = dy · up · gelu'(g)        d_up = dy · gelu(g)

The kernels are swiglu's too and stand in gated.py: fp32 arithmetic, one rounding.
"""

from __future__ import annotations

from typing import Literal

import torch
from torch import nn
from torch.nn import functional as F

from ligertune_kernels.launcher import runs_triton
from ligertune_kernels.ops.mlp import _gated as gated

Approximate = Literal["tanh", "none"]


def geglu_reference(
    gate: torch.Tensor, up: torch.Tensor | None = None, *, approximate: Approximate = "tanh"
) -> torch.Tensor:
    """The same in plain torch."""
    gate, up = gate.chunk(2, dim=-1) if up is None else (gate, up)
    wide = torch.promote_types(gate.dtype, torch.float32)
    return (F.gelu(gate.to(wide), approximate=approximate) * up.to(wide)).to(gate.dtype)


def geglu(
    gate: torch.Tensor, up: torch.Tensor | None = None, *, approximate: Approximate = "tanh", inplace: bool = False
) -> torch.Tensor:
    """gelu(gate) · up of gate and up (..., F), or of one packed tensor (..., 2F) whose first half is the gate.

    inplace allows the backward to write the gradients over gate and up, as swiglu's does.
    """
    gated.check("geglu", gate, up)
    if approximate not in ("tanh", "none"):
        raise ValueError(f"geglu: approximate is {approximate!r}; expected 'tanh' or 'none'")
    if gate.numel() == 0 or not runs_triton(gate):
        return geglu_reference(gate, up, approximate=approximate)
    return gated.apply(gate, up, "gelu_tanh" if approximate == "tanh" else "gelu_erf", inplace)


class GeGLU(nn.Module):
    """`geglu` as a module without weights."""

    def __init__(self, approximate: Approximate = "tanh") -> None:
        super().__init__()
        self.approximate = approximate

    def forward(self, gate: torch.Tensor, up: torch.Tensor | None = None) -> torch.Tensor:
        return geglu(gate, up, approximate=self.approximate)

    def extra_repr(self) -> str:
        return f"approximate={self.approximate!r}"
