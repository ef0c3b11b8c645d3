"""ssd against a loop in float64: chunks, documents, groups, states, decays, widths, strides, dtypes, bad arguments."""

import pytest
import torch
from ligertune_kernels import ssd, ssd_reference, ssd_with_states
from ligertune_kernels.launcher import INTERPRETED
from ligertune_kernels.ops.recurrence.ssd import op
from ligertune_kernels.ops.recurrence.ssd.tiles import PART_HEADS
from support.covering import every_pair
from support.kernels.attention_runs import documents_of
from support.kernels.judge import ONE_ROUNDING
from support.kernels.recurrence_loops import ssd_loop

# The interpreter multiplies the bits of bfloat16 as if they were integers.
LOW = (torch.float16,) if INTERPRETED else (torch.float16, torch.bfloat16)
LENGTHS = (
    pytest.param(None, id="two rows"),
    pytest.param((1,), id="one token"),
    pytest.param((1, 2, 61), id="documents of 1 and 2 tokens, and two chunks"),
    pytest.param((3, 20, 1, 41, 5), id="several documents per chunk, one over three chunks"),
)
WIDTHS = (
    # H, G, P, N
    pytest.param((1, 1, 16, 16), id="one head"),
    pytest.param((4, 2, 16, 32), id="two heads per group"),
    pytest.param((2, 1, 24, 20), id="widths not a power of two"),
)
FORMS = (
    # D's dimensions, with z, with dt_bias and softplus
    pytest.param((0, False, False), id="bare"),
    pytest.param((1, True, True), id="D, z, softplus"),
    pytest.param((2, False, True), id="D of columns, softplus"),
)
# of A: hardly any decay, and more than any of a model that is trained
DECAYS = (1e-4, 1.0, 20.0)
# Largest error, relative to the largest number, of an fp32 result. With the fastest decays G reaches 500 in a chunk,
# whose rounding is 3e-5, and a difference of two has twice that.
FP32 = {1e-4: 3e-6, 1.0: 5e-6, 20.0: 6e-5}
# The gradient of A adds differences of sums, one for each token, of either sign: it has lost a few bits more.
CANCELLING = 4
# 16-bit factors of products: at most as many roundings as lie between an input and a gradient
ROUNDINGS = 8


def inputs(
    lengths, widths, dtype, device, decay: float = 1.0, form: tuple[int, bool, bool] = (1, True, True)
) -> dict[str, torch.Tensor]:
    """Return the tensors of a call; x, B and C are views of one projection. lengths: None for two rows of 45."""
    heads, groups, head_dim, state_dim = widths
    d_dims, has_z, has_bias = form
    batch, n_tokens = (2, 45) if lengths is None else (1, sum(lengths))
    sizes = (heads * head_dim, groups * state_dim, groups * state_dim)
    joined = torch.randn(batch, n_tokens, sum(sizes), device=device, dtype=dtype).split(sizes, -1)
    wide = torch.promote_types(dtype, torch.float32)
    found = {
        "x": joined[0].unflatten(-1, (heads, head_dim)),
        "dt": torch.randn(batch, n_tokens, heads, device=device, dtype=dtype),
        "A": -decay * (0.1 + torch.rand(heads, device=device, dtype=wide)),
        "B": joined[1].unflatten(-1, (groups, state_dim)),
        "C": joined[2].unflatten(-1, (groups, state_dim)),
    }
    if not has_bias:
        found["dt"] = found["dt"].abs()
    if d_dims:
        found["D"] = torch.randn((heads, head_dim)[:d_dims], device=device, dtype=wide)
    if has_z:
        found["z"] = torch.randn(batch, n_tokens, heads, head_dim, device=device, dtype=dtype)
    if has_bias:
        found["dt_bias"] = torch.randn(heads, device=device, dtype=wide)
    return found


