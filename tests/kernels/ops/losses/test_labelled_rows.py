"""Rows without a label: found on the host or the device, left out of every product, with a gradient of exactly zero."""

from functools import partial

import pytest
import torch
from ligertune_kernels import (
    labelled_rows,
    launcher,
    linear_cross_entropy,
    linear_cross_entropy_reference,
    linear_log_probs,
)
from ligertune_kernels.ops.losses import labelled_rows as labelled_rows_module
from ligertune_kernels.ops.losses.kernels import LossOptions
from ligertune_kernels.ops.losses.labelled_rows import PendingRows, can_skip_rows, rows_to_take
from ligertune_kernels.ops.losses.tiles import SEARCH_BLOCK
from support.kernels.judge import judge

ROWS, HIDDEN, VOCAB = 45, 16, 67  # 45 rows fill no multiple of 16


@pytest.fixture(autouse=True)
def small_products_are_worth_a_search(monkeypatch) -> None:
    monkeypatch.setattr(labelled_rows_module, "MIN_PRODUCTS", 0)


def example(device: torch.device, share: float = 0.3):
    """Return hidden (3, 15, E), weight, and labels on the CPU, of which about this share is not ignored."""
    labels = torch.randint(VOCAB, (3, 15))
    labels[torch.rand(3, 15) > share] = -100
    return torch.randn(3, 15, HIDDEN, device=device), torch.randn(VOCAB, HIDDEN, device=device), labels


def spoil_what_is_left_out(hidden: torch.Tensor, labels: torch.Tensor) -> None:
    """Write NaN into the rows that nothing has to read; a product with a gradient of 0 would carry it into dW."""
    left_out = torch.ones(labels.numel(), dtype=torch.bool)
    left_out[labelled_rows(labels.cpu())] = left_out[0] = False
    assert left_out.any()
    hidden.view(-1, HIDDEN)[left_out.to(hidden.device)] = torch.nan


def test_finds_rows_with_a_label_and_fills_up_to_a_multiple_where_there_are_enough() -> None:
    labels = torch.full((2, 20), -100)
    labels[0, 3], labels[1, 0], labels[1, 19] = 5, 6, 7
    assert labelled_rows(labels, multiple_of=1).tolist() == [3, 20, 39]
    rows = labelled_rows(labels)
    assert len(rows) == 16 == len(set(rows.tolist())) and {3, 20, 39} <= set(rows.tolist())
    assert labelled_rows(labels[:, 4:19]).numel() == 0  # nothing to compute
    # no more rows than there are
    assert labelled_rows(torch.zeros(3, dtype=torch.int64)).tolist() == [0, 1, 2]
    assert labelled_rows(torch.tensor([1, -100, 2])).tolist() == [0, 1, 2]


@pytest.mark.parametrize("shift", [1, 2, 5], ids=lambda shift: f"shift {shift}")
def test_shifts_within_each_sequence(shift) -> None:
    labels = torch.tensor([[-100, -100, 1, 2], [3, -100, -100, 4]])
    shifted = torch.nn.functional.pad(labels, (0, shift), value=-100)[:, shift:]
    assert torch.equal(labelled_rows(labels, shift=shift, multiple_of=1), labelled_rows(shifted, multiple_of=1))


def test_several_shifts_take_the_rows_of_each() -> None:
    labels = torch.full((2, 9), -100)
    labels[0, 8], labels[1, 1] = 5, 6
    assert labelled_rows(labels, shift=(1, 2, 4), multiple_of=1).tolist() == [4, 6, 7, 9]


def test_labels_on_a_device_are_refused() -> None:
    with pytest.raises(ValueError, match="expected the CPU"):
        labelled_rows(torch.zeros(3, device="meta"))


@pytest.mark.parametrize("options", [*({"reduction": r} for r in ("mean", "sum", "none")), {"num_items_in_batch": 100}])
@pytest.mark.parametrize("given", [True, False], ids=["rows given", "labels on the CPU"])
def test_agrees_with_all_rows_computed(given, options, device) -> None:
    hidden, weight, labels = example(device)
    on_device = labels.to(device)
    rows = labelled_rows(labels) if given else None
    assert len(rows_to_take(hidden, labels, rows, -100)[0]) < ROWS
    op = partial(linear_cross_entropy, labels=on_device if given else labels, labelled_rows=rows, **options)
    judge(op, partial(linear_cross_entropy_reference, labels=on_device, **options), [hidden, weight])


def test_rows_left_out_have_a_gradient_of_exactly_zero(device) -> None:
    hidden, weight, labels = example(device)
    hidden[labels == -100] = torch.nan  # what is not computed cannot spoil anything
    hidden.requires_grad_()
    rows = labelled_rows(labels, multiple_of=1)
    linear_cross_entropy(hidden, weight, labels.to(device), labelled_rows=rows.to(device)).backward()
    assert not hidden.grad[labels == -100].any() and hidden.grad.isfinite().all()
    assert hidden.grad[labels != -100].any(dim=-1).all()


@pytest.mark.parametrize("reduction", ["mean", "none"])
def test_no_label_at_all(reduction, device) -> None:
    hidden, weight, labels = example(device, share=0.0)
    hidden.requires_grad_(), weight.requires_grad_()
    loss = linear_cross_entropy(
        hidden, weight, labels.to(device), labelled_rows=labelled_rows(labels), reduction=reduction
    )
    loss.sum().backward()
    assert not loss.any() and not hidden.grad.any() and not weight.grad.any()
    assert loss.shape == (labels.shape if reduction == "none" else ())


