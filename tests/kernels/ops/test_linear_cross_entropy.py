"""linear_cross_entropy against float64: chunks, terms, who needs a gradient, scales, precision, autocast."""

from __future__ import annotations

import pytest
import torch
from judge import judge
from ligertune_kernels import (
    LinearCrossEntropyLoss,
    linear_cross_entropy,
    linear_cross_entropy_reference,
    runs_triton,
)
from ligertune_kernels.ops.schedule import Chunks, chunks_of
from torch.utils.checkpoint import checkpoint

DTYPES = (torch.float32, torch.bfloat16, torch.float16)
ROWS, HIDDEN, VOCAB = 11, 24, 131  # no size a multiple of anything the kernels like

ONE_CHUNK = 1 << 30
TERMS = (
    {},
    {"softcap": 2.0, "logit_scale": 0.5},
    {"z_loss": 0.1},
    {"label_smoothing": 0.2},
    {"softcap": 2.0, "logit_scale": 3.0, "z_loss": 0.1, "label_smoothing": 0.2},
)


def rows_in_chunk(n_rows: int, dtype: torch.dtype = torch.float32) -> int:
    """chunk_bytes that hold so many rows of the vocabulary."""
    return n_rows * VOCAB * dtype.itemsize


def example(device: torch.device, dtype: torch.dtype = torch.float32, *, leading: tuple[int, ...] = (ROWS,)):
    """hidden, weight, bias and labels, a quarter of them ignored."""
    hidden = torch.randn(*leading, HIDDEN, device=device, dtype=dtype)
    weight = 0.3 * torch.randn(VOCAB, HIDDEN, device=device, dtype=dtype)
    bias = torch.randn(VOCAB, device=device, dtype=dtype)
    labels = torch.randint(VOCAB, leading, device=device)
    labels.view(-1)[1::4] = -100
    return hidden, weight, bias, labels


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("reduction", ["mean", "sum", "none"])
@pytest.mark.parametrize("rows", [ROWS, 6, 3], ids=["one chunk", "two flushes", "four flushes: dW in fp32"])
def test_agrees_with_float64(rows, reduction, dtype, device) -> None:
    hidden, weight, bias, labels = example(device, dtype)
    options = {"chunk_bytes": rows_in_chunk(rows, dtype), "reduction": reduction}
    judge(
        lambda h, w, b: linear_cross_entropy(h, w, labels, b, **options),
        lambda h, w, b: linear_cross_entropy_reference(h, w, labels, b, reduction=reduction),
        [hidden, weight, bias],
    )


@pytest.mark.parametrize("terms", TERMS, ids=lambda terms: " ".join(terms) or "plain")
@pytest.mark.parametrize("reduction", ["mean", "none"])
def test_every_term_agrees_with_float64(terms, reduction, device) -> None:
    hidden, weight, _, labels = example(device, leading=(2, 5))
    judge(
        lambda h, w: linear_cross_entropy(h, w, labels, reduction=reduction, chunk_bytes=rows_in_chunk(4), **terms),
        lambda h, w: linear_cross_entropy_reference(h, w, labels, reduction=reduction, **terms),
        [hidden, weight],
    )


@pytest.mark.parametrize("reduction", ["mean", "none"])
@pytest.mark.parametrize("grads", [(True, False, False), (False, True, False), (False, False, True)])
def test_computes_only_the_gradient_that_is_needed(grads, reduction, device) -> None:
    hidden, weight, bias, labels = example(device)
    judge(
        lambda h, w, b: linear_cross_entropy(h, w, labels, b, reduction=reduction, chunk_bytes=rows_in_chunk(4)),
        lambda h, w, b: linear_cross_entropy_reference(h, w, labels, b, reduction=reduction),
        [hidden, weight, bias],
        grads=grads,
    )


@pytest.mark.parametrize("reduction", ["mean", "sum", "none"])
def test_gradcheck(reduction, device) -> None:
    hidden, weight, bias, labels = example(device, torch.float64, leading=(5,))
    leaves = [t[:7].detach().requires_grad_() for t in (hidden, weight, bias)]
    labels = labels % 7

    def loss(h, w, b):
        return linear_cross_entropy(
            h, w, labels, b, reduction=reduction, softcap=3.0, z_loss=0.1, label_smoothing=0.1, chunk_bytes=2 * 7 * 8
        )

    assert torch.autograd.gradcheck(loss, leaves)


