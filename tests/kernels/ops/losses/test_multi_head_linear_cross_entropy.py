"""multi_head_linear_cross_entropy against float64: one weight or several, coefficients, rows without a label."""

import pytest
import torch
from ligertune_kernels import (
    labelled_rows,
    linear_cross_entropy_reference,
    multi_head_linear_cross_entropy,
    multi_head_linear_cross_entropy_reference,
)
from support.kernels.judge import DTYPES, judge_loss

HEADS, HIDDEN, VOCAB = 3, 24, 131
COEFFICIENTS = (1.0, 0.8, 0.64)


def example(device: torch.device, dtype: torch.dtype = torch.float32, *, shared: bool = True):
    """Return hiddens (K, 2, 4, E), weight, labels (K, 2, 4), of which head k ignores the last k + 1 per sequence."""
    hiddens = torch.randn(HEADS, 2, 4, HIDDEN, device=device, dtype=dtype)
    weight = 0.3 * torch.randn(*(() if shared else (HEADS,)), VOCAB, HIDDEN, device=device, dtype=dtype)
    labels = torch.randint(VOCAB, (HEADS, 2, 4), device=device)
    for k in range(HEADS):
        labels[k, :, 3 - k :] = -100
    return hiddens, weight, labels


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("shared", [True, False], ids=["one weight", "a weight each"])
@pytest.mark.parametrize(
    "dropped, counts", [(False, None), (True, (40, 30, 20))], ids=["all rows", "labelled rows, counts from outside"]
)
def test_agrees_with_float64(dropped, counts, shared, dtype, device) -> None:
    hiddens, weight, labels = example(device, dtype, shared=shared)
    rows = labelled_rows(labels.cpu(), multiple_of=1) if dropped else None
    options = {"num_items_in_batch": counts, "softcap": 5.0, "z_loss": 0.01}
    judge_loss(
        lambda h, w: multi_head_linear_cross_entropy(h, w, labels, COEFFICIENTS, labelled_rows=rows, **options).loss,
        lambda h, w: multi_head_linear_cross_entropy_reference(h, w, labels, COEFFICIENTS, **options).loss,
        [hiddens, weight],
    )


@pytest.mark.parametrize("shared", [True, False], ids=["one weight", "a weight each"])
def test_returns_the_loss_of_each_head(shared, device) -> None:
    hiddens, weight, labels = example(device, shared=shared)
    rows = labelled_rows(labels.cpu(), multiple_of=1)
    found = multi_head_linear_cross_entropy(
        list(hiddens.requires_grad_()), weight, labels, COEFFICIENTS, labelled_rows=rows
    )
    own = [
        linear_cross_entropy_reference(h, weight if shared else w, y)
        for h, w, y in zip(hiddens, weight, labels, strict=False)
    ]
    torch.testing.assert_close(found.head_losses, torch.stack(own).detach())
    assert not found.head_losses.requires_grad
    torch.testing.assert_close(found.loss, sum(c * loss for c, loss in zip(COEFFICIENTS, own, strict=True)))


def test_a_head_switched_off_has_no_gradient(device) -> None:
    hiddens, weight, labels = example(device)
    hiddens.requires_grad_()
    found = multi_head_linear_cross_entropy(hiddens, weight, labels, (0.0, 1.0, 0.0))
    found.loss.backward()
    assert hiddens.grad.flatten(1).any(dim=1).tolist() == [False, True, False]
    assert found.head_losses.isfinite().all()


def test_no_label_at_all(device) -> None:
    hiddens, weight, labels = example(device)
    labels.fill_(-100)
    for rows in (None, labelled_rows(labels.cpu())):
        hiddens.grad = None
        found = multi_head_linear_cross_entropy(
            hiddens.requires_grad_(), weight.requires_grad_(), labels, COEFFICIENTS, labelled_rows=rows
        )
        found.loss.backward()
        assert found.loss == 0.0 and found.head_losses.tolist() == [0.0] * HEADS
        assert not hiddens.grad.any() and not weight.grad.any()
