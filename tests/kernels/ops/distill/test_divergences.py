"""kl_div and jsd against float64 and torch: every reduction, ignored rows, zeros, NaN, close distributions."""

from functools import partial

import pytest
import torch
from ligertune_kernels import jsd, jsd_reference, kl_div, runs_triton
from support.covering import every_pair
from support.kernels.judge import DTYPES, judge, judge_loss, judge_op
from torch.nn import functional as F

REDUCTIONS = ("none", "sum", "mean", "batchmean")
BETAS = (0.0, 0.3, 1.0)

SIZES = (
    pytest.param((1, 1), id="one element"),
    pytest.param((2, 5, 131), id="rows in two dimensions, columns of no multiple of the vector"),
    pytest.param((3, 5000), id="more columns than a block"),
    pytest.param((7,), id="one row without a batch"),
)


def log_probs(shape: tuple[int, ...], device: torch.device, dtype: torch.dtype = torch.float32):
    """Return log-probabilities of a student and a teacher, and labels, a quarter ignored."""
    student, teacher = ((3.0 * torch.randn(shape, device=device)).log_softmax(-1).to(dtype) for _ in range(2))
    labels = torch.zeros(shape[:-1], dtype=torch.int64, device=device)
    if labels.dim():
        labels.view(-1)[1::4] = -100
    return student, teacher, labels


def example(shape: tuple[int, ...], device: torch.device, dtype: torch.dtype = torch.float32, *, log: bool = False):
    """Return log-probabilities of a student, and probabilities of a teacher or their logarithms."""
    input, target = (torch.randn(shape, device=device).log_softmax(-1) for _ in range(2))
    return input.to(dtype), (target if log else target.exp()).to(dtype)


@pytest.mark.parametrize("shape, reduction, log_target, dtype", every_pair(SIZES, REDUCTIONS, (False, True), DTYPES))
def test_kl_div_agrees_with_float64(shape, reduction, log_target, dtype, device) -> None:
    inputs, compare = example(shape, device, dtype, log=log_target), judge if reduction == "none" else judge_loss
    judge_op(kl_div, inputs, compare=compare, reduction=reduction, log_target=log_target)


@pytest.mark.filterwarnings("ignore:reduction. 'mean' divides")
@pytest.mark.parametrize("log_target", [False, True])
@pytest.mark.parametrize("reduction", REDUCTIONS)
def test_kl_div_is_torchs(reduction, log_target, device) -> None:
    leaves = [t.requires_grad_() for t in example((4, 33), device, log=log_target)]
    ours = kl_div(*leaves, reduction=reduction, log_target=log_target)
    torchs = F.kl_div(*leaves, reduction=reduction, log_target=log_target)
    torch.testing.assert_close(ours, torchs)
    torch.testing.assert_close(*(torch.autograd.grad(loss.sum(), leaves) for loss in (ours, torchs)))


@pytest.mark.parametrize("grads", [(True, False), (False, True)], ids=["input", "target"])
@pytest.mark.parametrize("reduction", ["none", "batchmean"])
def test_kl_div_computes_only_the_gradient_that_is_needed(reduction, grads, device) -> None:
    judge_op(kl_div, example((3, 40), device), compare=partial(judge, grads=grads), reduction=reduction)


@pytest.mark.parametrize("log_target", [False, True])
@pytest.mark.parametrize("reduction", ["none", "sum"])
def test_a_probability_of_zero_adds_nothing_to_kl_div(reduction, log_target, device) -> None:
    """The teacher is cut down to two columns; the student is at -inf in one of the others."""
    input = torch.tensor([[-1.0, -2.0, -float("inf"), -3.0]], device=device, requires_grad=True)
    target = torch.tensor([[0.25, 0.75, 0.0, 0.0]], device=device)
    loss = kl_div(input, target.log() if log_target else target, reduction=reduction, log_target=log_target)
    (gradient,) = torch.autograd.grad(loss.sum(), input)
    torch.testing.assert_close(loss.sum().item(), F.kl_div(input[:, :2], target[:, :2], reduction="sum").item())
    torch.testing.assert_close(gradient, -target)


