"""Flash attention of a part of a row: fewer queries than keys, where the last of both belong together."""

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from ligertune.attention.packed_documents import WindowMask, varlen

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(torch.version.hip is not None, reason="torch's varlen attention is for NVIDIA GPUs"),
]

# queries and keys of runs: the end of a document, a whole one, one token of many, and longer than a block of flash
RUNS = ((5, 19), (24, 24), (1, 300), (200, 1000))


def in_plain_torch(query: Tensor, key: Tensor, value: Tensor, window: int | None) -> Tensor:
    """(1, H, T, D), (1, K, keys, D) twice -> (1, T, H, D), one run after another with a mask."""
    found = []
    lengths = ([q for q, _ in RUNS], [k for _, k in RUNS], [k for _, k in RUNS])
    for q, k, v in zip(*(t.split(n, dim=2) for t, n in zip((query, key, value), lengths, strict=True)), strict=True):
        back = torch.arange(k.shape[2])[-q.shape[2] :, None] - torch.arange(k.shape[2])
        seen = ((back >= 0) & (back < (window or k.shape[2]))).to(q.device)
        k, v = (t.repeat_interleave(q.shape[1] // k.shape[1], dim=1) for t in (k, v))
        found.append(F.scaled_dot_product_attention(q, k, v, attn_mask=seen))
    return torch.cat(found, dim=2).transpose(1, 2)


def both_ways(function, tensors: tuple[Tensor, ...], dy: Tensor, dtype: torch.dtype) -> list[Tensor]:
    leaves = [t.to(dtype).requires_grad_() for t in tensors]
    out = function(*leaves)
    return [t.detach().float() for t in (out, *torch.autograd.grad(out, leaves, dy.to(dtype)))]


def by_run(found: list[Tensor], truth: list[Tensor]) -> list[float]:
    """How far each run's output and gradients are from the truth: one of many keys has small numbers."""
    shares = []
    for (one, other), (dim, place) in zip(
        zip(found, truth, strict=True), ((1, 0), (2, 0), (2, 1), (2, 1)), strict=True
    ):
        lengths = [run[place] for run in RUNS]
        for mine, right in zip(one.split(lengths, dim=dim), other.split(lengths, dim=dim), strict=True):
            shares.append(float((mine - right).norm() / right.norm()))
    return shares


@pytest.mark.parametrize("window", [None, 64])
def test_runs_attend_to_the_keys_before_them(window):
    torch.manual_seed(0)
    queries, keys = (sum(run[place] for run in RUNS) for place in (0, 1))
    shapes = ((1, 8, queries, 64), (1, 2, keys, 64), (1, 2, keys, 64))
    tensors = tuple(torch.randn(shape, device="cuda") for shape in shapes)
    dy = torch.randn(1, queries, 8, 64, device="cuda")
    ends = [torch.tensor([0, *(run[place] for run in RUNS)], device="cuda").cumsum(0).int() for place in (0, 1)]
    places = {"cu_seq_lens_q": ends[0], "cu_seq_lens_k": ends[1],
              "max_length_q": max(q for q, _ in RUNS), "max_length_k": max(k for _, k in RUNS)}  # fmt: skip

    def ours(*qkv: Tensor) -> Tensor:
        mask = None if window is None else WindowMask(window)
        return varlen(torch.nn.Identity(), *qkv, mask, sliding_window=window, **places)[0]

    truth = both_ways(lambda *qkv: in_plain_torch(*qkv, window), tensors, dy, torch.float32)
    found = both_ways(ours, tensors, dy, torch.bfloat16)
    assert max(by_run(found, truth)) < 2e-2
