"""cross_entropy against float64 and torch: every term and reduction, in place, invalid labels."""

import pytest
import torch
from ligertune_kernels import cross_entropy, cross_entropy_reference, runs_triton
from support.covering import every_pair
from support.kernels.judge import DTYPES, judge_op
from torch.nn import functional as F

REDUCTIONS = ("mean", "sum", "none")

SIZES = (
    pytest.param((1, 2), id="one row, two classes"),
    pytest.param((19, 515), id="more rows than programs, columns of no multiple of the vector"),
    pytest.param((3, 17000), id="more columns than a sweep takes at once"),
)
TERMS = (
    {},
    {"softcap": 2.0},
    {"z_loss": 0.1},
    {"label_smoothing": 0.2},
    {"weighted": True},
    {"weighted": True, "label_smoothing": 0.2, "z_loss": 0.1, "softcap": 2.0},
)


def labels_for(shape: tuple[int, ...], device: torch.device, ignored: int = 1) -> torch.Tensor:
    """Labels that hold the first and the last class, and some -100 where there is more than one row."""
    n_rows, n_classes = shape
    labels = torch.randint(n_classes, (n_rows,), device=device)
    labels[0], labels[-1] = 0, n_classes - 1
    if n_rows > 2:
        labels[1 : 1 + ignored] = -100
    return labels


@pytest.mark.parametrize("shape, reduction, dtype", every_pair(SIZES, REDUCTIONS, DTYPES))
def test_agrees_with_float64(shape, reduction, dtype, device) -> None:
    logits = 4.0 * torch.randn(shape, device=device, dtype=dtype)
    judge_op(cross_entropy, [logits], labels_for(shape, device), reduction=reduction)


@pytest.mark.parametrize("terms, reduction, inplace", every_pair(TERMS, REDUCTIONS, (False, True)))
def test_every_term_agrees_with_float64(terms, reduction, inplace, device) -> None:
    options = {"reduction": reduction, **terms}
    if options.pop("weighted", False):
        options["weight"] = torch.rand(131, device=device)
    inputs, labels = [2.0 * torch.randn(7, 131, device=device)], labels_for((7, 131), device)
    judge_op(cross_entropy, inputs, labels, ours={"inplace": inplace}, **options)


@pytest.mark.parametrize("reduction, label_smoothing, weighted", every_pair(REDUCTIONS, (0.0, 0.1), (False, True)))
def test_reference_is_torchs(reduction, label_smoothing, weighted) -> None:
    logits, labels = torch.randn(2, 6, 11, dtype=torch.float64), torch.randint(11, (2, 6))
    labels[0, :2] = -7
    options = {"ignore_index": -7, "reduction": reduction, "label_smoothing": label_smoothing}
    options["weight"] = torch.rand(11, dtype=torch.float64) if weighted else None
    expected = F.cross_entropy(logits.transpose(1, 2), labels, **options)
    torch.testing.assert_close(cross_entropy_reference(logits, labels, **options), expected)


def test_masked_classes_have_no_share(device) -> None:
    logits = torch.randn(3, 300, device=device)
    logits[:, 10:290] = -torch.inf  # longer than a vector, and whole lanes of it
    logits.requires_grad_()
    labels = torch.tensor([0, 5, 299], device=device)
    cross_entropy(logits, labels).backward()
    expected = torch.autograd.grad(F.cross_entropy(logits, labels), logits)[0]
    torch.testing.assert_close(logits.grad, expected)


def test_large_logits_do_not_overflow(device) -> None:
    judge_op(cross_entropy, [1e4 * torch.randn(4, 40, device=device)], labels_for((4, 40), device))


@pytest.mark.gpu
@pytest.mark.parametrize("n_cols", [40, 40_000])
def test_probabilities_of_large_logits_are_exact(n_cols, device) -> None:
    """In float32 an lse of 10,000 is rounded by 5e-4. The interpreter has no fused multiply-add."""
    judge_op(cross_entropy, [1e4 - 3 * torch.rand(4, n_cols, device=device)], labels_for((4, n_cols), device))


@pytest.mark.parametrize("reduction", ["mean", "none"])
def test_the_callers_logits_stay_unless_inplace_which_autograd_sees(reduction, device) -> None:
    logits = torch.randn(4, 16, device=device, requires_grad=True)
    labels = labels_for((4, 16), device)
    kept, doubled = logits.detach().clone(), logits * 1.0
    cross_entropy(doubled, labels, reduction=reduction).sum().backward()
    assert torch.equal(doubled, kept) and torch.equal(logits, kept)
    expected = logits.grad.clone()
    doubled = logits * 1.0
    cross_entropy(doubled, labels, reduction=reduction, inplace=True).sum().backward()
    torch.testing.assert_close(logits.grad, 2.0 * expected)
    if runs_triton(logits):  # the reference never writes over the logits
        torch.testing.assert_close(doubled, expected)
        activated = logits.exp()  # exp's backward reads its result
        with pytest.raises(RuntimeError, match="modified by an inplace operation"):
            cross_entropy(activated, labels, inplace=True).backward()
