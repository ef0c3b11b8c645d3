"""add_rms_norm against float64, and against a separate addition and norm."""

from __future__ import annotations

import pytest
import torch
from covering import every_pair
from judge import DTYPES, judge_op
from ligertune_kernels import AddRMSNorm, RMSNorm, add_rms_norm, add_rms_norm_reference, rms_norm_reference

CASTS = (pytest.param("llama", 0.0), pytest.param("gemma", 1.0))
SIZES = (
    pytest.param((1, 7), id="one short row"),
    pytest.param((43, 3, 96), id="ragged last tile, leading dimensions"),
    pytest.param((19, 1025), id="two rows per tile"),
    pytest.param((3, 8193), id="first size whose backward takes two parts"),
    pytest.param((2, 16385), id="first size whose forward is swept"),
)


@pytest.mark.parametrize("shape, cast, offset, dtype", every_pair(SIZES, CASTS, DTYPES))
def test_agrees_with_float64(shape, cast, offset, dtype, device) -> None:
    inputs = [torch.randn(s, device=device, dtype=dtype) for s in (shape, shape, shape[-1:])]
    judge_op(add_rms_norm, inputs, 1e-5, offset=offset, cast=cast)


def test_the_norm_uses_the_rounded_sum(device) -> None:
    """1 + 2⁻⁹ is 1 in bf16, rounded or truncated: the sum is exact, and the norm is that of ones."""
    x = torch.ones(64, 64, device=device, dtype=torch.bfloat16)
    y, new_residual = add_rms_norm(x, torch.full_like(x, 2.0**-9), x[0], 0.0, cast="none")
    assert torch.equal(new_residual, x) and torch.equal(y, x)


@pytest.mark.parametrize("used", [0, 1], ids=["only the norm is used", "only the sum is used"])
def test_an_unused_output_changes_no_gradient(used, device) -> None:
    leaves = [torch.randn(s, device=device, requires_grad=True) for s in ((4, 33), (4, 33), (33,))]
    expected = torch.autograd.grad(add_rms_norm_reference(*leaves)[used].square().sum(), leaves, allow_unused=True)
    ours = torch.autograd.grad(add_rms_norm(*leaves)[used].square().sum(), leaves, allow_unused=True)
    torch.testing.assert_close(ours, expected)


def test_gradients_of_both_uses_of_the_sum_add_up(device) -> None:
    """x and residual receive the same gradient tensor, which later ops must not accumulate into twice."""
    x, w = torch.randn(4, 24, device=device, requires_grad=True), torch.ones(24, device=device)
    found = []
    for op in (add_rms_norm, add_rms_norm_reference):
        y, s = op(x, x, w)
        z, t = op(y, s, w)
        found.append(torch.autograd.grad((z + t + s).square().sum(), x)[0])
    torch.testing.assert_close(*found)


def test_takes_tensors_of_any_stride_and_of_two_dtypes(device) -> None:
    wide = torch.randn(4, 6, 80, device=device)
    w = torch.rand(40, device=device)
    for x, residual in ((wide[..., :40], wide[..., 40:]), (wide[:, ::2, 1:41], wide.bfloat16()[:, 1::2, ::2])):
        found = add_rms_norm(x, residual, w)
        for ours, expected in zip(found, add_rms_norm_reference(x, residual, w), strict=True):
            torch.testing.assert_close(ours, expected)
    x, residual = torch.randn(3, 8, device=device, requires_grad=True), wide[0, :3, :8].bfloat16().requires_grad_()
    sum(t.sum() for t in add_rms_norm(x, residual, w[:8])).backward()
    assert x.grad.dtype == torch.float32 and residual.grad.dtype == torch.bfloat16


def test_inplace_does_not_overwrite_a_gradient_that_both_results_share(device) -> None:
    """y + s passes one gradient tensor to both results: the norm must not overwrite it before the sum reads it."""
    inputs = [torch.randn(s, device=device, requires_grad=True) for s in ((5, 64), (5, 64), (64,))]
    plain, reused = (
        torch.autograd.grad(sum(add_rms_norm(*inputs, inplace=inplace)).square().sum(), inputs)
        for inplace in (False, True)
    )
    assert all(torch.equal(a, b) for a, b in zip(plain, reused, strict=True))


def test_module_is_the_norm_of_the_sum(device) -> None:
    x, residual = torch.randn(2, 4, 32, device=device).unbind()
    fused, norm = AddRMSNorm(32, 1e-5).to(device), RMSNorm(32, 1e-5).to(device)
    fused.load_state_dict(norm.state_dict())
    torch.testing.assert_close(fused(x, residual)[0], rms_norm_reference(x + residual, norm.weight, 1e-5))
