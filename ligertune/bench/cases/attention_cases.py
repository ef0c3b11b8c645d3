"""The subject of attention over packed documents: some of one length, one behind another."""

from __future__ import annotations

import torch
from torch import Tensor
from torch.nn import functional as F
from torch.utils.checkpoint import checkpoint

from ligertune.attention.flash import flash_varlen
from ligertune.attention.sdpa import same_bits
from ligertune.bench.case import Case, Provider, Subject, Tensors, Work, ours

HEADS, KEY_VALUE_HEADS, HEAD_DIM = 32, 8, 128  # Llama-3-8B's


def _inputs(case: Case, device: torch.device) -> Tensors:
    """query (N, L, H, D), key and value (N, L, K, D); starts, ends (N * L,) of the row of all documents."""
    documents, length = case.sizes
    shapes = ((documents, length, heads, HEAD_DIM) for heads in (HEADS, KEY_VALUE_HEADS, KEY_VALUE_HEADS))
    made = (torch.randn(shape, dtype=case.dtype, device=device, requires_grad=True) for shape in shapes)
    starts = torch.arange(documents * length, device=device, dtype=torch.int32) // length * length
    return *made, starts, starts + length


def _work(case: Case) -> Work:
    """Two products of a head's width for each pair of tokens forward, five backward."""
    documents, length = case.sizes
    product = documents * length * (length + 1) * HEADS * HEAD_DIM  # a multiplication and an addition for half of them
    one = documents * length * HEAD_DIM * case.dtype.itemsize
    read, written = (HEADS + 2 * KEY_VALUE_HEADS) * one, HEADS * one
    return Work((read + written, 2.0 * (read + written)), (2.0 * product, 5.0 * product))


def _plain(query: Tensor, key: Tensor, value: Tensor, starts: Tensor, ends: Tensor) -> Tensor:
    """By single heads, whose scores are made again in the backward: those of all would not fit."""

    def attend(*one: Tensor) -> Tensor:
        return F.scaled_dot_product_attention(*one, is_causal=True)

    heads = [
        checkpoint(
            attend,
            *(t.transpose(1, 2) for t in (query[:, :, h : h + 1], key[:, :, k : k + 1], value[:, :, k : k + 1])),
            use_reentrant=False,
        )
        for h in range(HEADS)
        for k in (h * KEY_VALUE_HEADS // HEADS,)
    ]
    return torch.cat(heads, dim=1).transpose(1, 2)


def _in_tiles(kernels, case: Case, *args: Tensor) -> Tensor:
    query, key, value, starts, ends = args
    flat = (t.flatten(0, 1) for t in (query, key, value))
    return kernels.document_attention(*flat, starts, ends).view_as(query)


def _torch(name: str, *, steady: bool) -> Provider:
    """Its flash attention of documents on a GPU, of a batch elsewhere."""

    def make(case: Case, args: Tensors):
        query, key, value, *_ = args
        documents, length = case.sizes
        if not query.is_cuda or case.dtype is torch.float32:
            batch = [t.transpose(1, 2) for t in (query, key, value)]
            return lambda: F.scaled_dot_product_attention(*batch, is_causal=True, enable_gqa=True).transpose(1, 2)
        bounds = torch.arange(documents + 1, device=query.device, dtype=torch.int32) * length

        def call() -> Tensor:
            flat = (t.flatten(0, 1) for t in (query, key, value))
            return flash_varlen(*flat, (bounds,) * 2, (length,) * 2, window=(-1, 0)).view_as(query)

        return call

    return Provider(name, make, within=lambda: same_bits(steady))


ATTENTION = Subject(
    op="document_attention",
    dims=("N", "L"),
    axis="L",
    sizes=((160, 100), (32, 512), (4, 4096), (1, 16384)),
    small=((3, 10), (2, 40)),
    args=("query", "key", "value", "starts", "ends"),
    inputs=_inputs,
    rows=(),
    work=_work,
    plain=lambda case, args: _plain,
    providers=(
        ours("ours", _in_tiles),
        _torch("torch", steady=False),
        _torch("torch, same bits", steady=True),
    ),
)
