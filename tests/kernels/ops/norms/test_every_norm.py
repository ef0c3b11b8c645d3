"""All norms against float64: sizes on both sides of every launch threshold, strides, in-place gradients, modules."""

from __future__ import annotations

import ligertune_kernels as kernels
import pytest
import torch
from covering import every_pair
from judge import DTYPES, judge, judge_op
from torch.nn import functional as F

FP32, BF16, FP16 = DTYPES


def normal(*shapes: tuple[int, ...], device: torch.device, dtype: torch.dtype = FP32) -> list[torch.Tensor]:
    return [torch.randn(shape, device=device, dtype=dtype, requires_grad=True) for shape in shapes]


SIZES = (
    pytest.param((1, 7), id="one short row"),
    pytest.param((99, 3, 96), id="leading dimensions, ragged last tile, two tiles per program"),
    pytest.param((41, 1025), id="two rows per tile, three tiles per program"),
    pytest.param((5, 5000), id="one row per tile"),
    pytest.param((5, 8193), id="first size whose backward takes two parts"),
    pytest.param((5, 8208), id="long row that the backward holds whole if packed"),
    pytest.param((2, 16385), id="first size with several backward parts and a swept forward"),
)
ONE_COLUMN = pytest.param((3, 1), id="one column, whose variance is zero")
# op, tensors of x's shape, tensors of a row's, options
NORMS = (
    *(
        pytest.param("rms_norm", 1, 1, {"cast": cast, "offset": offset}, id=f"rms_norm {cast} {offset}")
        for cast, offset in (("llama", 0.0), ("gemma", 1.0), ("gemma", 0.0), ("none", 0.0))
    ),
    pytest.param("add_rms_norm", 2, 1, {"cast": "llama", "offset": 0.0}, id="add_rms_norm llama"),
    pytest.param("add_rms_norm", 2, 1, {"cast": "gemma", "offset": 1.0}, id="add_rms_norm gemma"),
    pytest.param("layer_norm", 1, 2, {}, id="layer_norm"),
)
GROUPS = (
    pytest.param((3, 12), 3, id="no positions: norm of four channels"),
    pytest.param((2, 4, 1), 4, id="one element per group: variance zero"),
    pytest.param((2, 6, 7, 5), 2, id="ragged channels and positions in one tile"),
    pytest.param((1, 5, 17, 19), 1, id="channels in several tiles, the last ragged"),
    pytest.param((2, 2, 70, 71), 1, id="positions of a channel in two tiles"),
    pytest.param((3, 5000), 1, id="more channels than a tile holds"),
)


@pytest.mark.parametrize(
    "shape, name, n_rows, n_affine, options, dtype",
    [*every_pair(SIZES, NORMS, DTYPES), *every_pair([ONE_COLUMN], NORMS[-1:], DTYPES)],
)
def test_agrees_with_float64(shape, name, n_rows, n_affine, options, dtype, device) -> None:
    inputs = normal(*[shape] * n_rows, *[shape[-1:]] * n_affine, device=device, dtype=dtype)
    judge_op(getattr(kernels, name), inputs, eps=1e-5, **options)


def test_layer_norm_of_long_rows_in_halves_agrees_with_float64(device) -> None:
    """A backward that holds a bfloat16 row whole. In place only: the interpreter takes a second for each row."""
    inputs = normal((5, 16384), (16384,), (16384,), device=device, dtype=BF16)
    judge_op(kernels.layer_norm, inputs, ours={"inplace": True})


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("shape, num_groups", GROUPS)
def test_group_norm_agrees_with_float64(shape, num_groups, dtype, device) -> None:
    judge(
        lambda x, w, b: kernels.group_norm(x, num_groups, w, b, 1e-4),
        lambda x, w, b: kernels.group_norm_reference(x, num_groups, w, b, 1e-4),
        normal(shape, shape[1:2], shape[1:2], device=device, dtype=dtype),
    )


# The second argument is the size or the number of groups.
MISSING = (
    pytest.param(lambda x, _, *affine: kernels.layer_norm(x, *affine), F.layer_norm, (5, 40), (40,), id="whole rows"),
    pytest.param(lambda x, _, *affine: kernels.layer_norm(x, *affine), F.layer_norm, (2, 16400), (16400,), id="swept"),
    pytest.param(kernels.group_norm, kernels.group_norm_reference, (2, 6, 5), 3, id="groups"),
)


@pytest.mark.parametrize("op, reference, shape, second", MISSING)
def test_weight_and_bias_may_be_missing(op, reference, shape, second, device) -> None:
    x, w, b = normal(shape, shape[1:2], shape[1:2], device=device)
    judge(lambda x: op(x, second), lambda x: reference(x, second), [x])
    judge(lambda x, w: op(x, second, w), lambda x, w: reference(x, second, w), [x, w])
    judge(lambda x, b: op(x, second, None, b), lambda x, b: reference(x, second, None, b), [x, b])


