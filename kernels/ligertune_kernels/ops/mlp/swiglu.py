r"""SwiGLU: y = silu(gate) · up with silu(g) = g σ(g), σ the logistic function.

    d_gate = dy · up · σ(g) (1 + g (1 - σ(g)))        d_up = dy · silu(g)

The kernels are geglu's too and stand in gated.py: fp32 arithmetic, one rounding.
"""

from __future__ import annotations

import torch
from torch import nn
from torch.nn import functional as F

from ligertune_kernels.launcher import runs_triton
from ligertune_kernels.ops.mlp import _gated as gated


def swiglu_reference(gate: torch.Tensor, up: torch.Tensor | None = None) -> torch.Tensor:
    """The same in plain torch."""
    gate, up = gate.chunk(2, dim=-1) if up is None else (gate, up)
    wide = torch.promote_types(gate.dtype, torch.float32)
    return (F.silu(gate.to(wide)) * up.to(wide)).to(gate.dtype)


def swiglu(gate: torch.Tensor, up: torch.Tensor | None = None, *, inplace: bool = False) -> torch.Tensor:
    """silu(gate) · up of gate and up (..., F), or of one packed tensor (..., 2F) whose first half is the gate.

    inplace allows the backward to write the gradients over gate and up, which saves their size. The caller must not
    read them after it; autograd notices if another op's backward would. A second backward is then refused.
    """
    gated.check("swiglu", gate, up)
    if gate.numel() == 0 or not runs_triton(gate):
        return swiglu_reference(gate, up)
    return gated.apply(gate, up, "silu", inplace)


class SwiGLU(nn.Module):
    """`swiglu` as a module without weights."""

    def forward(self, gate: torch.Tensor, up: torch.Tensor | None = None) -> torch.Tensor:
        return swiglu(gate, up)
