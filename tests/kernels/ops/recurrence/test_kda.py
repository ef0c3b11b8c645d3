"""kda against a loop in float64: chunks, documents, states, decays, widths, dtypes, package names, bad arguments."""

import pytest
import torch
from ligertune_kernels import kda, kda_reference, kda_step, kda_with_states
from ligertune_kernels.launcher import INTERPRETED
from ligertune_kernels.ops.recurrence.kda.kda_functions import chunk_kda, fused_recurrent_kda
from support.covering import every_pair
from support.kernels.attention_runs import documents_of
from support.kernels.judge import ONE_ROUNDING
from support.kernels.recurrence_loops import delta_rule_loop

# The interpreter multiplies the bits of bfloat16 as if they were integers.
LOW = (torch.float16,) if INTERPRETED else (torch.float16, torch.bfloat16)
PACKED = (3, 40, 1, 2, 84, 5)  # several documents per chunk, one over three chunks, documents of 1 and 2 tokens
LENGTHS = (
    pytest.param(None, id="two rows"),
    pytest.param((1,), id="one token"),
    pytest.param((64, 64), id="documents as long as a chunk"),
    pytest.param(PACKED, id="documents across chunks"),
)
HEADS = (
    # H, X, K, V
    pytest.param((1, 1, 16, 16), id="one head"),
    pytest.param((1, 2, 16, 32), id="two value heads per key head"),
    pytest.param((1, 1, 40, 20), id="widths not a power of two"),
)
# largest decay of a token as a logarithm: hardly any, the fastest of a model that is trained, and one that erases all
DECAYS = (1e-4, 2.0, 20.0, 1e4)
FP32 = 3e-6  # largest error, relative to the largest number, of an fp32 result
# 16-bit factors of products: at most as many roundings as lie between an input and a gradient
ROUNDINGS = 8


def inputs(lengths, heads, dtype, device, decay: float = 2.0, beta: float = 1.0) -> list[torch.Tensor]:
    """Return query and key, views of one projection, value, decay and beta. lengths: None for two rows of 70.

    Decays of a token and channel are spread evenly between 0 and the largest, and some channels do not decay at all.
    """
    key_heads, value_heads, key_dim, value_dim = heads
    batch, n_tokens = (2, 70) if lengths is None else (1, sum(lengths))
    joined = torch.randn(batch, n_tokens, key_heads, 2 * key_dim, device=device, dtype=dtype)
    query, key = joined.split(key_dim, -1)
    value = torch.randn(batch, n_tokens, value_heads, value_dim, device=device, dtype=dtype)
    wide = torch.promote_types(dtype, torch.float32)
    logs = -decay * torch.rand(batch, n_tokens, value_heads, key_dim, device=device, dtype=wide)
    logs[..., ::5] = 0
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
        ours = run(kda_with_states, leaves, grads, **options)
    else:
        documents = None if lengths is None else documents_of(lengths, leaves[0].device)
        ours = run(kda, leaves, grads, documents=documents, **options)
    truth = run(delta_rule_loop, [t.double() for t in leaves], grads, lengths=lengths, **options)
    for found, expected in zip(ours, truth, strict=True):
        error = (found.double() - expected).abs().max()
        # a gradient that is 0, such as that of the first token's decay, has no largest number
        assert error <= tolerance * expected.abs().max().clamp(min=0.1)


@pytest.mark.skipif(INTERPRETED, reason="runs no kernel")
@pytest.mark.parametrize("lengths, decay, l2_norm", every_pair(LENGTHS, DECAYS, (True, False)))
def test_the_reference_in_float64_is_the_loop(lengths, decay, l2_norm) -> None:
    leaves = inputs(lengths, (2, 4, 6, 5), torch.float64, "cpu", decay)
    if not l2_norm:  # longer keys would let the state grow
        leaves[1] = leaves[1] / leaves[1].norm(dim=-1, keepdim=True)
    compare(leaves, lengths, 1e-9, l2_norm=l2_norm, state=lengths is None)


