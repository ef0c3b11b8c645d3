"""Scales of float8 tensors over steps, ranks, evaluations and resumes, against the formula."""

import pytest
import torch
from torch import Tensor, nn

from ligertune.models.float8.delayed_scales import HEADROOM, DelayedScales
from ligertune.models.float8.float8_linear import to_float8_linears

CPU = torch.device("cpu")
E4M3_MAX = 448.0  # the largest float8_e4m3fn
INPUT, WEIGHT, GRADIENT = 0, 1, 2  # slots of a layer


def keep(amax: Tensor) -> Tensor:
    """Stand for the reduction over ranks: there is one."""
    return amax


@pytest.fixture
def layer() -> nn.Linear:
    torch.manual_seed(0)
    made = nn.Linear(16, 16)
    to_float8_linears([made], CPU)
    return made


def scale_of(layer: nn.Linear, slot: int) -> float:
    return float(layer.float8_scales.scale[slot, 0])


def step(layer: nn.Linear, x: Tensor, dy: Tensor) -> None:
    layer(x).backward(dy)
    layer.float8_scales.update(keep)


def test_ranks_share_the_scale_of_the_largest_value_of_any_rank():
    """The other rank saw values three times as large."""
    scales = DelayedScales([torch.float8_e4m3fn], CPU)
    scales.quantize(0, torch.full((1, 16), 2.0))
    scales.update(lambda amax: 3 * amax)
    assert float(scales.scale[0, 0]) == pytest.approx(E4M3_MAX / (HEADROOM * 6.0))


def test_neither_inputs_nor_gradients_of_an_evaluation_change_the_scales(layer):
    x, dy = torch.ones(16, 16, requires_grad=True), torch.full((16, 16), 0.5)
    step(layer, x, dy)
    expected = [scale_of(layer, slot) for slot in (INPUT, WEIGHT, GRADIENT)]
    assert expected[INPUT] == E4M3_MAX / (HEADROOM * 1.0)
    layer.eval()
    layer((100 * x).detach().requires_grad_()).backward(100 * dy)
    layer.train()
    step(layer, x, dy)
    assert [scale_of(layer, slot) for slot in (INPUT, WEIGHT, GRADIENT)] == expected


def test_an_input_that_changed_in_place_is_quantised_again(layer):
    with torch.no_grad():
        x = torch.ones(16, 16)
        before = layer(x)
        x.mul_(2)
        twice = layer(x) - layer.bias
    torch.testing.assert_close(twice, 2 * (before - layer.bias), rtol=0.1, atol=0.01)


def test_a_layer_that_trains_after_one_that_does_not_gets_its_input_by_columns():
    """A frozen layer quantises the input by rows only; the weight gradient of the next one multiplies by columns."""
    torch.manual_seed(0)
    frozen, trained = nn.Linear(16, 16), nn.Linear(16, 16)
    frozen.requires_grad_(False)
    to_float8_linears([frozen, trained], CPU)
    x = torch.randn(16, 16)
    frozen(x)
    trained(x).sum().backward()
    torch.testing.assert_close(trained.weight.grad, x.sum(0).expand(16, 16), rtol=0.1, atol=0.3)
