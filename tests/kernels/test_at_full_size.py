"""Kernels on a GPU at real sizes: rounding in bf16 and fp16, more than 2³¹ elements, streams, memory."""

from __future__ import annotations

from functools import partial

import ligertune_kernels as kernels
import pytest
import torch
from judge import assert_close, judge

pytestmark = pytest.mark.gpu

LOW = (torch.bfloat16, torch.float16)
OPS = (
    pytest.param(kernels.rms_norm, kernels.rms_norm_reference, ((4096, 4096), (4096,)), id="rms_norm"),
    pytest.param(
        kernels.rms_norm, kernels.rms_norm_reference, ((2048, 16384), (16384,)), id="rms_norm, swept backward"
    ),
    pytest.param(kernels.rms_norm, kernels.rms_norm_reference, ((512, 32768), (32768,)), id="rms_norm, swept"),
    pytest.param(kernels.rms_norm, kernels.rms_norm_reference, ((4096, 32, 128), (128,)), id="rms_norm of heads"),
    pytest.param(kernels.swiglu, kernels.swiglu_reference, ((4096, 14336), (4096, 14336)), id="swiglu"),
    pytest.param(kernels.swiglu, kernels.swiglu_reference, ((4096, 2 * 8192),), id="swiglu packed"),
    pytest.param(kernels.geglu, kernels.geglu_reference, ((4096, 11008), (4096, 11008)), id="geglu"),
    pytest.param(
        partial(kernels.geglu, approximate="none"),
        partial(kernels.geglu_reference, approximate="none"),
        ((4096, 2 * 4096),),
        id="geglu with erf",
    ),
)


@pytest.mark.parametrize("dtype", LOW)
@pytest.mark.parametrize("op, reference, shapes", OPS)
def test_elementwise_ops_round_as_torch_does(op, reference, shapes, dtype, device) -> None:
    judge(op, reference, [torch.randn(shape, device=device, dtype=dtype) for shape in shapes])


@pytest.mark.parametrize("dtype", LOW)
@pytest.mark.parametrize("interleaved", [False, True])
def test_rope_rounds_as_torch_does(interleaved, dtype, device) -> None:
    q, k = (torch.randn(2, 2048, n, 128, device=device, dtype=dtype).transpose(1, 2) for n in (32, 8))
    angle = 6.0 * torch.rand(1, 2048, 128, device=device)
    cos, sin = angle.cos(), angle.sin()
    judge(
        lambda q, k: kernels.apply_rope(q, k, cos, sin, interleaved=interleaved),
        lambda q, k: kernels.apply_rope_reference(q, k, cos, sin, interleaved=interleaved),
        [q, k],
    )


@pytest.mark.parametrize("dtype", (*LOW, torch.float32))
@pytest.mark.parametrize("options", [{}, {"softcap": 30.0, "z_loss": 1e-4, "label_smoothing": 0.1}])
def test_cross_entropy_of_a_large_vocabulary(options, dtype, device) -> None:
    logits = 3.0 * torch.randn(1024, 128256, device=device, dtype=dtype)
    labels = torch.randint(128256, (1024,), device=device)
    labels[::5] = -100
    judge(
        lambda x: kernels.cross_entropy(x, labels, **options),
        lambda x: kernels.cross_entropy_reference(x, labels, **options),
        [logits],
    )


@pytest.mark.parametrize("dtype", LOW)
@pytest.mark.parametrize(
    "vocab_size, chunk_bytes",
    [
        pytest.param(128256, 1 << 30, id="one flush"),
        pytest.param(128256, 1024 * 128256 * 2, id="two flushes in bf16"),
        pytest.param(32000, 512 * 32000 * 2, id="four flushes in fp32"),
    ],
)
def test_linear_cross_entropy_of_a_large_vocabulary(vocab_size, chunk_bytes, dtype, device) -> None:
    """Both sides round their logits to the low dtype."""
    hidden = torch.randn(2048, 1024, device=device, dtype=dtype)
    weight = 0.03 * torch.randn(vocab_size, 1024, device=device, dtype=dtype)
    labels = torch.randint(vocab_size, (2048,), device=device)
    labels[::5] = -100
    judge(
        lambda h, w: kernels.linear_cross_entropy(h, w, labels, chunk_bytes=chunk_bytes),
        lambda h, w: kernels.linear_cross_entropy_reference(h, w, labels),
        [hidden, weight],
    )


