"""The ops under the names of causal-conv1d and flash-linear-attention: documents in all forms, states, scale."""

import pytest
import torch
from ligertune_kernels import causal_conv1d, gated_delta_rule, gated_delta_rule_with_states
from ligertune_kernels.ops.recurrence import package_functions
from support.kernels.attention_runs import documents_of

LENGTHS = (4, 1, 9, 6)
DOCUMENTS = documents_of(LENGTHS, torch.device("cpu"))
BOUNDS = torch.tensor((0, *LENGTHS)).cumsum(0)
FORMS = {"cu_seqlens": BOUNDS.int(), "document_places": torch.stack((DOCUMENTS.starts, DOCUMENTS.ends))}
NUMBERS = torch.tensor([3, 1, 2, 1]).repeat_interleave(torch.tensor(LENGTHS))[None].int()  # neighbours differ
RULE_FORMS = {**FORMS, "cu_seq_lens_q": BOUNDS, "seq_idx": NUMBERS}
TWO_ROWS = torch.zeros(2, 20).int()


@pytest.fixture
def tensors() -> list[torch.Tensor]:
    """Return query, key, value, decay and beta of 20 tokens."""
    query, key = torch.randn(2, 1, sum(LENGTHS), 1, 16).unbind()
    value = torch.randn(1, sum(LENGTHS), 2, 16)
    return [
        query,
        key / key.norm(dim=-1, keepdim=True),
        value,
        -torch.rand(value.shape[:3]),
        torch.rand(value.shape[:3]),
    ]


@pytest.mark.parametrize("form", RULE_FORMS)
@pytest.mark.parametrize("name", ["chunk_gated_delta_rule", "fused_recurrent_gated_delta_rule"])
def test_documents_of_the_rule_in_each_form(name, form, tensors) -> None:
    out, state = getattr(package_functions, name)(*tensors, **{form: RULE_FORMS[form]})
    assert state is None
    torch.testing.assert_close(out, gated_delta_rule(*tensors, documents=DOCUMENTS))


@pytest.mark.parametrize("form", [*FORMS, "seq_idx"])
def test_documents_of_the_convolution_in_each_form(form) -> None:
    x = torch.randn(1, 5, sum(LENGTHS))
    weight = torch.randn(5, 4)
    # transformers passes bounds to the convolution under attention's name
    given = {"cu_seq_lens_q": FORMS["cu_seqlens"]} if form == "cu_seqlens" else {form: FORMS.get(form, NUMBERS)}
    out = package_functions.causal_conv1d_fn(x, weight, activation="swish", **given)
    torch.testing.assert_close(out, causal_conv1d(x, weight, activation="silu", documents=DOCUMENTS))


@pytest.mark.parametrize("name", ["chunk_gated_delta_rule", "fused_recurrent_gated_delta_rule"])
def test_states_and_scale(name, tensors) -> None:
    state = torch.randn(1, 2, 16, 16)
    given = {"initial_state": state, "output_final_state": True, "use_qk_l2norm_in_kernel": True, "scale": 0.5}
    out, final = getattr(package_functions, name)(*tensors, **given)
    expected, last = gated_delta_rule_with_states(*tensors, l2_norm=True, initial_state=state)
    torch.testing.assert_close(out, 2 * expected, rtol=1e-4, atol=1e-5)  # 1 / sqrt(16) is 0.25
    torch.testing.assert_close(final, last, rtol=1e-4, atol=1e-5)


def test_documents_with_states_are_refused(tensors) -> None:
    with pytest.raises(ValueError, match=r"packed documents start from zeros .* use_cache=False"):
        package_functions.chunk_gated_delta_rule(*tensors, output_final_state=True, cu_seqlens=BOUNDS)


def test_next_tokens_move_the_state() -> None:
    x = torch.randn(2, 5, 3)
    weight = torch.randn(5, 4)
    state = torch.zeros(2, 5, 4)
    whole = package_functions.causal_conv1d_fn(x, weight)
    parts = [package_functions.causal_conv1d_update(x[..., i], state, weight) for i in range(3)]
    torch.testing.assert_close(torch.stack(parts, -1), whole)
    assert torch.equal(state[..., 1:], x)


