"""linear_cross_entropy and related ops on a GPU at real sizes: rounding, memory, determinism."""

from functools import partial

import ligertune_kernels as kernels
import pytest
import torch
from ligertune_kernels.ops.losses import linear_log_probs
from support.covering import every_pair
from support.kernels.judge import DTYPES, judge, judge_loss, judge_op

pytestmark = pytest.mark.gpu

N, E, V = 2048, 1024, 128256
LEAN = kernels.Schedule("lean", slot=1024, buffer=1024, flushes=1, slab=4096)
SCHEDULES = (
    pytest.param(None, id="fast, one flush"),
    pytest.param(kernels.Schedule("fast", slot=512, buffer=1024, flushes=2), id="fast, two flushes"),
    pytest.param(kernels.Schedule("fast", slot=512, buffer=512, flushes=4), id="fast, four flushes"),
    pytest.param(kernels.Schedule("fast", slot=1024, buffer=N, flushes=1, slab=4096, groups=14), id="fast, in groups"),
    pytest.param(LEAN, id="lean"),
    pytest.param(kernels.Schedule("lean", 512, 512, 1, slab=4096, groups=2, kept=16384), id="lean, a quarter kept"),
)


def example(device: torch.device, dtype: torch.dtype = torch.bfloat16, ignored: float = 0.2):
    hidden = torch.randn(N, E, device=device, dtype=dtype)
    weight = torch.randn(V, E, device=device, dtype=dtype) / E**0.5
    labels = torch.randint(V, (N,), device=device)
    labels[torch.rand(N, device=device) < ignored] = -100
    return hidden, weight, labels


@pytest.mark.parametrize(
    "schedule, dtype", [*every_pair(SCHEDULES, [torch.bfloat16]), *every_pair(SCHEDULES[:3], [torch.float16])]
)
def test_every_schedule_rounds_as_torch_does_and_is_deterministic(schedule, dtype, device) -> None:
    """Both sides round their logits to the low dtype."""
    hidden, weight, labels = example(device, dtype)
    judge_op(kernels.linear_cross_entropy, [hidden, weight], labels, ours={"schedule": schedule})
    leaves = hidden.requires_grad_(), weight.requires_grad_()
    runs = [
        torch.autograd.grad(kernels.linear_cross_entropy(*leaves, labels, schedule=schedule), leaves) for _ in range(2)
    ]
    assert all(torch.equal(a, b) for a, b in zip(*runs, strict=True))


@pytest.mark.parametrize("schedule", [None, LEAN], ids=["fast", "lean"])
def test_a_low_rank_term_rounds_as_torch_does(schedule, device) -> None:
    hidden, weight, labels = example(device)
    a, b = torch.randn(16, E, device=device).bfloat16() / E**0.5, 0.1 * torch.randn(V, 16, device=device).bfloat16()

    def call(op, h, w, a, b, **more):
        return op(h, w, labels, lora=kernels.LinearLora(a, b, 2.0), **more)

    ours = partial(call, kernels.linear_cross_entropy, schedule=schedule)
    judge(ours, partial(call, kernels.linear_cross_entropy_reference), [hidden, weight, a, b])


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("options", [{}, {"softcap": 30.0, "z_loss": 1e-4, "label_smoothing": 0.1}])
@pytest.mark.parametrize(
    "shape",
    [
        pytest.param((1024, 128256), id="Llama 3's vocabulary"),
        pytest.param((3000, 32000), id="rows held whole, more than run at once"),
        pytest.param((500, 32001), id="rows of odd length"),
        pytest.param((300, 256000), id="rows with an eighth held in registers"),
        pytest.param((300, 65537), id="one column past a multiple of every block"),
    ],
)
def test_the_row_pass_takes_rows_of_every_length(shape, options, dtype, device) -> None:
    logits = 3.0 * torch.randn(shape, device=device, dtype=dtype)
    labels = torch.randint(shape[1], shape[:1], device=device)
    labels[0], labels[1], labels[2::5] = 0, shape[1] - 1, -100
    judge_op(kernels.cross_entropy, [logits], labels, compare=judge_loss, **options)


def test_lean_allocates_little_more_than_the_gradients(peak_bytes, device) -> None:
    """dX 4 MB, dW 263 MB, a slab of 2048 · 8192 logits 34 MB; bf16 logits alone would be 525 MB."""
    hidden, weight, labels = (t.requires_grad_(t.is_floating_point()) for t in example(device))
    peak = peak_bytes(lambda: kernels.linear_cross_entropy(hidden, weight, labels, chunk_bytes=1 << 26))
    assert peak < hidden.grad.nbytes + weight.grad.nbytes + 80e6


@pytest.mark.parametrize("given", [True, False], ids=["rows given", "rows found"])
def test_rows_without_a_label_are_not_computed(given, peak_bytes, device) -> None:
    """A fifth of the rows needs a fifth of the logits, which the buffer's size shows."""
    hidden, weight, labels = example(device, ignored=0.8)
    rows = kernels.labelled_rows(labels.cpu()).to(device) if given else None
    hidden.requires_grad_()
    peak = peak_bytes(lambda: kernels.linear_cross_entropy(hidden, weight, labels, labelled_rows=rows))
    assert peak < 0.35 * N * V * 2
    assert not hidden.grad[labels == -100].any()


def test_rows_that_are_found_and_rows_that_are_given_give_the_same_bits(device) -> None:
    hidden, weight, labels = example(device, ignored=0.5)
    leaves = hidden.requires_grad_(), weight.requires_grad_()
    rows = kernels.labelled_rows(labels.cpu()).to(device)
    runs = [kernels.linear_cross_entropy(*leaves, labels, labelled_rows=given) for given in (None, rows)]
    found, given = ((loss.detach(), *torch.autograd.grad(loss, leaves)) for loss in runs)
    assert all(torch.equal(a, b) for a, b in zip(found, given, strict=True))


