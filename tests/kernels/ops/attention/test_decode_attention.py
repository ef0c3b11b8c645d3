"""decode_attention against torch's attention over each text alone."""

import pytest
import torch
from ligertune_kernels import decode_attention
from ligertune_kernels.launcher import INTERPRETED
from support.covering import every_pair
from torch.nn import functional as F

# query heads, key heads, head width, value width: a head each, grouped, odd widths, more heads than a tile has rows
HEADS = [(2, 2, 16, 16), (8, 2, 64, 64), (6, 2, 24, 40), (34, 1, 32, 32)]
# The interpreter multiplies the bits of bfloat16 as if they were integers.
DTYPES = (torch.float32, torch.float16) if INTERPRETED else (torch.float32, torch.float16, torch.bfloat16)
TOLERANCE = {torch.float32: 2e-6, torch.float16: 2e-3, torch.bfloat16: 2e-2}
RANGES = [(0, 1), (0, 37), (5, 20), (36, 37)]  # one column, all, a window, the last one alone


def alone(query, keys, values, scale: float, softcap: float) -> torch.Tensor:
    """Attend from query (H, D) to keys (K, N, D) and values (K, N, V) in float64."""
    group = len(query) // len(keys)
    keys, values = (t.double().repeat_interleave(group, 0) for t in (keys, values))
    if not softcap:
        return F.scaled_dot_product_attention(query.double()[:, None], keys, values, scale=scale)[:, 0]
    scores = softcap * torch.tanh((keys @ query.double()[:, :, None])[..., 0] * scale / softcap)
    return (scores.softmax(1)[:, None] @ values)[:, 0]


@pytest.mark.parametrize("heads, dtype, softcap", every_pair(HEADS, DTYPES, (0.0, 3.0)))
def test_each_slot_attends_to_its_range_as_if_it_were_alone(heads, dtype, softcap, device):
    n_heads, n_key_heads, width, value_width = heads
    slots, columns = len(RANGES), 37
    query = torch.randn(n_heads, slots, width, device=device, dtype=dtype).transpose(0, 1)  # strides of a projection
    keys = torch.randn(slots, n_key_heads, columns, width, device=device, dtype=dtype)
    values = torch.randn(slots, n_key_heads, columns, value_width, device=device, dtype=dtype)
    first, end = torch.tensor(RANGES, dtype=torch.int32, device=device).unbind(1)  # strided too
    expected = [
        alone(query[slot], keys[slot, :, a:b], values[slot, :, a:b], 0.3, softcap) for slot, (a, b) in enumerate(RANGES)
    ]
    start, stop = RANGES[2]
    keys[2, :, :start] = values[2, :, stop:] = torch.nan  # columns outside of a range are not read
    found = decode_attention(query, keys, values, first, end, scale=0.3, softcap=softcap)
    tolerance = TOLERANCE[dtype]
    torch.testing.assert_close(found.double(), torch.stack(expected), rtol=tolerance, atol=tolerance)


def test_an_empty_range_gives_zeros(device):
    query, keys = torch.randn(2, 2, 16, device=device), torch.randn(2, 2, 5, 16, device=device)
    first, end = (
        torch.tensor([3, 0], dtype=torch.int32, device=device),
        torch.tensor([3, 5], dtype=torch.int32, device=device),
    )
    found = decode_attention(query, keys, keys, first, end, scale=1.0)
    assert not found[0].any() and found[1].any()


def test_tensors_that_do_not_fit_are_refused(device):
    query, keys, places = torch.zeros(2, 3, 16), torch.zeros(2, 2, 5, 16), torch.zeros(2, dtype=torch.int32)
    with pytest.raises(ValueError, match=r"decode_attention: shapes \(2, 3, 16\), \(2, 2, 5, 16\)"):
        decode_attention(query, keys, keys, places, places, scale=1.0)
    with pytest.raises(ValueError, match=r"decode_attention: dtypes torch.float32, torch.float16"):
        decode_attention(query[:, :2], keys.half(), keys, places, places, scale=1.0)