def test_tokens_after_the_last_bound_are_a_document(tensors) -> None:
    """Places of a transposed tensor have a stride."""
    few = package_functions.chunk_gated_delta_rule(*tensors, cu_seqlens=torch.tensor([0, 4, 5, 14]))[0]
    strided = FORMS["document_places"].t().contiguous().t()
    places = package_functions.chunk_gated_delta_rule(*tensors, document_places=strided)[0]
    expected = gated_delta_rule(*tensors, documents=DOCUMENTS)
    for out in (few, places):
        torch.testing.assert_close(out, expected)


@pytest.mark.parametrize(
    "bounds, message",
    [
        ([4, 5, 14, 20], "begins at 4; expected 0"),
        ([-1, 5, 20], "begins at -1; expected 0"),
        ([0, 4, 5, 14, 90], "ends at 90, and the row has 20 tokens"),
        ([0, 14, 5, 20], "decreases; expected the places of documents in order"),
        ([0, 90, 20], "decreases"),
    ],
)
@pytest.mark.parametrize("name", ["cu_seqlens", "cu_seq_lens_q"])
def test_bounds_that_are_not_of_the_row_are_refused_on_the_cpu(name, bounds, message, tensors) -> None:
    given = {name: torch.tensor(bounds)}
    with pytest.raises(ValueError, match=f"chunk_gated_delta_rule: {name} {message}"):
        package_functions.chunk_gated_delta_rule(*tensors, **given)
    with pytest.raises(ValueError, match=f"causal_conv1d_fn: {name} {message}"):
        package_functions.causal_conv1d_fn(torch.randn(1, 2, 20), torch.randn(2, 4), **given)


@pytest.mark.parametrize(
    "bounds, in_order",
    [
        ([4, 5, 14, 20], [0, 4, 5, 14, 20]),
        ([-9, 5, 20], [0, 5, 20]),
        ([0, 4, 5, 14, 2**40], [0, 4, 5, 14, 20]),
        ([0, 14, 5, 20], [0, 14, 20]),
        ([0, 90, 5], [0, 20]),
        ([0], [0, 20]),
    ],
)
def test_bounds_that_nobody_reads_are_brought_into_order(bounds, in_order) -> None:
    """On a GPU the host does not read them."""
    found = package_functions.bounded_documents(torch.tensor(bounds), 20)
    starts = torch.tensor(in_order[:-1]).repeat_interleave(torch.tensor(in_order).diff())
    ends = torch.tensor(in_order[1:]).repeat_interleave(torch.tensor(in_order).diff())
    assert torch.equal(found.starts, starts.int())
    assert torch.equal(found.ends, ends.int())


@pytest.mark.parametrize(
    "given",
    [
        {"seq_idx": TWO_ROWS},
        {"cu_seqlens": TWO_ROWS},
        {"cu_seqlens": BOUNDS.float()},
        {"cu_seqlens": BOUNDS > 0},
        {"document_places": NUMBERS},
    ],
)
def test_documents_of_another_form_are_refused(given, tensors) -> None:
    name = next(iter(given))
    with pytest.raises(ValueError, match=f"{name} is .* for one row of 20 tokens"):
        package_functions.chunk_gated_delta_rule(*tensors, **given)


def test_documents_that_are_no_tensor_are_refused(tensors) -> None:
    with pytest.raises(TypeError, match="cu_seqlens is a list; expected a tensor"):
        package_functions.chunk_gated_delta_rule(*tensors, cu_seqlens=BOUNDS.tolist())


@pytest.mark.parametrize("name, value", [("head_first", True), ("A_log", torch.ones(1)), ("gv", torch.ones(1))])
def test_arguments_that_change_the_result_are_refused(name, value, tensors) -> None:
    with pytest.raises(ValueError, match=f"{name} is given, which these kernels do not compute; leave it out"):
        package_functions.fused_recurrent_gated_delta_rule(*tensors, **{name: value})
    x = torch.randn(1, 2, 3)
    with pytest.raises(ValueError, match="initial_states is given"):
        package_functions.causal_conv1d_fn(x, torch.randn(2, 4), initial_states=x)
    with pytest.raises(ValueError, match="cache_seqlens is given"):
        package_functions.causal_conv1d_update(x, torch.zeros(1, 2, 4), torch.randn(2, 4), cache_seqlens=x)
    package_functions.causal_conv1d_fn(x, torch.randn(2, 4), return_final_states=False, position_ids=x)


