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


@pytest.mark.parametrize("form", FORMS)
@pytest.mark.parametrize("name", ["chunk_gated_delta_rule", "fused_recurrent_gated_delta_rule"])
def test_documents_of_the_rule_in_each_form(name, form, tensors) -> None:
    out, state = getattr(package_functions, name)(*tensors, **{form: FORMS[form]})
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


def test_other_activations_are_refused() -> None:
    with pytest.raises(ValueError, match="activation is 'gelu'; expected silu, swish or None"):
        package_functions.causal_conv1d_fn(torch.randn(1, 2, 3), torch.randn(2, 4), activation="gelu")
