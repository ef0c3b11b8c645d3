"""experts on a GPU at real sizes: rounding, determinism, no synchronisation, memory, empty experts."""

from functools import partial

import pytest
import torch
from ligertune_kernels import ExpertLayout, ExpertLora, ExpertProjection, GatedActivation, experts, experts_reference
from support.kernels.judge import judge

pytestmark = pytest.mark.gpu

QWEN3 = (2048, 32, 8, 2048, 768)  # tokens, a quarter of the experts, experts per token, E, F
GPT_OSS = {"activation": GatedActivation(alpha=1.702, limit=7.0, up_offset=1.0), "layout": ExpertLayout(True, True)}
PRODUCTS = ("grouped_mm", "triton", "loop")


def example(
    device: torch.device, sizes: tuple[int, ...], dtype: torch.dtype = torch.bfloat16, transposed: bool = False
):
    """Return expert_index, in which the last expert never occurs, and hidden, weights, gate_up, down."""
    n, x, k, e, f = sizes
    scores, index = torch.randn(n, x - 1, device=device).topk(k)
    shapes = ((x, e, 2 * f), (x, f, e)) if transposed else ((x, 2 * f, e), (x, e, f))
    matrices = (torch.randn(shape, device=device) / size**0.5 for shape, size in zip(shapes, (e, f), strict=True))
    made = (torch.randn(n, e, device=device), scores.softmax(-1), *matrices)
    return index, [t.to(dtype).requires_grad_() for t in made]


def call(
    op, index, hidden, weights, gate_up, down, gate_up_bias=None, down_bias=None, *, loras=(None, None), **options
) -> torch.Tensor:
    projections = map(ExpertProjection, (gate_up, down), (gate_up_bias, down_bias), loras)
    return op(hidden, index, weights, *projections, **options)


@pytest.mark.parametrize("products", PRODUCTS)
def test_rounds_as_torch_does_with_either_product(products, device) -> None:
    index, tensors = example(device, QWEN3)
    judge(partial(call, experts, index, products=products), partial(call, experts_reference, index), tensors)


@pytest.mark.parametrize("products", PRODUCTS[:2])
@pytest.mark.parametrize("n_tokens", [3, 1500])
def test_clamped_experts_with_biases_round_as_torch_does(n_tokens, products, device) -> None:
    index, tensors = example(device, (n_tokens, 16, 4, 2880, 2880), transposed=True)
    biases = (torch.randn(16, 5760, device=device).bfloat16(), torch.randn(16, 2880, device=device).bfloat16())
    ours = partial(call, experts, index, products=products, **GPT_OSS)
    judge(ours, partial(call, experts_reference, index, **GPT_OSS), [*tensors, *biases], times=1.5)


@pytest.mark.parametrize("dtype", [torch.float16, torch.float32])
def test_other_dtypes_round_as_torch_does(dtype, device) -> None:
    index, tensors = example(device, (1000, 9, 3, 500, 333), dtype)
    judge(partial(call, experts, index), partial(call, experts_reference, index), tensors, times=1.5)


@pytest.mark.parametrize("products", PRODUCTS[:2])
def test_is_deterministic_and_does_not_synchronise(products, no_synchronisation, device) -> None:
    _, x, _, e, f = QWEN3
    index, tensors = example(device, QWEN3)
    low = ((x, 16, e), (x, 2 * f, 16), (x, 16, f), (x, e, 16))
    low = [torch.randn(shape, device=device, dtype=torch.bfloat16).mul_(0.1).requires_grad_() for shape in low]
    loras = ExpertLora(*low[:2], 2.0), ExpertLora(*low[2:], 2.0)
    leaves = [*tensors, *low]
    no_synchronisation()
    runs = []
    for _ in range(2):
        y = call(experts, index, *tensors, products=products, loras=loras)
        runs.append((y, *torch.autograd.grad(y, leaves, torch.ones_like(y))))
    torch.cuda.set_sync_debug_mode("default")
    assert all(torch.equal(a, b) for a, b in zip(*runs, strict=True))
    assert all(t.isfinite().all() for t in runs[0])


def test_keeps_half_of_what_plain_torch_keeps(device) -> None:
    """Pre-activations (S, 2F); plain torch keeps the gathered rows, both halves, their product and the outputs."""
    n, _, k, _, f = QWEN3
    index, tensors = example(device, QWEN3)
    kept = []
    for op in (experts, experts_reference):
        torch.cuda.empty_cache()
        before = torch.cuda.memory_allocated(device)
        y = call(op, index, *tensors)
        kept.append(torch.cuda.memory_allocated(device) - before - y.nbytes)
        del y
    assert kept[0] < 1.02 * 2 * n * k * 2 * f + (1 << 20)
    assert kept[0] < 0.55 * kept[1]
