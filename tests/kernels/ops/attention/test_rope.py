"""apply_rope against float64: pairings, partial rotation, tables, strides, layouts; in-place rules."""

from __future__ import annotations

import pytest
import torch
from covering import every_pair
from judge import DTYPES, judge_op
from ligertune_kernels import apply_rope, apply_rope_reference

SHAPES = (
    # B, H, K, T, D, R
    pytest.param((1, 1, 1, 1, 2, 2), id="the smallest"),
    pytest.param((2, 4, 2, 3, 16, 16), id="grouped heads"),
    pytest.param((2, 7, 1, 3, 24, 12), id="odd heads, sizes not powers of two, half of the columns rotated"),
    pytest.param((1, 96, 8, 2, 128, 128), id="more heads than one tile holds"),
    pytest.param((3, 14, 2, 67, 32, 32), id="tiles that end within a sequence; more tokens per tile of k than of q"),
    pytest.param((1, 2, 1, 3, 2100, 2064), id="a head longer than a tile, with few unrotated columns"),
    pytest.param((2, 3, 2, 5, 40, 8), id="more unrotated than rotated columns"),
)


def angles(batch: int, n_tokens: int, rotary_dim: int, device: torch.device) -> tuple[torch.Tensor, torch.Tensor]:
    """Return cos and sin (B, T, R) with a different angle per column, which no model uses but the op allows."""
    angle = 6.0 * torch.rand(batch, n_tokens, rotary_dim, device=device)
    return angle.cos(), angle.sin()


def queries_and_keys(shape, dtype, device) -> tuple[torch.Tensor, torch.Tensor]:
    """Return q and k as models make them: transposed projections (B, T, H, D)."""
    batch, n_q_heads, n_k_heads, n_tokens, head_dim, _ = shape
    q, k = (torch.randn(batch, n_tokens, n, head_dim, device=device, dtype=dtype) for n in (n_q_heads, n_k_heads))
    return q.transpose(1, 2), k.transpose(1, 2)


@pytest.mark.parametrize("inplace", [False, True])
@pytest.mark.parametrize("shape, interleaved, dtype", every_pair(SHAPES, [False, True], DTYPES))
def test_agrees_with_float64(shape, interleaved, dtype, inplace, device) -> None:
    cos, sin = angles(shape[0], shape[3], shape[5], device)
    inputs = queries_and_keys(shape, dtype, device)
    judge_op(apply_rope, inputs, cos, sin, interleaved=interleaved, ours={"inplace": inplace})


@pytest.mark.parametrize("batch", [1, 2])
def test_tables_of_low_precision_are_per_sequence_or_shared(batch, device) -> None:
    shape = (2, 2, 1, 3, 8, 8)
    cos, sin = (t.bfloat16() for t in angles(batch, 3, 8, device))
    q, k = queries_and_keys(shape, torch.float32, device)
    torch.testing.assert_close(apply_rope(q, k, cos, sin), apply_rope_reference(q, k, cos, sin))


@pytest.mark.parametrize("rows", [1, 2])
def test_position_ids_select_rows_of_a_table(rows, device) -> None:
    cos, sin = (t[0] for t in angles(1, 11, 8, device))
    position_ids = torch.tensor([[0, 10, 3], [7, 7, 1]], device=device)[:rows]
    q, k = queries_and_keys((2, 2, 1, 3, 8, 8), torch.float32, device)
    expected = apply_rope_reference(q, k, cos[position_ids], sin[position_ids])
    torch.testing.assert_close(apply_rope(q, k, cos, sin, position_ids), expected)


def test_takes_any_strides_and_keeps_a_projections_layout(device) -> None:
    cos, sin = angles(1, 5, 16, device)
    packed = torch.randn(2, 5, 6, 16, device=device)  # q, k and v heads of a packed projection
    q, k = packed[:, :, :3].transpose(1, 2), packed[:, :, 3:5].transpose(1, 2)
    rotated = apply_rope(q, k, cos, sin)
    torch.testing.assert_close(rotated, apply_rope_reference(q, k, cos, sin))
    contiguous = apply_rope(q.contiguous(), k.contiguous(), cos, sin)
    torch.testing.assert_close(contiguous, rotated)
    assert all(t.is_contiguous() for t in contiguous)
    assert all(t.transpose(1, 2).is_contiguous() for t in rotated)  # no copy follows


