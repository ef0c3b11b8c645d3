"""linear_jsd against float64: chunks, betas, who needs a gradient, temperature, scales, precision, autocast."""

from __future__ import annotations

import pytest
import torch
from judge import AS_MUCH, OF_A_ROW, judge
from judge_loss import judge_loss
from ligertune_kernels import LinearJSDLoss, jsd, linear_jsd, linear_jsd_reference, runs_triton
from torch.utils.checkpoint import checkpoint

DTYPES = (torch.float32, torch.bfloat16, torch.float16)
BETAS = (0.0, 0.3, 1.0)
ROWS, HIDDEN, TEACHER_HIDDEN, VOCAB = 11, 24, 40, 131  # no size a multiple of anything the kernels like

ONE_CHUNK = 1 << 30


def rows_in_chunk(n_rows: int, dtype: torch.dtype = torch.float32) -> int:
    """chunk_bytes that hold so many rows of both vocabularies."""
    return 2 * n_rows * VOCAB * dtype.itemsize


def example(device: torch.device, dtype: torch.dtype = torch.float32, *, leading: tuple[int, ...] = (ROWS,)):
    """The student's hidden, weight and bias; the teacher's; labels, a quarter of them ignored."""
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


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize(
    "rows, beta",
    [
        *(pytest.param(ROWS, beta, id=f"one chunk, beta {beta}") for beta in BETAS),
        pytest.param(6, 0.3, id="two flushes"),
        pytest.param(3, 0.3, id="four flushes: dW in fp32"),
    ],
)
def test_agrees_with_float64(rows, beta, dtype, device) -> None:
    student, (teacher_hidden, teacher_weight, _), labels = example(device, dtype)

    def loss(op, h, w, b, **chunks):
        teacher = (teacher_hidden.to(h.dtype), teacher_weight.to(h.dtype))
        return op(h, w, *teacher, labels=labels, beta=beta, student_bias=b, **chunks)

    judge_loss(
        lambda *leaves: loss(linear_jsd, *leaves, chunk_bytes=rows_in_chunk(rows, dtype)),
        lambda *leaves: loss(linear_jsd_reference, *leaves),
        student,
    )


@pytest.mark.parametrize("leading", [(2, 5), (1,)], ids=["rows in two dimensions", "one row"])
@pytest.mark.parametrize("beta", BETAS)
@pytest.mark.parametrize("temperature", [0.5, 3.0])
def test_temperature_bias_and_leading_shape(temperature, beta, leading, device) -> None:
    student, teacher, _ = example(device, leading=leading)
    options = {"beta": beta, "temperature": temperature}

    def loss(op, h, w, b):
        t_h, t_w, t_b = (t.to(h.dtype) for t in teacher)
        return op(h, w, t_h, t_w, student_bias=b, teacher_bias=t_b, **options)

    ops = (lambda *leaves: loss(linear_jsd, *leaves), lambda *leaves: loss(linear_jsd_reference, *leaves))
    judge(*ops, student, times=OF_A_ROW if leading == (1,) else AS_MUCH)


@pytest.mark.parametrize("beta", BETAS)
def test_is_jsd_of_the_logits(beta, device) -> None:
    (h, w, _), (t_h, t_w, _), labels = example(device)
    student, teacher = ((x @ y.T / 2.0).log_softmax(-1) for x, y in ((h, w), (t_h, t_w)))
    ours = linear_jsd(h, w, t_h, t_w, labels=labels, beta=beta, temperature=2.0)
    torch.testing.assert_close(ours, jsd(student, teacher, labels=labels, beta=beta))


@pytest.mark.parametrize("grads", [(True, False, False), (False, True, False), (False, False, True)])
def test_computes_only_the_gradient_that_is_needed(grads, device) -> None:
    student, (t_h, t_w, _), labels = example(device)
    options = {"labels": labels}
    judge(
        lambda h, w, b: linear_jsd(h, w, t_h, t_w, student_bias=b, chunk_bytes=rows_in_chunk(4), **options),
        lambda h, w, b: linear_jsd_reference(h, w, t_h.to(h.dtype), t_w.to(h.dtype), student_bias=b, **options),
        student,
        grads=grads,
    )


