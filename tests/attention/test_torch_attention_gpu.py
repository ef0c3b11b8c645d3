"""flash_varlen on a GPU: the bits of torch's own way to the same kernels, forward and backward."""

import pytest
import torch
from torch.nn.attention.varlen import varlen_attn

from ligertune.attention.torch_attention import GROUPED_HEADS, deterministic_backward, flash_varlen

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(torch.version.hip is not None, reason="torch's varlen attention is for NVIDIA GPUs"),
]
CAUSAL, ALL, LOCAL = (-1, 0), (-1, -1), (6, 0)
LENGTHS = (1, 33, 200, 7)


def bounds_of(lengths: tuple[int, ...]) -> torch.Tensor:
    return torch.tensor((0, *lengths), device="cuda").cumsum(0, dtype=torch.int32)


def inputs(key_heads: int, head_dim: int, dtype: torch.dtype, key_lengths: tuple[int, ...]) -> list[torch.Tensor]:
    """(T, H, D), (S, K, D) twice, each a view of non-contiguous tokens."""
    torch.manual_seed(0)
    shapes = (4, sum(LENGTHS)), (key_heads, sum(key_lengths)), (key_heads, sum(key_lengths))
    made = (torch.randn(*shape, head_dim, device="cuda", dtype=dtype, requires_grad=True) for shape in shapes)
    return [t.transpose(0, 1) for t in made]


def results(attend, tensors: list[torch.Tensor], *, steady: bool) -> list[torch.Tensor]:
    """The output and the gradients of query, key and value."""
    out = attend(*tensors)
    grad = torch.randn(out.shape, generator=torch.Generator("cuda").manual_seed(1), device="cuda").to(out.dtype)
    with deterministic_backward(steady):
        return [out, *torch.autograd.grad(out, tensors, grad)]


@pytest.mark.parametrize("window", [CAUSAL, ALL, LOCAL])
@pytest.mark.parametrize(("key_heads", "head_dim", "dtype"), [(4, 64, torch.bfloat16), (2, 128, torch.float16)])
@pytest.mark.parametrize("key_lengths", [LENGTHS, (5, 40, 210, 7)])  # a part of a document has more keys than queries
def test_the_bits_of_varlen_attn(window, key_heads, head_dim, dtype, key_lengths):
    tensors = inputs(key_heads, head_dim, dtype, key_lengths)
    bounds, longest = (bounds_of(LENGTHS), bounds_of(key_lengths)), (max(LENGTHS), max(key_lengths))
    keywords = {"window_size": window, "scale": 0.3}
    truth = results(lambda *t: varlen_attn(*t, *bounds, *longest, **keywords, **GROUPED_HEADS), tensors, steady=True)
    found = results(lambda *t: flash_varlen(*t, bounds, longest, window=window, scale=0.3), tensors, steady=True)
    assert all(torch.equal(a, b) for a, b in zip(found, truth, strict=True))
    assert all(t.isfinite().all() and t.any() for t in found)


def test_a_compiled_layer_gives_the_same_within_rounding():
    tensors, bounds, longest = inputs(2, 64, torch.bfloat16, LENGTHS), (bounds_of(LENGTHS),) * 2, (max(LENGTHS),) * 2

    def attend(*t: torch.Tensor) -> torch.Tensor:
        return flash_varlen(*t, bounds, longest, window=CAUSAL) * 2

    compiled = torch.compile(attend, fullgraph=True)
    pairs = zip(results(compiled, tensors, steady=False), results(attend, tensors, steady=False), strict=True)
    assert all(torch.allclose(a.float(), b.float(), rtol=1e-2, atol=1e-3) for a, b in pairs)


def test_second_gradients_are_refused():
    tensors, bounds, longest = inputs(2, 64, torch.bfloat16, LENGTHS), (bounds_of(LENGTHS),) * 2, (max(LENGTHS),) * 2
    out = flash_varlen(*tensors, bounds, longest, window=CAUSAL)
    (grad,) = torch.autograd.grad(out.float().square().sum(), tensors[0], create_graph=True)
    with pytest.raises(RuntimeError, match="cannot be differentiated again"):
        (grad.float().sum() + tensors[0].float().sum()).backward()
