"""rms_norm against float64: casting orders, sizes on both sides of every launch threshold, strides."""

from __future__ import annotations

from functools import partial

import pytest
import torch
from covering import every_pair
from judge import DTYPES, judge, judge_op
from ligertune_kernels import RMSNorm, rms_norm, rms_norm_reference

CASTS = tuple(pytest.param(*cast) for cast in (("llama", 0.0), ("gemma", 1.0), ("gemma", 0.0), ("none", 0.0)))

SIZES = (
    pytest.param((1, 7), id="one short row"),
    pytest.param((301, 96), id="no size fills a tile, two tiles per program"),
    pytest.param((3, 5, 128), id="norm of heads, leading dimensions"),
    pytest.param((41, 1025), id="two rows per tile, three tiles per program"),
    pytest.param((5, 5000), id="one row per tile"),
    pytest.param((5, 8193), id="first size whose backward takes two parts"),
    pytest.param((5, 8208), id="long row that the backward holds whole if packed"),
    pytest.param((2, 16385), id="first size with several backward parts and a swept forward"),
)


@pytest.mark.parametrize("shape, cast, offset, dtype", every_pair(SIZES, CASTS, DTYPES))
def test_agrees_with_float64(shape, cast, offset, dtype, device) -> None:
    inputs = [torch.randn(s, device=device, dtype=dtype) for s in (shape, shape[-1:])]
    judge_op(rms_norm, inputs, 1e-5, offset=offset, cast=cast)


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


def test_a_residual_around_the_norm_gets_the_right_gradient(device) -> None:
    """norm(h) + h passes one gradient tensor to both terms: by default the norm does not overwrite it."""
    h, w = torch.randn(5, 64, device=device), torch.randn(64, device=device)
    judge(lambda h, w: rms_norm(h, w) + h, lambda h, w: rms_norm_reference(h, w) + h, [h, w])


def test_module_starts_with_a_scale_of_one(device) -> None:
    x = torch.randn(4, 32, device=device)
    torch.testing.assert_close(RMSNorm(32).to(device)(x), RMSNorm(32, offset=1.0, cast="gemma").to(device)(x))
