"""linear_cross_entropy against float64: schedules, terms, who needs a gradient, scales, precision, autocast."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
from judge import judge
from ligertune_kernels import (
    LinearCrossEntropyLoss,
    linear_cross_entropy,
    linear_cross_entropy_reference,
    runs_triton,
)
from ligertune_kernels.ops.losses._schedule import Schedule
from torch.utils.checkpoint import checkpoint

DTYPES = (torch.float32, torch.bfloat16, torch.float16)
ROWS, HIDDEN, VOCAB = 11, 24, 131  # no size a multiple of anything the kernels like

ONE_CHUNK = 1 << 30
ONE_FLUSH = Schedule("fast", slot=6, buffer=ROWS, flushes=1)
LEAN = Schedule("lean", slot=5, buffer=5, flushes=1, slab=50)  # three chunks of rows, three slabs, the last ones short
LEAN_KEEPING = replace(LEAN, groups=3, kept=8)  # 24 columns are made once
IN_GROUPS = Schedule("fast", slot=4, buffer=ROWS, flushes=1, slab=8, groups=6)  # 48 columns of 131 in dW's memory
SCHEDULES = (
    pytest.param(ONE_FLUSH, id="two slots, one flush"),
    pytest.param(Schedule("fast", slot=3, buffer=6, flushes=2), id="two flushes"),
    pytest.param(Schedule("fast", slot=3, buffer=3, flushes=4), id="four flushes"),
    pytest.param(IN_GROUPS, id="in groups"),
    pytest.param(LEAN, id="lean"),
    pytest.param(LEAN_KEEPING, id="lean, some columns kept"),
)
WAYS = pytest.mark.parametrize(
    "schedule, reduction",
    [(ONE_FLUSH, "mean"), (IN_GROUPS, "mean"), (LEAN, "mean"), (LEAN_KEEPING, "mean"), (ONE_FLUSH, "none")],
    ids=["fast", "in groups", "lean", "lean, some columns kept", "rows"],
)
TERMS = (
    {},
    {"softcap": 2.0, "logit_scale": 0.5},
    {"z_loss": 0.1},
    {"label_smoothing": 0.2},
    {"logit_scale": -0.5},
    {"weighted": True},
    {"weighted": True, "softcap": 2.0, "logit_scale": 3.0, "z_loss": 0.1, "label_smoothing": 0.2},
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
@pytest.mark.parametrize("reduction", ["mean", "none"])
@pytest.mark.parametrize("schedule", SCHEDULES)
def test_agrees_with_float64(schedule, reduction, dtype, device) -> None:
    hidden, weight, bias, labels = example(device, dtype)
    if dtype is torch.float16:
        schedule = replace(schedule, groups=0)  # as schedule_of has it: the groups would not be as wide as dW
    options = {"schedule": schedule, "reduction": reduction}
    judge(
        lambda h, w, b: linear_cross_entropy(h, w, labels, b, **options),
        lambda h, w, b: linear_cross_entropy_reference(h, w, labels, b, reduction=reduction),
        [hidden, weight, bias],
    )


@pytest.mark.parametrize("terms", TERMS, ids=lambda terms: " ".join(terms) or "plain")
@WAYS
def test_every_term_agrees_with_float64(terms, schedule, reduction, device) -> None:
    hidden, weight, _, labels = example(device, leading=(2, 5))
    options = {"reduction": reduction, **terms}
    if options.pop("weighted", False):
        options["class_weight"] = torch.rand(VOCAB, device=device)
    judge(
        lambda h, w: linear_cross_entropy(h, w, labels, schedule=schedule, **options),
        lambda h, w: linear_cross_entropy_reference(h, w, labels, **options),
        [hidden, weight],
    )


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@WAYS
@pytest.mark.parametrize("frozen", [False, True], ids=["all trained", "only the low-rank term trained"])
def test_a_low_rank_term_is_exact(frozen, reduction, schedule, dtype, device) -> None:
    """Two projections of a rank of 3: nothing is a multiple of the kernels' sizes."""
    hidden, weight, bias, labels = example(device, dtype)
    a, b = 0.3 * torch.randn(3, HIDDEN, device=device, dtype=dtype), torch.randn(VOCAB, 3, device=device, dtype=dtype)
    options = {"lora_scale": 0.5, "softcap": 4.0, "reduction": reduction}
    judge(
        lambda h, w, c, a, b: linear_cross_entropy(h, w, labels, c, lora_a=a, lora_b=b, schedule=schedule, **options),
        lambda h, w, c, a, b: linear_cross_entropy_reference(h, w, labels, c, lora_a=a, lora_b=b, **options),
        [hidden, weight, bias, a, b],
        grads=(not frozen, not frozen, not frozen, True, True),
    )


