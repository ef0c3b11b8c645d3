"""document_attention on a GPU with long documents, whose kernels differ on Hopper, and with more than 2³¹ elements."""

from functools import partial

import pytest
import torch
from ligertune_kernels import document_attention, document_attention_with_lse
from ligertune_kernels.ops.attention import tiles
from support.kernels.attention_runs import documents_of, run
from support.kernels.judge import LOW, OF_A_ROW, judge, judge_op

pytestmark = pytest.mark.gpu

TERMS = ({}, {"window": 300}, {"softcap": 30.0}, {"softcap": 50.0, "window": 130})
LONG = (
    # The mean length selects the Hopper kernels at every head width.
    pytest.param((4096,), id="one tile after another"),
    pytest.param((9000, 1, 63, 5000, 7000), id="documents that end within tiles"),
)


@pytest.mark.parametrize("dtype", LOW)
@pytest.mark.parametrize("terms", TERMS, ids=str)
@pytest.mark.parametrize("lengths", LONG)
@pytest.mark.parametrize("heads", [(8, 2, 64), (4, 1, 128), (2, 2, 256)], ids=str)
def test_long_documents_round_no_worse_than_torch(heads, lengths, terms, dtype, device) -> None:
    n_heads, n_key_heads, head_dim = heads
    sizes = ((sum(lengths), n, head_dim) for n in (n_heads, n_key_heads, n_key_heads))
    inputs = [torch.randn(size, device=device, dtype=dtype) for size in sizes]
    judge_op(
        document_attention,
        inputs,
        documents_of(lengths, device, len(lengths)),
        compare=partial(judge, times=OF_A_ROW),
        **terms,
    )


@pytest.mark.parametrize("dtype", LOW)
@pytest.mark.parametrize("lengths", LONG)
@pytest.mark.parametrize("heads", [(8, 2, 64), (4, 1, 128), (2, 2, 256)], ids=str)
def test_the_log_sum_exp_of_long_documents_has_its_gradient(heads, lengths, dtype, device) -> None:
    """Judged by float64 scores of the longest document, which no other one reads."""
    n_heads, n_key_heads, head_dim = heads
    sizes = ((sum(lengths), n, head_dim) for n in (n_heads, n_key_heads, n_key_heads))
    leaves = [torch.randn(size, device=device, dtype=dtype).requires_grad_() for size in sizes]
    out, lse = document_attention_with_lse(*leaves, documents_of(lengths, device, len(lengths)))
    d_out, d_lse = torch.randn_like(out), torch.randn_like(lse)
    found = torch.autograd.grad((out, lse), leaves, (d_out, d_lse))
    own = slice(0, min(lengths[0], 2048))  # its first tokens read no later ones
    group = n_heads // n_key_heads
    wide = [t.detach()[own].double().requires_grad_() for t in leaves]
    key, value = (t.repeat_interleave(group, 1) for t in wide[1:])
    scores = torch.einsum("ihd,jhd->hij", wide[0], key) * head_dim**-0.5
    hidden = torch.ones(scores.shape[1:], dtype=torch.bool, device=device).triu(1)
    scores = scores.masked_fill(hidden, float("-inf"))
    expected = scores.logsumexp(-1).t(), torch.einsum("hij,jhd->ihd", scores.softmax(-1), value)
    torch.testing.assert_close(lse[own].double(), expected[0], rtol=1e-4, atol=1e-4)
    # keys get gradients of later queries, too: only those of the queries are compared
    wanted = torch.autograd.grad(expected, wide[0], (d_lse[own].double(), d_out[own].double()))[0]
    error = torch.linalg.vector_norm(found[0][own].double() - wanted) / torch.linalg.vector_norm(wanted)
    assert error < (1e-2 if dtype == torch.bfloat16 else 2e-3)


# The second computes some heads at a time in the backward, too.
@pytest.mark.parametrize("heads", [(16, 4, 64), (32, 8, 128), (16, 4, 128), (16, 4, 256)], ids=str)
def test_long_documents_are_deterministic(heads, device) -> None:
    n_heads, n_key_heads, head_dim = heads
    lengths = (5000, 5, 8187)
    q, k, v = (
        torch.randn(sum(lengths), n, head_dim, device=device, dtype=torch.bfloat16)
        for n in (n_heads, n_key_heads, n_key_heads)
    )
    grad = torch.randn_like(q)
    first = run(q, k, v, lengths, grad, count=len(lengths))
    for _ in range(10):
        again = run(q, k, v, lengths, grad, count=len(lengths))
        assert all(torch.equal(a, b) for a, b in zip(first, again, strict=True))


@pytest.mark.parametrize("width", [64, 128])
def test_key_heads_in_several_launches_have_the_same_bits(width, device, monkeypatch) -> None:
    sizes = ((9000, n, width) for n in (12, 3, 3, 12))
    q, k, v, grad = (torch.randn(size, device=device, dtype=torch.bfloat16) for size in sizes)
    once = run(q, k, v, (9000,), grad, count=1)
    monkeypatch.setattr(tiles, "SUMS_AT_ONCE", 2 * tiles.sums_bytes(9000, 4, 1, width))
    assert all(torch.equal(a, b) for a, b in zip(once, run(q, k, v, (9000,), grad, count=1), strict=True))


@pytest.mark.parametrize(
    ("lengths", "heads", "key_heads"), [((1000,) * 140, 128, 1), ((3000,) * 180, 32, 4)], ids=["short", "long"]
)
def test_a_document_has_its_gradients_anywhere_in_more_than_2_31_elements(lengths, heads, key_heads, device) -> None:
    q, k, v = (
        torch.randn(sum(lengths), n, 128, device=device, dtype=torch.bfloat16) for n in (heads, *[key_heads] * 2)
    )
    grad = torch.randn_like(q)
    assert q.numel() > 1 << 31
    found = run(q, k, v, lengths, grad, count=len(lengths))
    for i in (0, len(lengths) // 2, len(lengths) - 1):
        own = slice(i * lengths[0], (i + 1) * lengths[0])
        expected = run(q[own], k[own], v[own], lengths[:1], grad[own], count=1)
        for whole, alone in zip(found, expected, strict=True):
            torch.testing.assert_close(whole[own].float(), alone.float(), rtol=2e-2, atol=2e-2)