@pytest.mark.parametrize("which", [0, 1], ids=["input", "target"])
@pytest.mark.parametrize("op, options", [*((kl_div, {"log_target": log}) for log in (False, True)),
                                         *((jsd, {"beta": beta}) for beta in BETAS)])  # fmt: skip
def test_nan_is_not_swallowed(op, options, which, device) -> None:
    tensors = example((3, 9), device, log=options.get("log_target", True))
    tensors[which][1, 4] = torch.nan
    assert op(*tensors, reduction="none", **options).isnan().nonzero().tolist() == [[1, 4] if op is kl_div else [1]]


def test_input_and_target_of_kl_div_may_differ_in_dtype(device) -> None:
    input, target = example((3, 40), device)
    leaves = [input.bfloat16().requires_grad_(), target.requires_grad_()]
    kl_div(*leaves, reduction="batchmean").backward()
    assert [leaf.grad.dtype for leaf in leaves] == [torch.bfloat16, torch.float32]
    torch.testing.assert_close(leaves[0].grad.float(), -target.detach() / 3, rtol=2**-7, atol=0.0)


@pytest.mark.parametrize("shape, reduction, beta, dtype", every_pair(SIZES, REDUCTIONS[:3], BETAS, DTYPES))
def test_jsd_agrees_with_float64(shape, reduction, beta, dtype, device) -> None:
    student, teacher, labels = log_probs(shape, device, dtype)
    compare = judge if reduction == "none" else judge_loss
    judge_op(jsd, [student], teacher, compare=compare, beta=beta, reduction=reduction, labels=labels)


def definition(student: torch.Tensor, teacher: torch.Tensor, beta: float) -> torch.Tensor:
    """Return the loss of each row, computed with torch's kl_div as in TRL's GKDTrainer."""
    kl = {"reduction": "none", "log_target": True}
    if beta == 0.0:
        return F.kl_div(student, teacher, **kl).sum(-1)
    if beta == 1.0:
        return F.kl_div(teacher, student, **kl).sum(-1)
    mixture = (beta * teacher.exp() + (1.0 - beta) * student.exp()).log()
    return (beta * F.kl_div(mixture, teacher, **kl) + (1.0 - beta) * F.kl_div(mixture, student, **kl)).sum(-1)


@pytest.mark.parametrize("beta", BETAS)
def test_jsd_is_the_definition(beta, device) -> None:
    student, teacher, labels = log_probs((6, 50), device)
    losses = definition(student, teacher, beta)
    torch.testing.assert_close(jsd(student, teacher, beta=beta, reduction="none"), losses)
    torch.testing.assert_close(jsd(student, teacher, beta=beta), losses.mean())
    torch.testing.assert_close(jsd(student, teacher, beta=beta, labels=labels), losses[labels != -100].mean())


@pytest.mark.parametrize("beta", BETAS)
def test_a_probability_of_zero_adds_nothing_to_jsd(beta, device) -> None:
    """Both have probability 0 in the last column, and one of them in another, where the divergence stays finite."""
    gone = -float("inf")
    student = torch.tensor([[-1.0, -0.5, gone if beta else -2.0, gone]], device=device, requires_grad=True)
    teacher = torch.tensor([[-0.7, -1.5, -2.5 if 0 < beta < 1 else gone if beta == 0 else -1.0, gone]], device=device)
    loss = jsd(student, teacher, beta=beta)
    loss.backward()
    assert loss.isfinite() and student.grad.isfinite().all()
    assert not student.grad[student == gone].any()


def test_close_distributions_keep_their_digits(device) -> None:
    """1e-3 apart the divergence is 1e-7: t - m out of two rounded logarithms of -10 would lose a tenth of it."""
    student = torch.randn(4, 3000, device=device).log_softmax(-1)
    teacher = (student + 1e-3 * torch.randn_like(student)).log_softmax(-1)
    x, truth = student.clone().requires_grad_(), student.double().requires_grad_()
    jsd(x, teacher).backward()
    jsd_reference(truth, teacher.double()).backward()
    lost = (x.grad.double() - truth.grad).norm() / truth.grad.norm()
    assert lost < (2e-3 if runs_triton(x) else 1e-2)