def run(function, tensors, grads, **options) -> dict[str, torch.Tensor]:
    """Return outputs, the final state if there is an initial one, and gradients, by name."""
    leaves = {name: t.detach().requires_grad_() for name, t in tensors.items()}
    outs = function(**leaves, dt_softplus="dt_bias" in leaves, **options)
    outs = [outs] if isinstance(outs, torch.Tensor) else list(outs[: len(grads)])
    upstream = [g.to(t.dtype) for g, t in zip(grads, outs, strict=True)]
    found = torch.autograd.grad(outs, list(leaves.values()), upstream)
    return dict(zip(("out", "final"), outs, strict=False)) | {
        f"gradient of {name}": t for name, t in zip(leaves, found, strict=True)
    }


def compare(
    tensors, lengths, tolerance: float, *, state: bool = False, function=None, without: str = "", **options
) -> None:
    """Compare outputs and gradients, but one of them, with the loop's, by the largest number of each.

    The gradient of A adds numbers of all tokens, of either sign. Where they happen to cancel, no sum is exact relative
    to what remains: there it is compared by the root of the sum of their squares.
    """
    x = tensors["x"]
    grads = [torch.randn(x.shape, device=x.device)]
    if state:
        size = (x.shape[0], *x.shape[2:], tensors["B"].shape[-1])
        tensors = tensors | {"initial_state": torch.randn(size, device=x.device, dtype=tensors["A"].dtype)}
        grads.append(torch.randn(size, device=x.device))
    given = dict(options) if lengths is None else options | {"documents": documents_of(lengths, x.device)}
    ours = run(function or (ssd_with_states if state else ssd), tensors, grads, **given)
    wide = {name: t.double() for name, t in tensors.items()}
    wide["A"] = wide["A"].expand(tensors["dt"].shape)
    truth = run(ssd_loop, wide, [g.double() for g in grads], lengths=lengths, **options)
    assert ours.keys() == truth.keys()
    of_tokens = truth["gradient of A"]
    truth["gradient of A"] = of_tokens.sum((0, 1))
    sizes = {name: t.abs().max() for name, t in truth.items()}
    sizes["gradient of A"] = max(CANCELLING * sizes["gradient of A"], of_tokens.square().sum((0, 1)).max().sqrt())
    truth.pop(without, None)
    for name, expected in truth.items():
        error = (ours[name].double() - expected).abs().max()
        # a gradient that is 0, such as that of A for a single token, has no size
        assert error <= tolerance * sizes[name].clamp(min=0.1), name
        assert ours[name].shape == expected.shape


@pytest.mark.skipif(INTERPRETED, reason="runs no kernel")
@pytest.mark.parametrize("lengths, form", every_pair(LENGTHS, FORMS))
def test_the_reference_in_float64_is_the_loop(lengths, form) -> None:
    tensors = inputs(lengths, (4, 2, 6, 5), torch.float64, "cpu", form=form)
    compare(tensors, lengths, 1e-9, state=lengths is None, function=ssd_reference)


@pytest.mark.parametrize("lengths, widths, form, decay", every_pair(LENGTHS, WIDTHS, FORMS, DECAYS))
def test_agrees_with_the_loop_in_float32(lengths, widths, form, decay, device) -> None:
    compare(inputs(lengths, widths, torch.float32, device, decay, form), lengths, FP32[decay])


@pytest.mark.parametrize("form", FORMS[1:])
def test_states_go_in_and_out(form, device) -> None:
    compare(inputs(None, (2, 1, 16, 20), torch.float32, device, 0.1, form), None, 5e-6, state=True)


def test_groups_of_more_heads_than_a_program_adds(device) -> None:
    heads = PART_HEADS + 1  # parts of 9 and 8
    compare(inputs((20,), (heads, 1, 8, 8), torch.float32, device, form=(1, False, True)), (20,), 5e-6)


