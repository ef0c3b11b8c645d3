"""document_attention on packed documents of given lengths, for tests."""

from __future__ import annotations

import torch
from ligertune_kernels import document_attention


def places(lengths: tuple[int, ...], device: torch.device) -> tuple[torch.Tensor, torch.Tensor]:
    """Return the starts and ends that document_attention takes, (T,) int32 each."""
    sizes = torch.tensor(lengths)
    ends = sizes.cumsum(0)
    return tuple(t.repeat_interleave(sizes).to(device, torch.int32) for t in (ends - sizes, ends))


def run(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, lengths: tuple[int, ...], grad: torch.Tensor, **options):
    """Return the output (T, H, D) of document_attention, and the gradients of q, k and v for `grad`."""
    leaves = [t.detach().requires_grad_() for t in (q, k, v)]
    out = document_attention(*leaves, *places(lengths, q.device), **options)
    return [out.detach(), *torch.autograd.grad(out, leaves, grad)]
