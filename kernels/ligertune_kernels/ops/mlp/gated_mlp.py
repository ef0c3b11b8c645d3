r"""Gated activations of MLPs: y = act(gate) · up. Each op also takes one packed tensor of both halves.

SwiGLU: y = silu(gate) · up with silu(g) = g σ(g), σ the logistic function.

    d_gate = dy · up · σ(g) (1 + g (1 - σ(g)))        d_up = dy · silu(g)

Options clamp gate and up, scale the argument of σ and the result, and add a constant to up.

GeGLU: y = gelu(gate) · up, with the normal distribution function Φ (density φ) or its tanh approximation.

    none    gelu(g) = g Φ(g)                                gelu'(g) = Φ(g) + g φ(g)
    tanh    gelu(g) = g (1 + tanh(i)) / 2 = g s             gelu'(g) = s + g s (1 - s) 2 i'
            s = σ(2i), i = √(2/π) (g + 0.044715 g³)         i' = √(2/π) (1 + 0.134145 g²)

    d_gate = dy · up · gelu'(g)        d_up = dy · gelu(g)        (σ: the logistic function)

ReGLU: y = relu(gate) · up, or relu(gate)² · up (BitNet b1.58).

    d_gate = dy · up · [g > 0]  or  dy · up · 2 relu(g)        d_up = dy · relu(g)  or  dy · relu(g)²

Everything is computed in fp32 and rounded once. Kernels and autograd: kernels.py. Source: Shazeer, arXiv:2002.05202.
"""

from __future__ import annotations

from typing import Literal

import torch
from torch import nn
from torch.nn import functional as F

from ligertune_kernels.launcher import runs_triton
from ligertune_kernels.ops.mlp.kernels import GateForm, check_gate_and_up, gate_and_up, gated_activation

Approximate = Literal["tanh", "none"]


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
