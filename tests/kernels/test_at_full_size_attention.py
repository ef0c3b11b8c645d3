"""document_attention on a GPU at real sizes: rounding, the same bits in each run, non-finite values."""

from functools import partial

import pytest
import torch
from ligertune_kernels import document_attention
from support.kernels.attention_runs import documents_of, run
from support.kernels.judge import LOW, OF_A_ROW, judge, judge_op

pytestmark = pytest.mark.gpu

ROWS = (
    # H, K, D; documents
    pytest.param((8, 2, 128), (1000, 1, 64, 700, 283), id="Llama-3-8B's heads"),
    pytest.param((8, 2, 64), (2048,), id="Llama-3.2-1B's"),
    pytest.param((4, 4, 256), (900, 100, 500), id="Gemma-7B's"),
    pytest.param((7, 1, 128), (100,) * 17, id="Qwen2-7B's, short documents"),
    pytest.param((6, 2, 96), (511, 513, 3), id="Phi-3's"),
)
TERMS = ({}, {"window": 300}, {"softcap": 30.0}, {"softcap": 50.0, "window": 130})


@pytest.mark.parametrize("dtype", LOW)
@pytest.mark.parametrize("terms", TERMS, ids=str)
@pytest.mark.parametrize("heads, lengths", ROWS)
def test_rounds_no_worse_than_torch(heads, lengths, terms, dtype, device) -> None:
    """Gradients of queries and keys are differences, and the kernels round once more than the reference."""
    n_heads, n_key_heads, head_dim = heads
    sizes = ((n, sum(lengths), head_dim) for n in (n_heads, n_key_heads, n_key_heads))
    inputs = [torch.randn(size, device=device, dtype=dtype).transpose(0, 1) for size in sizes]
    judge_op(document_attention, inputs, documents_of(lengths, device), compare=partial(judge, times=OF_A_ROW), **terms)


def test_is_deterministic(device) -> None:
    lengths = (3000, 5, 1091)
    q, k, v = (torch.randn(4096, n, 128, device=device, dtype=torch.bfloat16) for n in (16, 4, 4))
    grad = torch.randn_like(q)
    first = run(q, k, v, lengths, grad)
    for _ in range(5):
        assert all(torch.equal(a, b) for a, b in zip(first, run(q, k, v, lengths, grad), strict=True))


def test_non_finite_values_do_not_affect_the_next_call(device) -> None:
    lengths = (500, 500)
    q, k, v = (torch.randn(1000, n, 128, device=device, dtype=torch.bfloat16) for n in (4, 2, 2))
    before = run(q, k, v, lengths, torch.ones_like(q))
    for bad in (float("nan"), float("inf")):
        assert run(*(torch.full_like(t, bad) for t in (q, k, v)), lengths, torch.ones_like(q))[0].isnan().all()
        assert all(torch.equal(a, b) for a, b in zip(before, run(q, k, v, lengths, torch.ones_like(q)), strict=True))