@pytest.mark.parametrize("as_tensor", [False, True])
@pytest.mark.parametrize("reduction", ["mean", "sum"])
def test_num_items_in_batch_replaces_the_mean(reduction, as_tensor, device) -> None:
    hidden, weight, _, labels = example(device)
    n = torch.tensor(37, device=device) if as_tensor else 37
    judge(
        lambda h, w: linear_cross_entropy(h, w, labels, reduction=reduction, num_items_in_batch=n),
        lambda h, w: linear_cross_entropy_reference(h, w, labels, reduction="sum") / 37,
        [hidden, weight],
    )
    torch.testing.assert_close(
        linear_cross_entropy_reference(hidden, weight, labels, num_items_in_batch=n),
        linear_cross_entropy_reference(hidden, weight, labels, reduction="sum") / 37,
    )


@pytest.mark.parametrize("n", [None, 0, 5])
def test_all_labels_ignored_give_zero_and_zero_gradients(n, device) -> None:
    leaves = [t.requires_grad_() for t in example(device)[:3]]
    hidden, weight, bias = leaves
    labels = torch.full((ROWS,), -100, device=device)
    loss = linear_cross_entropy(hidden, weight, labels, bias, num_items_in_batch=n, z_loss=0.1)
    loss.backward()
    assert loss == 0.0 and not any(t.grad.any() for t in leaves)


def test_a_label_that_is_no_class_makes_the_loss_nan(device) -> None:
    hidden, weight, _, labels = example(device)
    for label in (VOCAB, -1):
        labels[2] = label
        losses = linear_cross_entropy(hidden, weight, labels, reduction="none")
        assert losses.isnan().nonzero().tolist() == [[2]]
        assert linear_cross_entropy(hidden, weight, labels).isnan()


@pytest.mark.parametrize("shape", [(0,), (2, 0)])
def test_takes_empty_tensors(shape, device) -> None:
    hidden, weight, _, labels = example(device, leading=shape)
    hidden.requires_grad_(), weight.requires_grad_()
    loss = linear_cross_entropy(hidden, weight, labels)
    loss.backward()
    assert loss == 0.0 and hidden.grad.shape == hidden.shape and not weight.grad.any()


def test_takes_hidden_of_any_stride(device) -> None:
    hidden, weight, _, labels = example(device, leading=(2, 5))
    shifted, upside_down = hidden[:, :-1], hidden.transpose(0, 1)
    for h, y in ((shifted, labels[:, 1:]), (upside_down, labels.T)):
        expected = linear_cross_entropy_reference(h, weight, y)
        torch.testing.assert_close(linear_cross_entropy(h, weight, y), expected)


def test_float16_survives_gradscalers_factor(device) -> None:
    """p/n is 4e-9 here, below what float16 holds; 65536 p/n is not."""
    n_rows, vocab_size = 512, 512
    hidden = 0.02 * torch.randn(n_rows, HIDDEN, device=device, dtype=torch.float16)
    weight = 0.02 * torch.randn(vocab_size, HIDDEN, device=device, dtype=torch.float16)
    labels = torch.randint(vocab_size, (n_rows,), device=device)
    judge(
        lambda h, w: linear_cross_entropy(h, w, labels, num_items_in_batch=1000 * n_rows) * 65536.0,
        lambda h, w: linear_cross_entropy_reference(h, w, labels, num_items_in_batch=1000 * n_rows) * 65536.0,
        [hidden, weight],
    )


def test_float16_sums_of_dw_do_not_overflow(device) -> None:
    """One class, rows of 300: undivided, dW is 512 · 300 = 153,600, past float16's 65,504; divided it is 300."""
    hidden = torch.full((512, 8), 300.0, device=device, dtype=torch.float16)
    weight = torch.zeros(4, 8, device=device, dtype=torch.float16, requires_grad=True)
    linear_cross_entropy(hidden, weight, torch.zeros(512, device=device, dtype=torch.int64)).backward()
    torch.testing.assert_close(weight.grad[0], torch.full_like(weight[0], -225.0))


def test_many_flushes_round_dw_once(device) -> None:
    """A running sum in bf16 over 64 flushes would lose four times what one product does."""
    hidden, weight, _, labels = example(device, torch.bfloat16, leading=(64,))
    truth = weight.double().requires_grad_()
    linear_cross_entropy_reference(hidden.double(), truth, labels).backward()
    lost = []
    for chunk_bytes in (ONE_CHUNK, rows_in_chunk(1, torch.bfloat16)):
        w = weight.detach().requires_grad_()
        linear_cross_entropy(hidden, w, labels, chunk_bytes=chunk_bytes).backward()
        lost.append((w.grad.double() - truth.grad).norm())
    assert lost[1] <= 1.1 * lost[0]


