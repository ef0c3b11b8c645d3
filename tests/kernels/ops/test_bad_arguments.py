"""Mismatched arguments of every op that is not a loss: the error names them and what was expected."""

from __future__ import annotations

import ligertune_kernels as kernels
import pytest
import torch

FP32, INT8, UINT8, INT32 = torch.float32, torch.int8, torch.uint8, torch.int32
ADAMW = {"step": 1, "lr": 1e-2, "betas": (0.9, 0.99), "eps": 1e-8, "weight_decay": 0.0}


def zeros(*shape: int, dtype: torch.dtype = FP32) -> torch.Tensor:
    return torch.zeros(shape, dtype=dtype)


def rope(k: tuple[int, ...] = (1, 1, 3, 8), cos: tuple[int, ...] = (1, 3, 8), needs_grad: bool = False) -> None:
    kernels.apply_rope(zeros(1, 2, 3, 8), zeros(*k), zeros(*cos).requires_grad_(needs_grad), zeros(*cos))


def attend(k: int = 2, k_dtype: torch.dtype = FP32, places: torch.dtype = INT32, ends: int = 9, **options) -> None:
    q, k, v = zeros(9, 6, 16), zeros(9, k, 16, dtype=k_dtype), zeros(9, 2, 16)
    kernels.document_attention(q, k, v, zeros(9, dtype=places), torch.full((ends,), 9, dtype=INT32), **options)


def multiply(dtype: torch.dtype = INT8, n_inner: int = 8, **scales: torch.Tensor) -> None:
    kernels.int2_int8_matmul(zeros(2, n_inner, dtype=dtype), zeros(3, 2, dtype=UINT8), **scales)


BAD = [
    (lambda: kernels.rms_norm(zeros(2, 8), zeros(7)), r"weight is \(7,\), but x is \(2, 8\)"),
    (lambda: kernels.rms_norm(zeros(2, 8), zeros(8), cast="olmo"), "'olmo'"),
    (lambda: kernels.add_rms_norm(zeros(2, 8), zeros(1, 8), zeros(8)), r"x is \(2, 8\), but residual is \(1, 8\)"),
    (lambda: kernels.add_rms_norm(zeros(2, 8), zeros(2, 8), zeros(7)), r"add_rms_norm: weight is \(7,\), but x is"),
    (lambda: kernels.layer_norm(zeros(2, 8), zeros(8), zeros(7)), r"bias is \(7,\), but x is \(2, 8\)"),
    (lambda: kernels.group_norm(zeros(2, 6, 5), 4), r"x is \(2, 6, 5\): expected \(N, C, \*\) with C a multiple of 4"),
    (lambda: kernels.group_norm(zeros(2, 6, 5), 3, zeros(5)), r"weight is \(5,\), but x is \(2, 6, 5\)"),
    (lambda: rope(k=(1, 1, 2, 8)), "only their heads may differ"),
    (lambda: rope(cos=(1, 2, 8)), r"expected \(1 or 1, 3, 8\)"),
    (lambda: rope(cos=(1, 3, 10)), "even number up to 8"),
    (lambda: rope(needs_grad=True), "get no gradient"),
    (lambda: attend(k=1), r"key \(9, 1, 16\), value \(9, 2, 16\); expected"),
    (lambda: attend(k_dtype=torch.float16), "expected one dtype"),
    (lambda: attend(places=torch.int64), "starts is torch.int64"),
    (lambda: attend(ends=8), "ends is"),
    *((lambda scale=scale: attend(scale=scale), "scale is") for scale in (0.0, -1.0)),
    (lambda: attend(window=0), "window is 0; expected at least 1"),
    (lambda: attend(softcap=0.0), "softcap is 0.0; expected a positive number"),
    (lambda: kernels.swiglu(zeros(2, 7)), "even last size"),
    (lambda: kernels.geglu(zeros(2, 8), zeros(2, 7)), r"geglu: gate is \(2, 8\)"),
    (lambda: kernels.geglu(zeros(2, 8), approximate="erf"), "'erf'"),
    (lambda: kernels.embedding(zeros(2), zeros(3, 4)), r"expected \(V, E\), and int32 or int64"),
    (lambda: kernels.embedding(zeros(2, dtype=INT32), zeros(3, 4), 3), "padding_idx is 3, but weight has 3 rows"),
    (lambda: multiply(dtype=FP32), r"x is torch\.float32"),
    (lambda: multiply(n_inner=4), r"expected \(\.\.\., K\) and \(N, K/4\)"),
    (lambda: multiply(x_scale=zeros(3)), r"x_scale is \(3,\); expected \(2,\)"),
    (lambda: multiply(weight_scale=zeros(2)), r"weight_scale is \(2,\); expected \(\) or \(3,\)"),
    (lambda: multiply(x_scale=zeros(2).requires_grad_()), "no backward"),
    (lambda: kernels.pack_int2(zeros(2, 6, dtype=INT8)), "the last size by 4"),
    (lambda: kernels.adamw_step(*[zeros(3)] * 3, zeros(4), **ADAMW), "adamw_step: shapes"),
]


@pytest.mark.parametrize("call, message", BAD, ids=[message for _, message in BAD])
def test_mismatched_arguments_raise_an_error_that_names_them(call, message) -> None:
    with pytest.raises(ValueError, match=message):
        call()
