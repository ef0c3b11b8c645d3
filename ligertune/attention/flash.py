"""Flash attention over documents that lie one behind another, without what torch's own way to it costs the host.

torch.nn.attention.varlen reaches torch's kernels through operators written in Python and fills a tensor with zeros in
each forward.
"""

from __future__ import annotations

import inspect
from typing import Any

import torch
from ligertune_kernels.autograd import no_double_backward
from ligertune_kernels.shortcuts import fast_apply
from torch import Tensor
from torch.nn.attention.varlen import varlen_attn

# torch 2.11 serves fewer key heads as they are and has no such argument; 2.12 and later ask for it
GROUPED_HEADS = {"enable_gqa": True} if "enable_gqa" in inspect.signature(varlen_attn).parameters else {}


class _Flash(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        bounds: tuple[Tensor, Tensor],
        longest: tuple[int, int],
        scale: float | None,
        window: tuple[int, int],
    ) -> Tensor:
        how = (*bounds, *longest, 0.0, window == (-1, 0))  # no dropout, causal or not
        keywords = {"scale": scale, "window_size_left": window[0], "window_size_right": window[1]}
        out, logsumexp, *random, _ = torch.ops.aten._flash_attention_forward(query, key, value, *how, False, **keywords)
        ctx.save_for_backward(query, key, value, out, logsumexp)
        ctx.how, ctx.random, ctx.keywords = how, random, keywords  # random: of dropout, which there is none of
        return out

    @staticmethod
    @no_double_backward
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        saved = ctx.saved_tensors
        grads = torch.ops.aten._flash_attention_backward(grad, *saved, *ctx.how, *ctx.random, **ctx.keywords)
        return (*grads, None, None, None, None)


_flash = fast_apply(_Flash, 3)


def flash_varlen(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    bounds: tuple[Tensor, Tensor],
    longest: tuple[int, int],
    *,
    scale: float | None = None,
    window: tuple[int, int] = (-1, -1),
) -> Tensor:
    """The bits of torch.nn.attention.varlen.varlen_attn, forward and backward: (T, H, D), (S, K, D) twice -> (T, H, D).

    bounds and longest: int32 (documents + 1,) and the longest document, of the queries and of the keys. Fewer key heads
    than query heads are shared. window: keys that a query sees to its left and right, its own not counted, -1: all;
    (-1, 0) is causal. bfloat16 or float16 on an NVIDIA GPU from sm80 on. FlashAttention-2: Dao, arXiv:2307.08691.
    """
    if torch.compiler.is_compiling():  # which keeps these operators as they are, with lengths that may change
        return varlen_attn(query, key, value, *bounds, *longest, scale=scale, window_size=window, **GROUPED_HEADS)
    return _flash(query, key, value, bounds, longest, scale, window)
