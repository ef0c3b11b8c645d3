r"""ReGLU: y = relu(gate) · up, or relu(gate)² · up (BitNet b1.58).

    d_gate = dy · up · [g > 0]  or  dy · up · 2 relu(g)        d_up = dy · relu(g)  or  dy · relu(g)²

Everything is computed in fp32 and rounded once. Kernels, shared with the other gated ops: _gated.py. Source: Shazeer,
arXiv:2002.05202.
"""

from __future__ import annotations

import torch
from torch import nn
from torch.nn import functional as F

from ligertune_kernels.launcher import runs_triton
from ligertune_kernels.ops.mlp._gated import GateForm, check_gate_and_up, gate_and_up, gated_activation


def reglu_reference(
    gate: torch.Tensor, up: torch.Tensor | None = None, *, squared: bool = False, up_first: bool = False
) -> torch.Tensor:
    """Compute `reglu` in plain torch."""
    gate, up = gate_and_up(gate, up, up_first)
    wide = torch.promote_types(gate.dtype, torch.float32)
    activated = F.relu(gate.to(wide))
    return ((activated.square() if squared else activated) * up.to(wide)).to(gate.dtype)


def reglu(
    gate: torch.Tensor,  # (..., F), or (..., 2F): gate, then up
    up: torch.Tensor | None = None,  # (..., F)
    *,
    squared: bool = False,
    up_first: bool = False,
    inplace: bool = False,
) -> torch.Tensor:  # (..., F)
    """Compute relu(gate) · up, or relu(gate)² · up if `squared`, of two tensors or of one packed tensor.

    up_first, inplace: as in `swiglu`. Raises ValueError on mismatched shapes or dtypes, or up_first with two tensors.
    """
    form = GateForm("relu2" if squared else "relu", up_first=up_first)
    check_gate_and_up("reglu", gate, up, form)
    if gate.numel() == 0 or not runs_triton(gate):
        return reglu_reference(gate, up, squared=squared, up_first=up_first)
    return gated_activation(gate, up, form, inplace)


class ReGLU(nn.Module):
    """`reglu` as a module; it has no weights."""

    def __init__(self, squared: bool = False) -> None:
        super().__init__()
        self.squared = squared

    def forward(self, gate: torch.Tensor, up: torch.Tensor | None = None) -> torch.Tensor:
        return reglu(gate, up, squared=self.squared)

    def extra_repr(self) -> str:
        return f"squared={self.squared}"
