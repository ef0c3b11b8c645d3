"""kl_div, jsd, linear_jsd and int2_int8_matmul on a GPU at real sizes: rounding, memory, more than 2³¹ elements."""

from functools import partial

import ligertune_kernels as kernels
import pytest
import torch
from support.kernels.judge import DTYPES, LOW, judge, judge_loss, judge_op

pytestmark = pytest.mark.gpu

VOCABS = (pytest.param(128256, id="Llama 3"), pytest.param(32001, id="Llama 2 and a padding token: unaligned rows"))


def log_probs(n_rows: int, vocab_size: int, device: torch.device, dtype: torch.dtype) -> torch.Tensor:
    return (3.0 * torch.randn(n_rows, vocab_size, device=device)).log_softmax(-1).to(dtype)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("vocab_size", VOCABS)
@pytest.mark.parametrize("reduction", ["none", "batchmean"])
def test_kl_div_of_a_large_vocabulary(reduction, vocab_size, dtype, device) -> None:
    student, teacher = (log_probs(256, vocab_size, device, dtype) for _ in range(2))
    if dtype is torch.float16:  # below 6e-8 a probability is 0 there, and the gradient of 0 log 0 is infinite
        teacher = teacher.clamp(min=-16.0)
    for log_target, target in ((True, teacher), (False, teacher.exp())):
        compare = judge if reduction == "none" else judge_loss
        judge_op(kernels.kl_div, [student, target], compare=compare, reduction=reduction, log_target=log_target)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("vocab_size", VOCABS)
@pytest.mark.parametrize("beta", [0.0, 0.3, 1.0])
def test_jsd_of_a_large_vocabulary(beta, vocab_size, dtype, device) -> None:
    student, teacher = (log_probs(256, vocab_size, device, dtype) for _ in range(2))
    labels = torch.zeros(256, dtype=torch.int64, device=device)
    labels[::5] = -100
    judge_op(kernels.jsd, [student], teacher, compare=judge_loss, labels=labels, beta=beta)


@pytest.mark.parametrize("dtype", LOW)
@pytest.mark.parametrize("vocab_size", VOCABS)
@pytest.mark.parametrize("beta", [0.0, 0.3, 1.0])
@pytest.mark.parametrize("rows", [1024, 512, 200], ids=["one flush", "two flushes", "eight flushes in fp32"])
def test_linear_jsd_of_a_large_vocabulary(rows, beta, vocab_size, dtype, device) -> None:
    """Both sides round their logits to the low dtype."""
    (h, w), (t_h, t_w) = (
        (
            torch.randn(1024, width, device=device, dtype=dtype),
            0.05 * torch.randn(vocab_size, width, device=device, dtype=dtype),
        )
        for width in (512, 768)
    )
    options = {"beta": beta, "temperature": 0.8}
    judge_loss(
        lambda h, w: kernels.linear_jsd(h, w, t_h, t_w, chunk_bytes=2 * 2 * rows * (vocab_size + 64), **options),
        lambda h, w: kernels.linear_jsd_reference(h, w, t_h.to(h.dtype), t_w.to(h.dtype), **options),
        [h, w],
    )


def test_linear_jsd_never_stores_all_logits(peak_bytes, device) -> None:
    """Two buffers of 788 MB, dW 525 MB, dX 17 MB: 1.33 GB. Logits in bf16 alone are 2.1 GB."""
    (h, w), (t_h, t_w) = (
        (torch.randn(4096, e, device=device, dtype=torch.bfloat16), torch.randn(128256, e, device=device).bfloat16())
        for e in (2048, 4096)
    )
    h.requires_grad_(), w.requires_grad_()
    assert peak_bytes(lambda: kernels.linear_jsd(h, w, t_h, t_w)) < 1.45e9


def test_kl_div_and_jsd_allocate_one_gradient(peak_bytes, device) -> None:
    """(4096, 32000) in fp32: 524 MB."""
    student, teacher = (log_probs(4096, 32000, device, torch.float32) for _ in range(2))
    student.requires_grad_()
    for op in (kernels.kl_div, kernels.jsd):
        assert peak_bytes(partial(op, student, teacher)) < 540e6
        student.grad = None


