"""swiglu_float8: the bits and maxima of swiglu and quantize_float8 one after the other, forward and backward."""

import pytest
import torch
from ligertune_kernels import quantize_float8, swiglu, swiglu_float8, swiglu_float8_backward
from ligertune_kernels.ops.float8.quantize_float8 import PARTS
from support.covering import every_pair
from torch import Tensor

E5M2 = torch.float8_e5m2
# one row, ragged rows and columns, more tiles than one in both directions
SHAPES = [(1, 16), (2, 3, 40), (130, 72), (48, 300)]


def bits(copy: Tensor) -> Tensor:
    return copy.view(torch.uint8)


def separate(dy: Tensor, gate: Tensor, up: Tensor, scales: list[Tensor], maxima: list[Tensor]) -> list[Tensor]:
    """Return y by rows, both gradients by rows and by columns, and y by columns, of the separate ops."""
    gate, up = (t.detach().clone().requires_grad_() for t in (gate, up))
    y = swiglu(gate, up)
    y.backward(dy)
    copies = quantize_float8(y.detach(), scales[0], amax=maxima[0])
    gradients = [
        quantize_float8(t.grad, scale, dtype=E5M2, amax=amax)
        for t, scale, amax in zip((gate, up), scales[1:], maxima[1:], strict=True)
    ]
    return [copies.rows, *gradients[0], *gradients[1], copies.columns]


@pytest.mark.parametrize("shape, dtype", every_pair(SHAPES, [torch.float32, torch.bfloat16, torch.float16]))
def test_bits_and_maxima_are_those_of_the_separate_ops(shape, dtype, device):
    dy, gate, up = (3 * torch.randn(shape, device=device).to(dtype) for _ in range(3))
    gate.view(-1)[0] = 300.0  # y is cut off at the largest float8
    scales = [torch.tensor(scale, device=device) for scale in (2.5, 300.0, 1e4)]
    expected_maxima, (y_max, *maxima) = ([torch.zeros(PARTS, device=device) for _ in range(3)] for _ in range(2))
    expected = separate(dy, gate, up, scales, expected_maxima)
    y = swiglu_float8(gate, up, scales[0], amax=y_max)
    d_gate, d_up, y_columns = swiglu_float8_backward(dy, gate, up, *scales, amax=tuple(maxima))
    found = [y, *d_gate, *d_up, y_columns]
    assert [t.dtype for t in found] == [t.dtype for t in expected]
    assert all(torch.equal(bits(a), bits(b)) for a, b in zip(found, expected, strict=True))
    assert [t.max() for t in (y_max, *maxima)] == [t.max() for t in expected_maxima]


def test_halves_of_one_tensor_are_taken_and_columns_can_be_left_out(device):
    gate, up = torch.randn(33, 96, device=device).chunk(2, dim=1)
    dy, one = torch.randn(33, 48, device=device), torch.ones((), device=device)
    assert torch.equal(bits(swiglu_float8(gate, up, one)), bits(quantize_float8(swiglu(gate, up), one).rows))
    whole, part = (swiglu_float8_backward(dy, gate, up, one, one, one, columns=columns) for columns in (True, False))
    assert part.y_columns is part.gate.columns is part.up.columns is None
    assert torch.equal(bits(part.gate.rows), bits(whole.gate.rows))
    assert torch.equal(bits(part.up.rows), bits(whole.up.rows))


def test_wrong_arguments_are_refused():
    gate, one = torch.zeros(4, 16), torch.ones(())
    with pytest.raises(ValueError, match=r"swiglu_float8: gate \(4, 16\) .*, up \(4, 8\) .*: expected the same"):
        swiglu_float8(gate, gate[:, :8], one)
    with pytest.raises(ValueError, match=r"swiglu_float8_backward: scale .*float64: expected one float32"):
        swiglu_float8_backward(gate, gate, gate, one, one, one.double())
    with pytest.raises(ValueError, match=r"amax \(3,\) .*: expected \(1024,\) float32"):
        swiglu_float8(gate, gate, one, amax=torch.zeros(3))