def test_widths_of_whole_tiles_that_are_no_power_of_two(device) -> None:
    """The last tile of a padded width is beyond the head: in the next head, or outside of the tensor."""
    compare(inputs((20,), (2, 2, 96, 48), torch.float32, device), (20,), 5e-6)


@pytest.mark.parametrize("limits", [(0.3, 1.0), (0.0, 0.5), (float("-inf"), float("inf"))])
@pytest.mark.parametrize("softplus", [True, False])
def test_limits_of_dt_stop_its_gradient(limits, softplus, device) -> None:
    tensors = inputs((40,), (2, 1, 16, 16), torch.float32, device, form=(0, False, softplus))
    if limits[0] < 0 or softplus:
        tensors["dt"] = 0.5 * tensors["dt"]
    compare(tensors, (40,), 5e-6, dt_limit=limits)


def test_softplus_of_small_and_large_numbers(device) -> None:
    """1 + exp(dt) rounds away what is small; above 20 it is dt. At the limit itself dt has its gradient."""
    tensors = inputs((40,), (1, 1, 16, 16), torch.float32, device, decay=0.01, form=(0, False, True))
    tensors["dt"] = torch.linspace(-25, 25, 40, device=device)[None, :, None]
    tensors["dt_bias"] = torch.zeros(1, device=device)
    compare(tensors, (40,), 5e-6)
    tensors["x"] = tensors["x"] / tensors["dt"].exp().clamp(max=1)[..., None]  # small steps weigh as much as large ones
    compare(tensors, (40,), 5e-6)
    del tensors["dt_bias"]
    tensors["dt"] = torch.tensor([0.5, 1.0, 0.0, 0.25], device=device).repeat(10)[None, :, None]
    compare(tensors, (40,), 5e-6, dt_limit=(0.25, 1.0))


@pytest.mark.parametrize("dtype", LOW)
@pytest.mark.parametrize("lengths, widths", [(None, (2, 1, 40, 64)), ((3, 40, 1, 86, 5), (4, 2, 16, 16))])
def test_half_precision_is_within_its_roundings(lengths, widths, dtype, device) -> None:
    compare(inputs(lengths, widths, dtype, device, 0.05), lengths, ROUNDINGS * ONE_ROUNDING[dtype])


@pytest.mark.slow
@pytest.mark.parametrize("dtype", (torch.float32, *LOW))
@pytest.mark.parametrize("widths", [(4, 2, 64, 128), (2, 1, 128, 256), (2, 2, 256, 16), (3, 1, 16, 200)])
@pytest.mark.parametrize("lengths", [None, (200, 1, 2, 130, 64)])
def test_heads_and_states_of_models(lengths, widths, dtype, device) -> None:
    tolerance = 1e-5 if dtype is torch.float32 else ROUNDINGS * ONE_ROUNDING[dtype]
    compare(inputs(lengths, widths, dtype, device, 0.5), lengths, tolerance)


def test_other_strides_than_those_of_a_projection(device) -> None:
    """Heads before tokens, a column stride that is not 1, z and dt of a wider tensor."""
    tensors = inputs((37,), (2, 2, 16, 16), torch.float32, device)
    moved = dict(tensors)
    moved["x"] = tensors["x"].transpose(1, 2).contiguous().transpose(1, 2)
    moved["B"] = tensors["B"].repeat_interleave(2, -1)[..., ::2]
    moved["dt"] = torch.cat((tensors["dt"], tensors["dt"]), -1)[..., 2:]
    moved["z"] = torch.cat((tensors["z"], tensors["z"]), -2)[..., :2, :]
    moved["A"] = tensors["A"].repeat_interleave(3)[::3]
    assert torch.equal(ssd(**moved), ssd(**tensors))


def test_the_same_call_has_the_same_bits(device) -> None:
    tensors = inputs((70,), (4, 1, 16, 16), torch.float32, device)
    grads = [torch.randn_like(tensors["z"])]
    one, other = (run(ssd, tensors, grads) for _ in range(2))
    assert all(torch.equal(one[name], other[name]) for name in one)


