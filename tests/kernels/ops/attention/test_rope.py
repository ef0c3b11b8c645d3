"""apply_rope against float64: pairings, partial rotation, q alone, tables, strides, layouts."""

from functools import partial

import pytest
import torch
from ligertune_kernels import apply_rope, apply_rope_reference
from support.covering import every_pair
from support.kernels.judge import DTYPES, judge, judge_op

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


@pytest.mark.parametrize("shape, interleaved, dtype", every_pair(SHAPES, [False, True], DTYPES))
def test_agrees_with_float64(shape, interleaved, dtype, device) -> None:
    cos, sin = angles(shape[0], shape[3], shape[5], device)
    inputs = queries_and_keys(shape, dtype, device)
    judge_op(apply_rope, inputs, cos, sin, interleaved=interleaved)


# (interleaved, deinterleave), columns of cos for a pair, with keys or not
LAYOUTS = ((False, False), (True, False), (True, True))


@pytest.mark.parametrize("shape, layout, columns, keys", every_pair(SHAPES, LAYOUTS, [1, 2], [True, False]))
def test_every_layout_agrees_with_float64(shape, layout, columns, keys, device) -> None:
    interleaved, deinterleave = layout
    cos, sin = angles(shape[0], shape[3], shape[5] * columns // 2, device)
    q, k = queries_and_keys(shape, torch.float32, device)
    options = {"interleaved": interleaved, "deinterleave": deinterleave, "rotary_dim": shape[5]}

    def call(op, *inputs):
        rotated = op(inputs[0], inputs[1] if keys else None, cos, sin, **options)
        return rotated if keys else rotated[0]

    judge(partial(call, apply_rope), partial(call, apply_rope_reference), (q, k) if keys else (q,))
    assert keys or apply_rope(q, None, cos, sin, **options)[1] is None


def test_a_deinterleaved_rotation_is_the_interleaved_one_in_another_order(device) -> None:
    cos, sin = angles(1, 3, 8, device)
    q, k = queries_and_keys((2, 4, 2, 3, 12, 8), torch.float32, device)
    pairs = apply_rope(q, k, cos, sin, interleaved=True)
    order = [0, 2, 4, 6, 1, 3, 5, 7, 8, 9, 10, 11]
    for rotated, other in zip(apply_rope(q, k, cos, sin, interleaved=True, deinterleave=True), pairs, strict=True):
        torch.testing.assert_close(rotated, other[..., order], rtol=0, atol=0)


def test_a_complex_table_is_read_as_cos_and_sin(device) -> None:
    q, k = queries_and_keys((2, 4, 2, 3, 8, 8), torch.float32, device)
    table = torch.polar(torch.ones(1, 3, 4, device=device), 6.0 * torch.rand(1, 3, 4, device=device))
    cos, sin = torch.view_as_real(table).unbind(-1)  # every second number
    for x, rotated in zip((q, k), apply_rope(q, k, cos, sin, interleaved=True, rotary_dim=8), strict=True):
        pairs = torch.view_as_complex(x.unflatten(-1, (4, 2)).contiguous())
        torch.testing.assert_close(rotated, torch.view_as_real(pairs * table[:, None]).flatten(-2))


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
def test_takes_non_contiguous_columns(interleaved, device) -> None:
    cos, sin = angles(2, 5, 12, device)
    q, k = (torch.randn(16, 5, n, 2, device=device).permute(3, 2, 1, 0) for n in (9, 3))
    expected = apply_rope_reference(q, k, cos, sin, interleaved=interleaved)
    torch.testing.assert_close(apply_rope(q, k, cos, sin, interleaved=interleaved), expected)


def test_a_position_outside_the_table_gives_nan(device) -> None:
    cos, sin = (t[0] for t in angles(1, 4, 8, device))
    position_ids = torch.tensor([[0, 4, 3], [-1, 1, 1 << 40]], device=device)
    q, k = queries_and_keys((2, 9, 2, 3, 12, 8), torch.float32, device)
    for rotated, x in zip(apply_rope(q, k, cos, sin, position_ids), (q, k), strict=True):
        outside = (position_ids < 0) | (position_ids >= 4)
        assert torch.equal(rotated[..., :8].isnan().all(-1), outside[:, None].expand(rotated.shape[:-1]))
        assert torch.equal(rotated[..., :8].isnan().any(-1), outside[:, None].expand(rotated.shape[:-1]))
        torch.testing.assert_close(rotated[..., 8:], x[..., 8:], rtol=0, atol=0)


@pytest.mark.gpu
@pytest.mark.parametrize("options", [{}, {"interleaved": True, "deinterleave": True, "rotary_dim": 16}], ids=str)
@pytest.mark.parametrize("alone", [False, True])
def test_compiles_without_a_graph_break(options, alone, device) -> None:
    cos, sin = angles(1, 3, 8, device)
    shape = (2, 4, 2, 3, options.get("rotary_dim", 8), 8)
    inputs = [t.requires_grad_() for t in queries_and_keys(shape, torch.float32, device)][: 1 if alone else 2]

    def rotated(q: torch.Tensor, k: torch.Tensor | None = None) -> list[torch.Tensor]:
        pair = apply_rope(q * 1.0, None if k is None else k * 1.0, cos, sin, **options)
        return [t for t in pair if t is not None]

    found, expected = torch.compile(rotated, fullgraph=True)(*inputs), rotated(*inputs)
    torch.testing.assert_close(found, expected)
    cubes = [sum(t.pow(3).sum() for t in pair) for pair in (found, expected)]
    torch.testing.assert_close(*(torch.autograd.grad(cube, inputs) for cube in cubes))
