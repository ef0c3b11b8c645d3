"""embedding: exact rows, and gradients whose segments begin in, end in, cross and fill the backward's chunks."""

import pytest
import torch
from ligertune_kernels import Embedding, embedding, embedding_reference
from ligertune_kernels.ops.extra.tiles import SORTED_CHUNK as CHUNK
from support.covering import every_pair
from support.kernels.judge import DTYPES, judge

V = 11
WIDTHS = (8, 1030)  # several rows per program; a ragged second block in the backward
SEGMENTS = (
    pytest.param([1], id="one index"),
    pytest.param([CHUNK], id="one segment, one chunk"),
    pytest.param([2 * CHUNK], id="a segment that fills two chunks"),
    pytest.param([2 * CHUNK + 1], id="a segment that ends one row after two chunks"),
    pytest.param([3, CHUNK, CHUNK - 3], id="a segment that ends where the next chunk ends"),
    pytest.param([5, 3 * CHUNK, 2, 1], id="a segment that crosses two whole chunks"),
    pytest.param([CHUNK, CHUNK, 1], id="segments that begin and end with their chunks"),
    pytest.param([1] * V, id="every index once"),
    pytest.param([CHUNK - 1, 2, CHUNK + 5, 2 * CHUNK, 7], id="crossings in a row, the last chunk ragged"),
)


def shuffled(lengths: list[int], device: torch.device, dtype: torch.dtype = torch.int64) -> torch.Tensor:
    """Return shuffled indices that occur as often as `lengths` gives, drawn from a table in random order."""
    values = torch.randperm(V)[: len(lengths)].repeat_interleave(torch.tensor(lengths))
    return values[torch.randperm(values.numel())].to(device, dtype)


@pytest.mark.parametrize("lengths, dtype, n_cols", every_pair(SEGMENTS, DTYPES, WIDTHS))
def test_agrees_with_float64(lengths, dtype, n_cols, device) -> None:
    indices = shuffled(lengths, device)
    weight = torch.randn(V, n_cols, device=device, dtype=dtype)
    assert torch.equal(embedding(indices, weight), weight[indices])

    def plain(w: torch.Tensor) -> torch.Tensor:
        """Round the gradient once, as the kernels do; torch rounds each partial sum on some devices."""
        return embedding_reference(indices, w if w.dtype == torch.float64 else w.float()).to(w.dtype)

    judge(lambda w: embedding(indices, w), plain, [weight])


@pytest.mark.parametrize("padding_idx", [4, -1])
@pytest.mark.parametrize("repeats", [1, 2 * CHUNK], ids=["within a chunk", "across chunks"])
def test_padding_gets_no_gradient(repeats, padding_idx, device) -> None:
    indices = torch.tensor([4, 10, 3] * repeats, device=device)
    weight = torch.randn(V, 8, device=device)
    options = {"indices": indices, "padding_idx": padding_idx}
    judge(lambda w: embedding(weight=w, **options), lambda w: embedding_reference(weight=w, **options), [weight])


@pytest.mark.parametrize("dtype", [torch.int32, torch.int64])
def test_takes_indices_of_any_shape_and_a_table_of_any_stride(dtype, device) -> None:
    indices = shuffled([4, 20, 12], device, dtype).view(3, 4, 3).transpose(0, 2)
    for weight in (torch.randn(V, 24, device=device)[:, 8:], torch.randn(16, V, device=device).T):
        leaf = weight.detach().requires_grad_()
        y, expected = embedding(indices, leaf), embedding_reference(indices, leaf)
        assert torch.equal(y, expected)
        up = torch.randn(16, 3, 4, 3, device=device).permute(1, 2, 3, 0)
        torch.testing.assert_close(torch.autograd.grad(y, leaf, up), torch.autograd.grad(expected, leaf, up))


def test_an_index_outside_the_table_gives_nan(device) -> None:
    weight = torch.randn(V, 8, device=device, requires_grad=True)
    indices = torch.tensor([2, V, -1, 3, 2**40] + [V + 1] * 40, device=device)
    y = embedding(indices, weight)
    assert y[[0, 3]].isfinite().all() and y[[1, 2, *range(4, 45)]].isnan().all()
    (grad,) = torch.autograd.grad(y, weight, torch.ones_like(y))
    expected = torch.zeros(V, 8, device=device)
    expected[[2, 3]] = 1.0
    assert torch.equal(grad, expected)


@pytest.mark.parametrize("shape", [(0,), (2, 0)])
def test_takes_empty_tensors(shape, device) -> None:
    weight = torch.randn(V, 8, device=device, requires_grad=True)
    y = embedding(torch.zeros(shape, device=device, dtype=torch.int64), weight)
    y.sum().backward()
    assert y.shape == (*shape, 8) and not weight.grad.any()


def test_module_agrees_with_torchs(device) -> None:
    indices = shuffled([3, 2], device)
    ours, torchs = Embedding(V, 8, padding_idx=2).to(device), torch.nn.Embedding(V, 8, padding_idx=2).to(device)
    assert not ours.weight[2].any() and ours.weight[3].all()
    ours.load_state_dict(torchs.state_dict())
    assert torch.equal(ours(indices), torchs(indices))