def test_a_packed_document_equals_itself_alone(device) -> None:
    """With slow decay, so that a state that leaks would show."""
    lengths = (10, 61, 2, 70)
    tensors = inputs(lengths, (2, 1, 16, 16), torch.float32, device, decay=0.01, form=(1, True, False))
    grad = torch.randn_like(tensors["z"])
    packed = run(ssd, tensors, [grad], documents=documents_of(lengths, device))
    rows = ("x", "dt", "B", "C", "z")
    split = zip(*(tensors[name].split(lengths, 1) for name in rows), grad.split(lengths, 1), strict=True)
    alone = [run(ssd, tensors | dict(zip(rows, part, strict=True)), [g]) for *part, g in split]
    for name, found in packed.items():
        of_rows = found.ndim > 2
        expected = torch.cat([some[name] for some in alone], 1) if of_rows else sum(some[name] for some in alone)
        torch.testing.assert_close(found, expected, rtol=1e-5, atol=2e-5 if of_rows else 2e-3)


def test_a_document_does_not_change_the_bits_of_others(device) -> None:
    lengths = (30, 50, 41)
    tensors = inputs(lengths, (2, 1, 16, 16), torch.float32, device, decay=0.05)
    rows = ("x", "dt", "B", "C", "z")
    changed = tensors | {name: tensors[name].clone() for name in rows}
    for name in rows:
        changed[name][:, 30:80] *= 0.5
    grad = torch.randn_like(tensors["z"])
    documents = documents_of(lengths, device)
    one, other = (run(ssd, given, [grad], documents=documents) for given in (tensors, changed))
    for name in ("out", *(f"gradient of {name}" for name in rows)):
        assert torch.equal(one[name][:, :30], other[name][:, :30])
        assert torch.equal(one[name][:, 80:], other[name][:, 80:])
        assert not torch.equal(one[name], other[name])


def test_extreme_decays_stay_finite_and_keep_the_digits_of_others(device) -> None:
    """A token that forgets all is not followed by sums of G that have lost the digits of slow tokens.

    The gradient of A weighs the rounding of that token's gradient with its dt, and is left out.
    """
    tensors = inputs((70,), (1, 1, 16, 16), torch.float32, device, form=(1, True, False))
    tensors["A"] = torch.full((1,), -1.0, device=device)
    tensors["dt"] = 0.01 * tensors["dt"]
    tensors["dt"][:, ::9] = 5000.0
    tensors["x"] = tensors["x"] / tensors["dt"][..., None].clamp(min=1)
    compare(tensors, (70,), 1e-4, without="gradient of A")


@pytest.mark.parametrize("beyond", [2**20, -(2**20)])
def test_documents_that_end_outside_of_the_row_stay_in_it(beyond, device) -> None:
    """The ends of the first and the last token of a part bound the scans; 2**20 is behind all memory of the row."""
    lengths = (20, 50)
    documents = documents_of(lengths, device)
    tensors = inputs(lengths, (2, 1, 16, 16), torch.float32, device)
    ends = documents.ends.clone()
    ends[-1] += beyond
    grads = [torch.randn_like(tensors["z"])]
    found = run(ssd, tensors, grads, documents=documents._replace(ends=ends))
    torch.testing.assert_close(found, run(ssd, tensors, grads, documents=documents))


def test_documents_that_begin_in_different_parts_of_a_row(device, monkeypatch) -> None:
    """Parts of 64 tokens: one ends with a document, in the next none begins, another has two."""
    monkeypatch.setattr(op, "PART", 64)
    lengths = (60, 68, 110, 5)
    tensors = inputs(lengths, (1, 1, 8, 8), torch.float32, device, decay=0.01, form=(0, False, True))
    grads = [torch.randn_like(tensors["x"])]
    documents = documents_of(lengths, device)
    found = run(ssd, tensors, grads, documents=documents)
    wide = {name: t.double() for name, t in tensors.items()}
    expected = run(ssd_reference, wide, grads, documents=documents)
    for name, t in expected.items():
        assert (found[name] - t).abs().max() <= 2e-5 * t.abs().max(), name


