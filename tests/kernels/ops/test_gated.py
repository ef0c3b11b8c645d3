"""swiglu and geglu against float64: split and packed, both forms of gelu, strides, extremes."""

from __future__ import annotations

from functools import partial

import pytest
import torch
from judge import judge
from ligertune_kernels import GeGLU, SwiGLU, geglu, geglu_reference, swiglu, swiglu_reference

DTYPES = (torch.float32, torch.bfloat16, torch.float16)
OPS = (
    pytest.param(swiglu, swiglu_reference, id="swiglu"),
    pytest.param(geglu, geglu_reference, id="geglu"),
    pytest.param(
        partial(geglu, approximate="none"), partial(geglu_reference, approximate="none"), id="geglu without tanh"
    ),
)
SHAPES = (
    pytest.param((1, 1), id="one number"),
    pytest.param((3, 5, 50), id="a block of no power of two, leading dimensions"),
    pytest.param((2, 2049), id="one column more than a block"),
)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("shape", SHAPES)
@pytest.mark.parametrize("op, reference", OPS)
def test_agrees_with_float64(op, reference, shape, dtype, device) -> None:
    gate, up = (3.0 * torch.randn(shape, device=device, dtype=dtype) for _ in range(2))
    judge(op, reference, [gate, up])
    judge(op, reference, [torch.cat((gate, up), dim=-1)])


@pytest.mark.parametrize("op, reference", OPS)
def test_stays_finite_where_the_activation_saturates(op, reference, device) -> None:
    gate = torch.tensor([[-1e4, -100.0, -20.0, -0.0, 0.0, 20.0, 100.0, 1e4]], device=device)
    judge(op, reference, [gate, torch.ones_like(gate)])


@pytest.mark.parametrize("grads", [(True, False), (False, True)])
@pytest.mark.parametrize("op, reference", OPS)
def test_computes_only_the_gradient_that_is_needed(op, reference, grads, device) -> None:
    judge(op, reference, [torch.randn(3, 20, device=device) for _ in range(2)], grads=grads)


def test_takes_rows_of_any_stride_and_upstream_of_any_stride(device) -> None:
    wide = torch.randn(4, 6, 80, device=device)
    for gate, up in ((wide[..., :40], wide[..., 40:]), (wide[:, ::2, ::2], wide[:, 1::2, 1::2]), (wide.mT, wide.mT)):
        gate, up = gate.detach().requires_grad_(), up.detach().requires_grad_()
        ours, theirs = swiglu(gate, up), swiglu_reference(gate, up)
        torch.testing.assert_close(ours, theirs)
        expected = torch.autograd.grad(theirs.sum(), (gate, up))
        torch.testing.assert_close(torch.autograd.grad(ours.sum(), (gate, up)), expected)


@pytest.mark.parametrize("op, reference", OPS)
def test_takes_empty_tensors(op, reference, device) -> None:
    gate = torch.zeros(2, 0, 8, device=device, requires_grad=True)
    op(gate, gate).sum().backward()
    assert op(gate).shape == (2, 0, 4)
    assert gate.grad.shape == gate.shape


def test_modules_are_the_functions(device) -> None:
    gate, up = torch.randn(2, 8, device=device), torch.randn(2, 8, device=device)
    torch.testing.assert_close(SwiGLU()(gate, up), swiglu(gate, up))
    torch.testing.assert_close(GeGLU("none")(gate, up), geglu(gate, up, approximate="none"))


def test_names_what_does_not_fit() -> None:
    with pytest.raises(ValueError, match="even last size"):
        swiglu(torch.zeros(2, 7))
    with pytest.raises(ValueError, match=r"geglu: gate is \(2, 8\)"):
        geglu(torch.zeros(2, 8), torch.zeros(2, 7))
    with pytest.raises(ValueError, match="'erf'"):
        geglu(torch.zeros(2, 8), approximate="erf")
