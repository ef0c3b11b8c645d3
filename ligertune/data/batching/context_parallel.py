"""Context parallel: each rank computes a part of each packed row, and its queries attend to the keys of all ranks.

Each packed row is cut into 2C pieces of equal length, and rank r of C ranks computes pieces r and 2C - 1 - r: later
tokens attend to more, so this gives all ranks the same work. Except for attention, layers work token by token, and each
rank sums the loss of its tokens.

Each rank gathers the keys and values of all ranks, which grouped-query attention keeps small, and its queries attend to
the keys of their own document (as Llama 3 is trained: arXiv 2407.21783, section 3.3.2). The gradients of gathered keys
return to the ranks that computed them.

The tokens of a part are runs, each of one document. Attention treats runs as documents that have at least as many keys
as queries, where the last query belongs to the last key.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from itertools import accumulate, pairwise
from typing import Any

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor
from torch.distributed import ProcessGroup

from ligertune.data.templates.label_masking import IGNORE_INDEX
from ligertune.planning.plan import Plan

TokenRange = tuple[int, int]


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
    def forward(ctx: Any, own: Tensor, group: ProcessGroup) -> Tensor:
        ctx.group = group
        gathered = own.new_empty(group.size() * own.shape[0], *own.shape[1:])
        dist.all_gather_into_tensor(gathered, own.contiguous(), group=group)
        return gathered

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None]:
        own = grad.new_empty(grad.shape[0] // ctx.group.size(), *grad.shape[1:])
        dist.reduce_scatter_tensor(own, grad.contiguous(), group=ctx.group)
        return own, None


@dataclass(frozen=True)
class ContextParallelSplit:
    """Splits packed batches between the ranks of `group`, which all have the same rows."""

    group: ProcessGroup

    def cut(self, batch: dict[str, Any]) -> dict[str, Any]:
        """Return this rank's part, (1, T / C), of a batch of collate_packed, (1, T) with T a multiple of 2C.

        `shift_labels` are the labels that its tokens predict. Some belong to another rank's tokens.
        """
        rank = self.group.rank()
        ranks = self.group.size()
        length = batch["input_ids"].shape[1]
        pieces = [rank_pieces(other, ranks, length) for other in range(ranks)]
        runs = document_runs(batch["document_lengths"], pieces[rank])
        lengths = tuple(last - first for _, first, last in runs)
        key_lengths = tuple(last - begin for begin, _, last in runs)
        place = torch.empty(length, dtype=torch.int64)  # of each token in the concatenated tokens of all ranks
        place[_tokens(piece for pair in pieces for piece in pair)] = torch.arange(length)
        own = self.tokens(length)
        predicted = F.pad(batch["labels"], (0, 1), value=IGNORE_INDEX)[:, 1:]
        return {
            **{name: batch[name][:, own] for name in ("input_ids", "position_ids", "labels")},
            "shift_labels": predicted[:, own],
            "cu_seq_lens_q": _cu_seq_lens(lengths),
            "cu_seq_lens_k": _cu_seq_lens(key_lengths),
            "max_length_q": max(lengths),
            "max_length_k": max(key_lengths),
            "document_lengths": lengths,
            "key_rows": place[_tokens((begin, last) for begin, _, last in runs)],
            "context_parallel": ContextParallelKeys(self.group, key_lengths),
        }

    def tokens(self, length: int) -> Tensor:
        """Return the indices of this rank's tokens in a row, (length / C,)."""
        return _tokens(rank_pieces(self.group.rank(), self.group.size(), length))


def context_parallel_split(plan: Plan) -> ContextParallelSplit | None:
    """Create this rank's group; None without context parallelism. All ranks call it."""
    if plan.batching.cp_size == 1:
        return None
    group, _ = dist.new_subgroups(plan.batching.cp_size)
    return ContextParallelSplit(group)


def rank_pieces(rank: int, ranks: int, length: int) -> tuple[TokenRange, TokenRange]:
    """Return the token ranges of a rank's two pieces of a row."""
    size, rest = divmod(length, 2 * ranks)
    if rest:
        raise ValueError(f"a row of {length} tokens cannot be cut into {2 * ranks} pieces of equal length")
    first, second = ((piece * size, (piece + 1) * size) for piece in (rank, 2 * ranks - 1 - rank))
    return first, second


def document_runs(document_lengths: Sequence[int], pieces: Sequence[TokenRange]) -> list[tuple[int, int, int]]:
    """Return (begin of its document, first token, end) of each part of a document in these pieces, in order."""
    documents = list(pairwise(accumulate(document_lengths, initial=0)))
    runs = [(begin, max(begin, first), min(end, last)) for first, last in pieces for begin, end in documents]
    return [run for run in runs if run[1] < run[2]]


def _tokens(ranges: Iterable[TokenRange]) -> Tensor:
    return torch.cat([torch.arange(*span) for span in ranges])


def _cu_seq_lens(lengths: Sequence[int]) -> Tensor:
    """Return the cumulative lengths from 0, int32."""
    return F.pad(torch.tensor(lengths).cumsum(0), (1, 0)).to(torch.int32)
