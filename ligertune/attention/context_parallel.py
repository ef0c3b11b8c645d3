"""Context parallel: attention of a rank that computes a part of each packed row.

Each rank gathers the keys and values of all, which grouped-query attention makes small, and its queries attend to those
of their own document as they would in the whole row (Llama 3 is trained this way: arXiv 2407.21783, section 3.3.2).
Gathered keys give their gradients back to the ranks that made them.

A part's tokens are runs, each of one document: what attention is told of documents is told of runs instead, which have
at least as many keys as queries; the last ones of both stand
next to each other. `data.batching.context_parallel_rows` cuts rows so.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed import ProcessGroup


@dataclass(frozen=True)
class ContextParallelKeys:
    """The ranks that have the other parts, and how many keys each of this part's runs sees."""

    group: ProcessGroup
    key_lengths: tuple[int, ...]

    def gather(self, own: Tensor, key_rows: Tensor) -> Tensor:
        """Keys or values of this rank's tokens (1, K, T, D) -> those that its runs see, (1, K, keys, D).

        key_rows: (keys,) int64, their places among those of all ranks, one rank's tokens behind another's.
        """
        everyone = _Gather.apply(own.squeeze(0).transpose(0, 1), self.group)  # (C * T, K, D)
        return everyone.index_select(0, key_rows).transpose(0, 1)[None]


class _Gather(torch.autograd.Function):
    """(T, ...) of each rank -> (C * T, ...) of all, on each; the gradients of all are added up where it began."""

    @staticmethod
    def forward(ctx, own, group):
        ctx.group = group
        everyone = own.new_empty(group.size() * own.shape[0], *own.shape[1:])
        dist.all_gather_into_tensor(everyone, own.contiguous(), group=group)
        return everyone

    @staticmethod
    def backward(ctx, grad):
        own = grad.new_empty(grad.shape[0] // ctx.group.size(), *grad.shape[1:])
        dist.reduce_scatter_tensor(own, grad.contiguous(), group=ctx.group)
        return own, None
