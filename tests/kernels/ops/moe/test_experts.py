"""experts against float64: sizes, dtypes, layouts, activations, biases, LoRA, frozen and made weights, routing."""

from collections.abc import Callable
from functools import partial

import pytest
import torch
from ligertune_kernels import ExpertLayout, ExpertLora, ExpertProjection, GatedActivation, experts, experts_reference
from ligertune_kernels.chips import INTERPRETER, Chip
from ligertune_kernels.ops.moe.tiles import loop_pays, product_for
from support.covering import every_pair
from support.kernels.judge import DTYPES, judge
from torch.autograd.graph import saved_tensors_hooks

NAMES = ("hidden", "weights", "gate_up", "down", "gate_up_bias", "down_bias", "a1", "b1", "a2", "b2")
CONCATENATED = ExpertLayout()
CLAMPED = GatedActivation(alpha=1.702, limit=1.5, up_offset=1.0)
# N tokens, K experts of each, X experts, E, F
SIZES = (
    pytest.param((11, 2, 3, 24, 40), id="more than a tile of rows"),
    pytest.param((5, 3, 7, 19, 37), id="odd sizes"),
    pytest.param((1, 1, 4, 16, 16), id="one token"),
)
FORMS = (
    pytest.param(ExpertLayout(), GatedActivation(), id="silu"),
    pytest.param(ExpertLayout(interleaved=True), GatedActivation("gelu_tanh"), id="interleaved"),
    pytest.param(ExpertLayout(transposed=True), GatedActivation("gelu_erf"), id="transposed"),
    pytest.param(ExpertLayout(True, True), CLAMPED, id="clamped"),
)
PARTS = (
    pytest.param(False, 0, id="plain"),
    pytest.param(True, 0, id="biases"),
    pytest.param(True, 4, id="biases and LoRA"),
)
PRODUCTS = ("loop", "triton", None)

Mix = Callable[..., torch.Tensor]


def example(
    sizes: tuple[int, ...], device: torch.device, dtype: torch.dtype = torch.float32,
    layout: ExpertLayout = CONCATENATED, biases: bool = False, rank: int = 0,
) -> tuple[torch.Tensor, list[torch.Tensor | None]]:  # fmt: skip
    """Return expert_index, and the tensors of NAMES, None for absent ones."""
    n, k, x, e, f = sizes
    index = torch.rand(n, x, device=device).topk(k).indices
    gate_up, down = torch.randn(x, 2 * f, e) / e**0.5, torch.randn(x, e, f) / f**0.5
    if layout.transposed:
        gate_up, down = gate_up.mT.contiguous(), down.mT.contiguous()
    made = [torch.randn(n, e), torch.rand(n, k), gate_up, down]
    made += [torch.randn(x, 2 * f), torch.randn(x, e)] if biases else [None] * 2
    low = [(x, rank, e), (x, 2 * f, rank), (x, rank, f), (x, e, rank)]
    made += [torch.randn(shape) / shape[2] ** 0.5 for shape in low] if rank else [None] * 4
    return index, [None if t is None else t.to(device, dtype) for t in made]


def mix(op: Mix, index: torch.Tensor, tensors: list[torch.Tensor | None], **options: object) -> torch.Tensor:
    """Call the op on the tensors of NAMES."""
    hidden, weights, gate_up, down, gate_up_bias, down_bias, a1, b1, a2, b2 = tensors
    gate_up_lora = None if a1 is None else ExpertLora(a1, b1, 0.5)
    down_lora = None if a2 is None else ExpertLora(a2, b2, 2.0)
    projections = ExpertProjection(gate_up, gate_up_bias, gate_up_lora), ExpertProjection(down, down_bias, down_lora)
    return op(hidden, index, weights, *projections, **options)


def judge_mix(index: torch.Tensor, tensors: list[torch.Tensor | None], products: str | None, **options: object) -> None:
    """Judge output and all gradients by the reference. Errors of a few numbers vary by chance: three times torch's."""
    there = [t is not None for t in tensors]

    def call(op: Mix, *given: torch.Tensor, **more: object) -> torch.Tensor:
        remaining = iter(given)
        return mix(op, index, [next(remaining) if is_there else None for is_there in there], **options, **more)

    ours, plain = partial(call, experts, products=products), partial(call, experts_reference)
    judge(ours, plain, [t for t in tensors if t is not None], times=3.0, slack=2.0)


