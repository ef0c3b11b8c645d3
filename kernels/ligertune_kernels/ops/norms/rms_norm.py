r"""Root-mean-square norm over the last dimension, of rows x (E,) with weight w (E,), or without (offset + w is 1).

    r = 1 / sqrt(mean(x²) + eps)        x̂ = r x        y = (offset + w) x̂

Backward, with g = (offset + w) dy:

    dx = r (g - x̂ mean(g x̂))            dw = sum over rows of dy x̂

Everything is computed in fp32. Models differ in where they round:

    llama   x̂ is rounded to x's dtype, then multiplied: y has the promoted dtype of x and w
    gemma   the product is taken in fp32 and rounded once to x's dtype (Gemma: offset 1; OLMo 2: offset 0)
    deepseek  r is rounded to x's dtype, then multiplied by x; there is no weight (DeepSeek-V4)
    none    as torch.nn.functional.rms_norm: the same arithmetic as gemma

add_rms_norm fuses the addition before the norm: s = x + residual, y = rms_norm(s), for x, residual (..., E). s is
rounded to the tensors' dtype, as the model's own addition does, and the norm reads the rounded sum. In the backward one
kernel computes the gradient of both x and residual, with ds the gradient that reaches s past the norm:

    dx = rms_norm's dx of dy at s + ds

Without fusion the sum, and backward both gradients, are written and read once more.

Kernels and launches: kernels.py; tiles.py. Source: Zhang and Sennrich, arXiv:1910.07467.
"""

from __future__ import annotations

from typing import Literal

import torch
from torch import nn

from ligertune_kernels.autograd import no_double_backward
from ligertune_kernels.launcher import runs_triton
from ligertune_kernels.ops.norms.kernels import NormOptions, RowNorm, norm_backward, norm_forward

Cast = Literal["llama", "gemma", "deepseek", "none"]


def rms_norm_reference(
    x: torch.Tensor, weight: torch.Tensor | None = None, eps: float = 1e-6, *, offset: float = 0.0, cast: Cast = "llama"
) -> torch.Tensor:
    """Compute `rms_norm` in plain torch, with the operations of Hugging Face's Llama, Gemma and OLMo 2 norms."""
    wide = torch.promote_types(x.dtype, torch.float32)
    xhat = x.to(wide)
    rstd = torch.rsqrt(xhat.pow(2).mean(-1, keepdim=True) + eps)
    # DeepSeek rounds r alone: the product is taken in x's dtype.
    if cast == "deepseek":
        return x * rstd.to(x.dtype)
    xhat = xhat * rstd
    if weight is None:
        return xhat.to(x.dtype)
    if cast == "llama":
        return (weight if offset == 0 else offset + weight) * xhat.to(x.dtype)
    return (xhat * (weight.to(wide) if offset == 0 else offset + weight.to(wide))).to(x.dtype)


def _options(eps: float, offset: float, cast: Cast, inplace: bool) -> NormOptions:
    rounds_xhat = cast == "llama"
    rounds_rstd = cast == "deepseek"
    return NormOptions(eps, offset, round_xhat=rounds_xhat, round_rstd=rounds_rstd, inplace=inplace)


def _check(op: str, x: torch.Tensor, weight: torch.Tensor | None, cast: str, offset: float) -> None:
    """Raise ValueError for shapes, casts and offsets that rms_norm and add_rms_norm do not take."""
    if weight is None and offset != 0.0:
        raise ValueError(f"{op}: offset is {offset}, but there is no weight to add it to: pass a weight, or offset=0.0")
    if weight is not None and weight.shape != x.shape[-1:]:
        raise ValueError(f"{op}: weight is {tuple(weight.shape)}, but x is {tuple(x.shape)}: expected its last size")
    if cast not in ("llama", "gemma", "deepseek", "none"):
        raise ValueError(f"{op}: cast is {cast!r}; expected 'llama', 'gemma', 'deepseek' or 'none'")
    if cast == "deepseek" and weight is not None:
        raise ValueError(f"{op}: cast is 'deepseek', which takes no weight: pass weight=None")


def rms_norm(
    x: torch.Tensor,  # (..., E)
    weight: torch.Tensor | None = None,  # (E,)
    eps: float = 1e-6,
    *,
    offset: float = 0.0,
    cast: Cast = "llama",
    inplace: bool = False,
) -> torch.Tensor:  # (..., E)
    """Normalise x by its root mean square over the last dimension, rounded as the model named by `cast` rounds.

    The result has x's dtype, except under "llama" with a wider weight (bf16 x, fp32 weight: fp32), as in that model.

    inplace: the backward may write x's gradient over the incoming gradient, which saves x's size. Only the norm may
    read that tensor: in `rms_norm(h) + h` both terms receive the same gradient tensor, and h's gradient would be wrong.
    A second backward through a retained graph with the same incoming tensor would be wrong too.

    Without a weight the result is x̂, rounded once to x's dtype. Raises ValueError on mismatched shapes, an unknown
    cast, or an offset without a weight.
    """
    _check("rms_norm", x, weight, cast, offset)
    # A launch needs a program, and an empty tensor has none.
    if x.numel() == 0 or not runs_triton(x) or not (weight is None or runs_triton(weight)):
        return rms_norm_reference(x, weight, eps, offset=offset, cast=cast)
    options = _options(eps, offset, cast, inplace)
    if torch.is_grad_enabled() and (x.requires_grad or (weight is not None and weight.requires_grad)):
        return RowNorm.apply(x, weight, None, options)
    return norm_forward(x, None, weight, None, options)[0]


