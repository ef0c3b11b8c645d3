"""merge_own_keys against float64: grouped heads, odd sizes, strides, many steps; and attention to all keys at once."""

import pytest
import torch
from ligertune_kernels import merge_own_keys, merge_own_keys_reference
from support.covering import every_pair
from support.kernels.judge import DTYPES, OF_A_ROW, judge

SHAPES = (
    # T, H, K, D, n
    pytest.param((1, 1, 1, 1, 1), id="the smallest"),
    pytest.param((9, 4, 2, 16, 3), id="grouped heads"),
    pytest.param((37, 7, 1, 24, 2), id="seven heads share one, widths that are no powers of two"),
    pytest.param((5, 6, 2, 128, 6), id="three heads share one"),
    pytest.param((3, 24, 1, 200, 1), id="more heads than a tile holds"),
)


def call(op, n_own: int, **options):
    """Return the op on (query, out, lse, keys, values) in one tuple."""
    return lambda query, out, lse, *own: op(query, out, lse, own[:n_own], own[n_own:], **options)


def inputs(shape, dtype, device) -> list[torch.Tensor]:
    n_tokens, heads, key_heads, head_dim, n_own = shape
    wide, narrow = (n_tokens, heads, head_dim), (n_tokens, key_heads, head_dim)
    made = [torch.randn(size, device=device, dtype=dtype) for size in (wide, wide, wide[:2], *[narrow] * 2 * n_own)]
    made[2] = made[2].float()
    return made


@pytest.mark.parametrize("shape, scale, dtype", every_pair(SHAPES, [None, 0.7], DTYPES))
def test_agrees_with_float64(shape, scale, dtype, device) -> None:
    n_own = shape[-1]
    ops = (call(op, n_own, scale=scale) for op in (merge_own_keys, merge_own_keys_reference))
    judge(*ops, inputs(shape, dtype, device), times=OF_A_ROW)


def test_is_attention_to_all_keys(device) -> None:
    """Output and log-sum-exp of some keys, merged with the others, are softmax attention to both."""
    query, _, _, *own = inputs((6, 2, 2, 8, 3), torch.float32, device)
    first = torch.randn(4, 2, 8, device=device)
    scores = torch.einsum("thd,jhd->thj", query, first) * 8**-0.5
    out = torch.einsum("thj,jhd->thd", scores.softmax(-1), first)
    merged = merge_own_keys(query, out, scores.logsumexp(-1), own[:3], own[3:])
    own_scores = torch.stack([(query * key).sum(-1) for key in own[:3]], -1) * 8**-0.5
    weights = torch.cat([scores, own_scores], -1).softmax(-1)
    expected = torch.einsum("thj,jhd->thd", weights[..., :4], first)
    expected += sum(weights[..., 4 + i, None] * value for i, value in enumerate(own[3:]))
    torch.testing.assert_close(merged, expected)


def test_large_scores_do_not_overflow(device) -> None:
    query, out, lse, *own = inputs((4, 2, 1, 16, 2), torch.float32, device)
    merged = merge_own_keys(300.0 * query, out, 1e4 + lse, own[:2], own[2:])
    torch.testing.assert_close(merged, merge_own_keys_reference(300.0 * query, out, 1e4 + lse, own[:2], own[2:]))
    assert merged.isfinite().all()


def test_takes_transposed_queries_and_sums(device) -> None:
    query, out, lse, *own = inputs((9, 4, 2, 16, 2), torch.float32, device)
    apart = query.transpose(0, 1).contiguous().transpose(0, 1)
    columns = lse.t().contiguous().t()
    found = merge_own_keys(apart, out, columns, own[:2], own[2:])
    assert torch.equal(found, merge_own_keys(query, out, lse, own[:2], own[2:]))


def test_without_keys_the_output_is_returned(device) -> None:
    query, out, lse = inputs((3, 2, 1, 8, 0), torch.float32, device)
    assert torch.equal(merge_own_keys(query, out, lse, [], []), out)


@pytest.mark.parametrize(
    ("change", "words"),
    [
        ({"lse": torch.zeros(3, 3)}, "are not"),
        ({"values": [torch.zeros(3, 1, 8)]}, "equal shapes"),
        ({"keys": [torch.zeros(3, 2, 8)] * 2, "values": [torch.zeros(3, 2, 8)] * 2}, "the query"),
        ({"out": torch.zeros(3, 1, 8, dtype=torch.float16)}, "dtypes differ"),
    ],
    ids=["lse", "number of values", "heads", "dtypes"],
)
def test_mismatched_tensors_are_refused(change, words) -> None:
    query = torch.zeros(3, 1, 8)
    arguments = {"query": query, "out": query, "lse": query[..., 0], "keys": [query] * 2, "values": [query] * 2}
    with pytest.raises(ValueError, match=words):
        merge_own_keys(**arguments | change)
