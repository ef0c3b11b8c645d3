"""Recurrences on a GPU at real sizes: rounding, 5 equal runs, more than 2³¹ elements, no wait for the device."""

import pytest
import torch
from ligertune_kernels import causal_conv1d, gated_delta_rule, gated_delta_rule_reference, kda, kda_reference
from support.kernels.attention_runs import documents_of
from support.kernels.judge import ONE_ROUNDING

pytestmark = pytest.mark.gpu

HEADS = (16, 32, 128, 128)  # of Qwen3.5
ROUNDINGS = 8  # of 16-bit factors between an input and a gradient
DOCUMENT = 1000  # tokens of each document of a row with more than 2³¹ elements


def inputs(n_tokens: int, heads, device, *, decay: float, dtype=torch.bfloat16) -> list[torch.Tensor]:
    """Return query, key, value, decay and beta of one row."""
    key_heads, value_heads, key_dim, value_dim = heads
    query, key = (torch.randn(1, n_tokens, key_heads, key_dim, device=device, dtype=dtype) for _ in range(2))
    value = torch.randn(1, n_tokens, value_heads, value_dim, device=device, dtype=dtype)
    logs = -decay * torch.rand(1, n_tokens, value_heads, device=device)
    return [query, key, value, logs, torch.rand(1, n_tokens, value_heads, device=device, dtype=dtype)]


def rule(leaves, grad, lengths=None) -> list[torch.Tensor]:
    leaves = [t.detach().requires_grad_() for t in leaves]
    documents = None if lengths is None else documents_of(lengths, leaves[0].device)
    out = gated_delta_rule(*leaves, l2_norm=True, documents=documents)
    return [out.detach(), *torch.autograd.grad(out, leaves, grad)]


@pytest.mark.parametrize("decay", [1e-4, 0.05, 2.0, 20.0])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
@pytest.mark.parametrize("heads", [(2, 4, 64, 64), (2, 4, 128, 128), (1, 2, 256, 256), (2, 2, 96, 80)], ids=str)
def test_the_rule_rounds_within_its_factors(heads, dtype, decay, device) -> None:
    leaves = inputs(1500, heads, device, decay=decay, dtype=dtype)
    grad = torch.randn_like(leaves[2])
    wide = [t.double().requires_grad_() for t in leaves]
    out, _ = gated_delta_rule_reference(*wide, l2_norm=True)
    expected = [out, *torch.autograd.grad(out, wide, grad.double())]
    for ours, truth in zip(rule(leaves, grad), expected, strict=True):
        error = (ours.double() - truth).abs().max()
        assert error <= ROUNDINGS * ONE_ROUNDING[dtype] * truth.abs().max().clamp(min=0.1)


@pytest.mark.parametrize("lengths", [(4096,), (700, 1, 64, 283, 2100, 1300)], ids=str)
def test_five_runs_have_the_same_bits(lengths, device) -> None:
    leaves = inputs(sum(lengths), HEADS, device, decay=0.1)
    grad = torch.randn_like(leaves[2])
    first = rule(leaves, grad, lengths)
    for _ in range(4):
        assert all(map(torch.equal, first, rule(leaves, grad, lengths)))


def test_a_document_has_its_gradients_anywhere_in_more_than_2_31_elements(device) -> None:
    """States, 8 GiB of them, and values have more than 2³¹ elements; the run needs 62 GiB."""
    lengths = (DOCUMENT,) * 525
    leaves = inputs(sum(lengths), HEADS, device, decay=0.1)
    grad = torch.randn_like(leaves[2])
    assert leaves[2].numel() > 1 << 31
    found = rule(leaves, grad, lengths)
    for i in (0, 260, 524):
        own = slice(i * DOCUMENT, (i + 1) * DOCUMENT)
        alone = rule([t[:, own] for t in leaves], grad[:, own])
        for whole, part in zip(found, alone, strict=True):
            torch.testing.assert_close(whole[:, own].float(), part.float(), rtol=2e-2, atol=2e-2)


