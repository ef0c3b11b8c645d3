"""apply_rope against float64: pairings, partial rotation, tables, strides, layouts."""

from __future__ import annotations

import pytest
import torch
from judge import judge
from ligertune_kernels import apply_rope, apply_rope_reference, runs_triton

DTYPES = (torch.float32, torch.bfloat16, torch.float16)

SHAPES = (
    # B, H, K, T, D, R
    pytest.param((1, 1, 1, 1, 2, 2), id="the smallest"),
    pytest.param((2, 4, 2, 3, 16, 16), id="grouped heads"),
    pytest.param((2, 7, 1, 3, 24, 12), id="odd heads, sizes of no power of two, half of the columns turned"),
    pytest.param((1, 96, 8, 2, 128, 128), id="more heads than one tile holds"),
)


def angles(batch: int, n_tokens: int, rotary_dim: int, device: torch.device) -> tuple[torch.Tensor, torch.Tensor]:
    """cos and sin (B, T, R), each column its own angle: more than any model asks for."""
    angle = 6.0 * torch.rand(batch, n_tokens, rotary_dim, device=device)
    return angle.cos(), angle.sin()


def queries_and_keys(shape, dtype, device) -> tuple[torch.Tensor, torch.Tensor]:
    """As models have them: projections (B, T, H, D), transposed."""
    batch, n_q_heads, n_k_heads, n_tokens, head_dim, _ = shape
    q, k = (torch.randn(batch, n_tokens, n, head_dim, device=device, dtype=dtype) for n in (n_q_heads, n_k_heads))
    return q.transpose(1, 2), k.transpose(1, 2)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("interleaved", [False, True])
@pytest.mark.parametrize("shape", SHAPES)
def test_agrees_with_float64(shape, interleaved, dtype, device) -> None:
    cos, sin = angles(shape[0], shape[3], shape[5], device)
    judge(
        lambda q, k: apply_rope(q, k, cos, sin, interleaved=interleaved),
        lambda q, k: apply_rope_reference(q, k, cos, sin, interleaved=interleaved),
        queries_and_keys(shape, dtype, device),
    )


@pytest.mark.parametrize("batch", [1, 2])
def test_tables_of_low_precision_serve_one_or_all_sequences(batch, device) -> None:
    shape = (2, 2, 1, 3, 8, 8)
    cos, sin = (t.bfloat16() for t in angles(batch, 3, 8, device))
    q, k = queries_and_keys(shape, torch.float32, device)
    torch.testing.assert_close(apply_rope(q, k, cos, sin), apply_rope_reference(q, k, cos, sin))


@pytest.mark.parametrize("rows", [1, 2])
def test_position_ids_choose_rows_of_a_table(rows, device) -> None:
    cos, sin = (t[0] for t in angles(1, 11, 8, device))
    position_ids = torch.tensor([[0, 10, 3], [7, 7, 1]], device=device)[:rows]
    q, k = queries_and_keys((2, 2, 1, 3, 8, 8), torch.float32, device)
    expected = apply_rope_reference(q, k, cos[position_ids], sin[position_ids])
    torch.testing.assert_close(apply_rope(q, k, cos, sin, position_ids), expected)


def test_takes_any_strides_and_keeps_a_projections_layout(device) -> None:
    cos, sin = angles(1, 5, 16, device)
    packed = torch.randn(2, 5, 6, 16, device=device)  # q, k and v heads of one projection
    q, k = packed[:, :, :3].transpose(1, 2), packed[:, :, 3:5].transpose(1, 2)
    rotated = apply_rope(q, k, cos, sin)
    torch.testing.assert_close(rotated, apply_rope_reference(q, k, cos, sin))
    contiguous = apply_rope(q.contiguous(), k.contiguous(), cos, sin)
    torch.testing.assert_close(contiguous, rotated)
    assert all(t.is_contiguous() for t in contiguous)
    if runs_triton(q):
        assert all(t.transpose(1, 2).is_contiguous() for t in rotated)  # (B, T, H, D) in memory: no copy follows


def test_turning_back_restores(device) -> None:
    cos, sin = (torch.cat((t, t), dim=-1) for t in angles(1, 4, 8, device))
    q, k = queries_and_keys((1, 2, 2, 4, 16, 16), torch.float32, device)
    back = apply_rope(*apply_rope(q, k, cos, sin), cos, -sin)
    torch.testing.assert_close(back, (q, k), atol=1e-6, rtol=1e-5)


@pytest.mark.parametrize("grads", [(True, False), (False, True)])
def test_computes_only_the_gradient_that_is_needed(grads, device) -> None:
    cos, sin = angles(1, 3, 8, device)
    inputs = queries_and_keys((2, 2, 1, 3, 8, 8), torch.float32, device)
    q, k = (t.requires_grad_(g) for t, g in zip(inputs, grads, strict=True))
    needed = [t for t in (q, k) if t.requires_grad]
    sums = (sum(t.square().sum() for t in f(q, k, cos, sin)) for f in (apply_rope, apply_rope_reference))
    ours, theirs = (torch.autograd.grad(s, needed) for s in sums)
    torch.testing.assert_close(ours, theirs)


def test_takes_empty_tensors(device) -> None:
    cos, sin = angles(1, 0, 8, device)
    q = torch.zeros(2, 2, 0, 8, device=device, requires_grad=True)
    rotated, _ = apply_rope(q, q, cos, sin)
    rotated.sum().backward()
    assert rotated.shape == q.grad.shape == q.shape


def test_names_what_does_not_fit() -> None:
    q, k = torch.zeros(1, 2, 3, 8), torch.zeros(1, 1, 3, 8)
    cos = torch.zeros(1, 3, 8)
    with pytest.raises(ValueError, match="only their heads may differ"):
        apply_rope(q, k[:, :, :2], cos, cos)
    with pytest.raises(ValueError, match=r"expected \(1 or 1, 3, 8\)"):
        apply_rope(q, k, cos[:, :2], cos[:, :2])
    with pytest.raises(ValueError, match="even number up to 8"):
        apply_rope(q, k, torch.zeros(1, 3, 10), torch.zeros(1, 3, 10))
    with pytest.raises(ValueError, match="get no gradient"):
        apply_rope(q, k, cos.clone().requires_grad_(), cos)
