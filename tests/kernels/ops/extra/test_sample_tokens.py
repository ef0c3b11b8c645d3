"""sample_tokens: the reference's draws, the law of a softmax, and log-probabilities of the whole distribution."""

import math

import pytest
import torch
from ligertune_kernels import sample_tokens, sample_tokens_reference
from ligertune_kernels.launcher import INTERPRETED
from support.covering import every_pair


def keys_of(n_rows: int, device) -> torch.Tensor:
    generator = torch.Generator().manual_seed(1)
    return torch.randint(-(2**31), 2**31 - 1, (n_rows, 2), generator=generator, dtype=torch.int32).to(device)


# one token, less than a block, whole blocks, and a ragged one after others
@pytest.mark.parametrize(
    "n_tokens, dtype, temperature, bounded",
    every_pair((1, 40, 128, 333), (torch.float32, torch.bfloat16), (0.0, 0.6, 1.0), (False, True)),
)
def test_draws_and_log_probabilities_are_those_of_the_reference(n_tokens, dtype, temperature, bounded, device):
    logits = (3 * torch.randn(21, n_tokens + 3, device=device)).to(dtype)[:, :n_tokens]  # rows with a stride
    keys = keys_of(21, device)
    least = logits.float().median(1).values * (1 / (temperature or 1.0)) if bounded else None
    tokens, log_probs = sample_tokens(logits, keys, temperature=temperature, least=least)
    expected, _ = sample_tokens_reference(logits, keys, temperature=temperature, least=least)
    assert torch.equal(tokens, expected)
    if not temperature:
        assert torch.equal(logits.gather(1, tokens[:, None])[:, 0], logits.amax(1))
    elif bounded:
        assert bool((logits.float().gather(1, tokens[:, None])[:, 0] * (1 / temperature) >= least).all())
    true = logits.double().log_softmax(1).gather(1, tokens[:, None])[:, 0]
    torch.testing.assert_close(log_probs.double(), true, rtol=0, atol=5e-6)


@pytest.mark.parametrize("temperature", [0.5, 1.0])
def test_counts_follow_the_softmax(temperature, device):
    """Chi-square at five deviations."""
    n_rows, n_tokens = (500 if INTERPRETED else 20_000), 24
    logits = torch.randn(n_tokens, generator=torch.Generator().manual_seed(5)).to(device)
    tokens, _ = sample_tokens(logits.expand(n_rows, -1).contiguous(), keys_of(n_rows, device), temperature=temperature)
    expected = n_rows * (logits / temperature).softmax(0)
    counts = torch.bincount(tokens, minlength=n_tokens)
    squares = ((counts - expected) ** 2 / expected).sum()
    assert squares < n_tokens - 1 + 5 * math.sqrt(2 * (n_tokens - 1))


@pytest.mark.parametrize("value", [math.nan, math.inf])
def test_a_logit_that_is_no_number_gives_nan_in_its_row_alone(value, device):
    logits = torch.randn(3, 100, device=device)
    logits[1, 70] = value
    logits[2, 3] = -math.inf
    for temperature in (0.0, 1.0):
        _, log_probs = sample_tokens(logits, keys_of(3, device), temperature=temperature)
        assert log_probs.isnan().tolist() == [False, True, False]


def test_arguments_that_do_not_fit_are_refused():
    logits = torch.zeros(3, 5)
    with pytest.raises(ValueError, match=r"sample_tokens: logits \(3, 5\), keys \(2, 2\) torch.int32"):
        sample_tokens(logits, torch.zeros(2, 2, dtype=torch.int32), temperature=1.0)
    with pytest.raises(ValueError, match=r"sample_tokens: least is \(2,\): expected \(3,\)"):
        sample_tokens(logits, torch.zeros(3, 2, dtype=torch.int32), temperature=1.0, least=torch.zeros(2))