def test_a_convolution_has_more_than_2_31_elements(device) -> None:
    lengths = (DOCUMENT,) * 263
    x = torch.randn(1, sum(lengths), 8192, device=device, dtype=torch.bfloat16).transpose(1, 2)
    weight = torch.randn(8192, 4, device=device, dtype=torch.bfloat16)
    assert x.numel() > 1 << 31
    grad = torch.randn_like(x)

    def run(x: torch.Tensor, grad: torch.Tensor, lengths) -> list[torch.Tensor]:
        x = x.detach().requires_grad_()
        y = causal_conv1d(x, weight, activation="silu", documents=documents_of(lengths, device))
        return [y.detach(), torch.autograd.grad(y, x, grad)[0]]

    found = run(x, grad, lengths)
    for i in (0, 131, 262):
        own = slice(i * DOCUMENT, (i + 1) * DOCUMENT)
        alone = run(x[..., own], grad[..., own], (DOCUMENT,))
        assert all(torch.equal(whole[..., own], part) for whole, part in zip(found, alone, strict=True))


def test_nothing_waits_for_the_device(no_synchronisation, device) -> None:
    leaves = [t.requires_grad_() for t in inputs(512, HEADS, device, decay=0.1)]
    documents = documents_of((100, 412), device)
    x = torch.randn(1, 512, 8192, device=device, dtype=torch.bfloat16, requires_grad=True)
    weight = torch.randn(8192, 4, device=device, dtype=torch.bfloat16, requires_grad=True)
    no_synchronisation()
    y = causal_conv1d(x.transpose(1, 2), weight, activation="silu", documents=documents)
    (gated_delta_rule(*leaves, l2_norm=True, documents=documents).sum() + y.sum()).backward()


def kda_inputs(n_tokens: int, heads, device, *, decay: float, dtype=torch.bfloat16) -> list[torch.Tensor]:
    """Return query, key, value, decay per channel and beta of one row."""
    query, key, value, _, beta = inputs(n_tokens, heads, device, decay=decay, dtype=dtype)
    logs = -decay * torch.rand(1, n_tokens, heads[1], heads[2], device=device)
    return [query, key, value, logs, beta]


def kda_with_gradients(leaves, grad, lengths=None) -> list[torch.Tensor]:
    leaves = [t.detach().requires_grad_() for t in leaves]
    documents = None if lengths is None else documents_of(lengths, leaves[0].device)
    out = kda(*leaves, l2_norm=True, documents=documents)
    return [out.detach(), *torch.autograd.grad(out, leaves, grad)]


@pytest.mark.parametrize("decay", [1e-4, 0.05, 2.0, 20.0, 1e4])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
@pytest.mark.parametrize("heads", [(4, 4, 64, 64), (4, 4, 128, 128), (1, 2, 256, 256), (2, 2, 96, 80)], ids=str)
def test_kda_rounds_within_its_factors(heads, dtype, decay, device) -> None:
    leaves = kda_inputs(1500, heads, device, decay=decay, dtype=dtype)
    grad = torch.randn_like(leaves[2])
    wide = [t.double().requires_grad_() for t in leaves]
    out, _ = kda_reference(*wide, l2_norm=True)
    expected = [out, *torch.autograd.grad(out, wide, grad.double())]
    for ours, truth in zip(kda_with_gradients(leaves, grad), expected, strict=True):
        error = (ours.double() - truth).abs().max()
        assert error <= ROUNDINGS * ONE_ROUNDING[dtype] * truth.abs().max().clamp(min=0.1)


@pytest.mark.parametrize("lengths", [(4096,), (700, 1, 64, 283, 2100, 1300)], ids=str)
def test_five_runs_of_kda_have_the_same_bits(lengths, device) -> None:
    leaves = kda_inputs(sum(lengths), (32, 32, 128, 128), device, decay=0.1)
    grad = torch.randn_like(leaves[2])
    first = kda_with_gradients(leaves, grad, lengths)
    for _ in range(4):
        assert all(map(torch.equal, first, kda_with_gradients(leaves, grad, lengths)))


def test_kda_does_not_wait_for_the_device(no_synchronisation, device) -> None:
    leaves = [t.requires_grad_() for t in kda_inputs(512, (32, 32, 128, 128), device, decay=0.1)]
    documents = documents_of((100, 412), device)
    no_synchronisation()
    kda(*leaves, l2_norm=True, documents=documents).sum().backward()
