"""Backend of this run; ops with a gradient: needed gradients only, empty tensors, checkpointing, autocast."""

import os
from collections.abc import Callable
from functools import partial

import ligertune_kernels as kernels
import pytest
import torch
from ligertune_kernels import backend, runs_triton
from ligertune_kernels.launcher import Launcher
from ligertune_kernels.table import OPS
from torch.utils.checkpoint import checkpoint

ROWS, WIDTH, CLASSES = 6, 40, 50


def tensors(*shapes: tuple[int, ...], device: torch.device, dtype: torch.dtype) -> list[torch.Tensor]:
    """Return leaves that need gradients, with the same values on every device."""
    generator = torch.Generator().manual_seed(3)
    made = (torch.randn(shape, generator=generator) for shape in shapes)
    return [t.to(device, dtype).requires_grad_() for t in made]


def labels(device: torch.device, *shape: int) -> torch.Tensor:
    found = torch.arange(torch.Size(shape or (ROWS,)).numel(), device=device) % CLASSES
    found[1] = -100
    return found.view(shape or (ROWS,))


def rotated(q: torch.Tensor, k: torch.Tensor) -> torch.Tensor:
    angles = torch.arange(16, dtype=torch.float32, device=q.device).outer(torch.ones(8, device=q.device)) / 7
    cos, sin = angles.cos().to(q.dtype), angles.sin().to(q.dtype)
    return torch.cat([t.flatten() for t in kernels.apply_rope(q, k, cos[None], sin[None])])


