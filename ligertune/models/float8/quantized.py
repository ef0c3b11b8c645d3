"""Matrices in float8 and their products."""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

OPERAND = torch.float8_e4m3fn
GRADIENT = torch.float8_e5m2


class Quantized(NamedTuple):
    """A matrix (N, C) in float8: x = q · inverse."""

    rows: Tensor | None  # (..., C)
    columns: Tensor | None  # (C, N rounded up to a multiple of 16)
    inverse: Tensor  # () float32
    whole: Tensor | None = None  # of a weight in an `InputGroup`: the group's matrix, which contains `columns`


def float8_product(
    a: Tensor,  # (M, K) float8
    b: Tensor,  # (N, K) float8
    a_inverse: Tensor,  # () float32
    b_inverse: Tensor,  # () float32
    dtype: torch.dtype,
    *,
    fast: bool,
) -> Tensor:  # (M, N)
    """Return a b^T of two quantised matrices. fast: partial sums have fewer bits than float32."""
    if a.is_cuda:
        return torch._scaled_mm(a, b.t(), scale_a=a_inverse, scale_b=b_inverse, out_dtype=dtype, use_fast_accum=fast)
    return ((a.float() @ b.float().t()) * (a_inverse * b_inverse)).to(dtype)