def test_a_step_with_a_state_that_trains_has_gradients(device, tensors) -> None:
    """By kernels: the reference of a step has gradients in any case."""
    inputs = [t.to(device) for t in tensors]
    state = torch.randn(1, 2, 16, 16, device=device, requires_grad=True)
    package_functions.fused_recurrent_gated_delta_rule(*inputs, initial_state=state)[0].sum().backward()
    assert state.grad.abs().sum() > 0


def test_other_activations_are_refused() -> None:
    with pytest.raises(ValueError, match="activation is 'gelu'; expected silu, swish or None"):
        package_functions.causal_conv1d_fn(torch.randn(1, 2, 3), torch.randn(2, 4), activation="gelu")


def call(name: str, tensors: list[torch.Tensor], **options: object) -> object:
    """Call a function with tensors that fit, and others by name."""
    x = torch.randn(1, 2, 20)
    weight = torch.randn(2, 4)
    inputs = {"causal_conv1d_fn": (x, weight), "causal_conv1d_update": (x[..., :1], torch.zeros(1, 2, 3), weight)}
    return getattr(package_functions, name)(*inputs.get(name, tensors), **options)


@pytest.mark.parametrize(
    "name, unknown, hint",
    [
        ("causal_conv1d_fn", "seqidx", "did you mean seq_idx"),
        ("causal_conv1d_fn", "A_log", "leave it out"),
        ("causal_conv1d_update", "conv_state_indexes", "did you mean conv_state_indices"),
        ("chunk_gated_delta_rule", "cu_seqlen", "did you mean cu_seqlens"),
        ("chunk_gated_delta_rule", "attention_mask", "leave it out"),
        ("fused_recurrent_gated_delta_rule", "use_qk_l2norm", "did you mean use_qk_l2norm_in_kernel"),
    ],
)
def test_unknown_names_are_refused(name, unknown, hint, tensors) -> None:
    for value in (None, torch.ones(1)):
        with pytest.raises(TypeError, match=f"{name}: unknown argument {unknown}; {hint}"):
            call(name, tensors, **{unknown: value})


@pytest.mark.parametrize(
    "name, names",
    [
        ("causal_conv1d_fn", package_functions.CONVOLUTION),
        ("causal_conv1d_update", package_functions.NEXT_CONVOLUTION),
        ("chunk_gated_delta_rule", package_functions.RULE),
        ("fused_recurrent_gated_delta_rule", package_functions.RULE),
    ],
)
def test_names_of_the_packages_pass_with_their_defaults_alone(name, names, tensors) -> None:
    call(name, tensors, **dict.fromkeys(names.taken | names.refused))
    call(name, tensors, **dict.fromkeys(names.refused, False))
    for refused in sorted(names.refused):
        with pytest.raises(ValueError, match=f"{name}: {refused} is given"):
            call(name, tensors, **{refused: torch.ones(1)})


@pytest.mark.parametrize("name", ["causal_conv1d_fn", "chunk_gated_delta_rule", "fused_recurrent_gated_delta_rule"])
def test_values_that_cannot_be_honoured_are_refused(name, tensors) -> None:
    with pytest.raises(ValueError, match=f"{name}: cu_seq_lens_k is given without cu_seqlens"):
        call(name, tensors, cu_seq_lens_k=BOUNDS)
    call(name, tensors, cu_seq_lens_k=BOUNDS, cu_seq_lens_q=BOUNDS)
    with pytest.raises(ValueError, match=f"{name}: is_causal is False"):
        call(name, tensors, is_causal=False)
    call(name, tensors, is_causal=True)


@pytest.mark.parametrize("name", ["chunk_gated_delta_rule", "fused_recurrent_gated_delta_rule"])
def test_query_key_and_value_have_short_names(name, tensors) -> None:
    query, key, value, g, beta = tensors
    function = getattr(package_functions, name)
    expected = function(*tensors)[0]
    assert torch.equal(function(q=query, k=key, v=value, g=g, beta=beta)[0], expected)
    assert torch.equal(function(query=query, key=key, value=value, g=g, beta=beta)[0], expected)
    assert torch.equal(function(query, key, v=value, g=g, beta=beta)[0], expected)
    with pytest.raises(TypeError, match="query and q are one argument"):
        function(q=query, query=query, k=key, v=value, g=g, beta=beta)


