"""linear_log_probs against float64: frozen and trained layers, options, statistics, labelled rows, second backward."""

import pytest
import torch
from ligertune_kernels import (
    LinearLora,
    launcher,
    linear_log_probs,
    linear_log_probs_reference,
    log_probs_memory,
    runs_triton,
    schedule_of,
)
from ligertune_kernels import labelled_rows as find_labelled_rows
from support.covering import every_pair
from support.kernels.judge import DTYPES, assert_close, judge
from torch._dynamo.testing import CompileCounterWithBackend

ROWS, HIDDEN, VOCAB = 11, 24, 131  # no size a multiple of anything the kernels like
FROZEN = (True, False, False, False, False)
TRAINED = (True,) * 5
ONLY_ADAPTER = (True, False, False, True, True)
TERMS = ({}, {"softcap": 2.0}, {"logit_scale": -0.5}, {"softcap": 20.0, "logit_scale": 3.0, "ignore_index": 7})
CHUNKS = {"one row": 1, "five rows": 5, "all rows": ROWS}


def example(device: torch.device, dtype: torch.dtype = torch.float32, *, leading: tuple[int, ...] = (ROWS,)):
    """Return hidden, weight, bias, lora_a, lora_b and labels, a quarter ignored."""
    hidden = torch.randn(*leading, HIDDEN, device=device, dtype=dtype)
    weight, lora_a = (0.3 * torch.randn(n, HIDDEN, device=device, dtype=dtype) for n in (VOCAB, 3))
    bias, lora_b = (torch.randn(*size, device=device, dtype=dtype) for size in ((VOCAB,), (VOCAB, 3)))
    labels = torch.randint(VOCAB, leading, device=device)
    labels.view(-1)[1::4] = -100
    return hidden, weight, bias, lora_a, lora_b, labels


def of(op, labels, lora_scale=1.0, **options):
    """Return the log-probabilities as a function of hidden, weight, bias, A and B of LoRA; some may be left out."""

    def logprob(hidden, weight, bias=None, *adapter):
        lora = LinearLora(*adapter, lora_scale) if adapter else None
        return op(hidden, weight, labels, bias, lora=lora, **options).logprob

    return logprob


def agrees(inputs, labels, *, grads, rows_per_chunk: int = ROWS, **options) -> None:
    chunk_bytes = rows_per_chunk * VOCAB * inputs[0].itemsize
    ours = of(linear_log_probs, labels, chunk_bytes=chunk_bytes, **options)
    # dX of a frozen layer is rounded in the forward, and again when it is multiplied by the upstream gradient.
    slack = 1.0 if any(grads[1:]) else 2.0
    judge(ours, of(linear_log_probs_reference, labels, **options), inputs, grads=grads, slack=slack)


@pytest.mark.parametrize(
    "grads, dtype, rows_per_chunk",
    every_pair(
        [pytest.param(FROZEN, id="frozen"), pytest.param(TRAINED, id="trained"), pytest.param(ONLY_ADAPTER, id="lora")],
        DTYPES,
        [pytest.param(rows, id=name) for name, rows in CHUNKS.items()],
    ),
)
def test_agrees_with_float64(grads, dtype, rows_per_chunk, device) -> None:
    """With an upstream gradient for each token, as documents' losses have it."""
    *tensors, labels = example(device, dtype)
    agrees(tensors, labels, grads=grads, rows_per_chunk=rows_per_chunk, lora_scale=0.5)


@pytest.mark.parametrize("grads", [FROZEN[:2], TRAINED[:2]], ids=["frozen", "trained"])
@pytest.mark.parametrize("terms", TERMS, ids=str)
def test_every_term_agrees_with_float64(terms, grads, device) -> None:
    hidden, weight, *_, labels = example(device, leading=(2, 5))
    labels[labels == -100] = terms.get("ignore_index", -100)
    agrees([hidden, weight], labels, grads=grads, rows_per_chunk=3, **terms)


