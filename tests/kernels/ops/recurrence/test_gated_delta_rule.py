"""gated_delta_rule against a loop in float64: chunks, documents, states, decays, widths, dtypes, bad arguments."""

import pytest
import torch
from ligertune_kernels import gated_delta_rule, gated_delta_rule_reference, gated_delta_rule_with_states
from ligertune_kernels.launcher import INTERPRETED
from ligertune_kernels.ops.recurrence.tiles import padded
from support.covering import every_pair
from support.kernels.attention_runs import documents_of
from support.kernels.judge import ONE_ROUNDING
from support.kernels.pretend_gpu import TARGETS
from support.kernels.recurrence_loops import delta_rule_loop

# The interpreter multiplies the bits of bfloat16 as if they were integers.
LOW = (torch.float16,) if INTERPRETED else (torch.float16, torch.bfloat16)
LENGTHS = (
    pytest.param(None, id="two rows"),
    pytest.param((1,), id="one token"),
    pytest.param((64, 64), id="documents as long as a chunk"),
    pytest.param((3, 40, 1, 86, 5), id="several documents per chunk, one over three chunks"),
)
HEADS = (
    # H, X, K, V
    pytest.param((1, 1, 16, 16), id="one head"),
    pytest.param((2, 4, 16, 32), id="two value heads per key head"),
    pytest.param((1, 3, 24, 20), id="widths not a power of two"),
)
# largest decay of a token as a logarithm: hardly any, and the fastest of a model that is trained
DECAYS = (1e-4, 2.0, 20.0)
# Largest error, relative to the largest number, of an fp32 result.
FP32 = {1e-4: 3e-6, 2.0: 3e-6, 20.0: 2e-5}
# 16-bit factors of products: at most as many roundings as lie between an input and a gradient
ROUNDINGS = 8


def inputs(lengths, heads, dtype, device, decay: float = 2.0, beta: float = 1.0) -> list[torch.Tensor]:
    """Return query and key, views of one projection, value, decay and beta. lengths: None for two rows of 70."""
    key_heads, value_heads, key_dim, value_dim = heads
    batch, n_tokens = (2, 70) if lengths is None else (1, sum(lengths))
    joined = torch.randn(batch, n_tokens, key_heads, 2 * key_dim, device=device, dtype=dtype)
    query, key = joined.split(key_dim, -1)
    value = torch.randn(batch, n_tokens, value_heads, value_dim, device=device, dtype=dtype)
    wide = torch.promote_types(dtype, torch.float32)
    logs = -decay * torch.rand(batch, n_tokens, value_heads, device=device, dtype=wide)
    return [query, key, value, logs, beta * torch.rand(batch, n_tokens, value_heads, device=device, dtype=dtype)]


def run(function, leaves, grads, **options) -> list[torch.Tensor]:
    """Return outputs, the final state if the leaves have an initial one, and gradients."""
    leaves = [t.detach().requires_grad_() for t in leaves]
    if len(leaves) == 6:
        options["initial_state"] = leaves[5]
    outs = function(*leaves[:5], **options)
    outs = [outs] if isinstance(outs, torch.Tensor) else list(outs[: len(grads)])
    return [*outs, *torch.autograd.grad(outs, leaves, [g.to(t.dtype) for g, t in zip(grads, outs, strict=True)])]


def compare(leaves, lengths, tolerance: float, *, state: bool = False, **options) -> None:
    """Compare outputs and gradients with the loop's, by the largest number of each."""
    batch, _, value_heads, value_dim = leaves[2].shape
    shapes = [leaves[2].shape]
    if state:
        shapes.append((batch, value_heads, leaves[0].shape[-1], value_dim))
        leaves = [*leaves, torch.randn(shapes[1], device=leaves[0].device, dtype=leaves[3].dtype)]
    grads = [torch.randn(shape, device=leaves[0].device) for shape in shapes]
    if state:
        ours = run(gated_delta_rule_with_states, leaves, grads, **options)
    else:
        documents = None if lengths is None else documents_of(lengths, leaves[0].device)
        ours = run(gated_delta_rule, leaves, grads, documents=documents, **options)
    truth = run(delta_rule_loop, [t.double() for t in leaves], grads, lengths=lengths, **options)
    for found, expected in zip(ours, truth, strict=True):
        error = (found.double() - expected).abs().max()
        # a gradient that is 0, such as that of the first token's decay, has no largest number
        assert error <= tolerance * expected.abs().max().clamp(min=0.1)


