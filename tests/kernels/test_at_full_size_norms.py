"""Norms, embedding and SwiGLU on a GPU at real sizes: rounding, determinism, saved launches, 2³¹ elements."""

from functools import partial

import ligertune_kernels as kernels
import pytest
import torch
from support.kernels.judge import LOW, judge, judge_op

pytestmark = pytest.mark.gpu

ROWS = (
    pytest.param((8192, 4096), id="two programs per processor"),
    pytest.param((4001, 8192), id="one program per processor, runs of unequal length"),
    pytest.param((2048, 16384), id="two parts"),
    pytest.param((512, 32768), id="many parts, swept forward"),
    pytest.param((4096, 32, 128), id="heads"),
    pytest.param((4096, 1023), id="unaligned rows"),
    pytest.param((1001, 8191), id="parts of unaligned rows"),
)


def normal(*shapes: tuple[int, ...], device: torch.device, dtype: torch.dtype = torch.bfloat16) -> list[torch.Tensor]:
    return [torch.randn(shape, device=device, dtype=dtype) for shape in shapes]


def zipf(n: int, vocab_size: int, device: torch.device) -> torch.Tensor:
    """Return indices distributed as tokens of text: a few are most of them."""
    return (vocab_size ** torch.rand(n, device=device)).long() - 1


@pytest.mark.parametrize("dtype", LOW)
@pytest.mark.parametrize("shape", ROWS)
def test_norms_round_as_torch_does(shape, dtype, device) -> None:
    x, residual, w, b = normal(shape, shape, shape[-1:], shape[-1:], device=device, dtype=dtype)
    judge_op(kernels.rms_norm, [x, w])
    judge_op(kernels.add_rms_norm, [x, residual, w])
    judge_op(kernels.layer_norm, [x, w, b])
    for before in (True, False):
        judge_op(kernels.gated_rms_norm, [x, residual, w], norm_before_gate=before)


@pytest.mark.parametrize("dtype", LOW)
@pytest.mark.parametrize("shape", [(8, 320, 64, 64), (2, 512, 256, 256), (64, 2048)], ids=str)
def test_group_norm_rounds_as_torch_does(shape, dtype, device) -> None:
    inputs = normal(shape, shape[1:2], shape[1:2], device=device, dtype=dtype)
    judge(
        lambda x, w, b: kernels.group_norm(x, 32, w, b),
        lambda x, w, b: kernels.group_norm_reference(x, 32, w, b),
        inputs,
    )


@pytest.mark.parametrize("dtype", LOW)
def test_the_gradient_of_an_embedding_is_rounded_once(dtype, device) -> None:
    indices = zipf(16384, 32000, device).view(4, 4096)
    (weight,) = normal((32000, 1024), device=device, dtype=dtype)
    assert torch.equal(kernels.embedding(indices, weight), weight[indices])

    def plain(w: torch.Tensor) -> torch.Tensor:
        return kernels.embedding_reference(indices, w if w.dtype == torch.float64 else w.float()).to(w.dtype)

    judge(lambda w: kernels.embedding(indices, w), plain, [weight])


def test_gradients_are_deterministic(device) -> None:
    x, residual, w, b = (t.requires_grad_() for t in normal((4096, 4096), (4096, 4096), *[(4096,)] * 2, device=device))
    indices = zipf(8192, 4096, device)
    for op, leaves in (
        *((partial(kernels.rms_norm, cast=cast), (x, w)) for cast in ("llama", "gemma")),
        (kernels.add_rms_norm, (x, residual, w)),
        (kernels.layer_norm, (x, w, b)),
        (kernels.gated_rms_norm, (x, residual, w)),
        (partial(kernels.gated_rms_norm, norm_before_gate=False, group_size=512), (x, residual, w)),
        (lambda x, w, b: kernels.group_norm(x.view(64, 4096, 64), 32, w, b), (x, w, b)),
        (partial(kernels.embedding, indices), (x,)),
    ):
        outputs = op(*leaves)
        outputs = outputs if isinstance(outputs, tuple) else (outputs,)
        up = normal(*(y.shape for y in outputs), device=device)
        first, second = (torch.autograd.grad(outputs, leaves, up, retain_graph=True) for _ in range(2))
        assert all(torch.equal(a, b) for a, b in zip(first, second, strict=True))


def test_saved_launches_are_not_confused(device) -> None:
    """The second launch bypasses Triton: dtypes, strides and alignments must select the saved form."""
    flat, w = torch.randn(64 * 1024 + 8, device=device), torch.randn(1024, device=device)
    wide = torch.randn(64, 2048, device=device)
    aligned = flat[: 64 * 1024].view(64, 1024)
    views = [aligned, flat[1:-7].view(64, 1024), wide[:, 1024:], wide[:, 3:1027], aligned.bfloat16(), aligned[:7]]
    for x in views * 3:
        x = x.detach().requires_grad_()
        y, expected = kernels.rms_norm(x, w, cast="gemma"), kernels.rms_norm_reference(x, w, cast="gemma")
        torch.testing.assert_close(y, expected)
        up = torch.randn_like(y)
        torch.testing.assert_close(torch.autograd.grad(y, x, up), torch.autograd.grad(expected, x, up))


def test_compiles_without_a_graph_break(device) -> None:
    shapes = ((256, 1024), (256, 1024), (1024,), (1024,))
    leaves = tuple(t.requires_grad_() for t in normal(*shapes, device=device, dtype=torch.float32))
    indices = zipf(256, 256, device)

    def layer(x: torch.Tensor, residual: torch.Tensor, w: torch.Tensor, b: torch.Tensor) -> torch.Tensor:
        y, s = kernels.add_rms_norm(kernels.embedding(indices, x), residual, w)
        y = kernels.gated_rms_norm(y, residual, w, group_size=256, norm_before_gate=False)
        return kernels.rms_norm(kernels.layer_norm(y, w, b), w) + kernels.group_norm(s, 32, w, b)

    eager, compiled = (f(*leaves) for f in (layer, torch.compile(layer, fullgraph=True)))
    torch.testing.assert_close(compiled, eager)
    up = torch.randn_like(eager)
    ours, expected = (torch.autograd.grad(y, leaves, up) for y in (compiled, eager))
    # The gradients of both uses of w are added in either order.
    torch.testing.assert_close(ours, expected, rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize("op, width", [("rms_norm", 16384), ("layer_norm", 16384), ("swiglu", 2 * 16384)])
def test_addresses_more_than_2_31_elements(op, width, device) -> None:
    """2.3e9 elements, 4.6 GB in bf16; the last rows lie past 2³¹."""
    row, w = normal((1, width), (width,), device=device)
    x = row.repeat(140_000 * 16384 // width, 1).requires_grad_()
    weights, reference = ((), "swiglu_reference") if op == "swiglu" else ((w,), op)
    y = getattr(kernels, op)(x, *weights)
    y.backward(torch.ones_like(y))
    row.requires_grad_()
    expected = getattr(kernels, reference)(row, *weights)
    expected.sum().backward()
    for ends in (slice(1), slice(-1, None)):
        torch.testing.assert_close(y[ends], expected)
        torch.testing.assert_close(x.grad[ends], row.grad)