RULE_TENSORS = ("query", "key", "value", "decay", "beta")  # the op's names
WRONG_TENSORS = [
    ("a list", TypeError, "is a list; expected a tensor"),
    ("None", TypeError, "is None; expected a tensor"),
    ("integers", ValueError, r"is torch\.int64; expected a float dtype"),
    ("another device", ValueError, "is on meta and .* on cpu|is on cpu and .* on meta"),
    ("another rank", ValueError, "expected"),
    ("a scalar", ValueError, "expected"),
]


def wrong(tensor: torch.Tensor, kind: str) -> object:
    kinds = {"a list": tensor.tolist(), "None": None, "integers": tensor.long(), "another device": tensor.to("meta")}
    return {**kinds, "another rank": tensor[0], "a scalar": tensor.sum()}[kind]


@pytest.mark.parametrize("kind, error, message", WRONG_TENSORS)
@pytest.mark.parametrize("position", range(5))
@pytest.mark.parametrize("name", ["chunk_gated_delta_rule", "fused_recurrent_gated_delta_rule"])
def test_tensors_of_the_rule_that_do_not_fit_are_refused(name, position, kind, error, message, tensors) -> None:
    tensors[position] = wrong(tensors[position], kind)
    for options in ({}, {"output_final_state": True}):
        with pytest.raises(error, match=f"gated_delta_rule.*({message})") as caught:
            getattr(package_functions, name)(*tensors, **options)
        assert RULE_TENSORS[position] in str(caught.value)
    with pytest.raises(error, match="expected"):
        getattr(package_functions, name)(*tensors, cu_seqlens=BOUNDS)


@pytest.mark.parametrize("kind, error, message", WRONG_TENSORS)
@pytest.mark.parametrize("name", ["chunk_gated_delta_rule", "fused_recurrent_gated_delta_rule"])
def test_states_that_do_not_fit_are_refused(name, kind, error, message, tensors) -> None:
    state = wrong(torch.zeros(1, 2, 16, 16), kind)
    if state is None:
        return
    with pytest.raises(error, match=f"gated_delta_rule.*initial_state .*({message})"):
        getattr(package_functions, name)(*tensors, initial_state=state)


@pytest.mark.parametrize("kind, error, message", WRONG_TENSORS)
@pytest.mark.parametrize("position", range(3))
def test_tensors_of_the_convolutions_that_do_not_fit_are_refused(position, kind, error, message) -> None:
    given = [torch.zeros(1, 2, 5), torch.zeros(2, 4), torch.zeros(2)]
    changed = wrong(given[position], kind)
    if not (position == 2 and changed is None):
        given[position] = changed
        with pytest.raises(error, match=f"causal_conv1d.*({message})"):
            package_functions.causal_conv1d_fn(*given)
    step = [torch.zeros(1, 2, 1), torch.zeros(1, 2, 3), torch.zeros(2, 4)]
    step[position] = wrong(step[position], kind)
    # x of two dimensions is one token of each channel
    with pytest.raises(error, match=f"causal_conv1d_step.*({message})"):
        package_functions.causal_conv1d_update(*step)


def test_a_scale_that_is_no_number_is_refused(tensors) -> None:
    with pytest.raises(TypeError, match="chunk_gated_delta_rule: scale is a str; expected a number"):
        package_functions.chunk_gated_delta_rule(*tensors, scale="1")


def test_documents_on_another_device_are_refused(tensors) -> None:
    for name, form in RULE_FORMS.items():
        with pytest.raises(ValueError, match=f"{name} is on meta and the tokens on cpu"):
            package_functions.chunk_gated_delta_rule(*tensors, **{name: form.to("meta")})


def test_no_row_gives_no_row(tensors) -> None:
    empty = [t[:0] for t in tensors]
    assert package_functions.chunk_gated_delta_rule(*empty)[0].shape == (0, 20, 2, 16)
    assert package_functions.fused_recurrent_gated_delta_rule(*empty)[0].shape == (0, 20, 2, 16)
    weight = torch.randn(2, 4)
    assert package_functions.causal_conv1d_fn(torch.randn(0, 2, 3), weight).shape == (0, 2, 3)
    x = torch.randn(0, 2)
    assert package_functions.causal_conv1d_update(x, torch.zeros(0, 2, 3), weight).shape == (0, 2)
