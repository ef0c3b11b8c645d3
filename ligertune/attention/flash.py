"""Flash attention over concatenated documents, with less host time than torch.nn.attention.varlen.

torch's function reaches the same kernels through operators written in Python, and zero-fills a tensor in each forward.
"""

from __future__ import annotations

import inspect
from typing import Any

import torch
from ligertune_kernels.autograd import no_double_backward
from torch import Tensor
from torch.nn.attention.varlen import varlen_attn

# torch 2.11 accepts fewer key heads than query heads without an argument; 2.12 requires it
GROUPED_HEADS: dict[str, Any] = (
    {"enable_gqa": True} if "enable_gqa" in inspect.signature(varlen_attn).parameters else {}
)


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
        arguments = (*bounds, *longest, 0.0, window == (-1, 0))  # no dropout, causal or not
        keywords = {"scale": scale, "window_size_left": window[0], "window_size_right": window[1]}
        out, logsumexp, *random, _ = torch.ops.aten._flash_attention_forward(
            query, key, value, *arguments, False, **keywords
        )
        ctx.save_for_backward(query, key, value, out, logsumexp)
        # random: the state of dropout, which is off
        ctx.arguments = arguments
        ctx.random = random
        ctx.keywords = keywords
        return out

    @staticmethod
    @no_double_backward
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        saved = ctx.saved_tensors
        grads = torch.ops.aten._flash_attention_backward(grad, *saved, *ctx.arguments, *ctx.random, **ctx.keywords)
        return (*grads, None, None, None, None)


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
    """Return the same bits as torch.nn.attention.varlen.varlen_attn, forward and backward.

    query (T, H, D), key and value (S, K, D) -> (T, H, D). bounds and longest: int32 (documents + 1,) and the longest
    document, of the queries and of the keys. window: keys that a query sees to its left and right, without its own; -1
    means all, so (-1, 0) is causal. bfloat16 or float16 on an NVIDIA GPU from sm80 on. Source: FlashAttention-2 (Dao,
    arXiv:2307.08691).
    """
    if torch.compiler.is_compiling():  # it traces these operators with dynamic lengths
        out: Any = varlen_attn(query, key, value, *bounds, *longest, scale=scale, window_size=window, **GROUPED_HEADS)
        return out  # a tuple only with return_aux
    return _Flash.apply(query, key, value, bounds, longest, scale, window)
