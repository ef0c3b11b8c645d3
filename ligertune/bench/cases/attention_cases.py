"""Benchmarks of attention within packed documents, all of one length, and to more keys of each token's own."""

from __future__ import annotations

from collections.abc import Callable

import ligertune_kernels as kernels
import torch
from torch import Tensor
from torch.nn import functional as F
from torch.utils.checkpoint import checkpoint

from ligertune.attention.torch_attention import deterministic_backward, flash_varlen
from ligertune.bench.case import Case, OpBenchmark, Provider, Tensors, Work, function, providers_of

# those of Llama-3-8B; a third size of a case is another head dimension
HEADS = 32
KEY_VALUE_HEADS = 8
HEAD_DIM = 128


def _sizes(case: Case) -> tuple[int, int, int]:
    """Return (documents, tokens of each, head dimension)."""
    documents, length, *head_dim = case.sizes
    return documents, length, head_dim[0] if head_dim else HEAD_DIM


def _inputs(case: Case, device: torch.device) -> Tensors:
    """Return query (N, L, H, D), key and value (N, L, K, D); starts and ends (N L,) of the row of all documents."""
    documents, length, head_dim = _sizes(case)
    shapes = ((documents, length, heads, head_dim) for heads in (HEADS, KEY_VALUE_HEADS, KEY_VALUE_HEADS))
    made = (torch.randn(shape, dtype=case.dtype, device=device, requires_grad=True) for shape in shapes)
    starts = torch.arange(documents * length, device=device, dtype=torch.int32) // length * length
    return *made, starts, starts + length


def _work(case: Case) -> Work:
    """Return the work of two matrix products per pair of tokens in the forward and five in the backward."""
    documents, length, head_dim = _sizes(case)
    product = documents * length * (length + 1) * HEADS * head_dim  # two FLOPs for half of the pairs
    one = documents * length * head_dim * case.dtype.itemsize
    read = (HEADS + 2 * KEY_VALUE_HEADS) * one
    written = HEADS * one
    return Work((read + written, 2.0 * (read + written)), (2.0 * product, 5.0 * product))


def _reference(query: Tensor, key: Tensor, value: Tensor, starts: Tensor, ends: Tensor) -> Tensor:
    """Attend one head at a time and recompute its scores in the backward: those of all heads would not fit."""

    def attend(query: Tensor, key: Tensor, value: Tensor) -> Tensor:
        return F.scaled_dot_product_attention(query, key, value, is_causal=True)

    def head_of(t: Tensor, head: int) -> Tensor:
        return t[:, :, head : head + 1].transpose(1, 2)

    heads = []
    for head in range(HEADS):
        shared = head * KEY_VALUE_HEADS // HEADS
        one = head_of(query, head), head_of(key, shared), head_of(value, shared)
        heads.append(checkpoint(attend, *one, use_reentrant=False))
    return torch.cat(heads, dim=1).transpose(1, 2)


def _ours(query: Tensor, key: Tensor, value: Tensor, starts: Tensor, ends: Tensor) -> Tensor:
    flat = (t.flatten(0, 1) for t in (query, key, value))
    return kernels.document_attention(*flat, kernels.Documents(starts, ends, len(query))).view_as(query)


def _torch(name: str, *, deterministic: bool) -> Provider:
    """Return torch's flash attention over documents of different lengths; on a CPU and in fp32, over a batch."""

    def make(case: Case, args: Tensors) -> Callable[[], Tensor]:
        query, key, value, *_ = args
        documents, length, _ = _sizes(case)
        if not query.is_cuda or case.dtype is torch.float32:
            q, k, v = (t.transpose(1, 2) for t in (query, key, value))
            return lambda: F.scaled_dot_product_attention(q, k, v, is_causal=True, enable_gqa=True).transpose(1, 2)
        bounds = torch.arange(documents + 1, device=query.device, dtype=torch.int32) * length

        def call() -> Tensor:
            q, k, v = (t.flatten(0, 1) for t in (query, key, value))
            return flash_varlen(q, k, v, (bounds, bounds), (length, length), window=(-1, 0)).view_as(query)

        return call

    return Provider(name, make, within=lambda: deterministic_backward(deterministic))


ATTENTION = OpBenchmark(
    op="document_attention",
    dims=("N", "L"),
    sizes=((160, 100), (32, 512), (4, 4096), (1, 16384)),
    cpu_sizes=((3, 10), (2, 40)),
    args=("query", "key", "value", "starts", "ends"),
    inputs=_inputs,
    work=_work,
    reference=lambda case, args: _reference,
    providers=(
        function("ours", _ours),
        _torch("torch", deterministic=False),
        _torch("torch, same bits", deterministic=True),
    ),
)


# ---- attention to more keys of each token's own


def _own_inputs(case: Case, device: torch.device) -> Tensors:
    """Return query and out (T, H, D), their log-sum-exp (T, H) fp32, keys and values (n, T, K, D)."""
    n_tokens, n_own = case.sizes
    wide = (n_tokens, HEADS, HEAD_DIM)
    own = (n_own, n_tokens, KEY_VALUE_HEADS, HEAD_DIM)
    query, out, keys, values = (
        torch.randn(shape, dtype=case.dtype, device=device, requires_grad=True) for shape in (wide, wide, own, own)
    )
    lse = torch.randn(wide[:2], device=device, requires_grad=True)
    return query, out, lse, keys, values


def _own_work(case: Case) -> Work:
    """Return the work of reading and writing each tensor and each gradient once."""
    n_tokens, n_own = case.sizes
    wide = n_tokens * HEADS * HEAD_DIM * case.dtype.itemsize
    own = 2 * n_own * n_tokens * KEY_VALUE_HEADS * HEAD_DIM * case.dtype.itemsize
    return Work((3.0 * wide + own, 5.0 * wide + 2.0 * own))


def _merged(query: Tensor, out: Tensor, lse: Tensor, keys: Tensor, values: Tensor) -> Tensor:
    return kernels.merge_own_keys(query, out, lse, keys.unbind(), values.unbind())


def _merged_reference(query: Tensor, out: Tensor, lse: Tensor, keys: Tensor, values: Tensor) -> Tensor:
    return kernels.merge_own_keys_reference(query, out, lse, keys.unbind(), values.unbind())


OWN_KEYS = OpBenchmark(
    op="merge_own_keys",
    dims=("T", "n"),
    sizes=((8192, 1), (8192, 3), (8192, 6)),
    cpu_sizes=((16, 2), (64, 1)),
    args=("query", "out", "lse", "keys", "values"),
    inputs=_own_inputs,
    work=_own_work,
    reference=lambda case, args: _merged_reference,
    providers=providers_of(_merged, eager=_merged_reference),
)
