"""seeded_dropout: Philox's numbers, torch's law of dropout, and the same elements for the same seed."""

import math

import pytest
import torch
from ligertune_kernels import draw_seed, seeded_dropout, seeded_dropout_reference
from ligertune_kernels.ops.extra.tiles import DROPOUT_BLOCK
from support.covering import every_pair

# one element, no whole counter of four numbers, a whole block, and a ragged one after others
SHAPES = [(1,), (3, 7), (2, DROPOUT_BLOCK // 2), (3, DROPOUT_BLOCK + 1)]


@pytest.mark.parametrize(
    "shape, dtype, p, added", every_pair(SHAPES, (torch.float32, torch.bfloat16), (0.0, 0.1, 0.75), (False, True))
)
def test_agrees_with_float64(shape, dtype, p, added, device):
    x, other = (torch.randn(shape, device=device, dtype=dtype) for _ in range(2))
    seed = torch.tensor(2**61 + 12345, device=device)
    add_to = other if added else None
    found = seeded_dropout(x, seed, p, stream=3, add_to=add_to)
    expected = seeded_dropout_reference(
        x.double(), seed, p, stream=3, add_to=None if add_to is None else add_to.double()
    )
    assert found.dtype == dtype and found.shape == x.shape
    torch.testing.assert_close(found, expected.to(dtype), rtol=2**-22 if dtype == torch.float32 else 2**-7, atol=1e-6)


def test_the_numbers_are_philox_4x32_10s(device):
    """The known answer of Random123 for key 0 and counter 0."""
    seed, ones = torch.tensor(0, device=device), torch.ones(4, device=device)
    for i, number in enumerate((0x6627E8D5, 0xE169C58D, 0xBC57AC4C, 0x9B00DBD8)):
        u = number / 2**32
        kept = [bool(seeded_dropout(ones, seed, p)[i]) for p in (u - 2**-23, u + 2**-23)]
        assert kept == [True, False]


def test_an_element_is_kept_with_torchs_probability_and_scale(device):
    """2**18 elements: five deviations of a binomial law. Neighbours, streams and seeds are independent."""
    n, p = 2**18, 0.3
    x = torch.ones(n, device=device)
    first, second = (draw_seed(x.device) for _ in range(2))
    masks = [seeded_dropout(x, seed, p, stream=stream) != 0 for seed, stream in ((first, 0), (first, 1), (second, 0))]
    assert seeded_dropout(x, first, p).max().item() == pytest.approx(1 / (1 - p))
    bound = 5 * math.sqrt(p * (1 - p) / n)
    for mask in masks:
        assert abs(mask.double().mean().item() - (1 - p)) < bound
    pairs = [(masks[0], masks[1]), (masks[0], masks[2]), *((masks[0], masks[0].roll(k)) for k in (1, 2, 3, 4, 1024))]
    for one, other in pairs:
        together = (one & other).double().mean().item()
        assert abs(together - (1 - p) ** 2) < 5 * math.sqrt((1 - p) ** 2 / n)


def test_a_seed_drops_the_same_elements_again_and_torchs_generator_draws_it(device):
    x = torch.randn(50, 33, device=device)
    torch.manual_seed(7)
    first, second = draw_seed(x.device), draw_seed(x.device)
    torch.manual_seed(7)
    again = draw_seed(x.device)
    assert torch.equal(first, again) and not torch.equal(first, second)
    assert torch.equal(seeded_dropout(x, first, 0.5), seeded_dropout(x, again, 0.5))
    # elements count along rows, wherever the memory is
    assert torch.equal(seeded_dropout(x.t().contiguous().t(), first, 0.5), seeded_dropout(x, first, 0.5))


def test_bad_arguments_are_refused(device):
    x, seed = torch.zeros(3, device=device), torch.tensor(0, device=device)
    with pytest.raises(ValueError, match=r"p is 1.0: expected a number from 0"):
        seeded_dropout(x, seed, 1.0)
    with pytest.raises(ValueError, match=r"shapes \(3,\), \(4,\)"):
        seeded_dropout(x, seed, 0.5, add_to=torch.zeros(4, device=device))
