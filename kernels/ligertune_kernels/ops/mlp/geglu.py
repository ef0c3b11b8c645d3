r"""GeGLU: y = gelu(gate) · up, with the normal distribution function Φ (density φ) or its tanh approximation.

    none    gelu(g) = g Φ(g)                                gelu'(g) = Φ(g) + g φ(g)
    tanh    gelu(g) = g (1 + tanh(i)) / 2 = g s             gelu'(g) = s + g s (1 - s) 2 i'
            s = σ(2i), i = √(2/π) (g + 0.044715 g³)         i' = √(2/π) (1 + 0.134145 g²)

    d_gate = dy · up · gelu'(g)        d_up = dy · gelu(g)        (σ: the logistic function)

Everything is computed in fp32 and rounded once. Kernels, shared with the other gated op: _gated.py. Source: Shazeer,
arXiv:2002.05202.
"""

from __future__ import annotations

from typing import Literal

import torch
from torch import nn
from torch.nn import functional as F

from ligertune_kernels.launcher import runs_triton
from ligertune_kernels.ops.mlp._gated import GateForm, check_gate_and_up, gate_and_up, gated_activation

Approximate = Literal["tanh", "none"]


def geglu_reference(
    gate: torch.Tensor, up: torch.Tensor | None = None, *, approximate: Approximate = "tanh", up_first: bool = False
) -> torch.Tensor:
    """Compute `geglu` in plain torch."""
    gate, up = gate_and_up(gate, up, up_first)
    wide = torch.promote_types(gate.dtype, torch.float32)
    return (F.gelu(gate.to(wide), approximate=approximate) * up.to(wide)).to(gate.dtype)


def geglu(
    gate: torch.Tensor,  # (..., F), or (..., 2F): gate, then up
    up: torch.Tensor | None = None,  # (..., F)
    *,
    approximate: Approximate = "tanh",
    up_first: bool = False,
    inplace: bool = False,
) -> torch.Tensor:  # (..., F)
    """Compute gelu(gate) · up of two tensors or of one packed tensor.

    approximate: "tanh" or "none" (erf), as in torch. up_first, inplace: as in `swiglu`. Raises ValueError on mismatched
    shapes or dtypes, up_first with two tensors, or an unknown approximation.
    """
    form = GateForm("gelu_tanh" if approximate == "tanh" else "gelu_erf", up_first=up_first)
    check_gate_and_up("geglu", gate, up, form)
    if approximate not in ("tanh", "none"):
        raise ValueError(f"geglu: approximate is {approximate!r}; expected 'tanh' or 'none'")
    if gate.numel() == 0 or not runs_triton(gate):
        return geglu_reference(gate, up, approximate=approximate, up_first=up_first)
    return gated_activation(gate, up, form, inplace)


class GeGLU(nn.Module):
    """`geglu` as a module; it has no weights."""

    def __init__(self, approximate: Approximate = "tanh") -> None:
        super().__init__()
        self.approximate = approximate

    def forward(self, gate: torch.Tensor, up: torch.Tensor | None = None) -> torch.Tensor:
        return geglu(gate, up, approximate=self.approximate)

    def extra_repr(self) -> str:
        return f"approximate={self.approximate!r}"
