"""The attention kernels for Hopper on a CPU, with warps that run in random order (gluon_emulator.py)."""

import math
from types import ModuleType

import pytest
import torch
from ligertune_kernels import Documents, document_attention_reference
from ligertune_kernels.ops.attention import tiles
from support.kernels.gluon_emulator import Function, emulated

PACKAGE = "ligertune_kernels.ops.attention"
KERNELS = ("kernels", "hopper_kernels", "hopper_wide_kernels")
CASES = [
    # width, heads of queries and keys, documents, window, soft cap
    pytest.param(64, (2, 1), (400, 1, 90), None, None, id="64"),
    pytest.param(64, (2, 2), (150,), None, 5.0, id="64, soft cap"),
    pytest.param(128, (2, 1), (400, 1, 90), None, None, id="128", marks=pytest.mark.slow),
    pytest.param(128, (1, 1), (280,), 70, 5.0, id="128, window and soft cap"),
    pytest.param(128, (12, 4), (130, 1), None, None, id="128, in groups of heads"),
    pytest.param(256, (2, 1), (200, 1, 90), None, None, id="256"),
    pytest.param(256, (1, 1), (280,), 70, 5.0, id="256, window and soft cap"),
]


@pytest.fixture(scope="module")
def hopper() -> ModuleType:
    with emulated(f"{PACKAGE}.hopper_attention", *(f"{PACKAGE}.{name}" for name in KERNELS)) as module:
        return module


@pytest.mark.parametrize("width, heads, lengths, window, softcap", CASES)
def test_the_kernels_agree_with_float64(hopper, monkeypatch, width, heads, lengths, window, softcap) -> None:
    """In three random orders of the warps, or two with options, which give the same bits."""
    orders = 3 if window is None and softcap is None and heads[1] == 1 else 2
    monkeypatch.setattr(tiles, "GROUPED_FROM", 0)  # some heads at a time, as for large tensors
    generator = torch.Generator().manual_seed(0)
    sizes = ((sum(lengths), n, width) for n in (heads[0], heads[1], heads[1], heads[0]))
    q, k, v, d_out = (torch.randn(size, generator=generator).bfloat16() for size in sizes)
    bounds = [(sum(lengths[:i]), sum(lengths[: i + 1])) for i, n in enumerate(lengths) for _ in range(n)]
    starts, ends = torch.tensor(bounds, dtype=torch.int32).t().contiguous()
    leaves = [t.double().requires_grad_() for t in (q, k, v)]
    expected = document_attention_reference(*leaves, Documents(starts, ends), window=window, softcap=softcap)
    gradients = torch.autograd.grad(expected, leaves, d_out.double())
    terms, runs = hopper.AttentionTerms(width**-0.5, window, softcap), []
    for seed in range(orders):
        monkeypatch.setattr(Function, "seed", seed)
        out, lse = hopper.forward(q, k, v, starts, terms)
        kept = hopper.HopperInputs(q, k, v, starts, ends, out, lse)
        runs.append([out, *hopper.backward(kept, d_out, terms)])
    for found, wanted in zip(runs[0], [expected, *gradients], strict=True):
        assert torch.linalg.vector_norm(found.double() - wanted) < 4e-3 * torch.linalg.vector_norm(wanted)
    assert all(torch.equal(one, other) for again in runs[1:] for one, other in zip(runs[0], again, strict=True))


@pytest.mark.parametrize("width", [64, 256])
def test_the_gradient_of_the_log_sum_exp_agrees_with_float64(hopper, width) -> None:
    """Narrow and wide heads have backward kernels of their own; the pass before them subtracts the gradient."""
    generator = torch.Generator().manual_seed(0)
    sizes = ((130, n, width) for n in (2, 1, 1, 2))
    q, k, v, d_out = (torch.randn(size, generator=generator).bfloat16() for size in sizes)
    d_lse = torch.randn(130, 2, generator=generator)
    starts = torch.zeros(130, dtype=torch.int32)
    ends = torch.full((130,), 130, dtype=torch.int32)
    leaves = [t.double().requires_grad_() for t in (q, k, v)]
    scores = torch.einsum("ihd,jkd->ijh", leaves[0], leaves[1]) * width**-0.5
    scores = scores.masked_fill(torch.ones(130, 130, dtype=torch.bool).triu(1)[..., None], float("-inf"))
    expected = torch.einsum("ijh,jkd->ihd", scores.softmax(1), leaves[2]), scores.logsumexp(1)
    wanted = torch.autograd.grad(expected, leaves, (d_out.double(), d_lse.double()))
    terms = hopper.AttentionTerms(width**-0.5, None, None)
    out, lse = hopper.forward(q, k, v, starts, terms)
    torch.testing.assert_close(lse[:, :130].t().double() * math.log(2), expected[1], rtol=1e-4, atol=1e-4)
    d_bits = torch.zeros_like(lse)
    d_bits[:, :130] = d_lse.t() * math.log(2)
    kept = hopper.HopperInputs(q, k, v, starts, ends, out, lse)
    for found, right in zip(hopper.backward(kept, d_out, terms, d_bits), wanted, strict=True):
        assert torch.linalg.vector_norm(found.double() - right) < 4e-3 * torch.linalg.vector_norm(right)


def test_key_heads_in_several_launches_have_the_same_gradients(hopper, monkeypatch) -> None:
    monkeypatch.setattr(tiles, "SUMS_AT_ONCE", 2 * tiles.sums_bytes(191, 2, 1, 64))  # of two key heads of three
    test_the_kernels_agree_with_float64(hopper, monkeypatch, 64, (6, 3), (100, 1, 90), None, None)
