"""document_attention on packed documents of given lengths, for tests."""

from __future__ import annotations

import torch
from ligertune_kernels import Documents, document_attention


def documents_of(lengths: tuple[int, ...], device: torch.device, count: int | None = None) -> Documents:
    """Return documents of these lengths, one behind the other."""
    sizes = torch.tensor(lengths)
    ends = sizes.cumsum(0)
    starts, ends = (t.repeat_interleave(sizes).to(device, torch.int32) for t in (ends - sizes, ends))
    return Documents(starts, ends, count)


def run(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    lengths: tuple[int, ...],
    grad: torch.Tensor,
    *,
    count: int | None = None,
):
    """Return the output (T, H, D) of document_attention, and the gradients of q, k and v for `grad`."""
    leaves = [t.detach().requires_grad_() for t in (q, k, v)]
    out = document_attention(*leaves, documents_of(lengths, q.device, count))
    return [out.detach(), *torch.autograd.grad(out, leaves, grad)]
