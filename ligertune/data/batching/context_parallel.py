"""Context parallel attention: each rank computes the queries of a part of each packed row.

Each rank gathers the keys and values of all ranks, which grouped-query attention keeps small, and its queries attend to
the keys of their own document (as Llama 3 is trained: arXiv 2407.21783, section 3.3.2). The gradients of gathered keys
return to the ranks that computed them.

The tokens of a part are runs, each of one document. Attention treats runs as documents that have at least as many keys
as queries, where the last query belongs to the last key. `data.batching.collate` cuts rows this way.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed import ProcessGroup


@dataclass(frozen=True)
class ContextParallelKeys:
    """The ranks that hold the other parts, and the number of keys of each run of this part."""

    group: ProcessGroup
    key_lengths: tuple[int, ...]

    def gather(self, own: Tensor, key_rows: Tensor) -> Tensor:
        """Return the keys or values of this rank's runs (1, K, keys, D) from those of its tokens (1, K, T, D).

        key_rows: (keys,) int64, their places among the tokens of all ranks, concatenated in rank order.
        """
        gathered = _Gather.apply(own.squeeze(0).transpose(0, 1), self.group)  # (C * T, K, D)
        return gathered.index_select(0, key_rows).transpose(0, 1)[None]


class _Gather(torch.autograd.Function):
    """All-gather (T, ...) of C ranks into (C * T, ...); the backward sums each rank's gradients on that rank."""

    @staticmethod
    def forward(ctx, own, group):
        ctx.group = group
        gathered = own.new_empty(group.size() * own.shape[0], *own.shape[1:])
        dist.all_gather_into_tensor(gathered, own.contiguous(), group=group)
        return gathered

    @staticmethod
    def backward(ctx, grad):
        own = grad.new_empty(grad.shape[0] // ctx.group.size(), *grad.shape[1:])
        dist.reduce_scatter_tensor(own, grad.contiguous(), group=ctx.group)
        return own, None
