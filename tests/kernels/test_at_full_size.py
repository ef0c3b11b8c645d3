"""Kernels on a GPU at real sizes: rounding in bf16 and fp16, more than 2³¹ elements, streams, memory."""

import ligertune_kernels as kernels
import pytest
import torch
from support.kernels.judge import LOW, assert_close, judge_op

pytestmark = pytest.mark.gpu

GATED = (
    pytest.param(kernels.swiglu, {}, ((4096, 14336), (4096, 14336)), id="swiglu"),
    pytest.param(kernels.swiglu, {}, ((4096, 2 * 8192),), id="swiglu packed"),
    pytest.param(kernels.geglu, {}, ((4096, 11008), (4096, 11008)), id="geglu"),
    pytest.param(kernels.geglu, {"approximate": "none"}, ((4096, 2 * 4096),), id="geglu with erf"),
)


@pytest.mark.parametrize("dtype", LOW)
@pytest.mark.parametrize("op, options, shapes", GATED)
def test_gated_ops_round_as_torch_does(op, options, shapes, dtype, device) -> None:
    judge_op(op, [torch.randn(shape, device=device, dtype=dtype) for shape in shapes], **options)


@pytest.mark.parametrize("dtype", LOW)
@pytest.mark.parametrize("interleaved", [False, True])
def test_rope_rounds_as_torch_does(interleaved, dtype, device) -> None:
    q, k = (torch.randn(2, 2048, n, 128, device=device, dtype=dtype).transpose(1, 2) for n in (32, 8))
    angle = 6.0 * torch.rand(1, 2048, 128, device=device)
    judge_op(kernels.apply_rope, [q, k], angle.cos(), angle.sin(), interleaved=interleaved)


def test_linear_cross_entropy_never_stores_all_logits(peak_bytes, device) -> None:
    """dX 17 MB and a buffer of 131 MB; then one of 1.05 GB, dW 263 MB and its copy. bf16 logits alone are 2.1 GB."""
    hidden = torch.randn(8192, 1024, device=device, dtype=torch.bfloat16, requires_grad=True)
    weight = torch.randn(128256, 1024, device=device, dtype=torch.bfloat16, requires_grad=True)
    labels = torch.randint(128256, (8192,), device=device)
    one, frozen = hidden.detach().requires_grad_(), weight.detach()
    assert peak_bytes(lambda: kernels.linear_cross_entropy(one, frozen, labels, chunk_bytes=1 << 27)) < 250e6
    one.grad = None
    assert peak_bytes(lambda: kernels.linear_cross_entropy(hidden, weight, labels)) < 1.8e9


def test_ops_do_not_synchronise(no_synchronisation, device) -> None:
    shapes = ((512, 256), (4096, 256), (256,), (8, 256), (4096, 8))
    h, weight, w, a, b = (torch.randn(s, device=device, dtype=torch.bfloat16, requires_grad=True) for s in shapes)
    labels, count = torch.randint(4096, (512,), device=device), torch.tensor(400, device=device)
    rows = kernels.labelled_rows(labels.cpu()).pin_memory()
    x_int8, packed = torch.zeros(128, 256, dtype=torch.int8, device=device), kernels.pack_int2(weight.detach() > 0)
    lean = kernels.Schedule("lean", slot=256, buffer=256, flushes=1, slab=1024)
    no_synchronisation()
    y, s = kernels.add_rms_norm(kernels.embedding(labels, weight), kernels.rms_norm(h, w), w)
    y = kernels.swiglu(kernels.layer_norm(y, w, w), kernels.group_norm(s, 32, w, w))
    x = h.log_softmax(-1)
    losses = (
        kernels.linear_cross_entropy(y, weight, labels, num_items_in_batch=count),
        kernels.linear_cross_entropy(h, weight, labels, labelled_rows=rows, lora=kernels.LinearLora(a, b), z_loss=1e-4),
        kernels.linear_cross_entropy(h, weight, labels, schedule=lean, label_smoothing=0.1),
        kernels.multi_head_linear_cross_entropy(
            [h, h], weight, torch.stack([labels, labels]), (1.0, 0.8), num_items_in_batch=(512, 512)
        ).loss,
        kernels.linear_log_probs(h, weight, labels, labelled_rows=rows, statistics=True).logprob.sum(),
        kernels.linear_log_probs(h, weight.detach(), labels).logprob.square().sum(),
        kernels.cross_entropy(h * 2.0, labels.clamp(max=255), inplace=True),
        kernels.linear_jsd(h, weight, h, weight, labels=labels, num_items_in_batch=count),
        kernels.linear_jsd(h, weight, h, weight),
        kernels.jsd(x, x.detach(), labels=labels),
        kernels.kl_div(x, x.detach(), log_target=True),
    )
    sum(losses).backward()
    kernels.linear_token_statistics(h, weight, labels)
    for n_rows in (3, 128):
        kernels.int2_int8_matmul(x_int8[:n_rows], packed)


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
    torch.testing.assert_close(ours, expected)