def test_no_token_and_a_state(device) -> None:
    tensors = inputs((5,), (2, 1, 16, 12), torch.float32, device)
    state = torch.randn(1, 2, 16, 12, device=device)
    empty = {name: t[:, :0] if t.ndim > 2 else t for name, t in tensors.items()}
    leaves = {name: t.detach().requires_grad_() for name, t in empty.items()}
    out, final = ssd_with_states(**leaves, initial_state=state)
    assert out.shape == (1, 0, 2, 16) and torch.equal(final, state) and final.data_ptr() != state.data_ptr()
    gradients = torch.autograd.grad([out, final], list(leaves.values()), [out, torch.ones_like(final)])
    assert [g.shape for g in gradients] == [t.shape for t in leaves.values()]
    assert ssd_with_states(**{name: t.double() for name, t in empty.items()})[1].dtype is torch.float64


@pytest.mark.parametrize(
    "change, message",
    [
        ({"B": (1, 9, 2, 8)}, "expected \\(..., H, P\\) and twice \\(..., G, N\\)"),
        ({"B": (1, 9, 3, 8), "C": (1, 9, 3, 8)}, "4 heads and 3 groups"),
        ({"dt": (1, 9, 2)}, "dt is \\(1, 9, 2\\); expected \\(1, 9, 4\\)"),
        ({"A": (4, 16)}, "A is \\(4, 16\\); expected \\(4,\\)"),
        ({"D": (16,)}, "D is \\(16,\\); expected \\(4,\\) or \\(4, 16\\)"),
        ({"z": (1, 9, 4, 8)}, "z is \\(1, 9, 4, 8\\)"),
        ({"dt_bias": (1,)}, "dt_bias is \\(1,\\)"),
        ({"B": (1, 9, 2, 0), "C": (1, 9, 2, 0)}, "expected states of at least one column"),
        ({"initial_state": (1, 4, 12, 16)}, "initial_state is \\(1, 4, 12, 16\\); expected \\(1, 4, 16, 12\\)"),
    ],
)
def test_bad_shapes_are_refused(change, message) -> None:
    shapes = {"x": (1, 9, 4, 16), "dt": (1, 9, 4), "A": (4,), "B": (1, 9, 2, 12), "C": (1, 9, 2, 12)}
    tensors = {name: torch.zeros(shape) for name, shape in (shapes | change).items()}
    with pytest.raises(ValueError, match=message):
        ssd_with_states(**tensors)


def test_other_bad_arguments_are_refused() -> None:
    tensors = inputs((9,), (1, 1, 16, 16), torch.float32, "cpu")
    with pytest.raises(ValueError, match=r"documents have starts \(8,\) and x \(1, 9, 1, 16\)"):
        ssd(**tensors, documents=documents_of((8,), torch.device("cpu")))
    with pytest.raises(ValueError, match=r"x is torch\.float16, B torch\.float32"):
        ssd(**tensors | {"x": tensors["x"].half()})
    with pytest.raises(ValueError, match=r"z is torch\.float16 and x torch\.float32"):
        ssd(**tensors | {"z": tensors["z"].half()})
    with pytest.raises(ValueError, match=r"dt_limit is \(1, 0\)"):
        ssd(**tensors, dt_limit=(1, 0))
    with pytest.raises(TypeError, match="A is None; expected a tensor"):
        ssd(**tensors | {"A": None})


def test_the_reference_takes_wide_states(device) -> None:
    tensors = inputs((9,), (1, 1, 16, 320), torch.float32, device)
    assert torch.equal(ssd(**tensors, dt_softplus=True), ssd_reference(**tensors, dt_softplus=True)[0])
