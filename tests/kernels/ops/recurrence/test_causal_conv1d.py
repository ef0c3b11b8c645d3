"""causal_conv1d against a loop in float64: taps, documents at the edges of runs and tiles, strides, bad arguments."""

import pytest
import torch
from ligertune_kernels import causal_conv1d
from ligertune_kernels.launcher import INTERPRETED
from support.covering import every_pair
from support.kernels.attention_runs import documents_of
from support.kernels.judge import DTYPES, OF_A_ROW, judge
from support.kernels.recurrence_loops import convolution_loop

LENGTHS = (
    None,
    pytest.param((37,), id="one document"),
    pytest.param((1, 2, 3, 31), id="documents shorter than the taps"),
    pytest.param((128, 128, 1, 10), id="documents that end with runs of forward and backward"),
)
# channels of fewer than a vector, a block and more, with a ragged end
CHANNELS = (3, 130)
TAPS = (2, 3, 4, 5, 7, 8)


def places(lengths, n_tokens: int, device: torch.device):
    return (None, n_tokens) if lengths is None else (documents_of(lengths, device), sum(lengths))


def inputs(batch: int, channels: int, n_tokens: int, taps: int, bias: bool, dtype, device) -> list[torch.Tensor]:
    """Return x as projections make it, a view of (B, T, C), weight and bias."""
    shapes = [(batch, n_tokens, channels), (channels, taps), *([(channels,)] if bias else [])]
    x, *weights = (torch.randn(shape, device=device, dtype=dtype) for shape in shapes)
    return [x.transpose(1, 2), *weights]


@pytest.mark.skipif(INTERPRETED, reason="runs no kernel")
@pytest.mark.parametrize("lengths", LENGTHS)
@pytest.mark.parametrize("taps", [2, 3, 4, 7])
def test_the_reference_in_float64_is_the_loop(taps, lengths) -> None:
    documents, n_tokens = places(lengths, 9, torch.device("cpu"))
    leaves = [t.requires_grad_() for t in inputs(1, 5, n_tokens, taps, True, torch.float64, "cpu")]
    outs = (
        causal_conv1d(*leaves, activation="silu", documents=documents),
        convolution_loop(*leaves, silu=True, lengths=lengths),
    )
    grad = torch.randn_like(outs[1])
    torch.testing.assert_close(*outs, rtol=1e-12, atol=1e-12)
    for ours, expected in zip(*(torch.autograd.grad(out, leaves, grad) for out in outs), strict=True):
        torch.testing.assert_close(ours, expected, rtol=1e-9, atol=1e-9)


@pytest.mark.parametrize(
    "lengths, channels, taps, bias, activation, dtype",
    every_pair(LENGTHS, CHANNELS, TAPS, (True, False), ("silu", None), DTYPES),
)
def test_agrees_with_float64(lengths, channels, taps, bias, activation, dtype, device) -> None:
    documents, n_tokens = places(lengths, 41, device)
    batch = 2 if lengths is None else 1

    def op(*leaves: torch.Tensor) -> torch.Tensor:
        return causal_conv1d(*leaves, activation=activation, documents=documents)

    def loop(x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None = None) -> torch.Tensor:
        wide = torch.promote_types(x.dtype, torch.float32)
        terms = (None if t is None else t.to(wide) for t in (x, weight, bias))
        return convolution_loop(*terms, silu=activation == "silu", lengths=lengths).to(x.dtype)

    judge(op, loop, inputs(batch, channels, n_tokens, taps, bias, dtype, device), times=OF_A_ROW)


@pytest.mark.parametrize("taps", [4, 7])
def test_memory_of_any_layout_gives_the_same_bits(taps, device) -> None:
    x, weight = inputs(2, 20, 40, taps, False, torch.float32, device)
    expected = causal_conv1d(x, weight, activation="silu")
    padded = torch.randn(2, 44, 24, device=device)[:, 2:-2, 1:21]
    padded.copy_(x.transpose(1, 2))
    for other in (x.contiguous(), padded.transpose(1, 2)):
        assert torch.equal(causal_conv1d(other, weight, activation="silu"), expected)
    assert expected.stride(1) == 1  # channels stay neighbours


@pytest.mark.parametrize("taps", [4, 7])
def test_a_document_does_not_see_the_one_before_it(taps, device) -> None:
    x, weight = inputs(1, 6, 30, taps, False, torch.float32, device)
    documents = documents_of((11, 19), device)
    changed = x.clone()
    changed[..., :11] = torch.randn(1, 6, 11, device=device)
    outs = [causal_conv1d(t, weight, documents=documents) for t in (x, changed)]
    assert torch.equal(outs[0][..., 11:], outs[1][..., 11:]) and not torch.equal(*outs)


@pytest.mark.parametrize(
    "shapes, options, message",
    [
        (((1, 4, 9), (5, 4)), {}, "expected \\(B, C, T\\) and \\(C, 2 to 8\\)"),
        (((1, 4, 9), (4, 9)), {}, "expected \\(B, C, T\\) and \\(C, 2 to 8\\)"),
        (((1, 4, 9), (4, 4), (3,)), {}, "bias \\(3,\\); expected \\(4,\\)"),
        (((1, 4, 9), (4, 4)), {"activation": "relu"}, "activation is 'relu'; expected \"silu\" or None"),
        (
            ((2, 4, 9), (4, 4)),
            {"documents": documents_of((9,), torch.device("cpu"))},
            "expected \\(T,\\) and \\(1, C, T",
        ),
    ],
)
def test_bad_arguments_are_refused(shapes, options, message) -> None:
    with pytest.raises(ValueError, match=message):
        causal_conv1d(*(torch.zeros(shape) for shape in shapes), **options)