@WAYS
@pytest.mark.parametrize("grads", [(True, False, False), (False, True, False), (False, False, True)])
def test_computes_only_the_gradient_that_is_needed(schedule, grads, reduction, device) -> None:
    hidden, weight, bias, labels = example(device)
    judge(
        lambda h, w, b: linear_cross_entropy(h, w, labels, b, reduction=reduction, schedule=schedule),
        lambda h, w, b: linear_cross_entropy_reference(h, w, labels, b, reduction=reduction),
        [hidden, weight, bias],
        grads=grads,
    )


@WAYS
def test_gradcheck(schedule, reduction, device) -> None:
    hidden, weight, bias, labels = example(device, torch.float64, leading=(5,))
    leaves = [t[:7].detach().requires_grad_() for t in (hidden, weight, bias)]
    labels = labels % 7
    schedule = replace(schedule, slot=2, slab=3 if schedule.slab else 0, groups=2 if schedule.groups else 0, kept=2)

    def loss(h, w, b):
        return linear_cross_entropy(
            h, w, labels, b, reduction=reduction, softcap=3.0, z_loss=0.1, label_smoothing=0.1, schedule=schedule
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
    n_rows, vocab_size = 128, 2048
    hidden = 0.02 * torch.randn(n_rows, HIDDEN, device=device, dtype=torch.float16)
    weight = 0.02 * torch.randn(vocab_size, HIDDEN, device=device, dtype=torch.float16)
    labels = torch.randint(vocab_size, (n_rows,), device=device)
    judge(
        lambda h, w: linear_cross_entropy(h, w, labels, num_items_in_batch=1000 * n_rows) * 65536.0,
        lambda h, w: linear_cross_entropy_reference(h, w, labels, num_items_in_batch=1000 * n_rows) * 65536.0,
        [hidden, weight],
    )


def test_float16_sums_of_dw_do_not_overflow(device) -> None:
    """One class, rows of 1200: undivided, dW is 128 · 1200 = 153,600, past float16's 65,504; divided it is 1200."""
    hidden = torch.full((128, 8), 1200.0, device=device, dtype=torch.float16)
    weight = torch.zeros(4, 8, device=device, dtype=torch.float16, requires_grad=True)
    linear_cross_entropy(hidden, weight, torch.zeros(128, device=device, dtype=torch.int64)).backward()
    torch.testing.assert_close(weight.grad[0], torch.full_like(weight[0], -900.0))


def test_many_flushes_and_slabs_round_dw_once(device) -> None:
    """A running sum in bf16 over 64 flushes would lose four times what one product does."""
    hidden, weight, _, labels = example(device, torch.bfloat16, leading=(64,))
    truth = weight.double().requires_grad_()
    linear_cross_entropy_reference(hidden.double(), truth, labels).backward()
    lost = []
    for schedule in (Schedule("fast", 64, 64, 1), Schedule("fast", 1, 1, 64), replace(LEAN, slot=24)):
        w = weight.detach().requires_grad_()
        linear_cross_entropy(hidden, w, labels, schedule=schedule).backward()
        lost.append((w.grad.double() - truth.grad).norm())
    assert max(lost) <= 1.1 * lost[0]


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


def test_the_callers_tensors_and_hooks_see_no_scaling(device) -> None:
    """The backward scales what it saved; hidden, weight and what a hook was handed stay as they are."""
    hidden, weight, _, labels = example(device)
    kept = hidden.clone(), weight.clone()
    seen = []
    hidden.requires_grad_().register_hook(seen.append)
    weight.requires_grad_()
    (5.0 * linear_cross_entropy(hidden, weight, labels)).backward(retain_graph=True)
    assert torch.equal(hidden, kept[0]) and torch.equal(weight, kept[1])
    first = seen[0].clone()
    (2.0 * linear_cross_entropy(hidden, weight, labels)).backward()
    assert torch.equal(seen[0], first)
    torch.testing.assert_close(seen[1], 0.4 * first)


def test_saved_tensors_may_be_offloaded(device) -> None:
    hidden, weight, _, labels = example(device)
    hidden.requires_grad_()
    expected = torch.autograd.grad(3.0 * linear_cross_entropy(hidden, weight, labels), hidden)[0]
    with torch.autograd.graph.saved_tensors_hooks(torch.clone, torch.clone):
        loss = 3.0 * linear_cross_entropy(hidden, weight, labels)
    assert torch.equal(torch.autograd.grad(loss, hidden)[0], expected)


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
    with pytest.raises(ValueError, match="both or none"):
        linear_cross_entropy(hidden, weight, labels, lora_a=torch.zeros(3, 8))
    with pytest.raises(ValueError, match=r"expected \(R, 8\) and \(5, R\)"):
        linear_cross_entropy(hidden, weight, labels, lora_a=torch.zeros(3, 8), lora_b=torch.zeros(5, 2))
