"""Layer norm over the last dimension: x (..., E), optional weight and bias (E,).

Mathematics of both directions, kernels and launches: kernels.py. Everything is computed in fp32 and rounded once to
x's dtype. The variance is the mean of (x - m)², because mean(x²) - m² cancels.
"""

from __future__ import annotations

import torch
from torch import nn
from torch.nn import functional as F

from ligertune_kernels.launcher import runs_triton
from ligertune_kernels.ops.norms.kernels import NormOptions, RowNorm, norm_forward


def layer_norm_reference(
    x: torch.Tensor,
    weight: torch.Tensor | None = None,
    bias: torch.Tensor | None = None,
    eps: float = 1e-5,
    *,
    offset: float = 0.0,
) -> torch.Tensor:
    """Compute `layer_norm` in plain torch, whose function needs all tensors in one dtype."""
    weight = weight + offset if offset else weight
    wide = torch.promote_types(x.dtype, torch.float32)
    weight, bias = (None if t is None else t.to(wide) for t in (weight, bias))
    return F.layer_norm(x.to(wide), x.shape[-1:], weight, bias, eps).to(x.dtype)


def layer_norm(
    x: torch.Tensor,  # (..., E)
    weight: torch.Tensor | None = None,  # (E,)
    bias: torch.Tensor | None = None,  # (E,)
    eps: float = 1e-5,
    *,
    offset: float = 0.0,
    inplace: bool = False,
) -> torch.Tensor:  # (..., E)
    """Compute torch.nn.functional.layer_norm over the last dimension, in x's dtype.

    offset: added to the weight in the weight's dtype, as Nemotron's norm does with 1. inplace: the backward may write
    x's gradient over the incoming gradient, as in `rms_norm`. Raises ValueError on mismatched shapes, or an offset
    without a weight.
    """
    if offset:
        if weight is None:
            raise ValueError(f"layer_norm: offset is {offset}, but there is no weight to add it to: pass a weight")
        weight = weight + offset
    for name, t in (("weight", weight), ("bias", bias)):
        if t is not None and t.shape != x.shape[-1:]:
            raise ValueError(
                f"layer_norm: {name} is {tuple(t.shape)}, but x is {tuple(x.shape)}: expected its last size"
            )
    given = [t for t in (x, weight, bias) if t is not None]
    if x.numel() == 0 or not all(runs_triton(t) for t in given):
        return layer_norm_reference(x, weight, bias, eps)
    options = NormOptions(eps, centred=True, inplace=inplace)
    if torch.is_grad_enabled() and any(t.requires_grad for t in given):
        return RowNorm.apply(x, weight, bias, options)
    return norm_forward(x, None, weight, bias, options)[0]


class LayerNorm(nn.LayerNorm):
    """`layer_norm` as a module, with the parameters of torch.nn.LayerNorm over one dimension."""

    def __init__(
        self,
        hidden_size: int,
        eps: float = 1e-5,
        *,
        bias: bool = True,
        device: torch.device | str | None = None,
        dtype: torch.dtype | None = None,
    ) -> None:
        super().__init__(hidden_size, eps, bias=bias, device=device, dtype=dtype)

    def forward(self, hidden_states: torch.Tensor) -> torch.Tensor:
        return layer_norm(hidden_states, self.weight, self.bias, self.eps)
