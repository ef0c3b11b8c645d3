"""document_attention against float64: lengths of documents and tiles, windows, caps, strides, surrounding memory."""

import contextlib
import functools

import pytest
import torch
from ligertune_kernels import Documents, document_attention, document_attention_reference, document_attention_with_lse
from ligertune_kernels.chips import INTERPRETER, Chip
from ligertune_kernels.known_results import knowing
from ligertune_kernels.launcher import INTERPRETED
from ligertune_kernels.ops.attention.tiles import attention_tiles
from support.covering import every_pair
from support.kernels.attention_runs import documents_of
from support.kernels.judge import OF_A_ROW, judge

# The interpreter multiplies the bits of bfloat16 as if they were integers.
DTYPES = (torch.float32, torch.float16) if INTERPRETED else (torch.float32, torch.float16, torch.bfloat16)
LENGTHS = (
    pytest.param((2,), id="two tokens"),
    pytest.param((37,), id="one document"),
    pytest.param((16, 16, 16), id="documents as long as a tile"),
    pytest.param((3, 40, 1, 5, 20), id="several documents per tile, one over several tiles"),
)
HEADS = (
    # H, K, D
    pytest.param((1, 1, 16), id="one head"),
    pytest.param((4, 2, 32), id="grouped heads"),
    pytest.param((3, 1, 24), id="head width not a power of two"),
)
TERMS = (
    {},
    {"window": 2},
    {"window": 7},
    {"window": 24, "scale": 0.7},
    {"softcap": 2.0},
    {"softcap": 5.0, "window": 9},
)


def inputs(n_tokens: int, heads: tuple[int, int, int], dtype: torch.dtype, device: torch.device) -> list[torch.Tensor]:
    """Return (T, H, D) and (T, K, D), as models make them: views of (H, T, D); and contiguous values (T, K, D)."""
    n_heads, n_key_heads, head_dim = heads
    made = (torch.randn(n, n_tokens, head_dim, device=device, dtype=dtype) for n in (n_heads, n_key_heads, n_key_heads))
    query, key, value = (t.transpose(0, 1) for t in made)
    return [query, key, value.contiguous()]


class Formula(torch.autograd.Function):
    """The op's equations without tiles, in float32, rounded where the kernels round.

    Gradients of scores use the stored output; where a token attends to little more than itself, its rounding is most
    of their value.
    """

    @staticmethod
    def forward(ctx, q, k, v, starts, window, scale, softcap):
        out = document_attention_reference(
            q, k, v, Documents(starts, starts), window=window, scale=scale, softcap=softcap
        )
        ctx.save_for_backward(q, k, v, starts, out)
        ctx.terms = window, q.shape[-1] ** -0.5 if scale is None else scale, softcap
        return out

    @staticmethod
    def backward(ctx, grad):
        *tensors, starts, out = ctx.saved_tensors
        (window, scale, softcap), dtype, group = ctx.terms, out.dtype, out.shape[1] // tensors[1].shape[1]
        wide = [t.transpose(0, 1).to(torch.promote_types(dtype, torch.float32)) for t in (*tensors, out, grad)]
        q, k, v, out, grad = (t.repeat_interleave(group, 0) if i in (1, 2) else t for i, t in enumerate(wide))
        scores = q @ k.mT * scale
        slope = 1.0
        if softcap is not None:
            scores = softcap * torch.tanh(scores / softcap)
            slope = 1 - (scores / softcap).square()
        rows = torch.arange(len(starts), device=starts.device)
        seen = (rows <= rows[:, None]) & (rows >= starts[:, None]) & (rows > rows[:, None] - (window or len(starts)))
        weights = torch.softmax(scores.masked_fill(~seen, float("-inf")), -1)
        d_scores = weights * (grad @ v.mT - (grad * out).sum(-1, keepdim=True)) * slope
        d_scores, weights = (t.to(dtype).to(q.dtype) for t in (d_scores, weights))
        gradients = (
            scale * d_scores @ k,
            *(t.unflatten(0, (-1, group)).sum(1) for t in (scale * d_scores.mT @ q, weights.mT @ grad)),
        )
        return *(t.transpose(0, 1).to(dtype) for t in gradients), *(None,) * 4