@pytest.mark.parametrize("needed", range(5), ids=["hidden", "weight", "bias", "lora_a", "lora_b"])
def test_computes_only_the_gradient_that_is_needed(needed, device) -> None:
    *tensors, labels = example(device)
    agrees(tensors, labels, grads=[i == needed for i in range(5)])


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("terms", TERMS, ids=str)
def test_statistics_agree_with_float64(terms, dtype, device) -> None:
    *tensors, labels = example(device, dtype, leading=(2, 5))
    labels[labels == -100] = terms.get("ignore_index", -100)

    def call(op, wanted: torch.dtype, **options):
        hidden, weight, bias, a, b = (t.to(wanted) for t in tensors)
        return op(hidden, weight, labels, bias, lora=LinearLora(a, b), **terms, **options)

    ours = call(linear_log_probs, dtype, statistics=True, chunk_bytes=3 * VOCAB * dtype.itemsize)
    plain, truth = (call(linear_log_probs_reference, wide, statistics=True) for wide in (dtype, torch.float64))
    for name in ("logprob", "entropy", "mean_logit"):
        assert_close(name, *(getattr(found, name) for found in (ours, plain, truth)), dtype)
    ignored = labels == terms.get("ignore_index", -100)
    assert ignored.any() and not any(found[ignored].any() for found in ours)
    if dtype is torch.float32:
        assert torch.equal(ours.argmax, truth.argmax) and ours.argmax.dtype == torch.int64


@pytest.mark.parametrize("grads", [(), FROZEN, TRAINED], ids=["no gradient", "frozen", "trained"])
def test_statistics_change_neither_log_probabilities_nor_gradients(grads, device) -> None:
    *tensors, labels = example(device)
    leaves = [t.requires_grad_(i < len(grads) and grads[i]) for i, t in enumerate(tensors)]
    found = []
    for statistics in (False, True):
        hidden, weight, bias, a, b = leaves
        outputs = linear_log_probs(hidden, weight, labels, bias, lora=LinearLora(a, b), statistics=statistics)
        assert (outputs.entropy is not None) == statistics
        assert not statistics or not any(t.requires_grad for t in outputs[1:])
        needed = [leaf for leaf in leaves if leaf.requires_grad]
        gradients = torch.autograd.grad(outputs.logprob.square().sum(), needed) if needed else ()
        found.append((outputs.logprob, *gradients))
    assert all(torch.equal(a, b) for a, b in zip(*found, strict=True))


@pytest.mark.parametrize("frozen", [True, False], ids=["frozen", "trained"])
def test_only_labelled_rows_are_computed(frozen, device) -> None:
    """Rows without a label hold NaN: they change nothing."""
    hidden, weight, *_, labels = example(device, leading=(3, 7))
    expected = linear_log_probs_reference(hidden.requires_grad_(), weight, labels, statistics=True)
    (truth,) = torch.autograd.grad(expected.logprob.square().sum(), hidden)
    empty = torch.where((labels == -100).unsqueeze(-1), torch.nan, hidden).detach().requires_grad_()
    rows = find_labelled_rows(labels.cpu(), multiple_of=1)
    found = linear_log_probs(empty, weight.requires_grad_(not frozen), labels, labelled_rows=rows, statistics=True)
    torch.testing.assert_close(tuple(found), tuple(expected))
    found.logprob.square().sum().backward()
    torch.testing.assert_close(empty.grad, truth)
    assert frozen or weight.grad.isfinite().all()


@pytest.mark.parametrize("frozen", [True, False], ids=["frozen", "trained"])
def test_a_label_that_is_no_class_is_nan_in_its_row_alone(frozen, device) -> None:
    hidden, weight, *_, labels = example(device)
    labels[2], labels[3], labels[4] = VOCAB, -1, VOCAB - 1
    found = linear_log_probs(hidden.requires_grad_(), weight.requires_grad_(not frozen), labels, statistics=True)
    found.logprob.sum().backward()
    for bad in (found.logprob.isnan(), hidden.grad.isnan().all(dim=1), hidden.grad.isnan().any(dim=1)):
        assert bad.nonzero().flatten().tolist() == [2, 3]
    assert found.entropy.isfinite().all() and found.mean_logit.isfinite().all()


@pytest.mark.parametrize("frozen", [True, False], ids=["frozen", "trained"])
def test_takes_tensors_of_any_stride_and_small_labels(frozen, device) -> None:
    hidden, weight, *_, labels = example(device, leading=(6, 4))
    doubled = hidden.repeat_interleave(2, -1)  # every second column
    for part in (lambda t: t[:, :-1], lambda t: t.transpose(0, 1), lambda t: t[1:, ::2]):
        found = []
        for op, x in ((linear_log_probs_reference, hidden), (linear_log_probs, doubled[..., ::2])):
            x = x.detach().requires_grad_()
            logprob = op(part(x), weight.requires_grad_(not frozen), part(labels).int()).logprob
            found.append((logprob, *torch.autograd.grad(logprob.sum(), x)))
        torch.testing.assert_close(*found)


