"""linear_jsd against float64: chunks, betas, needed gradients, temperature, precision."""

from collections.abc import Callable
from functools import partial

import pytest
import torch
from ligertune_kernels import jsd, linear_jsd, linear_jsd_reference
from support.covering import every_pair
from support.kernels.judge import AS_MUCH, DTYPES, OF_A_ROW, judge, judge_loss

BETAS = (0.0, 0.3, 1.0)
CHUNKS = (
    pytest.param(11, id="one chunk"),
    pytest.param(6, id="two flushes"),
    pytest.param(3, id="four flushes: dW in fp32"),
)
ROWS, HIDDEN, TEACHER_HIDDEN, VOCAB = 11, 24, 40, 131  # no size a multiple of anything the kernels like

ONE_CHUNK = 1 << 30


def rows_in_chunk(n_rows: int, dtype: torch.dtype = torch.float32) -> int:
    """Return chunk_bytes for this number of rows of both models' logits."""
    return 2 * n_rows * VOCAB * dtype.itemsize


def example(device: torch.device, dtype: torch.dtype = torch.float32, *, leading: tuple[int, ...] = (ROWS,)):
    """Return (hidden, weight, bias) of student and teacher, and labels, a quarter ignored."""
    student, teacher = (
        (
            torch.randn(*leading, width, device=device).to(dtype),
            (0.3 * torch.randn(VOCAB, width, device=device)).to(dtype),
            torch.randn(VOCAB, device=device).to(dtype),
        )
        for width in (HIDDEN, TEACHER_HIDDEN)
    )
    labels = torch.zeros(leading, dtype=torch.int64, device=device)
    labels.view(-1)[1::4] = -100
    return student, teacher, labels


def ops(teacher, chunk_bytes: int = ONE_CHUNK, **options) -> list[Callable[..., torch.Tensor]]:
    """Return linear_jsd and its reference of the student's hidden, weight and bias, with the teacher in their dtype."""

    def call(op, h, w, b, **more):
        t_h, t_w, t_b = (t.to(h.dtype) for t in teacher)
        return op(h, w, t_h, t_w, student_bias=b, teacher_bias=t_b, **options, **more)

    return [partial(call, linear_jsd, chunk_bytes=chunk_bytes), partial(call, linear_jsd_reference)]


@pytest.mark.parametrize("rows, beta, temperature, dtype", every_pair(CHUNKS, BETAS, (0.5, 1.0, 3.0), DTYPES))
def test_agrees_with_float64(rows, beta, temperature, dtype, device) -> None:
    student, teacher, labels = example(device, dtype)
    options = {"labels": labels, "beta": beta, "temperature": temperature}
    judge_loss(*ops(teacher, rows_in_chunk(rows, dtype), **options), student)


@pytest.mark.parametrize("leading", [(2, 5), (1,)], ids=["rows in two dimensions", "one row"])
@pytest.mark.parametrize("beta", BETAS)
def test_leading_shapes_and_upstream_gradients_agree_with_float64(beta, leading, device) -> None:
    student, teacher, _ = example(device, leading=leading)
    judge(*ops(teacher, beta=beta), student, times=OF_A_ROW if leading == (1,) else AS_MUCH)


@pytest.mark.parametrize("beta", BETAS)
def test_is_jsd_of_the_logits(beta, device) -> None:
    (h, w, _), (t_h, t_w, _), labels = example(device)
    student, teacher = ((x @ y.T / 2.0).log_softmax(-1) for x, y in ((h, w), (t_h, t_w)))
    ours = linear_jsd(h, w, t_h, t_w, labels=labels, beta=beta, temperature=2.0)
    torch.testing.assert_close(ours, jsd(student, teacher, labels=labels, beta=beta))


@pytest.mark.parametrize("grads", [(True, False, False), (False, True, False), (False, False, True)])
def test_computes_only_the_gradient_that_is_needed(grads, device) -> None:
    student, teacher, labels = example(device)
    judge(*ops(teacher, rows_in_chunk(4), labels=labels), student, grads=grads)


def test_the_teacher_gets_no_gradient(device) -> None:
    (h, w, _), teacher, _ = example(device)
    t_h, t_w, t_b = (t.requires_grad_() for t in teacher)
    for op in (linear_jsd, linear_jsd_reference):
        op(h.requires_grad_(), w, t_h, t_w, teacher_bias=t_b).backward()
        assert h.grad.any() and all(t.grad is None for t in teacher)


def test_many_flushes_round_dw_once(device) -> None:
    """A running sum in bf16 over 24 flushes would have a fifth more error than one product."""
    (h, w, _), (t_h, t_w, _), _ = example(device, torch.bfloat16, leading=(24,))
    truth = w.double().requires_grad_()
    linear_jsd_reference(h.double(), truth, t_h.double(), t_w.double()).backward()
    lost = []
    for chunk_bytes in (ONE_CHUNK, rows_in_chunk(1, torch.bfloat16)):
        leaf = w.detach().requires_grad_()
        linear_jsd(h, leaf, t_h, t_w, chunk_bytes=chunk_bytes).backward()
        lost.append((leaf.grad.double() - truth.grad).norm())
    assert lost[1] <= 1.1 * lost[0]


def test_student_and_teacher_may_differ_in_dtype(device) -> None:
    (h, w, _), (t_h, t_w, _), _ = example(device)
    low = [t.bfloat16() for t in (t_h, t_w)]
    expected = linear_jsd_reference(h, w, *low)
    torch.testing.assert_close(linear_jsd(h, w, *low), expected)


def test_rows_that_do_not_count_are_not_computed(device) -> None:
    """They hold NaN in student and teacher: their products would show in dW."""
    student, teacher, labels = example(device, leading=(2, 15))
    labels[:, 1:] = -100
    expected = linear_jsd_reference(*(t.requires_grad_() for t in student[:2]), *teacher[:2], labels=labels)
    truth = torch.autograd.grad(expected, student[:2])
    empty, taught = student[0].detach().clone(), teacher[0].clone()
    empty[1, 1:], taught[1, 1:] = torch.nan, torch.nan  # the first sequence fills up to 16 rows
    empty.requires_grad_()
    found = linear_jsd(empty, student[1], taught, teacher[1], labels=labels.cpu())
    torch.testing.assert_close((found, *torch.autograd.grad(found, (empty, student[1]))), (expected, *truth))
    none = linear_jsd(empty, student[1], taught, teacher[1], labels=torch.full_like(labels, -100).cpu())
    assert none == 0.0 and not any(g.any() for g in torch.autograd.grad(none, (empty, student[1])))