@pytest.mark.skipif(INTERPRETED, reason="runs no kernel")
@pytest.mark.parametrize("lengths", LENGTHS)
@pytest.mark.parametrize("l2_norm", [True, False])
def test_the_reference_in_float64_is_the_loop(lengths, l2_norm) -> None:
    leaves = inputs(lengths, (2, 4, 6, 5), torch.float64, "cpu")
    if not l2_norm:  # longer keys would let the state grow
        leaves[1] = leaves[1] / leaves[1].norm(dim=-1, keepdim=True)
    compare(leaves, lengths, 1e-9, l2_norm=l2_norm, state=lengths is None)


@pytest.mark.parametrize("lengths, heads, decay", every_pair(LENGTHS, HEADS, DECAYS))
def test_agrees_with_the_loop_in_float32(lengths, heads, decay, device) -> None:
    compare(inputs(lengths, heads, torch.float32, device, decay), lengths, FP32[decay], l2_norm=True)


def test_keys_of_whole_tiles_whose_width_is_no_power_of_two(device) -> None:
    """The last tile of a padded width is beyond the head: in the next head, or outside of the tensor."""
    compare(inputs((20,), (2, 2, 96, 16), torch.float32, device), (20,), FP32[2.0], l2_norm=True)


@pytest.mark.parametrize("decay", [1e-4, 2.0])
def test_states_go_in_and_out(decay, device) -> None:
    compare(inputs(None, (1, 2, 16, 20), torch.float32, device, decay), None, 1e-5, l2_norm=True, state=True)


def test_large_and_vanishing_beta(device) -> None:
    """With beta up to 2 a state may change its sign; with 0 nothing is written, and beta still has a gradient."""
    leaves = inputs((70,), (1, 2, 16, 16), torch.float32, device, decay=0.05, beta=2.0)
    leaves[4][:, ::3] = 0
    compare(leaves, (70,), 1e-5, l2_norm=True)


def test_equal_keys_do_not_cancel(device) -> None:
    """Equal keys make the largest factors between tokens; powers of their matrix would reach 10^18."""
    leaves = inputs((70,), (1, 1, 16, 16), torch.float32, device, decay=1e-4)
    leaves[1] = leaves[1][:, :1].expand_as(leaves[1]).contiguous()
    leaves[4] = torch.ones_like(leaves[4])
    compare(leaves, (70,), 1e-4, l2_norm=True)  # gradients of the decays are sums that cancel


@pytest.mark.parametrize("dtype", LOW)
@pytest.mark.parametrize("lengths, width", [(None, 32), ((3, 40, 1, 86, 5), 16)])
def test_half_precision_is_within_its_roundings(lengths, width, dtype, device) -> None:
    leaves = inputs(lengths, (2, 4, width, width), dtype, device, 0.05)
    compare(leaves, lengths, ROUNDINGS * ONE_ROUNDING[dtype], l2_norm=True)


def test_a_packed_document_equals_itself_alone(device) -> None:
    """With slow decay, so that a state that leaks would show."""
    lengths = (10, 61, 30, 70)
    leaves = inputs(lengths, (1, 2, 16, 16), torch.float32, device, decay=0.05)
    grad = torch.randn_like(leaves[2])
    packed = run(gated_delta_rule, leaves, [grad], l2_norm=True, documents=documents_of(lengths, device))
    parts = zip(*(t.split(lengths, 1) for t in (*leaves, grad)), strict=True)
    alone = [run(gated_delta_rule, part, [g], l2_norm=True) for *part, g in parts]
    for found, expected in zip(packed, (torch.cat(ts, 1) for ts in zip(*alone, strict=True)), strict=True):
        torch.testing.assert_close(found, expected, rtol=1e-5, atol=1e-5)


def test_a_document_does_not_change_the_bits_of_others(device) -> None:
    lengths = (30, 50, 41)
    leaves = inputs(lengths, (1, 2, 16, 16), torch.float32, device, decay=0.05)
    changed = [t.clone() for t in leaves]
    for t in changed:
        t[:, 30:80] *= 0.5
    grad = torch.randn_like(leaves[2])
    documents = documents_of(lengths, device)
    outs = (run(gated_delta_rule, given, [grad], l2_norm=True, documents=documents) for given in (leaves, changed))
    for one, other in zip(*outs, strict=True):
        assert torch.equal(one[:, :30], other[:, :30]) and torch.equal(one[:, 80:], other[:, 80:])
        assert not torch.equal(one, other)