@pytest.mark.parametrize("beta", BETAS)
def test_gradcheck(beta, device) -> None:
    student, teacher, labels = example(device, torch.float64, leading=(5,))
    leaves, (t_h, t_w, t_b) = [t[:7].requires_grad_() for t in student], [t[:7] for t in teacher]

    def loss(h, w, b):
        return linear_jsd(
            h, w, t_h, t_w, labels=labels, beta=beta, temperature=2.0, student_bias=b, teacher_bias=t_b,
            chunk_bytes=2 * 2 * 7 * 8,
        )  # fmt: skip

    assert torch.autograd.gradcheck(loss, leaves)


@pytest.mark.parametrize("labelled", [True, False])
@pytest.mark.parametrize("as_tensor", [False, True])
def test_num_items_in_batch_replaces_the_mean(as_tensor, labelled, device) -> None:
    (h, w, _), (t_h, t_w, _), labels = example(device)
    options = {"labels": labels if labelled else None}
    counted = int((labels != -100).sum()) if labelled else ROWS
    n = torch.tensor(37, device=device) if as_tensor else 37
    expected = linear_jsd(h, w, t_h, t_w, **options) * counted / 37
    for op in (linear_jsd, linear_jsd_reference):
        torch.testing.assert_close(op(h, w, t_h, t_w, num_items_in_batch=n, **options), expected)


@pytest.mark.parametrize("n", [None, 0, 5])
@pytest.mark.parametrize("beta", BETAS)
def test_all_rows_ignored_give_zero_and_zero_gradients(beta, n, device) -> None:
    student, (t_h, t_w, _), labels = example(device)
    h, w, b = (t.requires_grad_() for t in student)
    loss = linear_jsd(
        h, w, t_h, t_w, labels=labels.fill_(-1), ignore_index=-1, beta=beta, student_bias=b, num_items_in_batch=n
    )
    loss.backward()
    assert loss == 0.0 and not any(t.grad.any() for t in student)


def test_the_teacher_gets_no_gradient(device) -> None:
    (h, w, _), teacher, _ = example(device)
    t_h, t_w, t_b = (t.requires_grad_() for t in teacher)
    for op in (linear_jsd, linear_jsd_reference):
        op(h.requires_grad_(), w, t_h, t_w, teacher_bias=t_b).backward()
        assert h.grad.any() and all(t.grad is None for t in teacher)


@pytest.mark.parametrize("shape", [(0,), (2, 0)])
def test_takes_empty_tensors(shape, device) -> None:
    (h, w, _), (t_h, t_w, _), labels = example(device, leading=shape)
    loss = linear_jsd(h.requires_grad_(), w.requires_grad_(), t_h, t_w, labels=labels)
    loss.backward()
    assert loss == 0.0 and h.grad.shape == h.shape and not w.grad.any()


def test_takes_hidden_of_any_stride(device) -> None:
    (h, w, _), (t_h, t_w, _), labels = example(device, leading=(2, 5))
    for cut in (lambda t: t[:, :-1], lambda t: t.transpose(0, 1)):
        options = {"labels": cut(labels)}
        expected = linear_jsd_reference(cut(h), w, cut(t_h), t_w, **options)
        torch.testing.assert_close(linear_jsd(cut(h), w, cut(t_h), t_w, **options), expected)


def test_float16_survives_gradscalers_factor(device) -> None:
    """p/n is 4e-9 here, below what float16 holds; 65536 p/n is not."""
    n_rows, vocab_size, n = 40, 512, 512_000
    h, t_h = (0.02 * torch.randn(n_rows, HIDDEN, device=device, dtype=torch.float16) for _ in range(2))
    w, t_w = (torch.randn(vocab_size, HIDDEN, device=device, dtype=torch.float16) for _ in range(2))
    judge(
        lambda h, w: linear_jsd(h, w, t_h, t_w, num_items_in_batch=n) * 65536.0,
        lambda h, w: linear_jsd_reference(h, w, t_h.to(h.dtype), t_w.to(h.dtype), num_items_in_batch=n) * 65536.0,
        [h, w],
    )


def test_many_flushes_round_dw_once(device) -> None:
    """A running sum in bf16 over 24 flushes would lose a fifth more than one product does."""
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