def test_a_cuda_graph_computes_all_rows_whatever_their_labels(device) -> None:
    """The number of labels changes between capture and replay."""
    hidden, weight, labels = example(device, ignored=0.8)
    leaves = hidden.requires_grad_(), weight.requires_grad_()
    stream = torch.cuda.Stream()
    stream.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(stream):
        torch.autograd.grad(kernels.linear_cross_entropy(*leaves, labels), leaves)
    torch.cuda.current_stream().wait_stream(stream)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        loss = kernels.linear_cross_entropy(*leaves, labels)
        gradients = torch.autograd.grad(loss, leaves)
    labels.copy_(torch.randint_like(labels, V))
    graph.replay()
    expected = kernels.linear_cross_entropy(*leaves, labels)
    torch.testing.assert_close(loss, expected)
    for ours, truth in zip(gradients, torch.autograd.grad(expected, leaves), strict=True):
        torch.testing.assert_close(ours, truth, rtol=2**-7, atol=2**-8 * truth.abs().max().item())


@pytest.mark.parametrize("schedule, given", [(None, True), (None, False), (LEAN, True)], ids=["fast", "found", "lean"])
def test_linear_losses_compile_without_a_graph_break(schedule, given, device) -> None:
    hidden, weight, labels = example(device)
    leaves = hidden.requires_grad_(), weight.requires_grad_()
    rows = kernels.labelled_rows(labels.cpu()).to(device) if given else None

    def loss(h, w):
        return kernels.linear_cross_entropy(h, w, labels, labelled_rows=rows, schedule=schedule)

    eager, compiled = loss(*leaves), torch.compile(loss, fullgraph=True)(*leaves)
    torch.testing.assert_close(compiled, eager, rtol=1e-4, atol=0)
    expected, found = (torch.autograd.grad(value, leaves) for value in (eager, compiled))
    for ours, truth in zip(found, expected, strict=True):
        torch.testing.assert_close(ours, truth, rtol=2**-7, atol=2**-8 * truth.abs().max().item())


def test_token_statistics_of_a_large_vocabulary(device, monkeypatch) -> None:
    monkeypatch.setattr(linear_log_probs, "CHUNK_BYTES", 1 << 28)
    hidden, weight, labels = example(device, torch.float32)
    ours = kernels.linear_token_statistics(hidden, weight, labels)
    truth = kernels.linear_token_statistics_reference(hidden, weight, labels)
    assert torch.equal(ours.argmax, truth.argmax)
    torch.testing.assert_close(ours.logprob, truth.logprob)
    torch.testing.assert_close(ours.entropy, truth.entropy)
    torch.testing.assert_close(ours.mean_logit, truth.mean_logit)


@pytest.mark.parametrize("frozen", [True, False], ids=["frozen", "trained"])
def test_log_probs_round_as_torch_does_and_are_deterministic(frozen, device) -> None:
    """With a frozen layer dX is rounded in the forward, and again when it is multiplied by the upstream gradient."""
    hidden, weight, labels = example(device)
    grads = (True, not frozen)

    def call(op, *leaves: torch.Tensor) -> torch.Tensor:
        return op(*leaves, labels).logprob

    ours, plain = partial(call, kernels.linear_log_probs), partial(call, kernels.linear_log_probs_reference)
    judge(ours, plain, [hidden, weight], grads=grads, slack=2.0 if frozen else 1.0)
    leaves = [t.requires_grad_(needed) for t, needed in zip((hidden, weight), grads, strict=True)]
    needed = [t for t in leaves if t.requires_grad]
    runs = [torch.autograd.grad(ours(*leaves).square().sum(), needed) for _ in range(2)]
    assert all(torch.equal(a, b) for a, b in zip(*runs, strict=True))


@pytest.mark.parametrize("frozen", [True, False], ids=["frozen", "trained"])
def test_log_probs_take_the_predicted_memory(frozen, peak_bytes, device) -> None:
    """Logits in bf16 would take 0.5 GB."""
    hidden, weight, labels = example(device)
    hidden, weight = hidden.requires_grad_(), weight.requires_grad_(not frozen)
    found = peak_bytes(lambda: kernels.linear_log_probs(hidden, weight, labels, chunk_bytes=1 << 27).logprob.sum())
    memory = kernels.log_probs_memory(N, E, V, torch.bfloat16, needs_dw=not frozen, chunk_bytes=1 << 27)
    gradients = 2 * (N * E + (0 if frozen else V * E))
    assert found <= max(memory.forward + memory.held, memory.backward + gradients) + (64 << 20)


def test_log_probs_address_more_than_2_31_elements(device) -> None:
    """A layer of 2.2e9 elements, 4.4 GB; the last classes lie past the first 2^31."""
    n_rows, width, vocab_size = 64, 2048, 1_080_000
    hidden = torch.randn(n_rows, width, device=device, dtype=torch.bfloat16)
    weight = torch.empty(vocab_size, width, device=device, dtype=torch.bfloat16).normal_(std=1 / width**0.5)
    labels = torch.arange(vocab_size - n_rows, vocab_size, device=device)
    found = []
    for op in (kernels.linear_log_probs, kernels.linear_log_probs_reference):
        x = hidden.detach().requires_grad_()
        results = op(x, weight, labels, statistics=True)
        found.append((results.logprob, results.entropy, *torch.autograd.grad(results.logprob.sum(), x)))
    for ours, plain in zip(*found, strict=True):
        torch.testing.assert_close(ours, plain, rtol=2**-6, atol=2**-8 * plain.abs().max().item())