@pytest.mark.parametrize(
    "lengths, heads, decay",
    [
        pytest.param((1,), (1, 1, 16, 16), 2.0, id="one token"),
        pytest.param((3, 40, 1, 2, 18), (1, 2, 16, 16), 2.0, id="a chunk of several documents, two value heads"),
        # slow decay, so that a state that leaks would show
        pytest.param((66, 4, 60), (1, 1, 24, 16), 0.05, id="documents across chunks, channels of two programs"),
    ],
)
def test_agrees_with_the_loop_in_float32(lengths, heads, decay, device) -> None:
    compare(inputs(lengths, heads, torch.float32, device, decay), lengths, FP32, l2_norm=True)


@pytest.mark.slow
@pytest.mark.parametrize("lengths, heads, decay", every_pair(LENGTHS, HEADS, DECAYS))
def test_lengths_heads_and_decays_agree_with_the_loop(lengths, heads, decay, device) -> None:
    compare(inputs(lengths, heads, torch.float32, device, decay), lengths, FP32, l2_norm=True)


@pytest.mark.slow
def test_keys_that_are_not_of_unit_length(device) -> None:
    leaves = inputs(PACKED, (1, 1, 16, 16), torch.float32, device)
    leaves[1] = 0.25 * leaves[1]
    compare(leaves, PACKED, FP32)


@pytest.mark.slow
def test_keys_of_whole_tiles_whose_width_is_no_power_of_two(device) -> None:
    """The last tile of a padded width is beyond the head: in the next head, or outside of the tensor."""
    compare(inputs((20,), (2, 2, 96, 16), torch.float32, device), (20,), FP32, l2_norm=True)


@pytest.mark.parametrize("decay", [2.0, pytest.param(1e-4, marks=pytest.mark.slow)])
def test_states_go_in_and_out(decay, device) -> None:
    compare(inputs((70,), (1, 1, 16, 20), torch.float32, device, decay), None, 1e-5, l2_norm=True, state=True)


def test_decays_that_differ_by_channel_and_token_lose_no_digits(device) -> None:
    """A channel that is erased by one token and hardly decays from there on: a difference of sums would be wrong."""
    leaves = inputs((40,), (1, 1, 16, 16), torch.float32, device)
    leaves[3] = torch.where(torch.rand_like(leaves[3]) < 0.2, -1e4, -1e-3)
    compare(leaves, (40,), FP32, l2_norm=True)


def test_infinite_decays_erase_and_nan_shows(device) -> None:
    leaves = inputs((20,), (1, 1, 16, 16), torch.float32, device)
    least = [*leaves]
    least[3] = leaves[3].clone()
    least[3][:, 7] = -1e30
    expected = kda(*least, l2_norm=True)
    least[3][:, 7] = float("-inf")
    assert torch.equal(kda(*least, l2_norm=True), expected)
    least[3][:, 7] = float("nan")
    assert kda(*least, l2_norm=True)[:, 7:].isnan().all()


@pytest.mark.slow
def test_large_and_vanishing_beta(device) -> None:
    """With beta up to 2 a state may change its sign; with 0 nothing is written, and beta still has a gradient."""
    leaves = inputs((70,), (1, 2, 16, 16), torch.float32, device, decay=0.05, beta=2.0)
    leaves[4][:, ::3] = 0
    compare(leaves, (70,), 1e-5, l2_norm=True)


@pytest.mark.slow
def test_equal_keys_do_not_cancel(device) -> None:
    """Equal keys make the largest factors between tokens; powers of their matrix would reach 10^18."""
    leaves = inputs((70,), (1, 1, 16, 16), torch.float32, device, decay=1e-4)
    leaves[1] = leaves[1][:, :1].expand_as(leaves[1]).contiguous()
    leaves[4] = torch.ones_like(leaves[4])
    compare(leaves, (70,), 1e-4, l2_norm=True)  # gradients of the decays are sums that cancel


