"""jsd against float64: forward, reverse and mixed, every reduction, ignored rows, zeros, close distributions."""

from __future__ import annotations

import pytest
import torch
from judge import judge
from judge_loss import judge_loss
from ligertune_kernels import JSDLoss, jsd, jsd_reference, runs_triton
from torch.nn import functional as F

DTYPES = (torch.float32, torch.bfloat16, torch.float16)
BETAS = (0.0, 0.3, 1.0)

SIZES = (
    pytest.param((1, 1), id="one element"),
    pytest.param((2, 5, 131), id="rows in two dimensions, columns of no multiple of the vector"),
    pytest.param((3, 5000), id="more columns than a block"),
    pytest.param((7,), id="one row without a batch"),
)


def example(shape: tuple[int, ...], device: torch.device, dtype: torch.dtype = torch.float32):
    """Log-probabilities of a student and a teacher, some of a row's far apart; labels, a quarter of them ignored."""
    student, teacher = ((3.0 * torch.randn(shape, device=device)).log_softmax(-1).to(dtype) for _ in range(2))
    labels = torch.zeros(shape[:-1], dtype=torch.int64, device=device)
    if labels.dim():
        labels.view(-1)[1::4] = -100
    return student, teacher, labels


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("beta", BETAS)
@pytest.mark.parametrize("reduction", ["mean", "sum", "none"])
@pytest.mark.parametrize("shape", SIZES)
def test_agrees_with_float64(shape, reduction, beta, dtype, device) -> None:
    student, teacher, labels = example(shape, device, dtype)
    options = {"beta": beta, "reduction": reduction, "labels": labels}
    (judge if reduction == "none" else judge_loss)(
        lambda x: jsd(x, teacher, **options), lambda x: jsd_reference(x, teacher, **options), [student]
    )


def definition(student: torch.Tensor, teacher: torch.Tensor, beta: float) -> torch.Tensor:
    """Row by row, as TRL's GKDTrainer puts it together from torch's kl_div."""
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


@pytest.mark.parametrize("reduction", ["mean", "sum", "none"])
@pytest.mark.parametrize("beta", BETAS)
def test_gradcheck(beta, reduction, device) -> None:
    student, teacher, labels = example((3, 5), device, torch.float64)
    options = {"beta": beta, "labels": labels, "reduction": reduction}
    assert torch.autograd.gradcheck(lambda x: jsd(x, teacher, **options), [student.requires_grad_()])


@pytest.mark.parametrize("beta", BETAS)
def test_a_probability_of_zero_adds_nothing(beta, device) -> None:
    """Both have nothing in the last column, and each nothing where the other's divergence allows it."""
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


@pytest.mark.parametrize("reduction", ["mean", "sum", "none"])
def test_ignored_rows_have_zero_loss_and_gradient(reduction, device) -> None:
    student, teacher, labels = example((4, 30), device)
    labels[:] = -1
    student.requires_grad_()
    loss = jsd(student, teacher, labels=labels, ignore_index=-1, reduction=reduction).sum()
    loss.backward()
    assert loss == 0.0 and not student.grad.any()


def test_takes_tensors_of_any_stride(device) -> None:
    student, teacher, labels = example((6, 4, 20), device)
    for x, t, y in (
        (student[..., ::2], teacher[..., ::2], labels),
        (student.transpose(0, 1), teacher.transpose(0, 1), labels.T),
        (student[:, :-1], teacher[:, 1:], labels[:, 1:]),
    ):
        judge(lambda x, t=t, y=y: jsd(x, t, labels=y), lambda x, t=t, y=y: jsd_reference(x, t, labels=y), [x])


def test_float16_survives_gradscalers_factor(device) -> None:
    """p/n is 1e-8 and less here, below what float16 holds; 65536 p/n is not."""
    student, teacher, _ = example((512, 600), device, torch.float16)
    judge(lambda x: jsd(x, teacher) * 65536.0, lambda x: jsd_reference(x, teacher) * 65536.0, [student])


def test_nothing_in_gives_nothing_out(device) -> None:
    empty = torch.zeros(0, 8, device=device, requires_grad=True)
    loss = jsd(empty, empty.detach())
    loss.backward()
    assert loss == 0.0 and empty.grad.shape == empty.shape
    assert jsd(empty, empty.detach(), reduction="none").shape == (0,)


def test_a_second_backward_is_right_or_refused(device) -> None:
    student, teacher, _ = example((3, 40), device)
    loss = 3.0 * jsd(student.requires_grad_(), teacher)
    (first,) = torch.autograd.grad(loss, student, retain_graph=True)
    if runs_triton(student):
        with pytest.raises(RuntimeError, match=r"jsd.*run the forward again"):
            loss.backward()
    else:
        assert torch.equal(first, torch.autograd.grad(loss, student)[0])


def test_module_is_the_function(device) -> None:
    student, teacher, labels = example((3, 40), device)
    assert torch.equal(JSDLoss(beta=0.2)(student, teacher, labels), jsd(student, teacher, labels=labels, beta=0.2))


def test_names_what_does_not_fit() -> None:
    two = torch.zeros(2, 8)
    with pytest.raises(ValueError, match=r"input is \(2, 8\) and target \(1, 8\)"):
        jsd(two, two[:1])
    with pytest.raises(ValueError, match=r"labels are \(8,\); expected \(2,\)"):
        jsd(two, two, labels=torch.zeros(8))
    with pytest.raises(ValueError, match=r"beta is 1\.5"):
        jsd(two, two, beta=1.5)
    with pytest.raises(ValueError, match="'batchmean'"):
        jsd(two, two, reduction="batchmean")
    with pytest.raises(ValueError, match=r"target\.detach\(\)"):
        jsd(two, two.clone().requires_grad_())
