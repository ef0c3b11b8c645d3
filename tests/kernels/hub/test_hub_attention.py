"""Attention of the hub package under FlashAttention's names, against dense masks and PyTorch's attention."""

import pytest
import torch
from torch import Tensor
from torch.nn import functional

pytest.importorskip("kernels.layer", reason="needs the package kernels of Hugging Face")
DEVICE = "cuda" if torch.cuda.is_available() else "cpu"


def masked_attention(q, k, v, edges, *, window: int | None = None, softcap: float = 0.0) -> Tensor:
    """Attention within documents by a dense mask, (T, H, D)."""
    q, k, v = (t.transpose(0, 1) for t in (q, k, v))
    k, v = (t.repeat_interleave(len(q) // len(k), 0) for t in (k, v))
    rows = torch.arange(q.shape[1], device=q.device)
    document = (rows[:, None] >= edges[None, 1:]).sum(1)
    visible = (rows[:, None] >= rows) & (document[:, None] == document)
    if window is not None:
        visible &= rows > rows[:, None] - window
    scores = q @ k.mT * q.shape[-1] ** -0.5
    scores = softcap * (scores / softcap).tanh() if softcap else scores
    return (scores.masked_fill(~visible, -torch.inf).softmax(-1) @ v).transpose(0, 1)


@pytest.mark.parametrize(
    ("lengths", "window", "softcap"),
    [((7, 1, 12), None, 0.0), ((20,), 4, 0.0), ((5, 15), 3, 2.0), ((6, 0, 14), None, 5.0)],
    ids=["three documents", "window", "window and softcap", "an empty document"],
)
def test_packed_attention_equals_a_dense_mask(lengths, window, softcap, kernel):
    torch.manual_seed(0)
    edges = torch.tensor([0, *lengths], device=DEVICE).cumsum(0).int()
    q, k, v = (torch.randn(20, heads, 16, device=DEVICE, requires_grad=True) for heads in (4, 2, 2))
    window_size = (-1, -1) if window is None else (window - 1, window - 1)
    got = kernel.flash_attn_varlen_func(
        q, k, v, edges, edges, max(lengths), max(lengths), causal=True, window_size=window_size, softcap=softcap
    )
    expected = masked_attention(q, k, v, edges, window=window, softcap=softcap)
    torch.testing.assert_close(got, expected, rtol=1e-4, atol=1e-5)
    for ours, plain in zip(*(torch.autograd.grad(y.sin().sum(), (q, k, v)) for y in (got, expected)), strict=True):
        torch.testing.assert_close(ours, plain, rtol=1e-4, atol=1e-4)


def test_attention_of_a_batch_equals_that_of_each_row(kernel):
    q, k, v = (torch.randn(3, 9, heads, 16, device=DEVICE) for heads in (4, 2, 2))
    got = kernel.flash_attn_func(q, k, v, causal=True)
    expected = functional.scaled_dot_product_attention(
        *(t.transpose(1, 2) for t in (q, k, v)), is_causal=True, enable_gqa=True
    )
    torch.testing.assert_close(got, expected.transpose(1, 2), rtol=1e-4, atol=1e-5)


def test_attention_refuses_what_it_does_not_compute(kernel):
    q, k = torch.randn(4, 2, 16), torch.randn(6, 2, 16)
    edges, other = torch.tensor([0, 4], dtype=torch.int32), torch.tensor([0, 2, 4], dtype=torch.int32)
    for options, message in (
        ({"causal": True, "dropout_p": 0.1}, "dropout_p is 0.1; expected 0"),
        ({}, "causal is False"),
        ({"causal": True, "s_aux": torch.zeros(2)}, "no attention sinks"),
        ({"causal": True, "k": k}, r"q has \(4,\) tokens and k \(6,\); expected the same tokens"),
        ({"causal": True, "cu_seqlens_k": other}, "expected the same documents"),
    ):
        arguments = {"k": q, "v": q, "cu_seqlens_q": edges, "cu_seqlens_k": edges} | options
        with pytest.raises(ValueError, match=message):
            kernel.flash_attn_varlen_func(q, **arguments)