def judged(lengths, heads, dtype, device, **terms) -> None:
    documents = documents_of(lengths, device)
    terms = {"window": None, "scale": None, "softcap": None} | terms

    def plain(q, k, v):
        rounds = q.dtype in (torch.float16, torch.bfloat16)
        reference = document_attention_reference
        return (
            Formula.apply(q, k, v, documents.starts, *terms.values())
            if rounds
            else reference(q, k, v, documents, **terms)
        )

    op = functools.partial(document_attention, **terms)
    judge(lambda q, k, v: op(q, k, v, documents), plain, inputs(sum(lengths), heads, dtype, device), times=OF_A_ROW)


@pytest.mark.parametrize("terms", TERMS, ids=str)
def test_the_formula_agrees_with_the_reference(terms, device) -> None:
    """Compare in float64, where rounding makes no difference."""
    lengths, terms = (3, 40, 1, 5, 20), {"window": None, "scale": None, "softcap": None} | terms
    documents = documents_of(lengths, device)
    leaves = [t.requires_grad_() for t in inputs(sum(lengths), (4, 2, 32), torch.float64, device)]
    formula = Formula.apply(*leaves, documents.starts, *terms.values())
    outs = formula, document_attention_reference(*leaves, documents, **terms)
    grad = torch.randn_like(outs[0])
    for ours, expected in zip(*(torch.autograd.grad(out, leaves, grad) for out in outs), strict=True):
        torch.testing.assert_close(ours, expected, rtol=1e-9, atol=1e-9)


@pytest.mark.parametrize("lengths, heads, dtype", every_pair(LENGTHS, HEADS, DTYPES))
def test_agrees_with_float64(lengths, heads, dtype, device) -> None:
    judged(lengths, heads, dtype, device)


@pytest.mark.parametrize("terms", TERMS, ids=str)
def test_every_option_agrees_with_float64(terms, device) -> None:
    judged((3, 40, 1, 5, 20), (4, 2, 32), torch.float32, device, **terms)


@pytest.mark.parametrize("window", [15, 16, 17, 31, 33, 63])
def test_windows_that_end_where_tiles_end_agree_with_float64(window, device) -> None:
    """The window decides which tiles need no mask; an error of one shows if it ends one token before a tile."""
    judged((70, 5), (2, 1, 16), torch.float32, device, window=window)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("lengths, terms", [((1,), {}), ((1,) * 40, {}), ((40,), {"window": 1})], ids=str)
def test_a_token_that_attends_to_itself_alone_gives_its_value(lengths, terms, dtype, device) -> None:
    leaves = [t.requires_grad_() for t in inputs(sum(lengths), (2, 1, 16), dtype, device)]
    out = document_attention(*leaves, documents_of(lengths, device), **terms)
    assert torch.equal(out, leaves[2].expand_as(out))
    grad = torch.randn_like(out)
    dq, dk, dv = torch.autograd.grad(out, leaves, grad)
    torch.testing.assert_close(dv, grad.sum(1, keepdim=True, dtype=torch.float32).to(dtype), rtol=8e-3, atol=1e-3)
    assert max(dq.abs().max(), dk.abs().max()) < 1e-5  # rounding of a difference of equal numbers


def test_is_scaled_dot_product_attention_of_each_document(device) -> None:
    lengths = (5, 33, 18)
    q, k, v = inputs(sum(lengths), (4, 2, 32), torch.float32, device)
    each = zip(*(t.split(lengths) for t in (q, k, v)), strict=True)
    expected = [
        torch.nn.functional.scaled_dot_product_attention(
            *(t.transpose(0, 1)[None] for t in document), is_causal=True, enable_gqa=True
        )[0].transpose(0, 1)
        for document in each
    ]
    found = document_attention(q, k, v, documents_of(lengths, device))
    torch.testing.assert_close(found, torch.cat(expected), rtol=1e-5, atol=1e-5)


