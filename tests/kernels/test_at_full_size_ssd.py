"""ssd on a GPU at the sizes of Nemotron-H: rounding, 5 equal runs, more than 2³¹ elements, no wait for the device."""

import pytest
import torch
from ligertune_kernels import ssd, ssd_reference, ssd_step
from support.kernels.attention_runs import documents_of
from support.kernels.judge import ONE_ROUNDING

pytestmark = pytest.mark.gpu

HEADS = (128, 8, 64, 128)  # of Nemotron-H-8B: heads, groups, width of a head, width of a state
ROUNDINGS = 8  # of 16-bit factors between an input and a gradient
DOCUMENT = 1024  # tokens of each document of a row with more than 2³¹ elements: whole chunks
ROWS = ("x", "dt", "B", "C")  # what has tokens


def inputs(n_tokens: int, heads, device, *, decay: float, dtype=torch.bfloat16) -> dict[str, torch.Tensor]:
    """Return the tensors of one row without z; x, B and C are views of one projection."""
    n_heads, groups, head_dim, state_dim = heads
    sizes = (n_heads * head_dim, groups * state_dim, groups * state_dim)
    x, b, c = torch.randn(1, n_tokens, sum(sizes), device=device, dtype=dtype).split(sizes, -1)
    return {
        "x": x.unflatten(-1, (n_heads, head_dim)),
        "dt": torch.randn(1, n_tokens, n_heads, device=device, dtype=dtype),
        "A": -decay * (0.1 + torch.rand(n_heads, device=device)),
        "B": b.unflatten(-1, (groups, state_dim)),
        "C": c.unflatten(-1, (groups, state_dim)),
        "D": torch.randn(n_heads, device=device),
        "dt_bias": torch.randn(n_heads, device=device) - 2.0,
    }


def run(function, tensors, grad, **options) -> dict[str, torch.Tensor]:
    leaves = {name: t.detach().requires_grad_() for name, t in tensors.items()}
    out = function(**leaves, dt_softplus=True, **options)
    out = out if isinstance(out, torch.Tensor) else out[0]  # the reference returns the last state, too
    found = torch.autograd.grad(out, list(leaves.values()), grad.to(out.dtype))
    return {"out": out.detach()} | dict(zip(leaves, found, strict=True))


@pytest.mark.parametrize("decay", [1e-4, 1.0, 20.0])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
@pytest.mark.parametrize(
    "heads", [(16, 2, 64, 128), (8, 1, 128, 256), (34, 1, 64, 64), (3, 3, 80, 96), (2, 1, 256, 16)], ids=str
)
def test_outputs_and_gradients_round_within_their_factors(heads, dtype, decay, device) -> None:
    tensors = inputs(1500, heads, device, decay=decay, dtype=dtype)
    grad = torch.randn(tensors["x"].shape, device=device, dtype=dtype)
    lengths = (700, 1, 2, 297, 500)
    found = run(ssd, tensors, grad, documents=documents_of(lengths, device))
    wide = {name: t.double() for name, t in tensors.items()}
    expected = run(ssd_reference, wide, grad, documents=documents_of(lengths, device))
    for name, truth in expected.items():
        error = (found[name].double() - truth).abs().max()
        assert error <= ROUNDINGS * ONE_ROUNDING[dtype] * truth.abs().max().clamp(min=0.1), name


@pytest.mark.parametrize("lengths", [(4096,), (700, 1, 64, 283, 2100, 1300)], ids=str)
def test_five_runs_have_the_same_bits(lengths, device) -> None:
    tensors = inputs(sum(lengths), HEADS, device, decay=1.0)
    grad = torch.randn_like(tensors["x"])
    first, *others = (run(ssd, tensors, grad, documents=documents_of(lengths, device)) for _ in range(5))
    assert all(torch.equal(first[name], other[name]) for other in others for name in first)


def test_a_document_has_its_gradients_anywhere_in_more_than_2_31_elements(device) -> None:
    """x, its gradients and the states have more than 2³¹ elements, 4 GiB each; the run needs about 40 GiB.

    Each document begins with a chunk, as it does alone: all its sums are rounded in the same places.
    """
    lengths = (DOCUMENT,) * 257
    tensors = inputs(sum(lengths), HEADS, device, decay=1.0)
    assert tensors["x"].numel() > 1 << 31
    grad = torch.randn(tensors["x"].shape, device=device, dtype=torch.bfloat16)
    found = run(ssd, tensors, grad, documents=documents_of(lengths, device))
    for i in (0, 128, 256):
        own = slice(i * DOCUMENT, (i + 1) * DOCUMENT)
        part = tensors | {name: tensors[name][:, own] for name in ROWS}
        alone = run(ssd, part, grad[:, own], documents=documents_of((DOCUMENT,), device))
        for name in ("out", *ROWS):
            assert torch.equal(found[name][:, own], alone[name]), name


def test_nothing_waits_for_the_device(no_synchronisation, device) -> None:
    tensors = {name: t.detach().requires_grad_() for name, t in inputs(512, HEADS, device, decay=1.0).items()}
    documents = documents_of((100, 412), device)
    state = torch.zeros(1, *HEADS[::2], HEADS[3], device=device)
    token = {name: t[:, 0] if name in ROWS else t for name, t in tensors.items()}
    no_synchronisation()
    ssd(**tensors, dt_softplus=True, documents=documents).sum().backward()
    ssd_step(state, **token, dt_softplus=True)
