"""Rows without a label: found on the host, left out of every product, with a gradient of exactly zero."""

from functools import partial

import pytest
import torch
from judge import judge
from ligertune_kernels import labelled_rows, linear_cross_entropy, linear_cross_entropy_reference
from ligertune_kernels.ops.losses._linear_inputs import rows_to_take

ROWS, HIDDEN, VOCAB = 45, 16, 67  # 45 rows fill no multiple of 16


def example(device: torch.device, share: float = 0.3):
    """Return hidden (3, 15, E), weight, and labels on the CPU, of which about this share is not ignored."""
    labels = torch.randint(VOCAB, (3, 15))
    labels[torch.rand(3, 15) > share] = -100
    return torch.randn(3, 15, HIDDEN, device=device), torch.randn(VOCAB, HIDDEN, device=device), labels


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