def test_a_second_backward_is_right_or_refused(device) -> None:
    (h, w, _), (t_h, t_w, _), _ = example(device)
    loss = 3.0 * linear_jsd(h.requires_grad_(), w, t_h, t_w)
    (first,) = torch.autograd.grad(loss, h, retain_graph=True)
    if runs_triton(h):
        with pytest.raises(RuntimeError, match=r"linear_jsd.*run the forward again"):
            loss.backward()
    else:
        assert torch.equal(first, torch.autograd.grad(loss, h)[0])


def test_autocast_computes_as_a_linear_layer_would(device) -> None:
    student, teacher, _ = example(device)
    low, leaves = ([t.detach().to(d).requires_grad_() for t in student] for d in (torch.bfloat16, None))
    t_h, t_w, _ = (t.bfloat16() for t in teacher)
    expected = linear_jsd(low[0], low[1], t_h, t_w, student_bias=low[2])
    with torch.autocast(device.type, dtype=torch.bfloat16):
        loss = linear_jsd(leaves[0], leaves[1], *teacher[:2], student_bias=leaves[2])
        loss.backward()
    expected.backward()
    assert torch.equal(loss, expected) and loss.dtype == torch.float32
    for ours, theirs in zip(leaves, low, strict=True):
        assert ours.grad.dtype == torch.float32 and torch.equal(ours.grad, theirs.grad.float())


def test_checkpointing_gives_the_same_gradients(device) -> None:
    (h, w, _), (t_h, t_w, _), _ = example(device)
    leaves = h.requires_grad_(), w.requires_grad_()
    grads = torch.autograd.grad(linear_jsd(h, w, t_h, t_w), leaves)
    loss = checkpoint(linear_jsd, h, w, t_h, t_w, use_reentrant=False)
    for ours, theirs in zip(torch.autograd.grad(loss, leaves), grads, strict=True):
        assert torch.equal(ours, theirs)


def test_without_grad_only_the_loss_is_computed(device) -> None:
    (h, w, _), (t_h, t_w, _), _ = example(device)
    expected = linear_jsd(h, w, t_h, t_w)
    with torch.no_grad():
        loss = linear_jsd(h.requires_grad_(), w, t_h, t_w)
    assert torch.equal(loss, expected) and loss.grad_fn is None


def test_module_is_the_function(device) -> None:
    (h, w, b), (t_h, t_w, t_b), labels = example(device)
    inputs = {"labels": labels, "student_bias": b, "teacher_bias": t_b, "num_items_in_batch": 3}
    loss = LinearJSDLoss(beta=0.2, temperature=2.0)(h, w, t_h, t_w, **inputs)
    assert torch.equal(loss, linear_jsd(h, w, t_h, t_w, beta=0.2, temperature=2.0, **inputs))


def test_names_what_does_not_fit(device) -> None:
    (h, w, b), (t_h, t_w, _), labels = example(device)
    with pytest.raises(ValueError, match=r"teacher_hidden is .*expected weight \(V, E\)"):
        linear_jsd(h, w, t_h, t_w.T)
    with pytest.raises(ValueError, match=r"vocabulary of 131, the teacher \(11,\) of 130"):
        linear_jsd(h, w, t_h, t_w[1:])
    with pytest.raises(ValueError, match=r"rows \(11,\).*the teacher \(10,\)"):
        linear_jsd(h, w, t_h[1:], t_w)
    with pytest.raises(ValueError, match=r"labels are \(1,\)"):
        linear_jsd(h, w, t_h, t_w, labels=labels[:1])
    with pytest.raises(ValueError, match=r"student_bias is \(4,\)"):
        linear_jsd(h, w, t_h, t_w, student_bias=b[:4])
    with pytest.raises(ValueError, match=r"teacher_hidden is torch\.float32 and a parameter torch\.bfloat16"):
        linear_jsd(h, w, t_h, t_w.bfloat16())
    with pytest.raises(ValueError, match="temperature is 0"):
        linear_jsd(h, w, t_h, t_w, temperature=0)
    with pytest.raises(ValueError, match="beta is -1"):
        linear_jsd(h, w, t_h, t_w, beta=-1)
