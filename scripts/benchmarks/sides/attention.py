"""Sides of bench_attention: how torch, FlashAttention and ligertune are called on the same packed tensors."""

from __future__ import annotations

import contextlib
import importlib
import importlib.util
from collections.abc import Callable
from dataclasses import dataclass


@dataclass(frozen=True)
class Case:
    """Heads and documents of a row."""

    width: int
    heads: tuple[int, int]
    lengths: tuple[int, ...]

    @property
    def size(self) -> tuple[int, int]:
        return len(self.lengths), self.lengths[0]

    def flops(self) -> float:
        """Return the FLOPs of the forward: two products for half of the pairs of tokens. The backward has five."""
        return sum(2.0 * n * (n + 1) for n in self.lengths) * self.heads[0] * self.width


@dataclass(frozen=True)
class Side:
    """How a side is called.

    make: takes a `Row` and the query, key and value in this side's layout; returns what computes the output.
    layout: "packed" (T, H, D), "batch" (N, H, L, D) or "row" (1, H, T, D). backend: of SDPBackend.
    """

    label: str
    make: Callable
    layout: str = "packed"
    backend: str | None = None
    needs: str | None = None

    @property
    def installed(self) -> bool:
        if self.needs is None:
            return True
        package = self.needs.partition(".")[0]
        return all(importlib.util.find_spec(name) is not None for name in dict.fromkeys((package, self.needs)))


@dataclass(frozen=True)
class Row:
    """Packed tensors of a case: query and gradient of the output (T, H, D), key and value (T, K, D), all bfloat16.

    starts, ends: int32 (T,), of the document of each token. bounds: int32 (documents + 1,).
    """

    case: Case
    tensors: tuple
    starts: object
    ends: object
    bounds: object


def row_of(case: Case, device: str) -> Row:
    import torch

    generator, tokens = torch.Generator(device).manual_seed(0), sum(case.lengths)
    shapes = ((tokens, heads, case.width) for heads in (case.heads[0], case.heads[1], case.heads[1], case.heads[0]))
    tensors = tuple(torch.randn(s, device=device, dtype=torch.bfloat16, generator=generator) for s in shapes)
    lengths = torch.tensor(case.lengths, device=device)
    bounds = torch.cat([lengths.new_zeros(1), lengths.cumsum(0)]).int()
    starts, ends = (t.repeat_interleave(lengths) for t in (bounds[:-1], bounds[1:]))
    return Row(case, tensors, starts, ends, bounds)


def ours(row, q, k, v):
    from ligertune_kernels import Documents, document_attention

    return lambda: document_attention(q, k, v, Documents(row.starts, row.ends, len(row.case.lengths)))


def ours_long(row, q, k, v):
    """Return ours with the kernels of long documents, which also run where documents are short."""
    from ligertune_kernels import Documents, document_attention

    return lambda: document_attention(q, k, v, Documents(row.starts, row.ends, 1))


def ours_short(row, q, k, v):
    from ligertune_kernels import Documents, document_attention

    return lambda: document_attention(q, k, v, Documents(row.starts, row.ends))


def ours_flash_4(row, q, k, v):
    """Return what kernels.attention: auto runs with train.full_determinism: false where `flash_4.takes` the row."""
    from ligertune.attention import flash_4

    return lambda: flash_4.flash_4(q, k, v, row.bounds, max(row.case.lengths), scale=None)


def sdpa(row, q, k, v):
    from torch.nn.functional import scaled_dot_product_attention

    return lambda: scaled_dot_product_attention(q, k, v, is_causal=True, enable_gqa=True)


def varlen(row, q, k, v):
    from ligertune.attention.torch_attention import flash_varlen

    return lambda: flash_varlen(q, k, v, (row.bounds,) * 2, (max(row.case.lengths),) * 2, window=(-1, 0))


def flex(row, q, k, v):
    import torch
    from torch.nn.attention.flex_attention import create_block_mask, flex_attention

    starts, tokens = row.starts, len(row.starts)

    def visible(batch, head, query, key):
        return (starts[query] == starts[key]) & (query >= key)

    mask = create_block_mask(visible, None, None, tokens, tokens, device=q.device)
    compiled = torch.compile(flex_attention, dynamic=False)
    return lambda: compiled(q, k, v, block_mask=mask, enable_gqa=True)


def flash_attention(module: str, **options: bool) -> Callable:
    """Return what makes the side of FlashAttention-3 or -4. options: of its function."""

    def make(row, q, k, v):
        function, longest = importlib.import_module(module).flash_attn_varlen_func, max(row.case.lengths)

        def call():
            found = function(q, k, v, cu_seqlens_q=row.bounds, cu_seqlens_k=row.bounds, max_seqlen_q=longest,
                             max_seqlen_k=longest, causal=True, **options)  # fmt: skip
            return found[0] if isinstance(found, tuple) else found  # some versions also return the log-sum-exp

        return call

    return make


SIDES = {
    "ligertune": Side("ligertune", ours),
    "auto": Side("ligertune, full_determinism: false", ours_flash_4, needs="flash_attn.cute"),
    "short": Side("ligertune, kernels of short documents", ours_short),
    "sdpa": Side("SDPA", sdpa, "batch"),
    "cudnn": Side("SDPA, cuDNN", sdpa, "batch", "CUDNN_ATTENTION"),
    "flash": Side("SDPA, flash", sdpa, "batch", "FLASH_ATTENTION"),
    "varlen": Side("torch varlen", varlen),
    "flex": Side("flex_attention", flex, "row"),
    "fa3": Side("FlashAttention-3", flash_attention("flash_attn_interface"), needs="flash_attn_interface"),
    "fa4": Side("FlashAttention-4", flash_attention("flash_attn.cute"), needs="flash_attn.cute"),
    "fa4_same": Side(
        "FlashAttention-4, deterministic",
        flash_attention("flash_attn.cute", deterministic=True),
        needs="flash_attn.cute",
    ),
}
ERROR_SIDES = (
    Side("ligertune, kernels of long documents", ours_long),
    Side("ligertune, kernels of short documents", ours_short),
    Side("torch varlen", varlen),
)


def call_of(side: Side, row: Row):
    """Return (function that returns output and gradients and calls `mark` between, what makes its results packed)."""
    import torch
    from torch.nn.attention import SDPBackend, sdpa_kernel

    count = {"packed": None, "batch": row.case.size[0], "row": 1}[side.layout]

    def shaped(t):
        return t if count is None else t.unflatten(0, (count, -1)).transpose(1, 2)

    def packed(t):
        return t if count is None else t.transpose(1, 2).flatten(0, 1)

    # leaves in the side's own layout: no side pays for a copy to another
    leaves = [shaped(t).detach().requires_grad_() for t in row.tensors[:3]]
    dout, function = shaped(row.tensors[3]), side.make(row, *leaves)

    def chosen():
        return sdpa_kernel(getattr(SDPBackend, side.backend)) if side.backend else contextlib.nullcontext()

    def call(mark: Callable = lambda: None):
        with chosen():
            out = function()
        mark()
        return [out, *torch.autograd.grad(out, leaves, dout)]

    return call, packed
