"""Matrices in float8 and their products."""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

OPERAND = torch.float8_e4m3fn
GRADIENT = torch.float8_e5m2


class Quantized(NamedTuple):
    """A matrix (N, C) in float8: x = q · inverse. A copy that no product reads is left out."""

    by_rows: Tensor | None  # (..., C)
    by_columns: Tensor | None  # (C, N rounded up to a multiple of 16)
    inverse: Tensor  # () float32
    whole: Tensor | None = None  # of a weight in an `InputGroup`: the group's matrix, which contains `columns`

    @property
    def rows(self) -> Tensor:  # (..., C)
        """The copy by rows, for a product that has asked for it."""
        assert self.by_rows is not None, "quantised without a copy by rows"
        return self.by_rows

    @property
    def columns(self) -> Tensor:  # (C, N rounded up to a multiple of 16)
        """The copy by columns, for a product that has asked for it."""
        assert self.by_columns is not None, "quantised without a copy by columns"
        return self.by_columns


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
