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


def test_tokens_without_bounds_are_documents_of_their_own(tensors) -> None:
    """The bounds end before the row, or after it; places of a transposed tensor have a stride."""
    few = package_functions.chunk_gated_delta_rule(*tensors, cu_seqlens=torch.tensor([4, 5, 14]))[0]
    many = package_functions.chunk_gated_delta_rule(*tensors, cu_seqlens=torch.tensor([0, 4, 5, 14, 90]))[0]
    strided = FORMS["document_places"].t().contiguous().t()
    places = package_functions.chunk_gated_delta_rule(*tensors, document_places=strided)[0]
    expected = gated_delta_rule(*tensors, documents=DOCUMENTS)
    for out in (few, many, places):
        torch.testing.assert_close(out, expected)


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
    with pytest.raises(ValueError, match="cu_seqlens is a list; expected a tensor"):
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
