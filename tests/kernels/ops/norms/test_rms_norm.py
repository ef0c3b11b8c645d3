"""rms_norm and add_rms_norm: dtypes, launch plans, transforms, the two results of the sum."""

from __future__ import annotations

from functools import partial

import pytest
import torch
from judge import judge, judge_op
from ligertune_kernels import (
    AddRMSNorm,
    RMSNorm,
    add_rms_norm,
    add_rms_norm_reference,
    rms_norm,
    rms_norm_reference,
)  # fmt: skip


@pytest.mark.parametrize("cast, dtype", [("llama", torch.float32), ("gemma", torch.bfloat16)])
def test_a_wider_weight_widens_the_result_only_under_llama(cast, dtype, device) -> None:
    x, w = torch.randn(4, 32, device=device, dtype=torch.bfloat16), torch.randn(32, device=device)
    assert rms_norm(x, w, cast=cast).dtype == dtype
    judge_op(rms_norm, [x, w], cast=cast)


def test_each_setting_gets_its_own_launch_plan(device) -> None:
    """Launch plans are cached; every setting that a plan depends on must be part of the key."""
    w = torch.rand(64, device=device)
    x = torch.randn(300, 64, device=device)
    usual = {"n_rows": 3, "eps": 1e-6, "offset": 0.0, "cast": "llama", "grads": (True, True)}
    for change in ({}, {"n_rows": 300}, {"eps": 0.5}, {"offset": 1.0}, {"cast": "gemma"}, {"grads": (True, False)}):
        n_rows, eps, offset, cast, grads = (usual | change).values()
        inputs = [x[:n_rows].bfloat16(), w]
        judge_op(rms_norm, inputs, compare=partial(judge, grads=grads), eps=eps, offset=offset, cast=cast)


def test_takes_tensors_left_over_from_an_ended_transform(device) -> None:
    left: list[torch.Tensor] = []

    def keeps(x: torch.Tensor) -> torch.Tensor:
        left.append(2.0 * x)
        return left[0].sum()

    torch.func.grad(keeps)(torch.randn(4, 8, device=device))
    w = torch.ones(8, device=device, requires_grad=True)
    assert torch.autograd.grad(rms_norm(left[0], w).sum(), w)[0].shape == (8,)


def test_kernels_refuse_tensors_of_an_active_transform(device) -> None:
    x, w = torch.randn(4, 8, device=device), torch.ones(8, device=device)
    with pytest.raises(RuntimeError, match="functorch transforms"):
        torch.func.grad(lambda x: rms_norm(x, w).sum())(x)


def test_saves_nothing_without_grad(device) -> None:
    x, w = torch.randn(4, 8, device=device), torch.ones(8, device=device, requires_grad=True)
    with torch.no_grad():
        assert rms_norm(x, w).grad_fn is None
    assert not rms_norm(x, w.detach()).requires_grad


def test_the_incoming_gradient_is_overwritten_only_with_inplace(device) -> None:
    x, w = torch.randn(5, 64, device=device, requires_grad=True), torch.ones(64, device=device)
    dy = torch.randn(5, 64, device=device)
    before = dy.clone()
    torch.autograd.grad(rms_norm(x, w), x, dy)
    assert torch.equal(dy, before)
    (dx,) = torch.autograd.grad(rms_norm(x, w, inplace=True), x, dy)
    assert dx.data_ptr() == dy.data_ptr()
    assert dy._version > before._version  # an op that saved it would raise in its backward
    spread = torch.randn((), device=device).expand(5, 64)  # its rows share memory: never overwritten
    torch.autograd.grad(rms_norm(x, w, inplace=True), x, spread)
    assert torch.equal(spread, spread[:1, :1].expand(5, 64))


def test_modules_start_with_a_scale_of_one_and_take_each_others_state(device) -> None:
    x, residual = torch.randn(2, 4, 32, device=device).unbind()
    norm, fused, gemma = RMSNorm(32), AddRMSNorm(32), RMSNorm(32, offset=1.0, cast="gemma")
    torch.testing.assert_close(norm.to(device)(x), gemma.to(device)(x))
    torch.nn.init.normal_(norm.weight)
    fused.load_state_dict(norm.state_dict())
    torch.testing.assert_close(fused.to(device)(x, residual)[0], rms_norm_reference(x + residual, norm.weight))


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


@pytest.mark.parametrize("inplace", [False, True])
def test_gradients_of_both_uses_of_the_sum_add_up(inplace, device) -> None:
    """x and residual receive one gradient tensor, and y + s passes one to both results: neither may be overwritten."""
    x, w = torch.randn(4, 24, device=device, requires_grad=True), torch.ones(24, device=device)
    found = []
    for op in (partial(add_rms_norm, inplace=inplace), add_rms_norm_reference):
        y, s = op(x, x, w)
        z, t = op(y + s, s, w)
        found.append(torch.autograd.grad((z + t + s).square().sum(), x)[0])
    torch.testing.assert_close(*found)


def test_add_rms_norm_takes_tensors_of_any_stride_and_of_two_dtypes(device) -> None:
    wide = torch.randn(4, 6, 80, device=device)
    w = torch.rand(40, device=device)
    for x, residual in ((wide[..., :40], wide[..., 40:]), (wide[:, ::2, 1:41], wide.bfloat16()[:, 1::2, ::2])):
        torch.testing.assert_close(add_rms_norm(x, residual, w), add_rms_norm_reference(x, residual, w))
    x, residual = torch.randn(3, 8, device=device, requires_grad=True), wide[0, :3, :8].bfloat16().requires_grad_()
    sum(t.sum() for t in add_rms_norm(x, residual, w[:8])).backward()
    assert x.grad.dtype == torch.float32 and residual.grad.dtype == torch.bfloat16
