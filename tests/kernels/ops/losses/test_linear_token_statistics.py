"""linear_token_statistics against float64: chunks, options, ties, labels that are ignored or no class."""

import pytest
import torch
from ligertune_kernels import (
    LinearLora,
    linear_cross_entropy,
    linear_token_statistics,
    linear_token_statistics_reference,
)
from ligertune_kernels.ops.losses import linear_log_probs
from support.kernels.judge import assert_close

HIDDEN = 24
OPTIONS = ({}, {"softcap": 20.0, "logit_scale": 3.0}, {"lora": True}, {"logit_scale": -1.0})


def example(device: torch.device, vocab_size: int = 131, dtype: torch.dtype = torch.float32):
    hidden = torch.randn(2, 5, HIDDEN, device=device, dtype=dtype)
    weight = 0.3 * torch.randn(vocab_size, HIDDEN, device=device, dtype=dtype)
    labels = torch.randint(vocab_size, (2, 5), device=device)
    labels[0, 1] = -100
    return hidden, weight, labels


@pytest.mark.parametrize("options", OPTIONS, ids=lambda options: " ".join(options) or "plain")
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("vocab_size", [131, 9000], ids=["one block", "more columns than a block"])
def test_agrees_with_float64(vocab_size, dtype, options, device, monkeypatch) -> None:
    monkeypatch.setattr(linear_log_probs, "CHUNK_BYTES", 4 * vocab_size * dtype.itemsize)  # three chunks of the rows
    hidden, weight, labels = example(device, vocab_size, dtype)
    options = dict(options)
    if options.pop("lora", False):
        a = torch.randn(3, HIDDEN, device=device, dtype=dtype)
        b = 0.1 * torch.randn(vocab_size, 3, device=device, dtype=dtype)
        options = {"lora": LinearLora(a, b, 0.5)}
    wide = {**options, "lora": LinearLora(a.double(), b.double(), 0.5)} if "lora" in options else options
    truth = linear_token_statistics_reference(hidden.double(), weight.double(), labels, **wide)
    plain = linear_token_statistics_reference(hidden, weight, labels, **options)
    ours = linear_token_statistics(hidden, weight, labels, **options)
    for name in ("logprob", "entropy"):
        assert_close(name, *(getattr(found, name) for found in (ours, plain, truth)), dtype)
    if dtype is torch.float32:
        assert torch.equal(ours.argmax, truth.argmax)


def test_loss_equals_linear_cross_entropy(device) -> None:
    hidden, weight, labels = example(device)
    found = linear_token_statistics(hidden.requires_grad_(), weight, labels)
    torch.testing.assert_close(found.loss, linear_cross_entropy(hidden, weight, labels, reduction="none").detach())
    assert not found.loss.requires_grad and found.argmax.dtype == torch.int64


def test_argmax_is_the_first_of_equal_logits(device) -> None:
    hidden, weight = torch.ones(1, 2, device=device), torch.zeros(9000, 2, device=device)
    weight[[8999, 17, 4100, 8300]] = 1.0  # in several blocks and lanes
    found = linear_token_statistics(hidden, weight, torch.zeros(1, dtype=torch.int64, device=device))
    assert found.argmax.tolist() == [17]


def test_a_label_that_is_no_class_is_nan_in_its_row_alone(device) -> None:
    hidden, weight, labels = example(device)
    labels[1] = torch.tensor([131, -1, 0, 130, -100])
    found = linear_token_statistics(hidden, weight, labels)
    assert found.logprob[1].isnan().tolist() == [True, True, False, False, False] and found.logprob[1, 4] == 0.0
    assert found.entropy.isfinite().all()


def test_takes_empty_tensors(device) -> None:
    hidden, weight, labels = example(device)
    found = linear_token_statistics(hidden[:0], weight, labels[:0])
    assert found.logprob.shape == found.argmax.shape == found.entropy.shape == (0, 5)