@pytest.mark.parametrize("frozen", [True, False], ids=["frozen", "trained"])
@pytest.mark.parametrize("shape", [(0,), (2, 0)])
def test_empty_tensors_have_empty_results_and_zero_gradients(shape, frozen, device) -> None:
    hidden, weight, *_, labels = example(device, leading=shape)
    found = linear_log_probs(hidden.requires_grad_(), weight.requires_grad_(not frozen), labels, statistics=True)
    assert all(t.shape == shape for t in found)
    found.logprob.sum().backward()
    assert hidden.grad.shape == hidden.shape and (frozen or not weight.grad.any())


@pytest.mark.parametrize("frozen", [True, False], ids=["frozen", "trained"])
def test_all_labels_ignored_give_zeros(frozen, device) -> None:
    hidden, weight, *_, labels = example(device)
    found = linear_log_probs(
        hidden.requires_grad_(), weight.requires_grad_(not frozen), labels.fill_(-100), statistics=True
    )
    found.logprob.sum().backward()
    assert not any(t.any() for t in found) and not hidden.grad.any() and (frozen or not weight.grad.any())


@pytest.mark.parametrize("frozen", [True, False], ids=["frozen", "trained"])
def test_a_second_backward_is_right_or_refused(frozen, device) -> None:
    hidden, weight, *_, labels = example(device)
    loss = linear_log_probs(hidden.requires_grad_(), weight.requires_grad_(not frozen), labels).logprob.square().sum()
    (first,) = torch.autograd.grad(loss, hidden, retain_graph=True)
    if frozen and runs_triton(hidden):
        with pytest.raises(RuntimeError, match=r"linear_log_probs.*run the forward again"):
            loss.backward()
    else:
        assert torch.equal(first, torch.autograd.grad(loss, hidden)[0])


def test_float16_keeps_small_probabilities(device) -> None:
    """One class has nearly all of the probability: 40 others have 1.5e-8 each, less than float16 holds."""
    hidden = torch.ones(1, 1, device=device, dtype=torch.float16)
    weight = torch.full((41, 1), -18.0, device=device, dtype=torch.float16)
    weight[0] = 0.0
    labels = torch.zeros(1, device=device, dtype=torch.int64)
    found = []
    for op, dtype in ((linear_log_probs, torch.float16), (linear_log_probs_reference, torch.float64)):
        x = hidden.to(dtype, copy=True).requires_grad_()
        (65536.0 * op(x, weight.to(dtype), labels).logprob).sum().backward()
        found.append(x.grad.double())
    torch.testing.assert_close(*found, rtol=0.05, atol=0.0)


@pytest.mark.skipif(launcher.INTERPRETED, reason="torch.compile cannot trace the interpreter")
@pytest.mark.parametrize("frozen", [True, False], ids=["frozen", "trained"])
def test_two_compiled_graphs_serve_all_numbers_of_rows(frozen, device) -> None:
    counter = CompileCounterWithBackend("aot_eager")
    compiled = torch.compile(linear_log_probs, backend=counter, fullgraph=True)
    for n_rows in (ROWS, 7, 19, 4):
        *tensors, labels = example(device, leading=(n_rows,))
        results = []
        for op in (compiled, linear_log_probs):
            leaves = [t.detach().clone().requires_grad_(i == 0 or not frozen) for i, t in enumerate(tensors)]
            hidden, weight, bias, a, b = leaves
            found = op(hidden, weight, labels, bias, lora=LinearLora(a, b), softcap=3.0, statistics=True)
            found.logprob.square().sum().backward()
            results.append([*(t.detach() for t in found), *(leaf.grad for leaf in leaves if leaf.requires_grad)])
        torch.testing.assert_close(*results, rtol=1e-5, atol=1e-5)
    assert counter.frame_count == 2
    torch._dynamo.reset()


def test_predicted_memory() -> None:
    """A frozen layer holds dX; a trained one nothing, and its backward needs what linear_cross_entropy's does."""
    sizes = (8192, 4096, 128256, torch.bfloat16)
    frozen, trained, evaluated = (
        log_probs_memory(*sizes, needs_dx=dx, needs_dw=dw) for dx, dw in ((True, False), (True, True), (False, False))
    )
    assert frozen.forward == trained.forward == evaluated.forward == 1152 * 128256 * 2
    assert (frozen.held, frozen.backward) == (8192 * 4096 * 2, 0) and evaluated[1:] == (0, 0)
    assert (trained.held, trained.backward) == (0, schedule_of(*sizes).extra_bytes)
    assert log_probs_memory(*sizes, needs_dw=True, free_bytes=1 << 30).backward < trained.backward