def test_group_norm_takes_channels_last_and_upstream_of_any_stride(device) -> None:
    x = torch.randn(2, 6, 4, 5, device=device).to(memory_format=torch.channels_last).requires_grad_()
    y, expected = kernels.group_norm(x, 2), kernels.group_norm_reference(x, 2)
    torch.testing.assert_close(y, expected)
    up = torch.randn(5, 4, 6, 2, device=device).permute(3, 2, 1, 0)
    torch.testing.assert_close(torch.autograd.grad(y, x, up), torch.autograd.grad(expected, x, up))


# Whole rows; a long row; parts, which read each other's columns; parts and a swept forward.
ROWS = (((5, 64), FP32), ((5, 8208), FP16), ((5, 8208), FP32), ((2, 16400), FP32))


@pytest.mark.parametrize("op, n_rows, n_affine", [("rms_norm", 1, 1), ("add_rms_norm", 2, 1), ("layer_norm", 1, 2)])
@pytest.mark.parametrize("shape, dtype", ROWS, ids=str)
def test_inplace_changes_no_gradient(op, n_rows, n_affine, shape, dtype, device) -> None:
    inputs = normal(*[shape] * n_rows, *[shape[-1:]] * n_affine, device=device, dtype=dtype)
    upstream = torch.randn(n_rows, *shape, device=device, dtype=dtype)
    op = getattr(kernels, op)
    plain, reused = (
        torch.autograd.grad(op(*inputs, inplace=inplace), inputs, tuple(upstream.clone())) for inplace in (False, True)
    )
    assert all(torch.equal(a, b) for a, b in zip(plain, reused, strict=True))


@pytest.mark.parametrize("name, n_affine", [("rms_norm", 1), ("layer_norm", 2)])
def test_takes_inputs_and_gradients_of_any_stride(name, n_affine, device) -> None:
    op, reference = getattr(kernels, name), getattr(kernels, f"{name}_reference")
    wide, *affine = (torch.randn(s, device=device) for s in ((4, 6, 80), *[(40,)] * n_affine))
    for x in (wide[..., :40], wide[:, ::2, 1:41], wide[:, 0, ::2], wide.transpose(0, 2)[:, :, 0].T[:, :40]):
        x = x.detach().requires_grad_()
        y, expected = op(x, *affine), reference(x, *affine)
        torch.testing.assert_close(y, expected)
        for upstream in (torch.ones((), device=device).expand(y.shape), y.detach()):  # strides of zero
            ours, plain = (torch.autograd.grad(t, x, upstream, retain_graph=True) for t in (y, expected))
            torch.testing.assert_close(ours, plain)


@pytest.mark.parametrize("n_cols", [100, 16400])  # ragged: unmasked padding would change the variance; and swept
def test_variance_is_accurate_with_a_large_mean(n_cols, device) -> None:
    x = 1e4 + torch.randn(3, n_cols, device=device)
    tolerance = {"rtol": 0.0, "atol": 2e-3}  # x itself is rounded to 1e-3
    torch.testing.assert_close(kernels.layer_norm(x), kernels.layer_norm_reference(x.double()).float(), **tolerance)
    groups = x[:2].view(2, 4, -1)
    torch.testing.assert_close(
        kernels.group_norm(groups, 2), kernels.group_norm_reference(groups.double(), 2).float(), **tolerance
    )


def test_gradients_have_the_dtypes_of_their_parameters(device) -> None:
    (x,), (w, b) = normal((4, 32, 1), device=device, dtype=BF16), normal((32,), (32,), device=device)
    b = b.detach().bfloat16().requires_grad_()
    for y in (kernels.layer_norm(x[..., 0], w, b), kernels.group_norm(x, 4, w, b)):
        grads = torch.autograd.grad(y.sum(), (x, w, b))
        assert (y.dtype, *(grad.dtype for grad in grads)) == (BF16, BF16, FP32, BF16)


MODULES = (
    ("GroupNorm", (4, 8), {}, (3, 8, 6)),
    ("LayerNorm", (24,), {}, (3, 24)),
    ("LayerNorm", (24,), {"bias": False}, (3, 24)),
)


@pytest.mark.parametrize("name, sizes, options, shape", MODULES)
def test_modules_agree_with_torchs(name, sizes, options, shape, device) -> None:
    ours, torchs = (getattr(package, name)(*sizes, **options).to(device) for package in (kernels, torch.nn))
    x = torch.randn(shape, device=device)
    for parameter in torchs.parameters():
        torch.nn.init.normal_(parameter)
    ours.load_state_dict(torchs.state_dict())
    torch.testing.assert_close(ours(x), torchs(x))