@pytest.mark.parametrize("op", [kernels.kl_div, kernels.jsd], ids=["kl_div", "jsd"])
def test_addresses_more_than_2_31_elements(op, device) -> None:
    """(17000, 128256) in bf16: 2.2e9 elements, 4.4 GB."""
    options = {"reduction": "sum"} | ({"log_target": True} if op is kernels.kl_div else {})
    row, teacher_row = (log_probs(1, 128256, device, torch.bfloat16) for _ in range(2))
    student, teacher = row.repeat(17_000, 1).requires_grad_(), teacher_row.repeat(17_000, 1)
    loss = op(student, teacher, **options)
    loss.backward()
    row.requires_grad_()
    expected = op(row, teacher_row, **options)
    expected.backward()
    torch.testing.assert_close(loss / 17_000, expected, rtol=1e-5, atol=0.0)
    assert torch.equal(student.grad[:1], row.grad) and torch.equal(student.grad[-1:], row.grad)


@pytest.mark.parametrize("n_rows", [1, 16, 17, 64, 65, 1001, 4096])
@pytest.mark.parametrize(
    "n_cols, n_inner",
    [
        pytest.param(4096, 14336, id="BitNet's"),
        pytest.param(1001, 4100, id="odd"),
        pytest.param(1001, 4096, id="an odd number of columns"),
        pytest.param(1000, 64, id="shortest rows with an unpacked weight"),
    ],
)
def test_int2_int8_matmul_is_exact(n_cols, n_inner, n_rows, device) -> None:
    """Contiguous rows, every second row, and rows that start unaligned."""
    both = torch.randint(-128, 128, (2 * n_rows, n_inner), device=device, dtype=torch.int8)
    w = kernels.pack_int2(torch.randint(-2, 2, (n_cols, n_inner), device=device))
    late = both.view(-1)[5 : 5 + n_rows * n_inner].view(n_rows, n_inner)
    for x in (both[:n_rows], both[::2], late):
        assert torch.equal(kernels.int2_int8_matmul(x, w), kernels.int2_int8_matmul_reference(x, w))
    scales = {"x_scale": torch.rand(n_rows, device=device), "weight_scale": torch.rand(n_cols, device=device)}
    x = both[::2]
    ours, theirs = kernels.int2_int8_matmul(x, w, **scales), kernels.int2_int8_matmul_reference(x, w, **scales)
    torch.testing.assert_close(ours, theirs, rtol=2.0**-22, atol=0.0)  # two roundings


@pytest.mark.parametrize("n_rows", [16, 128], ids=["few rows", "many rows"])
def test_int2_int8_matmul_compiles_without_a_graph_break(n_rows, device) -> None:
    x = torch.randint(-128, 128, (n_rows, 256), device=device, dtype=torch.int8)
    w = kernels.pack_int2(torch.randint(-2, 2, (512, 256), device=device))
    scale = torch.rand(512, device=device)

    def call(x, w, scale):
        scales = {"x_scale": scale[:n_rows], "weight_scale": scale}
        return kernels.int2_int8_matmul(x, w), kernels.int2_int8_matmul(x, w, **scales)

    compiled = torch.compile(call, fullgraph=True)
    assert all(torch.equal(a, b) for a, b in zip(compiled(x, w, scale), call(x, w, scale), strict=True))


def test_losses_compile_without_a_graph_break(device) -> None:
    h, w = (torch.randn(n, 256, device=device, dtype=torch.bfloat16, requires_grad=True) for n in (64, 1000))

    def loss(h, w):
        x = (h @ w.T).float().log_softmax(-1)
        fixed = x.detach().roll(1, 0)
        distilled = kernels.linear_jsd(h, w, h.roll(1, 0), w)
        return distilled + kernels.jsd(x, fixed) + kernels.kl_div(x, fixed, log_target=True)

    expected = torch.autograd.grad(loss(h, w), (h, w))
    compiled = torch.autograd.grad(torch.compile(loss, fullgraph=True)(h, w), (h, w))
    torch.testing.assert_close(compiled, expected, rtol=2e-2, atol=1e-4)
