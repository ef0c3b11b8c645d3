"""causal_conv1d_step and gated_delta_rule_step: one token after another equals a whole row."""

import pytest
import torch
from ligertune_kernels import causal_conv1d_step, gated_delta_rule_step
from support.kernels.recurrence_loops import convolution_loop, delta_rule_loop


@pytest.mark.parametrize("taps, places, bias", [(4, 4, True), (4, 3, False), (2, 4, True), (7, 6, True)])
def test_a_convolution_token_by_token_is_that_of_the_row(taps, places, bias, device) -> None:
    x = torch.randn(2, 37, 9, device=device)
    weight = torch.randn(37, taps, device=device)
    offsets = torch.randn(37, device=device) if bias else None
    state = torch.zeros(2, 37, places, device=device)
    parts = [causal_conv1d_step(t, state, weight, offsets, activation="silu") for t in x.split(1, -1)]
    torch.testing.assert_close(torch.cat(parts, -1), convolution_loop(x, weight, offsets, silu=True))
    assert torch.equal(state, x[..., -places:])


@pytest.mark.parametrize("heads", [(1, 1, 16, 16), (2, 4, 24, 40)], ids=str)
@pytest.mark.parametrize("dtype, tolerance", [(torch.float32, 1e-5), (torch.float16, 4e-3)])
def test_a_recurrence_token_by_token_is_that_of_the_row(heads, dtype, tolerance, device) -> None:
    key_heads, value_heads, key_dim, value_dim = heads
    query, key = (torch.randn(2, 7, key_heads, key_dim, device=device, dtype=dtype) for _ in range(2))
    value = torch.randn(2, 7, value_heads, value_dim, device=device, dtype=dtype)
    decay = -torch.rand(2, 7, value_heads, device=device)
    beta = torch.rand(2, 7, value_heads, device=device, dtype=dtype)
    state = torch.randn(2, value_heads, key_dim, value_dim, device=device)
    expected, last = delta_rule_loop(
        *(t.double() for t in (query, key, value, decay, beta)), l2_norm=True, initial_state=state.double()
    )
    out = []
    for part in zip(*(t.split((1, 2, 4), 1) for t in (query, key, value, decay, beta)), strict=True):
        found, state = gated_delta_rule_step(*part, l2_norm=True, initial_state=state)
        out.append(found)
    torch.testing.assert_close(torch.cat(out, 1).double(), expected, rtol=tolerance, atol=tolerance)
    torch.testing.assert_close(state.double(), last, rtol=tolerance, atol=tolerance)


@pytest.mark.parametrize(
    "given, message",
    [
        ({"beta": torch.zeros(1, 1, 3)}, r"gated_delta_rule_step: beta is \(1, 1, 3\); expected \(1, 1, 2\)"),
        ({"query": torch.zeros(1, 1, 1, 4).half()}, "gated_delta_rule_step: query is torch.float16"),
        ({"initial_state": torch.zeros(1, 1, 4, 3)}, r"gated_delta_rule_step: initial_state is .* \(1, 2, 4, 3\)"),
    ],
)
def test_tensors_of_a_step_that_do_not_fit_are_refused(given, message) -> None:
    shapes = {"query": (1, 1, 1, 4), "key": (1, 1, 1, 4), "value": (1, 1, 2, 3), "decay": (1, 1, 2), "beta": (1, 1, 2)}
    tensors = {name: torch.zeros(shape) for name, shape in shapes.items()}
    with pytest.raises(ValueError, match=message):
        gated_delta_rule_step(**{**tensors, **given})


@pytest.mark.parametrize("places", [3, 4])
def test_no_token_leaves_the_state_of_a_convolution(places, device) -> None:
    x = torch.randn(2, 6, 0, device=device)
    state = torch.randn(2, 6, places, device=device)
    kept = state.clone()
    assert causal_conv1d_step(x, state, torch.randn(6, 4, device=device)).shape == x.shape
    assert torch.equal(state, kept)


def test_states_of_a_convolution_that_do_not_fit_are_refused() -> None:
    x = torch.zeros(1, 2, 1)
    with pytest.raises(ValueError, match=r"causal_conv1d_step: conv_state is .* 3 places or more"):
        causal_conv1d_step(x, torch.zeros(1, 2, 2), torch.zeros(2, 4))
    with pytest.raises(ValueError, match="causal_conv1d_step: bias"):
        causal_conv1d_step(x, torch.zeros(1, 2, 3), torch.zeros(2, 4), torch.zeros(3))


def test_a_step_under_autocast_has_its_dtype(device) -> None:
    query = torch.randn(1, 1, 1, 16, device=device)
    decay = torch.zeros(1, 1, 1, device=device)
    with torch.autocast(device.type, torch.bfloat16):
        out, state = gated_delta_rule_step(query, query, query, decay, decay)
    assert out.dtype is torch.bfloat16 and state.dtype is torch.float32