def test_memory_around_the_tensors_is_not_read(device) -> None:
    """The inputs are non-contiguous views of a larger tensor of NaN."""
    lengths, room = (7, 30, 4), torch.full((60, 9, 48), float("nan"), device=device)
    room[5:46, 1:8, :32] = torch.randn(41, 7, 32, device=device)
    leaves = [room[5:46, first:last, :32] for first, last in ((1, 5), (5, 6), (7, 8))]
    own = [t.clone().requires_grad_() for t in leaves]
    leaves = [t.detach().requires_grad_() for t in leaves]
    outs = [document_attention(*t, documents_of(lengths, device)) for t in (leaves, own)]
    assert torch.equal(*outs)
    grads = [torch.autograd.grad(out.square().sum(), t) for out, t in zip(outs, (leaves, own), strict=True)]
    assert all(torch.equal(a, b) and a.isfinite().all() for a, b in zip(*grads, strict=True))


def test_large_scores_neither_overflow_nor_leak_through_masks(device) -> None:
    """Scores of 3,000 and -3,000; a row whose block is masked as a whole keeps its initial maximum."""
    q, k, v = inputs(50, (1, 1, 16), torch.float32, device)
    q, k = 40 * q, 40 * torch.cat((-q[:25], q[25:]))
    documents = documents_of((30, 20), device)
    expected = document_attention_reference(*(t.double() for t in (q, k, v)), documents)
    torch.testing.assert_close(document_attention(q, k, v, documents).double(), expected, rtol=1e-4, atol=1e-4)


def test_takes_non_contiguous_columns(device) -> None:
    tensors = [t.transpose(1, 2).contiguous().transpose(1, 2) for t in inputs(20, (2, 2, 16), torch.float32, device)]
    documents = documents_of((12, 8), device)
    expected = document_attention_reference(*tensors, documents)
    torch.testing.assert_close(document_attention(*tensors, documents), expected, rtol=1e-5, atol=1e-5)


CHIPS = [("sm90", 32, "nvidia"), ("sm80", 32, "nvidia"), ("gfx942", 64, "amd"), ("gfx1100", 32, "amd")]


@pytest.mark.parametrize("arch, warp, vendor", CHIPS)
@pytest.mark.parametrize("width", [16, 64, 80, 128, 256])
def test_a_block_of_queries_divides_a_tile_of_keys(width, arch, warp, vendor) -> None:
    """The dkdv kernel relies on it: blocks at the diagonal are whole."""
    tiles = attention_tiles(width, 2, Chip(vendor, arch, warp, 132, 1 << 20), has_cap=True)
    if tiles is None:
        assert (arch, width > 64) == ("gfx1100", True)
    else:
        rows, cols, *_ = tiles.dkdv
        assert cols % rows == 0


def test_the_interpreters_tiles_are_small_enough_for_these_tests() -> None:
    """Otherwise no input of these tests would span several tiles."""
    assert all(max(rows, cols) <= 16 for rows, cols, *_ in attention_tiles(32, 2, INTERPRETER, has_cap=False)[2:])


def test_autocast_converts_all_tensors_to_its_dtype(device) -> None:
    """RoPE with float32 tables leaves float32 queries and keys."""
    q, k, v = inputs(20, (2, 1, 16), torch.float32, device)
    v = v.to(torch.float16)
    documents = documents_of((12, 8), device)
    with torch.autocast(device.type, torch.float16):
        found = document_attention(q, k, v, documents)
    assert torch.equal(found, document_attention(q.to(torch.float16), k.to(torch.float16), v, documents))
    with pytest.raises(ValueError, match="one dtype"):
        document_attention(q, k, v, documents)


class Known:
    """Results of one first run, for as many second runs as there are."""

    def __init__(self) -> None:
        self.made, self.attentions = [], 0

    def result(self, compute):
        self.made = self.made or [compute()]
        return tuple(t.clone() for t in self.made[0])

    def attended(self, out) -> None:
        self.attentions += out.requires_grad