@pytest.mark.parametrize("interleaved", [False, True])
@pytest.mark.parametrize("inplace", [False, True])
def test_takes_non_contiguous_columns(inplace, interleaved, device) -> None:
    cos, sin = angles(2, 5, 12, device)
    q, k = (torch.randn(16, 5, n, 2, device=device).permute(3, 2, 1, 0) for n in (9, 3))
    expected = apply_rope_reference(q, k, cos, sin, interleaved=interleaved)
    torch.testing.assert_close(apply_rope(q, k, cos, sin, interleaved=interleaved, inplace=inplace), expected)


def test_a_position_outside_the_table_gives_nan(device) -> None:
    cos, sin = (t[0] for t in angles(1, 4, 8, device))
    position_ids = torch.tensor([[0, 4, 3], [-1, 1, 1 << 40]], device=device)
    q, k = queries_and_keys((2, 9, 2, 3, 12, 8), torch.float32, device)
    for rotated, x in zip(apply_rope(q, k, cos, sin, position_ids), (q, k), strict=True):
        outside = (position_ids < 0) | (position_ids >= 4)
        assert torch.equal(rotated[..., :8].isnan().all(-1), outside[:, None].expand(rotated.shape[:-1]))
        assert torch.equal(rotated[..., :8].isnan().any(-1), outside[:, None].expand(rotated.shape[:-1]))
        torch.testing.assert_close(rotated[..., 8:], x[..., 8:], rtol=0, atol=0)


