"""jsd against float64: forward, reverse and mixed, every reduction, ignored rows, zeros, close distributions."""

from __future__ import annotations

import pytest
import torch
from covering import every_pair
from judge import DTYPES, judge, judge_loss, judge_op
from ligertune_kernels import jsd, jsd_reference, runs_triton
from torch.nn import functional as F

BETAS = (0.0, 0.3, 1.0)

SIZES = (
    pytest.param((1, 1), id="one element"),
    pytest.param((2, 5, 131), id="rows in two dimensions, columns of no multiple of the vector"),
    pytest.param((3, 5000), id="more columns than a block"),
    pytest.param((7,), id="one row without a batch"),
)


def example(shape: tuple[int, ...], device: torch.device, dtype: torch.dtype = torch.float32):
    """Return log-probabilities of a student and a teacher, and labels, of which a quarter is ignored."""
    student, teacher = ((3.0 * torch.randn(shape, device=device)).log_softmax(-1).to(dtype) for _ in range(2))
    labels = torch.zeros(shape[:-1], dtype=torch.int64, device=device)
    if labels.dim():
        labels.view(-1)[1::4] = -100
    return student, teacher, labels


@pytest.mark.parametrize("shape, reduction, beta, dtype", every_pair(SIZES, ("mean", "sum", "none"), BETAS, DTYPES))
def test_agrees_with_float64(shape, reduction, beta, dtype, device) -> None:
    student, teacher, labels = example(shape, device, dtype)
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
def test_is_the_definition(beta, device) -> None:
    student, teacher, labels = example((6, 50), device)
    losses = definition(student, teacher, beta)
    torch.testing.assert_close(jsd(student, teacher, beta=beta, reduction="none"), losses)
    torch.testing.assert_close(jsd(student, teacher, beta=beta), losses.mean())
    torch.testing.assert_close(jsd(student, teacher, beta=beta, labels=labels), losses[labels != -100].mean())


@pytest.mark.parametrize("beta", BETAS)
def test_a_probability_of_zero_adds_nothing(beta, device) -> None:
    """Both have probability 0 in the last column, and one of them in another, where the divergence stays finite."""
    gone = -float("inf")
    student = torch.tensor([[-1.0, -0.5, gone if beta else -2.0, gone]], device=device, requires_grad=True)
    teacher = torch.tensor([[-0.7, -1.5, -2.5 if 0 < beta < 1 else gone if beta == 0 else -1.0, gone]], device=device)
    loss = jsd(student, teacher, beta=beta)
    loss.backward()
    assert loss.isfinite() and student.grad.isfinite().all()
    assert not student.grad[student == gone].any()


@pytest.mark.parametrize("beta", BETAS)
@pytest.mark.parametrize("which", [0, 1], ids=["student", "teacher"])
def test_nan_is_not_swallowed(which, beta, device) -> None:
    student, teacher, _ = example((3, 9), device)
    (student, teacher)[which][1, 4] = torch.nan
    assert jsd(student, teacher, beta=beta, reduction="none").isnan().tolist() == [False, True, False]


def test_close_distributions_keep_their_digits(device) -> None:
    """1e-3 apart the divergence is 1e-7: t - m out of two rounded logarithms of -10 would lose a tenth of it."""
    student = torch.randn(4, 3000, device=device).log_softmax(-1)
    teacher = (student + 1e-3 * torch.randn_like(student)).log_softmax(-1)
    x, truth = student.clone().requires_grad_(), student.double().requires_grad_()
    jsd(x, teacher).backward()
    jsd_reference(truth, teacher.double()).backward()
    lost = (x.grad.double() - truth.grad).norm() / truth.grad.norm()
    assert lost < (2e-3 if runs_triton(x) else 1e-2)