def test_a_known_output_is_not_computed_again(device) -> None:
    """A checkpointed layer's second run hands in what the first one computed."""
    leaves = [t.requires_grad_() for t in inputs(40, (4, 2, 32), torch.float32, device)]
    documents, known, found = documents_of((3, 30, 7), device), Known(), []
    for context in (contextlib.nullcontext(), knowing(known), knowing(known)):
        with context:
            out = document_attention(*leaves, documents)
        found.append([out, *torch.autograd.grad(out.sum(), leaves)])
    with knowing(known), torch.no_grad():
        assert torch.equal(document_attention(*leaves, documents), out)
    assert len(known.made) == 1 and known.attentions == 2
    for tensors in zip(*found, strict=True):
        assert all(torch.equal(tensors[0], other) for other in tensors[1:])


def dense_attention(q, k, v, starts, *, window=None, scale=None, softcap=None):
    """Return output (T, H, D) and log-sum-exp (T, H) from the scores of all pairs of tokens."""
    group = q.shape[1] // k.shape[1]
    scores = torch.einsum("ihd,jhd->ijh", q, k.repeat_interleave(group, 1)) * (scale or q.shape[-1] ** -0.5)
    if softcap is not None:
        scores = softcap * torch.tanh(scores / softcap)
    rows = torch.arange(len(starts), device=starts.device)
    seen = (rows <= rows[:, None]) & (rows >= starts[:, None]) & (rows > rows[:, None] - (window or len(starts)))
    scores = scores.masked_fill(~seen[..., None], float("-inf"))
    return torch.einsum("ijh,jhd->ihd", scores.softmax(1), v.repeat_interleave(group, 1)), scores.logsumexp(1)


@pytest.mark.parametrize("terms", TERMS, ids=str)
def test_log_sum_exp_and_its_gradient_agree_with_float64(terms, device) -> None:
    """The gradient of lse reaches queries and keys, with and without a gradient of the output."""
    documents = documents_of((3, 40, 1, 5, 20), device)
    leaves = [t.requires_grad_() for t in inputs(69, (4, 2, 32), torch.float32, device)]
    wide = [t.detach().double().requires_grad_() for t in leaves]
    found = document_attention_with_lse(*leaves, documents, **terms)
    expected = dense_attention(*wide, documents.starts, **terms)
    assert torch.equal(found[0], document_attention(*leaves, documents, **terms))
    d_out, d_lse = (torch.randn_like(t) for t in found)
    for out_scale in (0.0, 1.0):
        ours = torch.autograd.grad(found, leaves, (out_scale * d_out, d_lse), retain_graph=True)
        right = torch.autograd.grad(expected, wide, (out_scale * d_out.double(), d_lse.double()), retain_graph=True)
        for one, other in zip((*found, *ours), (*expected, *right), strict=True):
            torch.testing.assert_close(one.double(), other, rtol=1e-5, atol=1e-5)


def test_attention_merged_from_two_sets_of_keys_is_attention_to_both(device) -> None:
    """Use the log-sum-exp as its callers do: a row attends to its document, and to one key of its own."""
    documents = documents_of((9, 14), device)
    q, k, v = (t.requires_grad_() for t in inputs(23, (2, 2, 16), torch.float64, device))
    own_key, own_value = (torch.randn_like(k).requires_grad_() for _ in range(2))
    out, lse = document_attention_with_lse(q, k, v, documents)
    own_score = (q * own_key).sum(-1) * 16**-0.5
    weights = torch.stack([lse, own_score], -1).softmax(-1)
    merged = weights[..., :1] * out + weights[..., 1:] * own_value
    scores = torch.einsum("ihd,jhd->ijh", q, k) * 16**-0.5
    rows = torch.arange(23, device=device)
    hidden = (rows > rows[:, None]) | (rows < documents.starts[:, None])
    both = torch.cat([scores.masked_fill(hidden[..., None], float("-inf")), own_score[:, None]], 1).softmax(1)
    expected = torch.einsum("ijh,jhd->ihd", both[:, :-1], v) + both[:, -1][..., None] * own_value
    leaves = (q, k, v, own_key, own_value)
    grad = torch.randn_like(expected)
    found = [merged, *torch.autograd.grad(merged, leaves, grad, retain_graph=True)]
    wanted = [expected, *torch.autograd.grad(expected, leaves, grad)]
    for one, other in zip(found, wanted, strict=True):
        torch.testing.assert_close(one, other, rtol=1e-9, atol=1e-9)
