"""kl_div against float64 and torch's own: every reduction, both forms of the target, both gradients, zeros."""

from __future__ import annotations

import pytest
import torch
from judge import judge
from judge_loss import judge_loss
from ligertune_kernels import KLDivLoss, kl_div, kl_div_reference, runs_triton
from torch.nn import functional as F

DTYPES = (torch.float32, torch.bfloat16, torch.float16)
REDUCTIONS = ("none", "sum", "mean", "batchmean")

SIZES = (
    pytest.param((1, 1), id="one element"),
    pytest.param((2, 5, 131), id="rows in two dimensions, columns of no multiple of the vector"),
    pytest.param((3, 5000), id="more columns than a block"),
    pytest.param((7,), id="one row without a batch"),
)


def example(shape: tuple[int, ...], device: torch.device, dtype: torch.dtype = torch.float32, *, log: bool = False):
    """Log-probabilities of a student, and a teacher's probabilities or their logarithms."""
    input, target = (torch.randn(shape, device=device).log_softmax(-1) for _ in range(2))
    return input.to(dtype), (target if log else target.exp()).to(dtype)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("log_target", [False, True])
@pytest.mark.parametrize("reduction", REDUCTIONS)
@pytest.mark.parametrize("shape", SIZES)
def test_agrees_with_float64(shape, reduction, log_target, dtype, device) -> None:
    options = {"reduction": reduction, "log_target": log_target}
    (judge if reduction == "none" else judge_loss)(
        lambda x, t: kl_div(x, t, **options),
        lambda x, t: kl_div_reference(x, t, **options),
        example(shape, device, dtype, log=log_target),
    )


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
    judge(
        lambda x, t: kl_div(x, t, reduction=reduction),
        lambda x, t: kl_div_reference(x, t, reduction=reduction),
        example((3, 40), device),
        grads=grads,
    )


@pytest.mark.parametrize("reduction", REDUCTIONS)
@pytest.mark.parametrize("log_target", [False, True])
def test_gradcheck(log_target, reduction, device) -> None:
    leaves = [t.requires_grad_() for t in example((3, 5), device, torch.float64, log=log_target)]
    assert torch.autograd.gradcheck(lambda x, t: kl_div(x, t, reduction=reduction, log_target=log_target), leaves)


@pytest.mark.parametrize("log_target", [False, True])
@pytest.mark.parametrize("reduction", ["none", "sum"])
def test_a_probability_of_zero_adds_nothing(reduction, log_target, device) -> None:
    """Of a teacher cut down to two columns; the student may have nothing there either."""
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


def test_takes_tensors_of_any_stride(device) -> None:
    input, target = example((6, 4, 20), device)
    for x, t in ((input[..., ::2], target[..., ::2]), (input.transpose(0, 1), target.transpose(0, 1))):
        judge(lambda x, t: kl_div(x, t), lambda x, t: kl_div_reference(x, t), [x, t])
    x = input.clone().requires_grad_()
    kl_div(x, target, reduction="none").sum().backward()  # an upstream gradient whose strides are all 0
    torch.testing.assert_close(x.grad, -target)


def test_input_and_target_may_differ_in_dtype(device) -> None:
    input, target = example((3, 40), device)
    leaves = [input.bfloat16().requires_grad_(), target.requires_grad_()]
    kl_div(*leaves, reduction="batchmean").backward()
    assert [leaf.grad.dtype for leaf in leaves] == [torch.bfloat16, torch.float32]
    torch.testing.assert_close(leaves[0].grad.float(), -target.detach() / 3, rtol=2**-7, atol=0.0)


def test_float16_survives_gradscalers_factor(device) -> None:
    """q/n is 3e-9 here, below what float16 holds; 65536 q/n is not."""
    judge(
        lambda x, t: kl_div(x, t, reduction="mean") * 65536.0,
        lambda x, t: kl_div_reference(x, t, reduction="mean") * 65536.0,
        example((64, 2100), device, torch.float16),
        grads=(True, False),
    )


def test_nothing_in_gives_nothing_out(device) -> None:
    empty = torch.zeros(0, 8, device=device, requires_grad=True)
    loss = kl_div(empty, empty.detach(), reduction="sum")
    loss.backward()
    assert loss == 0.0 and empty.grad.shape == empty.shape
    assert kl_div(empty, empty.detach(), reduction="none").shape == (0, 8)


def test_a_second_backward_is_right_or_refused(device) -> None:
    input, target = example((3, 40), device)
    loss = 3.0 * kl_div(input.requires_grad_(), target, reduction="batchmean")
    (first,) = torch.autograd.grad(loss, input, retain_graph=True)
    torch.testing.assert_close(first, -target)
    if runs_triton(input):
        with pytest.raises(RuntimeError, match=r"kl_div.*run the forward again"):
            loss.backward()
    else:
        assert torch.equal(first, torch.autograd.grad(loss, input)[0])


def test_callers_tensors_are_left_alone(device) -> None:
    input, target = example((3, 40), device)
    before = input.clone(), target.clone()
    kl_div(input.requires_grad_(), target).backward()
    assert torch.equal(input, before[0]) and torch.equal(target, before[1])


def test_module_is_the_function(device) -> None:
    input, target = example((3, 40), device, log=True)
    loss = KLDivLoss(reduction="batchmean", log_target=True)(input, target)
    assert torch.equal(loss, kl_div(input, target, reduction="batchmean", log_target=True))


def test_names_what_does_not_fit() -> None:
    with pytest.raises(ValueError, match=r"input is \(2, 8\) and target \(8,\)"):
        kl_div(torch.zeros(2, 8), torch.zeros(8))
    with pytest.raises(ValueError, match="'rows'"):
        kl_div(torch.zeros(2, 8), torch.zeros(2, 8), reduction="rows")