@pytest.mark.slow
@pytest.mark.parametrize("dtype", LOW)
@pytest.mark.parametrize("decay", DECAYS)
def test_half_precision_is_within_its_roundings(decay, dtype, device) -> None:
    compare(inputs(PACKED, (1, 2, 16, 32), dtype, device, decay), PACKED, ROUNDINGS * ONE_ROUNDING[dtype], l2_norm=True)


@pytest.mark.parametrize("dtype", LOW)
def test_half_precision_of_two_chunks(dtype, device) -> None:
    leaves = inputs((40,), (1, 1, 16, 16), dtype, device, 0.05)
    leaves[3] = leaves[3].to(dtype)
    compare(leaves, (40,), ROUNDINGS * ONE_ROUNDING[dtype], l2_norm=True)


def test_strides_of_all_tensors_are_taken_as_they_are(device) -> None:
    """Heads before tokens, and parts of one projection."""
    leaves = inputs((20,), (1, 2, 16, 16), torch.float32, device)
    strided = [t.transpose(1, 2).contiguous().transpose(1, 2) for t in leaves]
    strided[3] = torch.cat((leaves[3], leaves[3]), -1)[..., 16:]
    assert not any(t.is_contiguous() for t in strided[2:])
    grads = [torch.randn_like(leaves[2])]
    for found, expected in zip(run(kda, strided, grads), run(kda, leaves, grads), strict=True):
        assert torch.equal(found, expected)


@pytest.mark.slow
def test_a_packed_document_equals_itself_alone(device) -> None:
    """With slow decay, so that a state that leaks would show."""
    lengths = (10, 61, 70)
    leaves = inputs(lengths, (1, 1, 16, 16), torch.float32, device, decay=0.05)
    grad = torch.randn_like(leaves[2])
    packed = run(kda, leaves, [grad], l2_norm=True, documents=documents_of(lengths, device))
    parts = zip(*(t.split(lengths, 1) for t in (*leaves, grad)), strict=True)
    alone = [run(kda, part, [g], l2_norm=True) for *part, g in parts]
    for found, expected in zip(packed, (torch.cat(ts, 1) for ts in zip(*alone, strict=True)), strict=True):
        torch.testing.assert_close(found, expected, rtol=1e-5, atol=1e-5)


def test_a_document_does_not_change_the_bits_of_others_and_runs_repeat(device) -> None:
    lengths = (30, 20, 11)
    leaves = inputs(lengths, (1, 1, 16, 16), torch.float32, device, decay=0.05)
    changed = [t.clone() for t in leaves]
    for t in changed:
        t[:, 30:50] *= 0.5
    grad = torch.randn_like(leaves[2])
    documents = documents_of(lengths, device)
    runs = [run(kda, given, [grad], l2_norm=True, documents=documents) for given in (leaves, changed, leaves)]
    for one, other, again in zip(*runs, strict=True):
        assert torch.equal(one[:, :30], other[:, :30]) and torch.equal(one[:, 50:], other[:, 50:])
        assert not torch.equal(one, other)
        assert torch.equal(one, again)


def test_a_second_derivative_is_refused(device) -> None:
    leaves = [t.requires_grad_() for t in inputs((5,), (1, 1, 16, 16), torch.float32, device)]
    (grad,) = torch.autograd.grad(kda(*leaves).sum(), leaves[0], create_graph=True)
    with pytest.raises(RuntimeError, match="cannot be differentiated again"):
        grad.sum().backward()


def test_no_token_and_a_state(device) -> None:
    leaves = inputs((5,), (1, 2, 16, 16), torch.float32, device)
    state = torch.randn(1, 2, 16, 16, device=device)
    empty = [t[:, :0].requires_grad_() for t in leaves]
    out, final = kda_with_states(*empty, initial_state=state)
    assert out.shape == (1, 0, 2, 16) and torch.equal(final, state) and final.data_ptr() != state.data_ptr()
    gradients = torch.autograd.grad([out, final], empty, [torch.ones_like(out), torch.ones_like(final)])
    assert [g.shape for g in gradients] == [t.shape for t in empty]
    assert kda_with_states(*(t.double() for t in empty))[1].dtype is torch.float64