def test_linear_cross_entropy_never_stores_all_logits(device) -> None:
    """dX 17 MB and a buffer of 131 MB; then one of 1.05 GB, dW 263 MB and its copy. bf16 logits alone are 2.1 GB."""
    hidden = torch.randn(8192, 1024, device=device, dtype=torch.bfloat16, requires_grad=True)
    weight = torch.randn(128256, 1024, device=device, dtype=torch.bfloat16, requires_grad=True)
    labels = torch.randint(128256, (8192,), device=device)
    torch.cuda.reset_peak_memory_stats(device)
    before = torch.cuda.memory_allocated(device)
    kernels.linear_cross_entropy(
        hidden.detach().requires_grad_(), weight.detach(), labels, chunk_bytes=1 << 27
    ).backward()
    assert torch.cuda.max_memory_allocated(device) - before < 250e6  # cuBLAS's workspace is counted too
    torch.cuda.reset_peak_memory_stats(device)
    kernels.linear_cross_entropy(hidden, weight, labels).backward()
    assert torch.cuda.max_memory_allocated(device) - before < 1.8e9


def test_ops_do_not_synchronise(device) -> None:
    hidden = torch.randn(512, 256, device=device, dtype=torch.bfloat16, requires_grad=True)
    weight = torch.randn(4096, 256, device=device, dtype=torch.bfloat16, requires_grad=True)
    labels = torch.randint(4096, (512,), device=device)
    n = torch.tensor(400, device=device)
    torch.cuda.set_sync_debug_mode("error")
    try:
        loss = kernels.linear_cross_entropy(
            kernels.rms_norm(hidden, hidden[0].detach()), weight, labels, num_items_in_batch=n
        )
        (loss + kernels.linear_cross_entropy(kernels.swiglu(hidden, hidden), weight, labels)).backward()
        kernels.cross_entropy(hidden * 2.0, labels.clamp(max=255), inplace=True).backward()
    finally:
        torch.cuda.set_sync_debug_mode("default")


def test_swiglu_addresses_more_than_2_31_elements(device) -> None:
    """(70000, 2 · 16384): 2.3e9 elements, 4.6 GB in bf16; the last rows lie past 2³¹."""
    packed = torch.randn(1, 2 * 16384, device=device, dtype=torch.bfloat16).repeat(70_000, 1).requires_grad_()
    y = kernels.swiglu(packed)
    y.backward(torch.ones_like(y))
    row = packed[-1:].detach().requires_grad_()
    expected = kernels.swiglu_reference(row)
    expected.sum().backward()
    torch.testing.assert_close(y[-1:], expected)
    torch.testing.assert_close(packed.grad[-1:], row.grad)
    torch.testing.assert_close(packed.grad[:1], row.grad)


def test_cross_entropy_addresses_more_than_2_31_elements(device) -> None:
    """(17000, 128256) in bf16: 2.2e9 elements, 4.4 GB, with the gradient over the logits."""
    row = torch.randn(1, 128256, device=device, dtype=torch.bfloat16)
    logits = row.repeat(17_000, 1).requires_grad_()
    labels = torch.full((17_000,), 128255, device=device)
    loss = kernels.cross_entropy(logits, labels, reduction="sum", inplace=True)
    loss.backward()
    row.requires_grad_()
    expected = kernels.cross_entropy_reference(row, labels[:1])
    expected.backward()
    torch.testing.assert_close(loss / 17_000, expected, rtol=1e-5, atol=0.0)
    for one in (logits.grad[:1], logits.grad[-1:]):
        assert_close("gradient", one, row.grad, row.grad.double(), torch.bfloat16)


def test_works_on_another_stream(device) -> None:
    hidden = torch.randn(256, 512, device=device, dtype=torch.bfloat16, requires_grad=True)
    weight = torch.randn(1000, 512, device=device, dtype=torch.bfloat16, requires_grad=True)
    labels = torch.randint(1000, (256,), device=device)
    expected = torch.autograd.grad(kernels.linear_cross_entropy(hidden, weight, labels), (hidden, weight))
    stream = torch.cuda.Stream(device)
    stream.wait_stream(torch.cuda.current_stream(device))
    with torch.cuda.stream(stream):
        torch.cuda._sleep(20_000_000)  # work on the default stream would finish before this
        late = hidden * 1.0
        ours = torch.autograd.grad(kernels.linear_cross_entropy(late, weight, labels), (hidden, weight))
    torch.cuda.current_stream(device).wait_stream(stream)
    for a, b in zip(ours, expected, strict=True):
        torch.testing.assert_close(a, b)


@pytest.mark.parametrize("cast", ["llama", "gemma"])
def test_rms_norm_is_deterministic(cast, device) -> None:
    leaves = [torch.randn(s, device=device, dtype=torch.bfloat16).requires_grad_() for s in ((4096, 4096), (4096,))]
    first, second = (torch.autograd.grad(kernels.rms_norm(*leaves, cast=cast).sum(), leaves) for _ in range(2))
    assert all(torch.equal(a, b) for a, b in zip(first, second, strict=True))
