"""kl_div against float64 and torch's own: every reduction, both forms of the target, both gradients, zeros."""

from __future__ import annotations

from functools import partial

import pytest
import torch
from covering import every_pair
from judge import DTYPES, judge, judge_loss, judge_op
from ligertune_kernels import kl_div
from torch.nn import functional as F

REDUCTIONS = ("none", "sum", "mean", "batchmean")

SIZES = (
    pytest.param((1, 1), id="one element"),
    pytest.param((2, 5, 131), id="rows in two dimensions, columns of no multiple of the vector"),
    pytest.param((3, 5000), id="more columns than a block"),
    pytest.param((7,), id="one row without a batch"),
)


def example(shape: tuple[int, ...], device: torch.device, dtype: torch.dtype = torch.float32, *, log: bool = False):
    """Return log-probabilities of a student, and probabilities of a teacher or their logarithms."""
    input, target = (torch.randn(shape, device=device).log_softmax(-1) for _ in range(2))
    return input.to(dtype), (target if log else target.exp()).to(dtype)


@pytest.mark.parametrize("shape, reduction, log_target, dtype", every_pair(SIZES, REDUCTIONS, (False, True), DTYPES))
def test_agrees_with_float64(shape, reduction, log_target, dtype, device) -> None:
    inputs, compare = example(shape, device, dtype, log=log_target), judge if reduction == "none" else judge_loss
    judge_op(kl_div, inputs, compare=compare, reduction=reduction, log_target=log_target)


@pytest.mark.filterwarnings("ignore:reduction. 'mean' divides")
@pytest.mark.parametrize("log_target", [False, True])
@pytest.mark.parametrize("reduction", REDUCTIONS)
def test_is_torchs(reduction, log_target, device) -> None:
    leaves = [t.requires_grad_() for t in example((4, 33), device, log=log_target)]
    ours = kl_div(*leaves, reduction=reduction, log_target=log_target)
    torchs = F.kl_div(*leaves, reduction=reduction, log_target=log_target)
    torch.testing.assert_close(ours, torchs)
    for a, b in zip(torch.autograd.grad(ours.sum(), leaves), torch.autograd.grad(torchs.sum(), leaves), strict=True):
        torch.testing.assert_close(a, b)


@pytest.mark.parametrize("grads", [(True, False), (False, True)], ids=["input", "target"])
@pytest.mark.parametrize("reduction", ["none", "batchmean"])
def test_computes_only_the_gradient_that_is_needed(reduction, grads, device) -> None:
    judge_op(kl_div, example((3, 40), device), compare=partial(judge, grads=grads), reduction=reduction)


@pytest.mark.parametrize("log_target", [False, True])
@pytest.mark.parametrize("reduction", ["none", "sum"])
def test_a_probability_of_zero_adds_nothing(reduction, log_target, device) -> None:
    """The teacher is cut down to two columns; the student is at -inf in one of the others."""
    input = torch.tensor([[-1.0, -2.0, -float("inf"), -3.0]], device=device, requires_grad=True)
    target = torch.tensor([[0.25, 0.75, 0.0, 0.0]], device=device)
    loss = kl_div(input, target.log() if log_target else target, reduction=reduction, log_target=log_target)
    (gradient,) = torch.autograd.grad(loss.sum(), input)
    torch.testing.assert_close(loss.sum().item(), F.kl_div(input[:, :2], target[:, :2], reduction="sum").item())
    torch.testing.assert_close(gradient, -target)


@pytest.mark.parametrize("log_target", [False, True])
@pytest.mark.parametrize("which", [0, 1], ids=["input", "target"])
def test_nan_is_not_swallowed(which, log_target, device) -> None:
    tensors = example((2, 9), device, log=log_target)
    tensors[which][1, 4] = torch.nan
    losses = kl_div(*tensors, reduction="none", log_target=log_target)
    assert losses.isnan().nonzero().tolist() == [[1, 4]]


def test_takes_an_upstream_gradient_whose_strides_are_zero(device) -> None:
    input, target = example((6, 4, 20), device)
    kl_div(input.requires_grad_(), target, reduction="none").sum().backward()
    torch.testing.assert_close(input.grad, -target)


def test_input_and_target_may_differ_in_dtype(device) -> None:
    input, target = example((3, 40), device)
    leaves = [input.bfloat16().requires_grad_(), target.requires_grad_()]
    kl_div(*leaves, reduction="batchmean").backward()
    assert [leaf.grad.dtype for leaf in leaves] == [torch.bfloat16, torch.float32]
    torch.testing.assert_close(leaves[0].grad.float(), -target.detach() / 3, rtol=2**-7, atol=0.0)