def attended(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> torch.Tensor:
    ends = torch.tensor([5] * 5 + [ROWS] * (ROWS - 5), device=q.device, dtype=torch.int32)[: len(q)]
    return kernels.document_attention(q, k, v, kernels.Documents(torch.where(ends == 5, 0, 5).int(), ends))


def mixed(hidden: torch.Tensor, weights: torch.Tensor, *matrices_and_biases: torch.Tensor) -> torch.Tensor:
    index = torch.arange(weights.numel(), device=hidden.device).view(weights.shape) % 3  # one of four has no token
    # The weights of the router keep their dtype under autocast, and a fourth is exact in every dtype.
    gate_up, down, *biases = (0.25 * t for t in matrices_and_biases)
    projections = map(kernels.ExpertProjection, (gate_up, down), biases)
    return kernels.experts(hidden, index, weights.bfloat16().float(), *projections)


def remembered(
    q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, rate: torch.Tensor, beta: torch.Tensor
) -> torch.Tensor:
    # Decay and beta keep their dtype under autocast, and are exact in every dtype.
    decay = -rate.bfloat16().float().square()
    return kernels.gated_delta_rule(q, k, v, decay, beta.bfloat16().float().sigmoid(), l2_norm=True)


def dual(
    x: torch.Tensor, dt: torch.Tensor, rate: torch.Tensor, b: torch.Tensor, c: torch.Tensor, skip: torch.Tensor,
    z: torch.Tensor, bias: torch.Tensor,
) -> torch.Tensor:  # fmt: skip
    # Numbers of heads keep their dtype under autocast, and are exact in every dtype.
    dt, rate, skip, bias = (t.bfloat16().float() for t in (dt, rate, skip, bias))
    return kernels.ssd(x, dt, -rate.square(), b, c, skip, z, bias, dt_softplus=True)


def remembered_by_channel(
    q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, rate: torch.Tensor, beta: torch.Tensor
) -> torch.Tensor:
    decay = -rate.bfloat16().float().square()
    return kernels.kda(q, k, v, decay, beta.bfloat16().float().sigmoid(), l2_norm=True)


# op -> (shapes of the differentiable tensors, call)
CALLS: dict[str, tuple[tuple[tuple[int, ...], ...], Callable[..., torch.Tensor]]] = {
    "rms_norm": (((ROWS, WIDTH), (WIDTH,)), kernels.rms_norm),
    "add_rms_norm": (
        ((ROWS, WIDTH), (ROWS, WIDTH), (WIDTH,)),
        lambda x, residual, weight: torch.cat(kernels.add_rms_norm(x, residual, weight)),
    ),
    "gated_rms_norm": (((ROWS, WIDTH), (ROWS, WIDTH), (WIDTH,)), kernels.gated_rms_norm),
    "layer_norm": (((ROWS, WIDTH), (WIDTH,), (WIDTH,)), kernels.layer_norm),
    "group_norm": (((2, 4, WIDTH), (4,), (4,)), lambda x, *scale: kernels.group_norm(x, 2, *scale)),
    "apply_rope": (((1, 2, 16, 8), (1, 1, 16, 8)), rotated),
    "document_attention": (((ROWS, 4, 16), (ROWS, 2, 16), (ROWS, 2, 16)), attended),
    "merge_own_keys": (
        ((ROWS, 4, 16), (ROWS, 4, 16), (ROWS, 4), (ROWS, 2, 16), (ROWS, 2, 16)),
        lambda query, out, lse, key, value: kernels.merge_own_keys(
            query, out, lse.bfloat16().float(), [key], [value]
        ),  # lse keeps its dtype
    ),
    "causal_conv1d": (((2, 5, ROWS), (5, 3), (5,)), partial(kernels.causal_conv1d, activation="silu")),
    "gated_delta_rule": (
        ((1, ROWS, 1, 16), (1, ROWS, 1, 16), (1, ROWS, 2, 16), (1, ROWS, 2), (1, ROWS, 2)),
        remembered,
    ),
    "ssd": (
        ((1, ROWS, 2, 16), (1, ROWS, 2), (2,), (1, ROWS, 1, 16), (1, ROWS, 1, 16), (2,), (1, ROWS, 2, 16), (2,)),
        dual,
    ),
    "kda": (
        ((1, ROWS, 1, 16), (1, ROWS, 1, 16), (1, ROWS, 2, 16), (1, ROWS, 2, 16), (1, ROWS, 2)),
        remembered_by_channel,
    ),
    "swiglu": (((ROWS, WIDTH), (ROWS, WIDTH)), kernels.swiglu),
    "geglu": (((ROWS, WIDTH), (ROWS, WIDTH)), kernels.geglu),
    "reglu": (((ROWS, WIDTH), (ROWS, WIDTH)), lambda *pair: kernels.reglu(*pair, squared=True)),
    "experts": (((ROWS, WIDTH), (ROWS, 2), (4, 48, WIDTH), (4, WIDTH, 24), (4, 48), (4, WIDTH)), mixed),
    "cross_entropy": (((ROWS, CLASSES),), lambda x: kernels.cross_entropy(x, labels(x.device))),
    "linear_cross_entropy": (
        ((ROWS, WIDTH), (CLASSES, WIDTH)),
        lambda hidden, weight: kernels.linear_cross_entropy(hidden, weight, labels(hidden.device)),
    ),
    "multi_head_linear_cross_entropy": (
        ((ROWS, WIDTH), (ROWS, WIDTH), (CLASSES, WIDTH)),
        lambda one, two, weight: (
            kernels.multi_head_linear_cross_entropy([one, two], weight, labels(one.device, 2, ROWS), [1.0, 0.5]).loss
        ),
    ),
    "linear_log_probs": (
        ((ROWS, WIDTH), (CLASSES, WIDTH)),
        lambda hidden, weight: kernels.linear_log_probs(hidden, weight, labels(hidden.device)).logprob,
    ),
    "kl_div": (
        ((ROWS, CLASSES),),
        lambda x: kernels.kl_div(x.log_softmax(-1), x.detach().flip(0).softmax(-1), reduction="batchmean"),
    ),
    "jsd": (((ROWS, CLASSES),), lambda x: kernels.jsd(x.log_softmax(-1), x.detach().flip(0).log_softmax(-1))),
    "linear_jsd": (
        ((ROWS, WIDTH), (CLASSES, WIDTH)),
        lambda hidden, weight: kernels.linear_jsd(hidden, weight, hidden.detach().flip(0), weight.detach()),
    ),
    "embedding": (((CLASSES, WIDTH),), lambda table: kernels.embedding(labels(table.device).clamp(min=0), table)),
}
# Long rows, whose gradients are computed in two parts.
LONG_ROWS = {
    "rms_norm, long rows": (((2, 8200), (8200,)), kernels.rms_norm),
    "rms_norm without a weight": (((ROWS, WIDTH),), kernels.rms_norm),
    "gated_rms_norm, gate first, groups": (
        ((ROWS, WIDTH), (ROWS, WIDTH), (WIDTH,)),
        lambda *args: kernels.gated_rms_norm(*args, group_size=8, norm_before_gate=False),
    ),
    "gated_rms_norm, long rows": (((2, 8200), (2, 8200), (8200,)), kernels.gated_rms_norm),
    "layer_norm, long rows": (((2, 8200), (8200,), (8200,)), kernels.layer_norm),
}
in_place = {"inplace": True}
IN_PLACE = {
    "swiglu, in place": (((ROWS, WIDTH),) * 2, lambda *pair: kernels.swiglu(*(t * 1.0 for t in pair), **in_place)),
    "geglu, in place": (((ROWS, WIDTH),) * 2, lambda *pair: kernels.geglu(*(t * 1.0 for t in pair), **in_place)),
}
# Shapes without elements, of rows or of columns.
EMPTY = [
    *(("rms_norm", (shape, shape[-1:])) for shape in ((0, 8), (2, 0, 8), (2, 0))),
    *(("add_rms_norm", (shape, shape, shape[-1:])) for shape in ((0, 8), (2, 0))),
    *(("layer_norm", (shape, shape[-1:], shape[-1:])) for shape in ((0, 8), (2, 0))),
    *(("gated_rms_norm", (shape, shape, shape[-1:])) for shape in ((0, 8), (2, 0))),
    *(("group_norm", (shape, (4,), (4,))) for shape in ((0, 4, 3), (2, 4, 0))),
    ("apply_rope", ((0, 2, 16, 8), (0, 2, 16, 8))),
    ("document_attention", ((0, 4, 16), (0, 2, 16), (0, 2, 16))),
    ("merge_own_keys", ((0, 4, 16), (0, 4, 16), (0, 4), (0, 2, 16), (0, 2, 16))),
    ("causal_conv1d", ((2, 4, 0), (4, 3), (4,))),
    ("gated_delta_rule", ((1, 0, 1, 8), (1, 0, 1, 8), (1, 0, 2, 8), (1, 0, 2), (1, 0, 2))),
    ("ssd", ((1, 0, 2, 8), (1, 0, 2), (2,), (1, 0, 1, 8), (1, 0, 1, 8), (2,), (1, 0, 2, 8), (2,))),
    ("kda", ((1, 0, 1, 8), (1, 0, 1, 8), (1, 0, 2, 8), (1, 0, 2, 8), (1, 0, 2))),
    ("swiglu", ((2, 0, 8), (2, 0, 8))),
    ("geglu", ((2, 0, 8), (2, 0, 8))),
    ("reglu", ((2, 0, 8), (2, 0, 8))),
    ("experts", ((0, 8), (0, 2), (4, 12, 8), (4, 8, 6), (4, 12), (4, 8))),
    ("experts", ((3, 8), (3, 2), (4, 0, 8), (4, 8, 0), (4, 0), (4, 8))),
]
every_op = pytest.mark.parametrize("name", CALLS)


def example(name: str, device: torch.device) -> tuple[Callable, list[torch.Tensor]]:
    shapes, call = (CALLS | LONG_ROWS | IN_PLACE)[name]
    return call, tensors(*shapes, device=device, dtype=torch.float32)


def test_the_backend_is_the_expected_one(device: torch.device) -> None:
    expected = "triton" if device.type == "cuda" else os.environ.get("LIGERTUNE_EXPECT_BACKEND", "reference")
    assert backend(device) == backend(str(device)) == expected
    assert runs_triton(torch.zeros(1, device=device)) == (expected == "triton")


def test_float64_runs_the_reference_everywhere(device: torch.device) -> None:
    assert not runs_triton(torch.zeros(1, device=device, dtype=torch.float64))


def test_meta_tensors_run_the_reference() -> None:
    assert backend("meta") == "reference"


def test_no_op_with_a_gradient_is_left_out() -> None:
    assert {op.name for op in OPS if op.inputs} - {"adamw_step"} == CALLS.keys()


@pytest.mark.parametrize("name", [*CALLS, *LONG_ROWS, *IN_PLACE])
def test_only_the_gradients_that_are_needed_are_computed(name, device) -> None:
    """Each gradient alone, and all but one: the same as with the others."""
    call, leaves = example(name, device)
    whole = torch.autograd.grad(call(*leaves).square().sum(), leaves)
    places = range(len(leaves))
    for needed in {*((i,) for i in places), *(tuple(j for j in places if j != i) for i in places)} - {()}:
        some = [leaf if i in needed else leaf.detach() for i, leaf in enumerate(leaves)]
        found = torch.autograd.grad(call(*some).square().sum(), [some[i] for i in needed])
        torch.testing.assert_close(found, tuple(whole[i] for i in needed))


@pytest.mark.parametrize("name", [*CALLS, *LONG_ROWS, *IN_PLACE])
def test_no_launch_gets_two_parts_of_one_allocation(name, device, monkeypatch) -> None:
    """torch.compile does not follow what a kernel writes to two views of one tensor: gradients are then wrong."""
    launch = Launcher.__call__
    shared = []

    def check(self, grid, tensors, *others) -> None:
        before = [t.clone() for t in tensors]
        launch(self, grid, tensors, *others)
        for t, old in zip(tensors, before, strict=True):
            storage = t.untyped_storage().data_ptr()
            parts = {other.data_ptr() for other in tensors if other.untyped_storage().data_ptr() == storage}
            written = not torch.equal(t.view(torch.uint8), old.view(torch.uint8))
            shared.extend([self.kernel.fn.__name__] * (written and len(parts) > 1))

    monkeypatch.setattr(Launcher, "__call__", check)
    call, leaves = example(name, device)
    torch.autograd.grad(call(*leaves).square().sum(), leaves)
    assert not shared


@pytest.mark.parametrize("name, shapes", EMPTY, ids=str)
def test_takes_empty_tensors(name, shapes, device) -> None:
    leaves = tensors(*shapes, device=device, dtype=torch.float32)
    CALLS[name][1](*leaves).sum().backward()
    assert all(leaf.grad.shape == leaf.shape and not leaf.grad.any() for leaf in leaves)


@every_op
@pytest.mark.parametrize("wanted", ["sum", "squares"])
def test_a_second_derivative_is_right_or_refused(name, wanted, device) -> None:
    """Also for a sum, whose gradient needs no gradient itself: a penalty must not be treated as a constant."""
    call, leaves = example(name, device)
    result = call(*leaves)
    loss = result.sum() if wanted == "sum" else result.square().sum()
    penalty = sum(grad.square().sum() for grad in torch.autograd.grad(loss, leaves, create_graph=True))
    if runs_triton(leaves[0]) or "linear" in name:
        with pytest.raises(RuntimeError, match=r"cannot be differentiated again.*reference"):
            (penalty + leaves[0].sum()).backward()
    elif penalty.requires_grad:  # plain torch has second derivatives
        (penalty + leaves[0].sum()).backward()
        assert all(leaf.grad is None or leaf.grad.isfinite().all() for leaf in leaves)


@every_op
def test_checkpointing_gives_the_same_gradients(name, device) -> None:
    call, leaves = example(name, device)
    expected = torch.autograd.grad(call(*leaves).square().sum(), leaves)
    found = torch.autograd.grad(checkpoint(call, *leaves, use_reentrant=False).square().sum(), leaves)
    assert all(torch.equal(a, b) for a, b in zip(found, expected, strict=True))


@every_op
def test_autocast_computes_products_in_its_dtype(name, device) -> None:
    """Matrix products in bfloat16, as linear layers; norms, activations and losses of logits in the input's dtype."""
    call, leaves = example(name, device)
    product = "linear" in name or name in (
        "document_attention",
        "merge_own_keys",
        "experts",
        "gated_delta_rule",
        "kda",
        "ssd",
    )
    plain = [t.detach().bfloat16().requires_grad_() for t in leaves] if product else leaves
    expected = call(*plain)
    with torch.autocast(device.type, dtype=torch.bfloat16):
        found = call(*leaves)
    assert product or found.dtype is expected.dtype
    torch.testing.assert_close(found.float(), expected.float(), rtol=1e-6, atol=1e-6)
    given = torch.autograd.grad(found.float().square().sum(), leaves)
    assert all(grad.dtype is torch.float32 and grad.isfinite().all() for grad in given)


@pytest.mark.gpu
@pytest.mark.skipif(torch.cuda.device_count() < 2, reason="needs two GPUs")
@every_op
def test_runs_on_a_gpu_that_is_not_the_current_one(name) -> None:
    results = []
    for index in (0, 1):
        call, leaves = example(name, torch.device("cuda", index))
        result = call(*leaves)
        gradients = torch.autograd.grad(result.square().sum(), leaves)
        assert {t.device.index for t in (result, *gradients)} == {index}
        results.append([t.cpu() for t in (result, *gradients)])
    assert torch.cuda.current_device() == 0
    assert all(torch.equal(a, b) for a, b in zip(*results, strict=True))