def test_what_lies_around_a_chunk_does_not_matter(device) -> None:
    """Tokens after the last of a row are loaded as zeros, even where the decays before them are extreme."""
    leaves = inputs((70,), (1, 1, 16, 16), torch.float32, device, decay=5000.0)
    outs = run(gated_delta_rule, leaves, [torch.ones_like(leaves[2])], l2_norm=True)
    assert all(t.isfinite().all() for t in outs)


def test_no_token_and_a_state(device) -> None:
    leaves = inputs((5,), (1, 2, 16, 16), torch.float32, device)
    state = torch.randn(1, 2, 16, 16, device=device)
    empty = [t[:, :0].requires_grad_() for t in leaves]
    out, final = gated_delta_rule_with_states(*empty, initial_state=state)
    assert out.shape == (1, 0, 2, 16) and torch.equal(final, state) and final.data_ptr() != state.data_ptr()
    gradients = torch.autograd.grad([out, final], empty, [torch.ones_like(out), torch.ones_like(final)])
    assert [g.shape for g in gradients] == [t.shape for t in empty]
    assert gated_delta_rule_with_states(*(t.double() for t in empty))[1].dtype is torch.float64


@pytest.mark.parametrize(
    "change, message",
    [
        ({"query": (1, 9, 2, 8)}, "expected twice \\(B, T, H, K\\) and \\(B, T, X, V\\)"),
        ({"value": (1, 9, 3, 8), "decay": (1, 9, 3), "beta": (1, 9, 3)}, "3 value heads and 2 key heads"),
        ({"decay": (1, 9, 2)}, "decay is \\(1, 9, 2\\); expected \\(1, 9, 4\\)"),
        ({"query": (1, 9, 2, 0), "key": (1, 9, 2, 0)}, "expected heads of at least one column"),
        ({"initial_state": (1, 4, 8, 16)}, "initial_state is \\(1, 4, 8, 16\\); expected \\(1, 4, 16, 8\\)"),
    ],
)
def test_bad_shapes_are_refused(change, message) -> None:
    shapes = {
        "query": (1, 9, 2, 16),
        "key": (1, 9, 2, 16),
        "value": (1, 9, 4, 8),
        "decay": (1, 9, 4),
        "beta": (1, 9, 4),
    }
    tensors = {name: torch.zeros(shape) for name, shape in (shapes | change).items()}
    with pytest.raises(ValueError, match=message):
        gated_delta_rule_with_states(**tensors)


def test_a_row_of_other_documents_is_refused() -> None:
    leaves = inputs((9,), (1, 1, 16, 16), torch.float32, "cpu")
    with pytest.raises(ValueError, match=r"documents have starts \(8,\) and value \(1, 9, 1, 16\)"):
        gated_delta_rule(*leaves, documents=documents_of((8,), torch.device("cpu")))


def test_dtypes_that_differ_are_refused() -> None:
    query, *others = inputs((9,), (1, 1, 16, 16), torch.float32, "cpu")
    with pytest.raises(ValueError, match=r"query is torch\.float16, key torch\.float32"):
        gated_delta_rule(query.half(), *others)


def test_the_reference_takes_wide_heads(device) -> None:
    leaves = inputs((9,), (1, 1, 320, 16), torch.float32, device)
    out = gated_delta_rule(*leaves, l2_norm=True)
    assert torch.equal(out, gated_delta_rule_reference(*leaves, l2_norm=True)[0])


@pytest.mark.parametrize(("arch", "width"), [("sm90", 64), ("sm80", 16), ("gfx942", 16)])
def test_narrow_heads_are_padded_as_far_as_products_of_the_chip_are_right(arch, width) -> None:
    assert [padded(head, TARGETS[arch]) for head in (8, 16)] == [width, width]
    assert padded(65, TARGETS[arch]) == 128


@pytest.mark.parametrize("beyond", [2**20, -(2**20)])
def test_documents_that_end_outside_of_the_row_stay_in_it(beyond, device) -> None:
    """The ends of the first and the last token of a part bound the scans; 2**20 is behind all memory of the row."""
    lengths = (70, 130)
    documents = documents_of(lengths, device)
    leaves = inputs(lengths, (1, 2, 16, 16), torch.float32, device)
    ends = documents.ends.clone()
    ends[-1] += beyond
    grads = [torch.randn_like(leaves[2])]
    found = run(gated_delta_rule, leaves, grads, documents=documents._replace(ends=ends))
    torch.testing.assert_close(found, run(gated_delta_rule, leaves, grads, documents=documents))