def test_a_second_backward_is_right_or_refused(device) -> None:
    hidden, weight, _, labels = example(device)
    hidden.requires_grad_()
    loss = 3.0 * linear_cross_entropy(hidden, weight, labels)
    (first,) = torch.autograd.grad(loss, hidden, retain_graph=True)
    if runs_triton(hidden):
        with pytest.raises(RuntimeError, match="run the forward again"):
            loss.backward()
    else:
        assert torch.equal(first, torch.autograd.grad(loss, hidden)[0])


@pytest.mark.parametrize("reduction", ["mean", "none"])
def test_autocast_computes_as_a_linear_layer_would(reduction, device) -> None:
    hidden, weight, bias, labels = example(device)
    low, leaves = ([t.detach().to(d).requires_grad_() for t in (hidden, weight, bias)] for d in (torch.bfloat16, None))
    expected = linear_cross_entropy(low[0], low[1], labels, low[2], reduction=reduction).sum()
    with torch.autocast(device.type, dtype=torch.bfloat16):
        loss = linear_cross_entropy(leaves[0], leaves[1], labels, leaves[2], reduction=reduction).sum()
        loss.backward()
    expected.backward()
    assert torch.equal(loss, expected) and loss.dtype == torch.float32
    for ours, theirs in zip(leaves, low, strict=True):
        assert ours.grad.dtype == torch.float32 and torch.equal(ours.grad, theirs.grad.float())


def test_checkpointing_gives_the_same_gradients(device) -> None:
    hidden, weight, _, labels = example(device)
    leaves = hidden.requires_grad_(), weight.requires_grad_()
    grads = torch.autograd.grad(linear_cross_entropy(hidden, weight, labels), leaves)
    loss = checkpoint(linear_cross_entropy, hidden, weight, labels, use_reentrant=False)
    for ours, theirs in zip(torch.autograd.grad(loss, leaves), grads, strict=True):
        assert torch.equal(ours, theirs)


def test_without_grad_only_the_loss_is_computed(device) -> None:
    hidden, weight, _, labels = example(device)
    expected = linear_cross_entropy(hidden, weight, labels)
    with torch.no_grad():
        loss = linear_cross_entropy(hidden.requires_grad_(), weight, labels)
    assert torch.equal(loss, expected) and loss.grad_fn is None


@pytest.mark.parametrize(
    "n_rows, needs_dw, expected",
    [
        pytest.param(8192, True, Chunks(2048, 4096, 2), id="Llama-3's head, 8192 tokens: two flushes"),
        pytest.param(4186, True, Chunks(1152, 2176, 2), id="just over what fits: two even halves"),
        pytest.param(100, True, Chunks(100, 100, 1), id="fewer than a tile"),
        pytest.param(20000, True, Chunks(2048, 4096, 5), id="many flushes"),
        pytest.param(8192, False, Chunks(1024, 1024, 0), id="frozen weight: one slot"),
    ],
)
def test_chunks_are_even_and_fit(n_rows, needs_dw, expected) -> None:
    assert chunks_of(n_rows, 128256 * 2, 1 << 30, 2048 if needs_dw else 1024, needs_dw=needs_dw) == expected


def test_a_row_that_exceeds_chunk_bytes_is_taken_alone() -> None:
    assert chunks_of(5, 1000, 1, 2048, needs_dw=True) == Chunks(1, 1, 5)


def test_module_is_the_function(device) -> None:
    hidden, weight, bias, labels = example(device)
    loss = LinearCrossEntropyLoss(softcap=2.0)(hidden, weight, labels, bias, num_items_in_batch=3)
    expected = linear_cross_entropy(hidden, weight, labels, bias, softcap=2.0, num_items_in_batch=3)
    assert torch.equal(loss, expected)


def test_names_what_does_not_fit() -> None:
    hidden, weight, labels = torch.zeros(2, 8), torch.zeros(5, 8), torch.zeros(2, dtype=torch.int64)
    with pytest.raises(ValueError, match=r"expected weight \(V, E\)"):
        linear_cross_entropy(hidden, weight.T, labels)
    with pytest.raises(ValueError, match=r"labels are \(1,\)"):
        linear_cross_entropy(hidden, weight, labels[:1])
    with pytest.raises(ValueError, match="expected the same"):
        linear_cross_entropy(hidden, weight.bfloat16(), labels)
    with pytest.raises(ValueError, match="num_items_in_batch"):
        linear_cross_entropy(hidden, weight, labels, reduction="none", num_items_in_batch=1)
    with pytest.raises(ValueError, match=r"bias is \(4,\)"):
        linear_cross_entropy(hidden, weight, labels, torch.zeros(4))