@pytest.mark.parametrize("share", [0.0, 0.001, 0.3, 1.0])
def test_the_device_finds_the_rows_that_the_host_finds(share, device) -> None:
    """The last two have more rows than one block of the kernel, and than two, in several sequences."""
    for shape in ((1,), (15,), (16,), (3, 15), (SEARCH_BLOCK + 1,), (2, SEARCH_BLOCK + 7)):
        labels = torch.randint(VOCAB, shape, dtype=torch.int32 if shape[0] == 3 else torch.int64)
        labels[torch.rand(shape) >= share] = -5
        for shift, multiple_of in ((0, 16), (1, 1), (20, 128)):
            options = {"ignore_index": -5, "shift": shift, "multiple_of": multiple_of}
            found = PendingRows(labels.to(device), **options).wait()
            assert found.device == device
            assert torch.equal(found.cpu(), labelled_rows(labels, **options)), (shape, options)


def test_the_device_finds_the_rows_of_labels_in_any_memory_order(device) -> None:
    *_, labels = example(device)
    found = PendingRows(labels.to(device).t(), shift=1, multiple_of=1).wait()
    assert torch.equal(found.cpu(), labelled_rows(labels.t().contiguous(), shift=1, multiple_of=1))
    assert PendingRows(labels[:, :0].to(device)).wait().numel() == 0


def test_all_rows_are_computed_if_the_host_must_not_wait(device) -> None:
    hidden, weight, labels = example(device)
    spoil_what_is_left_out(hidden, labels)
    computed = []
    for skip_ignored in (True, False):
        leaf = weight.clone().requires_grad_()
        linear_cross_entropy(hidden, leaf, labels, skip_ignored=skip_ignored).backward()
        computed.append(leaf.grad.isnan().any().item())
    assert computed == [False, True]
    assert not can_skip_rows(torch.empty(3, device="meta"), 1 << 60)


OPERATOR = {"wanted": [False, *[True] * 5], "scale": ()}  # all gradients, no statistics


@pytest.mark.parametrize("labelled", ["no", "one", "some", "all"])
@pytest.mark.parametrize("changed", [{}, {"scale": (ROWS,)}, {"wanted": [True, *[False] * 5], "scale": None}])
def test_the_operator_of_compiled_calls_skips_rows_without_a_change_of_results(labelled, changed, device) -> None:
    hidden, weight, labels = example(device, {"no": 0.0, "one": 0.0, "some": 0.3, "all": 2.0}[labelled])
    if labelled == "one":
        labels[2, 14] = 3
    given = OPERATOR | changed
    scale = None if given["scale"] is None else torch.rand(given["scale"], device=device)
    parameters = [weight, *(torch.randn(s, device=device) for s in (VOCAB, (3, HIDDEN), (VOCAB, 3)))]
    options = [float(number) for number in LossOptions(-100, 0.1, 5.0, 2.0, 0.1).numbers]

    def run(rows: torch.Tensor, skip_ignored: bool) -> list[torch.Tensor]:
        targets = [labels.reshape(-1).to(device), None, scale]
        operator = torch.ops.ligertune_kernels.linear_cross_entropy_chunks
        flat = rows.reshape(-1, HIDDEN)
        return operator(flat, parameters, 0.5, targets, options, 1 << 20, skip_ignored, given["wanted"])

    expected = run(hidden, False)
    if labelled != "all":
        spoil_what_is_left_out(hidden, labels)
    found = run(hidden, True)
    if given["wanted"][0]:  # only the loss and the log-probability are 0 where the label is ignored
        ignored = (labels == -100).reshape(-1).to(device)
        found, expected = ([t.masked_fill(ignored, 0) for t in side] for side in (found, expected))
    for ours, truth in zip(found, expected, strict=True):
        torch.testing.assert_close(ours, truth, rtol=1e-5, atol=1e-5)


@pytest.mark.skipif(launcher.INTERPRETED, reason="torch.compile cannot trace the interpreter")
def test_compiled_calls_skip_rows(device) -> None:
    hidden, weight, labels = example(device)
    labels = labels.to(device)
    spoil_what_is_left_out(hidden, labels)
    leaves = hidden.requires_grad_(), weight.requires_grad_()

    def loss(h: torch.Tensor, w: torch.Tensor, **options: bool) -> torch.Tensor:
        probs = linear_log_probs(h, w, labels, **options).logprob
        return linear_cross_entropy(h, w, labels, **options) - probs.sum() / ROWS

    compiled = torch.compile(loss, backend="aot_eager", fullgraph=True)
    for ours, truth in zip(*(torch.autograd.grad(f(*leaves), leaves) for f in (compiled, loss)), strict=True):
        torch.testing.assert_close(ours, truth, rtol=1e-5, atol=1e-6)
    assert torch.autograd.grad(compiled(*leaves, skip_ignored=False), weight)[0].isnan().any()
    clean = [leaf.detach().nan_to_num(1.0).requires_grad_() for leaf in leaves]
    given = (torch.autograd.grad(f(*clean, skip_ignored=False), clean) for f in (compiled, loss))
    for ours, truth in zip(*given, strict=True):
        torch.testing.assert_close(ours, truth, rtol=1e-5, atol=1e-6)
    torch._dynamo.reset()
