"""Benchmarks of generation: attention of one token of each text, and the choice of the next token."""

from __future__ import annotations

import ligertune_kernels as kernels
import torch
from torch import Tensor
from torch.nn import functional as F

from ligertune.bench.case import Case, OpBenchmark, Tensors, Work, function, providers_of

# those of Llama-3-8B
HEADS = 32
KEY_VALUE_HEADS = 8
HEAD_DIM = 128
SCALE = HEAD_DIM**-0.5


def _attention_inputs(case: Case, device: torch.device) -> Tensors:
    """Return query (S, H, D), keys and values (S, K, C, D), and ranges (S,) of a tenth of the columns and more."""
    slots, columns = case.sizes
    shapes = ((slots, HEADS, HEAD_DIM), *((slots, KEY_VALUE_HEADS, columns, HEAD_DIM),) * 2)
    made = (torch.randn(shape, dtype=case.dtype, device=device) for shape in shapes)
    lengths = torch.linspace(columns / 10, columns, slots, device=device).int().clamp(min=1)
    return *made, torch.zeros_like(lengths), lengths


def _attention_work(case: Case) -> Work:
    """Return the work of reading the ranges, which are 0.55 of all columns on average."""
    slots, columns = case.sizes
    return Work((0.55 * 2 * slots * columns * KEY_VALUE_HEADS * HEAD_DIM * case.dtype.itemsize, 0.0))


def _ours(query: Tensor, keys: Tensor, values: Tensor, first: Tensor, end: Tensor) -> Tensor:
    return kernels.decode_attention(query, keys, values, first, end, scale=SCALE)


def _reference(query: Tensor, keys: Tensor, values: Tensor, first: Tensor, end: Tensor) -> Tensor:
    return kernels.decode_attention_reference(query, keys, values, first, end, scale=SCALE)


def _masked(query: Tensor, keys: Tensor, values: Tensor, first: Tensor, end: Tensor) -> Tensor:
    """Attend as transformers does with a static cache: with a mask, over all columns."""
    columns = torch.arange(keys.shape[2], device=keys.device)
    mask = (columns >= first[:, None]) & (columns < end[:, None])
    grouped = query.view(len(query), KEY_VALUE_HEADS, -1, HEAD_DIM)
    return F.scaled_dot_product_attention(grouped, keys, values, attn_mask=mask[:, None, None]).view_as(query)


def _logits(case: Case, device: torch.device) -> Tensors:
    logits = 3 * torch.randn(case.sizes, dtype=case.dtype, device=device)
    return logits, torch.arange(2 * len(logits), dtype=torch.int32, device=device).view(-1, 2)


def _our_draw(logits: Tensor, keys: Tensor) -> Tensor:
    return kernels.sample_tokens(logits, keys, temperature=0.7)[1]


def _reference_draw(logits: Tensor, keys: Tensor) -> Tensor:
    return kernels.sample_tokens_reference(logits, keys, temperature=0.7)[1]


DECODING = (
    OpBenchmark(
        op="decode_attention",
        dims=("S", "C"),
        sizes=((512, 1024), (64, 8192)),
        cpu_sizes=((3, 20), (2, 50)),
        args=("query", "keys", "values", "first", "end"),
        inputs=_attention_inputs,
        work=_attention_work,
        reference=lambda case, args: _reference,
        providers=(function("ours", _ours), function("torch_masked", _masked), function("eager", _reference)),
        modes=("forward",),
    ),
    OpBenchmark(
        op="sample_tokens",
        dims=("S", "V"),
        sizes=((512, 128256), (64, 128256)),
        cpu_sizes=((3, 100), (2, 301)),
        args=("logits", "keys"),
        inputs=_logits,
        work=lambda case: Work((float(case.tensor_bytes()), 0.0)),
        reference=lambda case, args: _reference_draw,
        providers=providers_of(_our_draw, eager=_reference_draw),
        modes=("forward",),
    ),
)