@pytest.mark.parametrize(
    "sizes, layout, activation, biases, rank, dtype, products", every_pair(SIZES, FORMS, PARTS, DTYPES, PRODUCTS)
)
def test_agrees_with_float64(sizes, layout, activation, biases, rank, dtype, products, device) -> None:
    index, tensors = example(sizes, device, dtype, layout, biases, rank)
    judge_mix(index, tensors, products, layout=layout, activation=activation)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_torchs_grouped_product_agrees_with_float64(dtype, device) -> None:
    """Two of the experts have no token."""
    index, tensors = example((11, 2, 5, 24, 40), device, dtype, biases=True, rank=4)
    judge_mix(index % 4 // 2 * 3, tensors, "grouped_mm")


ROUTES = {
    "one expert": lambda index: torch.full_like(index, 2),
    "the same expert twice": lambda index: index.clone().fill_(1),
    "no expert for some pairs": lambda index: torch.where(torch.arange(len(index))[:, None] % 3 == 0, 5, index),
    "other integers for no expert": lambda index: torch.tensor([[-1, 1], [5, 6], [2, 99], [0, -7]]),
    "no expert at all": lambda index: torch.full_like(index, 5),
}


@pytest.mark.parametrize("products", PRODUCTS)
@pytest.mark.parametrize("route", ROUTES)
def test_agrees_with_float64_however_tokens_are_routed(route, products, device) -> None:
    """Rows of pairs without an expert hold NaN where they are not written: they may not reach any result."""
    index, tensors = example((4, 2, 5, 16, 20), device, biases=True, rank=4)
    index = ROUTES[route](index.cpu()).to(device)
    leaves = [t.clone().requires_grad_() for t in tensors]
    truth = [t.double().requires_grad_() for t in tensors]
    upstream = torch.randn(4, 16, device=device)
    torch.utils.deterministic.fill_uninitialized_memory = True
    torch.use_deterministic_algorithms(True, warn_only=True)  # new memory holds NaN
    try:
        y = mix(experts, index, leaves, products=products)
        found = (y, *torch.autograd.grad(y, leaves, upstream))
    finally:
        torch.use_deterministic_algorithms(False)
    wanted = mix(experts_reference, index, truth)
    given = torch.autograd.grad(wanted, truth, upstream.double(), allow_unused=True)
    gradients = [torch.zeros_like(t) if g is None else g for t, g in zip(truth, given, strict=True)]
    for name, a, b in zip(("output", *NAMES), found, (wanted, *gradients), strict=True):
        torch.testing.assert_close(a.double(), b, rtol=1e-5, atol=1e-5, msg=lambda text, name=name: f"{name}: {text}")


FROZEN = (
    ("gate_up", "down"),
    ("gate_up", "down", "gate_up_bias", "down_bias", "a2", "b2"),
    ("gate_up", "down", "gate_up_bias", "down_bias", "a1", "b1"),
    ("hidden", "weights", "gate_up", "down", "gate_up_bias", "down_bias", "b1", "a2"),
    ("hidden", "gate_up", "gate_up_bias", "a1", "b1"),
    tuple(name for name in NAMES if name != "b2"),
    tuple(name for name in NAMES if name != "a1"),
    tuple(name for name in NAMES if name != "down_bias"),
)


@pytest.mark.parametrize("frozen", FROZEN, ids=", ".join)
def test_frozen_tensors_change_no_other_gradient(frozen, device) -> None:
    index, tensors = example((6, 2, 3, 16, 8), device, biases=True, rank=4)
    every = [t.clone().requires_grad_() for t in tensors]
    expected = dict(zip(NAMES, torch.autograd.grad(mix(experts, index, every).square().sum(), every), strict=True))
    some = [t.clone().requires_grad_(name not in frozen) for name, t in zip(NAMES, tensors, strict=True)]
    mix(experts, index, some).square().sum().backward()
    for name, t in zip(NAMES, some, strict=True):
        if name in frozen:
            assert t.grad is None
        else:
            torch.testing.assert_close(t.grad, expected[name])


def test_a_made_weight_is_made_once_in_each_direction(device) -> None:
    """Its gradient is none, and all others are those with the weight itself."""
    index, tensors = example((6, 2, 3, 16, 8), device, biases=True, rank=4)
    calls: list[str] = []

    def made(name: str, weight: torch.Tensor) -> torch.Tensor:
        calls.append(name)
        return weight.double()

    leaves = [t.clone().requires_grad_(i not in (2, 3)) for i, t in enumerate(tensors)]
    functions = [partial(made, NAMES[i], tensors[i]) for i in (2, 3)]
    expected = mix(experts, index, leaves)
    found = mix(experts, index, [*leaves[:2], *functions, *leaves[4:]])
    trained = [t for t in leaves if t.requires_grad]
    pairs = [(y, *torch.autograd.grad(y.square().sum(), trained)) for y in (found, expected)]
    torch.testing.assert_close(*pairs)
    assert calls == ["gate_up", "down", "down", "gate_up"]
    wrong = [*leaves[:2], lambda: tensors[2][:, :, 1:], *leaves[3:]]
    with pytest.raises(ValueError, match=r"made a weight of \(3, 16, 15\); expected \(X, outputs, 16\)"):
        mix(experts, index, wrong)


def test_takes_leading_dimensions_and_any_strides(device) -> None:
    index, tensors = example((6, 2, 3, 16, 12), device, rank=4)
    expected = [t if t is None else t.clone().requires_grad_() for t in tensors]
    there = [t for t in expected if t is not None]
    y = mix(experts, index, expected)
    wanted = (y, *torch.autograd.grad(y, there, torch.ones_like(y)))

    def spread(t: torch.Tensor | None) -> torch.Tensor | None:
        return t if t is None else torch.stack((t, t), dim=-1).mT.contiguous().mT[..., 0].detach().requires_grad_()

    strided = [spread(t) for t in tensors]
    hidden, weights, *others = strided
    wide = [torch.stack((t, t), dim=-1)[..., 0].view(2, 3, -1) for t in (hidden, weights)]
    y = mix(experts, index.view(2, 3, 2), [*wide, *others])
    assert y.shape == (2, 3, 16)
    found = torch.autograd.grad(y, [t for t in strided if t is not None], torch.ones(1, device=device).expand(y.shape))
    torch.testing.assert_close((y.view(6, 16), *found), wanted)


@pytest.mark.parametrize("products", PRODUCTS)
def test_two_runs_give_the_same_bits_also_without_gradients(products, device) -> None:
    index, tensors = example((9, 2, 4, 24, 16), device, biases=True, rank=4)
    leaves = [t.requires_grad_() for t in tensors]
    runs = []
    for _ in range(2):
        y = mix(experts, index, leaves, products=products)
        runs.append((y, *torch.autograd.grad(y.square().sum(), leaves)))
    assert all(torch.equal(a, b) for a, b in zip(*runs, strict=True))
    with torch.no_grad():
        assert torch.equal(mix(experts, index, leaves, products=products), runs[0][0])


@pytest.mark.parametrize("rank", [0, 4])
def test_keeps_the_preactivations_and_the_order_only(rank, device) -> None:
    """Of S rows: z, two places of four bytes, one byte for the expert, and with LoRA both products with A."""
    n, k, x, _, f = sizes = 96, 2, 3, 24, 16
    index, tensors = example(sizes, device, rank=rank)
    leaves = [None if t is None else t.requires_grad_() for t in tensors]
    inputs = {t.untyped_storage().data_ptr() for t in (index, *leaves) if t is not None}
    kept: dict[int, int] = {}

    def keep(t: torch.Tensor) -> torch.Tensor:
        storage = t.untyped_storage()
        if storage.data_ptr() not in inputs:
            kept[storage.data_ptr()] = storage.nbytes()
        return t

    with saved_tensors_hooks(keep, lambda t: t):
        mix(experts, index, leaves)
    small = 4 * (x + 2 * (n * k // 16 + x))  # offsets, and the tiles of the products
    assert sum(kept.values()) <= n * k * (4 * 2 * f + 2 * 4 + 1 + 2 * 4 * rank) + small


def test_routers_weights_may_have_another_dtype(device) -> None:
    index, tensors = example((6, 2, 3, 16, 12), device, torch.bfloat16, biases=True)
    leaves = [None if t is None else t.requires_grad_() for t in tensors]
    wide = [leaves[0], leaves[1].detach().float().requires_grad_(), *leaves[2:]]
    y, expected = (mix(experts, index, given) for given in (wide, leaves))
    torch.testing.assert_close(y, expected)
    given = [torch.autograd.grad(out.sum(), ts[1])[0] for out, ts in ((y, wide), (expected, leaves))]
    assert given[0].dtype is torch.float32
    torch.testing.assert_close(given[0], given[1].float(), rtol=2e-2, atol=2e-2)


def test_torchs_product_is_refused_where_its_strides_do_not_fit(device) -> None:
    index, tensors = example((4, 2, 3, 19, 12), device)
    with pytest.raises(ValueError, match="multiples of 16 bytes; write products=None"):
        mix(experts, index, tensors, products="grouped_mm")


def test_torchs_product_is_chosen_only_where_it_is_one_kernel() -> None:
    h100 = Chip("nvidia", "sm90", 32, 132, 50 << 20)
    a100, mi300 = Chip("nvidia", "sm80", 32, 108, 40 << 20), Chip("amd", "gfx942", 64, 304, 4 << 20)
    shape = (1536, 2048)
    assert product_for(shape, torch.bfloat16, h100) == "grouped_mm"
    assert product_for((1536, 2052), torch.bfloat16, h100) == "triton"
    assert {product_for(shape, dtype, h100) for dtype in (torch.float16, torch.float32)} == {"triton"}
    assert {product_for(shape, torch.bfloat16, chip) for chip in (a100, mi300)} == {"triton"}
    for chip in (h100, a100, mi300):
        assert product_for(shape, torch.bfloat16, chip, has_ends=True) == "loop"


def test_one_product_per_expert_is_chosen_where_each_is_large() -> None:
    h100, mixtral, qwen3 = Chip("nvidia", "sm90", 32, 132, 50 << 20), (8, 28672, 4096), (128, 1536, 2048)
    assert loop_pays(2 * 2048, mixtral, h100) and not loop_pays(2 * 1024, mixtral, h100)
    assert not loop_pays(8 * 32768, qwen3, h100)  # as many rows per expert as Mixtral's at 8,192 tokens
    assert not loop_pays(2 * 32768, mixtral, INTERPRETER)


@pytest.mark.parametrize("products, interleaved", [("triton", False), (None, True)])
def test_a_backward_that_keeps_its_graph_can_run_again(products, interleaved, device) -> None:
    # Another backward writes the gradient of the pre-activations over them.
    layout = ExpertLayout(interleaved=interleaved)
    index, tensors = example((21, 2, 3, 32, 24), device, layout=layout, biases=True, rank=4)
    leaves = [t.requires_grad_() for t in tensors]
    out = mix(experts, index, leaves, layout=layout, products=products)
    runs = [torch.autograd.grad(out.square().sum(), leaves, retain_graph=kept) for kept in (True, False)]
    for first, *others in zip(*runs, strict=True):
        for other in others:
            assert torch.equal(first, other)


def test_the_backward_needs_no_second_copy_of_the_preactivations(device) -> None:
    kept: list[torch.Tensor] = []

    def keep(t: torch.Tensor) -> torch.Tensor:
        kept.append(t)
        return t

    index, tensors = example((21, 2, 3, 32, 24), device)
    leaves = [None if t is None else t.requires_grad_() for t in tensors]
    with saved_tensors_hooks(keep, lambda t: t):
        out = mix(experts, index, leaves)
    (z,) = (t for t in kept if t.shape == (42, 48))
    values = z.clone()
    out.sum().backward(retain_graph=True)
    assert torch.equal(z, values)
    out.sum().backward()
    assert not torch.equal(z, values)
