"""All norms: strides, gradients in place, large means, dtypes of gradients, and agreement with torch's modules."""

from __future__ import annotations

import ligertune_kernels as kernels
import pytest
import torch

FP32, BF16, FP16 = torch.float32, torch.bfloat16, torch.float16


def normal(*shapes: tuple[int, ...], device: torch.device, dtype: torch.dtype = FP32) -> list[torch.Tensor]:
    return [torch.randn(shape, device=device, dtype=dtype, requires_grad=True) for shape in shapes]


# Whole rows; a long row; parts, which read each other's columns; parts and a swept forward; halves of a layer norm.
ROWS = (((5, 64), FP32), ((5, 8208), FP16), ((5, 8208), FP32), ((2, 16400), FP32), ((1, 16384), BF16))


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


@pytest.mark.parametrize(
    "ours, torchs, shape",
    [
        (kernels.GroupNorm(4, 8), torch.nn.GroupNorm(4, 8), (3, 8, 6)),
        (kernels.LayerNorm(24), torch.nn.LayerNorm(24), (3, 24)),
        (kernels.LayerNorm(24, bias=False), torch.nn.LayerNorm(24, bias=False), (3, 24)),
    ],
    ids=["group", "layer", "layer without bias"],
)
def test_modules_agree_with_torchs(ours, torchs, shape, device) -> None:
    x, ours, torchs = torch.randn(shape, device=device), ours.to(device), torchs.to(device)
    with torch.no_grad():
        for p in torchs.parameters():
            p.normal_()
    ours.load_state_dict(torchs.state_dict())
    torch.testing.assert_close(ours(x), torchs(x))