@pytest.mark.parametrize(
    "change, message",
    [
        ({"query": (1, 9, 2, 8)}, "expected twice \\(B, T, H, K\\) and \\(B, T, X, V\\)"),
        ({"value": (1, 9, 3, 8), "decay": (1, 9, 3, 16), "beta": (1, 9, 3)}, "3 value heads and 2 key heads"),
        ({"decay": (1, 9, 4)}, "decay is \\(1, 9, 4\\); expected \\(1, 9, 4, 16\\)"),
        ({"decay": (1, 9, 4, 8)}, "decay is \\(1, 9, 4, 8\\); expected \\(1, 9, 4, 16\\)"),
        ({"beta": (1, 9, 4, 16)}, "beta is \\(1, 9, 4, 16\\); expected \\(1, 9, 4\\)"),
        ({"initial_state": (1, 4, 8, 16)}, "initial_state is \\(1, 4, 8, 16\\); expected \\(1, 4, 16, 8\\)"),
    ],
)
@pytest.mark.parametrize("function", [kda_with_states, kda_step])
def test_bad_shapes_are_refused(function, change, message) -> None:
    shapes = {
        "query": (1, 9, 2, 16),
        "key": (1, 9, 2, 16),
        "value": (1, 9, 4, 8),
        "decay": (1, 9, 4, 16),
        "beta": (1, 9, 4),
    }
    tensors = {name: torch.zeros(shape) for name, shape in (shapes | change).items()}
    with pytest.raises(ValueError, match=f"kda.*{message}"):
        function(**tensors)


def test_other_documents_and_dtypes_are_refused() -> None:
    query, *others = inputs((9,), (1, 1, 16, 16), torch.float32, "cpu")
    with pytest.raises(ValueError, match=r"kda: documents have starts \(8,\) and value \(1, 9, 1, 16\)"):
        kda(query, *others, documents=documents_of((8,), torch.device("cpu")))
    with pytest.raises(ValueError, match=r"kda: query is torch\.float16, key torch\.float32"):
        kda(query.half(), *others)


def test_the_reference_takes_wide_heads(device) -> None:
    leaves = inputs((9,), (1, 1, 320, 16), torch.float32, device)
    out = kda(*leaves, l2_norm=True)
    assert torch.equal(out, kda_reference(*leaves, l2_norm=True)[0])


@pytest.mark.slow
@pytest.mark.parametrize("beyond", [2**20, -(2**20)])
def test_documents_that_end_outside_of_the_row_stay_in_it(beyond, device) -> None:
    """The ends of the first and the last token of a part bound the scans; 2**20 is behind all memory of the row."""
    lengths = (70, 130)
    documents = documents_of(lengths, device)
    leaves = inputs(lengths, (1, 1, 16, 16), torch.float32, device)
    ends = documents.ends.clone()
    ends[-1] += beyond
    grads = [torch.randn_like(leaves[2])]
    found = run(kda, leaves, grads, documents=documents._replace(ends=ends))
    torch.testing.assert_close(found, run(kda, leaves, grads, documents=documents))


@pytest.mark.slow
def test_scans_of_several_parts_meet_within_a_chunk(device) -> None:
    """Parts have 1,024 tokens; a document of 50 tokens lies over the edge of two of them."""
    lengths = (1000, 50, 40)
    compare(inputs(lengths, (1, 1, 16, 16), torch.float32, device, 0.05), lengths, 1e-5, l2_norm=True)


