r"""SwiGLU: y = silu(gate) · up with silu(g) = g σ(g), σ the logistic function.

    d_gate = dy · up · σ(g) (1 + g (1 - σ(g)))        d_up = dy · silu(g)

Options clamp gate and up, scale the argument of σ and the result, and add a constant to up.

Everything is computed in fp32 and rounded once. Kernels, shared with the other gated op: _gated.py. Source: Shazeer,
arXiv:2002.05202.
"""

from __future__ import annotations

import torch
from torch import nn
from torch.nn import functional as F

from ligertune_kernels.launcher import runs_triton
from ligertune_kernels.ops.mlp._gated import GateForm, check_gate_and_up, gate_and_up, gated_activation


def swiglu_reference(
    gate: torch.Tensor,
    up: torch.Tensor | None = None,
    *,
    alpha: float = 1.0,
    limit: float | None = None,
    up_offset: float = 0.0,
    scale: float = 1.0,
    up_first: bool = False,
) -> torch.Tensor:
    """Compute `swiglu` in plain torch."""
    gate, up = gate_and_up(gate, up, up_first)
    dtype = gate.dtype
    wide = torch.promote_types(gate.dtype, torch.float32)
    gate = gate.to(wide)
    up = up.to(wide)
    if limit is not None:
        gate = gate.clamp(max=limit)
        up = up.clamp(-limit, limit)
    activated = F.silu(gate) if alpha == 1.0 else gate * torch.sigmoid(alpha * gate)
    y = activated * (up + up_offset if up_offset else up)
    return (y if scale == 1.0 else y * scale).to(dtype)


def swiglu(
    gate: torch.Tensor,  # (..., F), or (..., 2F): gate, then up
    up: torch.Tensor | None = None,  # (..., F)
    *,
    alpha: float = 1.0,
    limit: float | None = None,
    up_offset: float = 0.0,
    scale: float = 1.0,
    up_first: bool = False,
    inplace: bool = False,
) -> torch.Tensor:  # (..., F)
    """Compute scale · silu(gate) · (up + up_offset) of two tensors or of one packed tensor.

    alpha: silu(gate) is gate · σ(alpha · gate). limit: gate is at most limit, and up within ±limit, before all else
    (gpt-oss, MiniMax M3, DeepSeek V4). up_first: in a packed tensor up comes before gate.
    inplace: the backward may write the gradients over gate and up, which saves their size. The caller must not read
    them after it; autograd raises if another op's backward would. A second backward is then refused.

    Raises ValueError on mismatched shapes or dtypes, a limit that is not positive, or up_first with two tensors.
    """
    form = GateForm("silu", alpha, limit, up_offset, scale, up_first)
    check_gate_and_up("swiglu", gate, up, form)
    # The kernels launch at least one program; an empty tensor has none.
    if gate.numel() == 0 or not runs_triton(gate):
        return swiglu_reference(gate, up, alpha=alpha, limit=limit, up_offset=up_offset, scale=scale, up_first=up_first)
    return gated_activation(gate, up, form, inplace)


class SwiGLU(nn.Module):
    """`swiglu` as a module; it has no weights."""

    def forward(self, gate: torch.Tensor, up: torch.Tensor | None = None) -> torch.Tensor:
        return swiglu(gate, up)
