r"""SwiGLU: y = silu(gate) · up with silu(g) = g σ(g), σ the logistic function.

    d_gate = dy · up · σ(g) (1 + g (1 - σ(g)))        d_up = dy · silu(g)

Everything is computed in fp32 and rounded once. Kernels, shared with the other gated op: _gated.py. Source: Shazeer,
arXiv:2002.05202.
"""

from __future__ import annotations

import torch
from torch import nn
from torch.nn import functional as F

from ligertune_kernels.launcher import runs_triton
from ligertune_kernels.ops.mlp._gated import check_gate_and_up, gated_activation


def swiglu_reference(gate: torch.Tensor, up: torch.Tensor | None = None) -> torch.Tensor:
    """Compute `swiglu` in plain torch."""
    gate, up = gate.chunk(2, dim=-1) if up is None else (gate, up)
    wide = torch.promote_types(gate.dtype, torch.float32)
    return (F.silu(gate.to(wide)) * up.to(wide)).to(gate.dtype)


def swiglu(
    gate: torch.Tensor,  # (..., F), or (..., 2F): gate, then up
    up: torch.Tensor | None = None,  # (..., F)
    *,
    inplace: bool = False,
) -> torch.Tensor:  # (..., F)
    """Compute silu(gate) · up of two tensors or of one packed tensor.

    inplace: the backward may write the gradients over gate and up, which saves their size. The caller must not read
    them after it; autograd raises if another op's backward would. A second backward is then refused.

    Raises ValueError on mismatched shapes or dtypes.
    """
    check_gate_and_up("swiglu", gate, up)
    # The kernels launch at least one program; an empty tensor has none.
    if gate.numel() == 0 or not runs_triton(gate):
        return swiglu_reference(gate, up)
    return gated_activation(gate, up, "silu", inplace)


class SwiGLU(nn.Module):
    """`swiglu` as a module; it has no weights."""

    def forward(self, gate: torch.Tensor, up: torch.Tensor | None = None) -> torch.Tensor:
        return swiglu(gate, up)