def projected(device, *, bias: bool = False) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Return a trained leaf, and q and k (2, 4 or 2, 3, 8) as attention makes them: views of a matrix product."""
    x = torch.randn(2, 3, 6, device=device, requires_grad=True)
    weights = torch.randn(32, 6, device=device), torch.randn(16, 6, device=device)
    biases = [torch.randn(len(w), device=device) if bias else None for w in weights]
    q, k = (torch.nn.functional.linear(x, w, b) for w, b in zip(weights, biases, strict=True))
    return x, q.view(2, 3, 4, 8).transpose(1, 2), k.view(2, 3, 2, 8).transpose(1, 2)


def same_memory(a: torch.Tensor, b: torch.Tensor) -> bool:
    return (a.data_ptr(), a.stride(), a.shape) == (b.data_ptr(), b.stride(), b.shape)


@pytest.mark.parametrize("bias", [False, True])  # with a bias the projection's output is itself a view
@pytest.mark.parametrize("grad", [False, True])
def test_in_place_allocates_no_results(grad, bias, device) -> None:
    cos, sin = angles(1, 3, 8, device)
    with torch.set_grad_enabled(grad):
        _, q, k = projected(device, bias=bias)
        expected = apply_rope(q, k, cos, sin)
        rotated = apply_rope(q, k, cos, sin, inplace=True)
    torch.testing.assert_close(rotated, expected, rtol=0, atol=0)
    assert all(same_memory(*pair) for pair in zip(rotated, (q, k), strict=True))


def test_backward_in_place_overwrites_the_gradients(device) -> None:
    cos, sin = angles(1, 3, 8, device)
    q, k = (torch.randn(2, 3, heads, 8, device=device).transpose(1, 2).requires_grad_() for heads in (4, 2))
    upstream = torch.randn_like(q), torch.randn_like(k)
    expected = torch.autograd.grad(apply_rope(q, k, cos, sin), (q, k), upstream)
    found = torch.autograd.grad(apply_rope(q, k, cos, sin, inplace_backward=True), (q, k), upstream)
    torch.testing.assert_close(found, expected, rtol=0, atol=0)
    assert all(same_memory(*pair) for pair in zip(found, upstream, strict=True))
    # The gradient of a sum is one number in memory (strides of zero), which cannot be overwritten.
    expected = torch.autograd.grad(sum(t.sum() for t in apply_rope(q, k, cos, sin)), (q, k))
    found = torch.autograd.grad(sum(t.sum() for t in apply_rope(q, k, cos, sin, inplace_backward=True)), (q, k))
    torch.testing.assert_close(found, expected)


def test_in_place_raises_where_an_earlier_op_still_needs_q(device) -> None:
    cos, sin = angles(1, 3, 8, device)
    _, q, k = projected(device)
    kept = q.square().sum()  # saves q
    rotated, _ = apply_rope(q, k, cos, sin, inplace=True)
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        (kept + rotated.sum()).backward()
    _, q, k = projected(device)
    rotated, _ = apply_rope(q, k, cos, sin, inplace=True)
    with pytest.raises(RuntimeError, match="read after it was rotated in place"):
        (rotated.sum() + q.sum()).backward()


def test_in_place_allows_a_second_backward_and_other_readers_of_the_results(device) -> None:
    """A gradient that two branches share, and one that the caller holds, must not be overwritten."""
    cos, sin = angles(1, 3, 8, device)
    results = []
    for inplace in (False, True):
        torch.manual_seed(0)
        x, q, k = projected(device)
        a, b = apply_rope(q, k, cos, sin, inplace=inplace)
        extra = torch.zeros_like(a, requires_grad=True)
        upstream = torch.ones_like(a), torch.ones_like(b)
        results += [torch.autograd.grad((a + extra, b), (x, extra), upstream, retain_graph=not i) for i in range(2)]
        assert all(bool((g == 1.0).all()) for g in upstream)
    for found in results[1:]:
        torch.testing.assert_close(found, results[0])


def queries_and_keys_of(device, form: str) -> tuple[torch.Tensor, torch.Tensor]:
    """Return q and k (2, 2 or 1, 3, 8) that may not be overwritten where a gradient is needed."""
    whole = torch.randn(2, 4, 3, 8, device=device, requires_grad=True) * 1.0
    if form == "leaf":
        return (torch.randn(2, n, 3, 8, device=device, requires_grad=True) for n in (2, 1))
    if form == "view of a leaf":
        return (torch.randn(2, 3, n, 8, device=device, requires_grad=True).transpose(1, 2) for n in (2, 1))
    if form == "split":
        return whole.split([2, 1, 1], dim=1)[:2]
    if form == "unbind":
        return (whole.view(2, 2, 2, 3, 8).unbind(1)[0], whole.sum(1, keepdim=True))
    if form == "one tensor":
        return whole, whole
    if form == "repeated heads":
        return whole, whole[:, :1].expand(2, 3, 3, 8)
    return whole, whole.detach().clone()  # a frozen k


FORMS = ("leaf", "view of a leaf", "split", "unbind", "one tensor", "repeated heads", "frozen k")


@pytest.mark.parametrize("form", FORMS)
def test_in_place_allocates_where_overwriting_is_not_allowed(form, device) -> None:
    cos, sin = angles(1, 3, 8, device)
    q, k = queries_and_keys_of(device, form)
    before = q.detach().clone(), k.detach().clone()
    rotated = apply_rope(q, k, cos, sin, inplace=True)
    torch.testing.assert_close((q.detach(), k.detach()), before, rtol=0, atol=0)
    inputs = [t for t in (q, k) if t.requires_grad]
    cubes = [sum(t.pow(3).sum() for t in pair) for pair in (rotated, apply_rope_reference(q, k, cos, sin))]
    torch.testing.assert_close(*(torch.autograd.grad(s, inputs, retain_graph=True) for s in cubes))


def test_in_place_under_checkpointing(checkpointed, device) -> None:
    """Products kept for the second forward must not be rotated by the first one."""
    cos, sin = angles(1, 3, 8, device)
    weight = torch.randn(32, 6, device=device, requires_grad=True)
    x = torch.randn(2, 3, 6, device=device, requires_grad=True)

    def layer(x: torch.Tensor, inplace: bool) -> torch.Tensor:
        q, k = (torch.nn.functional.linear(x, w).view(2, 3, -1, 8).transpose(1, 2) for w in (weight, weight[:16]))
        return sum(t.pow(3).sum() for t in apply_rope(q, k, cos, sin, inplace=inplace))

    expected = torch.autograd.grad(layer(x, False), (x, weight))
    checkpointed(layer, x, True).backward()
    torch.testing.assert_close((x.grad, weight.grad), expected)


@pytest.mark.gpu
def test_in_place_compiles_without_a_graph_break(device) -> None:
    cos, sin = angles(1, 3, 8, device)
    x, q, k = projected(device)
    compiled = torch.compile(lambda q, k: apply_rope(q * 1.0, k * 1.0, cos, sin, inplace=True), fullgraph=True)
    found, expected = compiled(q, k), apply_rope(q, k, cos, sin)
    torch.testing.assert_close(found, expected)
    sums = (sum(t.pow(3).sum() for t in pair) for pair in (found, expected))
    torch.testing.assert_close(*(torch.autograd.grad(s, x, retain_graph=True)[0] for s in sums))