@pytest.mark.parametrize("heads", [(1, 1, 16, 16), (2, 4, 24, 40)], ids=str)
@pytest.mark.parametrize("dtype, tolerance", [(torch.float32, 1e-5), (torch.float16, 4e-3)])
def test_token_by_token_is_the_row(heads, dtype, tolerance, device) -> None:
    leaves = [torch.cat((t, t.flip(1))) for t in inputs((7,), heads, dtype, device)]
    _, value_heads, key_dim, value_dim = heads
    state = torch.randn(2, value_heads, key_dim, value_dim, device=device)
    expected, last = delta_rule_loop(*(t.double() for t in leaves), l2_norm=True, initial_state=state.double())
    out = []
    for part in zip(*(t.split((1, 2, 4), 1) for t in leaves), strict=True):
        found, state = kda_step(*part, l2_norm=True, initial_state=state)
        out.append(found)
    torch.testing.assert_close(torch.cat(out, 1).double(), expected, rtol=tolerance, atol=tolerance)
    torch.testing.assert_close(state.double(), last, rtol=tolerance, atol=tolerance)


LENGTHS_OF_ROW = (4, 1, 9, 6)
BOUNDS = torch.tensor((0, *LENGTHS_OF_ROW)).cumsum(0)
FUNCTIONS = pytest.mark.parametrize("function", [chunk_kda, fused_recurrent_kda])


@pytest.fixture
def row() -> list[torch.Tensor]:
    """Return query, key, value, decay and beta of 20 tokens on the CPU."""
    return inputs(LENGTHS_OF_ROW, (1, 2, 16, 16), torch.float32, "cpu")


@FUNCTIONS
def test_documents_of_the_package_functions(function, row) -> None:
    documents = documents_of(LENGTHS_OF_ROW, torch.device("cpu"))
    expected = kda(*row, l2_norm=True, documents=documents)
    places = torch.stack((documents.starts, documents.ends))
    for given in ({"cu_seqlens": BOUNDS}, {"cu_seq_lens_q": BOUNDS.int()}, {"document_places": places}):
        out, state = function(*row, use_qk_l2norm_in_kernel=True, **given)
        assert state is None
        torch.testing.assert_close(out, expected)
    with pytest.raises(ValueError, match=r"kda: packed documents start from zeros .* use_cache=False"):
        function(*row, output_final_state=True, cu_seqlens=BOUNDS)


@FUNCTIONS
def test_states_scale_and_short_names_of_the_package_functions(function, row) -> None:
    state = torch.randn(1, 2, 16, 16)
    given = {"initial_state": state, "output_final_state": True, "use_qk_l2norm_in_kernel": True, "scale": 0.5}
    expected, last = kda_with_states(*row, l2_norm=True, initial_state=state)
    query, key, value, g, beta = row
    for found in (function(*row, **given), function(q=query, k=key, v=value, g=g, beta=beta, **given)):
        torch.testing.assert_close(found[0], 2 * expected, rtol=1e-4, atol=1e-5)  # 1 / sqrt(16) is 0.25
        torch.testing.assert_close(found[1], last, rtol=1e-4, atol=1e-5)


@FUNCTIONS
def test_what_the_package_functions_do_not_compute_is_refused(function, row) -> None:
    with pytest.raises(ValueError, match=f"{function.__name__}: A_log is given, which these kernels do not compute"):
        function(*row, A_log=torch.ones(1))
    with pytest.raises(TypeError, match=f"{function.__name__}: unknown argument use_qk_l2norm; did you mean"):
        function(*row, use_qk_l2norm=True)
    with pytest.raises(TypeError, match=r"kda.*: decay is None; expected a tensor"):
        function(*row[:3], None, row[4])


def test_a_step_with_a_state_that_trains_has_gradients(device, row) -> None:
    """By kernels: the reference of a step has gradients in any case."""
    state = torch.randn(1, 2, 16, 16, device=device, requires_grad=True)
    tensors = [t[:, :3].to(device) for t in row]
    fused_recurrent_kda(*tensors, initial_state=state)[0].sum().backward()
    assert state.grad.abs().sum() > 0
