"""gated_delta_rule on a GPU: heads of all widths against the reference in float64, and five runs with the same bits.

A tile of few columns has another layout in shared memory. Triton's interpreter has no shared memory.
"""

import pytest
import torch
from ligertune_kernels import gated_delta_rule, gated_delta_rule_reference
from support.kernels.attention_runs import documents_of
from support.kernels.judge import ONE_ROUNDING
from support.kernels.recurrence_loops import rule_with_gradients

pytestmark = pytest.mark.gpu

RUNS = 5
ROUNDINGS = 8  # at most as many lie between an input and a gradient
LENGTHS = (150, 30, 300, 1)
WIDTHS = ((16, 16), (32, 32), (32, 64), (64, 32), (128, 16), (64, 64), (96, 80), (128, 128), (256, 32), (64, 256))


@pytest.mark.parametrize("key_dim, value_dim", WIDTHS)
@pytest.mark.parametrize("group, dtype", [(1, torch.bfloat16), (2, torch.float16)])
def test_agrees_with_the_reference(key_dim, value_dim, group, dtype) -> None:
    n_tokens, heads = sum(LENGTHS), 2
    query, key = torch.randn(2, 1, n_tokens, heads, key_dim, device="cuda", dtype=dtype)
    value, grad = torch.randn(2, 1, n_tokens, heads * group, value_dim, device="cuda", dtype=dtype)
    decay = -0.1 * torch.rand(1, n_tokens, heads * group, device="cuda")
    leaves = [query, key, value, decay, torch.rand(1, n_tokens, heads * group, device="cuda", dtype=dtype)]
    documents = documents_of(LENGTHS, "cuda")
    found = rule_with_gradients(gated_delta_rule, leaves, grad, documents)
    truth = rule_with_gradients(gated_delta_rule_reference, [t.double() for t in leaves], grad, documents)
    for ours, expected in zip(found, truth, strict=True):
        assert (ours.double() - expected).abs().max() <= ROUNDINGS * ONE_ROUNDING[dtype] * expected.abs().max()
    for _ in range(RUNS - 1):
        again = rule_with_gradients(gated_delta_rule, leaves, grad, documents)
        assert all(torch.equal(*pair) for pair in zip(found, again, strict=True))