class RMSNorm(nn.Module):
    """`rms_norm` as a module; its weight starts at ones, or at zeros where the offset is one.

    elementwise_affine=False: there is no weight, as in torch.nn.RMSNorm.
    """

    def __init__(
        self,
        hidden_size: int,
        eps: float = 1e-6,
        *,
        offset: float = 0.0,
        cast: Cast = "llama",
        elementwise_affine: bool = True,
        device: torch.device | str | None = None,
        dtype: torch.dtype | None = None,
    ) -> None:
        super().__init__()
        self.hidden_size = hidden_size
        self.eps = eps
        self.offset = offset
        self.cast = cast
        weight = torch.full((hidden_size,), 1.0 - offset, device=device, dtype=dtype) if elementwise_affine else None
        self.register_parameter("weight", None if weight is None else nn.Parameter(weight))

    def forward(self, hidden_states: torch.Tensor) -> torch.Tensor:
        return rms_norm(hidden_states, self.weight, self.eps, offset=self.offset, cast=self.cast)

    def extra_repr(self) -> str:
        affine = "" if self.weight is not None else ", elementwise_affine=False"
        return f"{self.hidden_size}, eps={self.eps}, offset={self.offset}, cast={self.cast!r}{affine}"


def add_rms_norm_reference(
    x: torch.Tensor,
    residual: torch.Tensor,
    weight: torch.Tensor | None = None,
    eps: float = 1e-6,
    *,
    offset: float = 0.0,
    cast: Cast = "llama",
) -> tuple[torch.Tensor, torch.Tensor]:
    """Compute `add_rms_norm` in plain torch: the addition, then the norm."""
    new_residual = x + residual
    return rms_norm_reference(new_residual, weight, eps, offset=offset, cast=cast), new_residual


class _AddRMSNorm(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x, residual, weight, options):
        y, new_residual, stats = norm_forward(x, residual, weight, None, options)
        ctx.set_materialize_grads(False)  # the last sum of a model has no reader: avoid a gradient of zeros
        ctx.save_for_backward(new_residual, weight, stats)
        ctx.options = options
        ctx.dtypes = (x.dtype, residual.dtype)
        return y, new_residual

    @staticmethod
    @no_double_backward
    def backward(ctx, dy, ds):
        new_residual, weight, stats = ctx.saved_tensors
        needs_dx, needs_dr, needs_dw, _ = ctx.needs_input_grad
        if dy is None:  # nothing read the normed sum: the gradient of the sum passes through
            dsum = ds
            dw = None
        else:
            needs = (needs_dx or needs_dr, needs_dw, False)
            dsum, dw, _ = norm_backward(dy, ds, new_residual, weight, None, stats, needs, ctx.options)
        x_dtype, residual_dtype = ctx.dtypes
        dx = dsum.to(x_dtype) if needs_dx and dsum is not None else None
        dr = dsum.to(residual_dtype) if needs_dr and dsum is not None else None
        return dx, dr, dw, None


def add_rms_norm(
    x: torch.Tensor,  # (..., E)
    residual: torch.Tensor,  # (..., E)
    weight: torch.Tensor | None = None,  # (E,)
    eps: float = 1e-6,
    *,
    offset: float = 0.0,
    cast: Cast = "llama",
    inplace: bool = False,
) -> tuple[torch.Tensor, torch.Tensor]:  # both (..., E)
    """Return (rms_norm(x + residual), x + residual), computed in one pass.

    cast and offset are those of `rms_norm`. inplace: the backward may write the sum's gradient over the incoming
    gradient of the norm. Raises ValueError on mismatched shapes, an unknown cast, or an offset without a weight.
    """
    if x.shape != residual.shape:
        raise ValueError(f"add_rms_norm: x is {tuple(x.shape)}, but residual is {tuple(residual.shape)}")
    _check("add_rms_norm", x, weight, cast, offset)
    given = (x, residual) if weight is None else (x, residual, weight)
    if x.numel() == 0 or not all(map(runs_triton, given)):
        return add_rms_norm_reference(x, residual, weight, eps, offset=offset, cast=cast)
    options = _options(eps, offset, cast, inplace)
    if torch.is_grad_enabled() and any(t.requires_grad for t in given):
        return _AddRMSNorm.apply(x, residual, weight, options)
    return norm_forward(x, residual, weight, None, options)[:2]


class AddRMSNorm(RMSNorm):
    """`add_rms_norm` as a module: (hidden_states, residual) -> (normed sum, sum)."""

    def forward(self, hidden_states: torch.Tensor, residual: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        return add_rms_norm(hidden_states, residual, self.weight, self.eps, offset=self.offset, cast=self.cast)
