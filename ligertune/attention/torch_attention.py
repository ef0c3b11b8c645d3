"""torch's attention: settings of scaled_dot_product_attention, and flash attention over concatenated documents.

Flash attention is called with less host time than by torch.nn.attention.varlen, which reaches the same kernels through
operators written in Python, and zero-fills a tensor in each forward.
"""

from __future__ import annotations

import contextlib
import inspect
from collections.abc import Iterator
from typing import Any

import torch
from ligertune_kernels.autograd import no_double_backward
from torch import Tensor
from torch.nn.attention.varlen import varlen_attn


def prefer_flash() -> None:
    """Switch off cuDNN's attention in this process.

    torch prefers it on Hopper, and it makes a plan for every new shape: 90 ms for each new length of a batch. A step of
    Llama-3.2-1B on Alpaca batches of 16 took 140 ms with it and 65 ms with flash attention (H100, torch 2.11).
    """
    torch.backends.cuda.enable_cudnn_sdp(False)


# Its backward always adds in one order, and raises in a mode that was off when its forward was compiled.
ALWAYS_DETERMINISTIC = "flex_attention"


@contextlib.contextmanager
def deterministic_backward(enabled: bool, attn_implementation: str = "sdpa") -> Iterator[None]:
    """Make a backward return the same bits in every run, and so after a resume.

    Flash attention then sums its gradients in a fixed order; our own kernels always do. The mode is on in the backward
    only: flash attention needs the strict mode, in which an operation without a deterministic form raises, and mixtures
    of experts route their tokens with such operations. Compiled layers need the mode in the forward too, where their
    backward is compiled.

    CUBLAS_WORKSPACE_CONFIG is not set. torch required it in this mode, and no longer does in 2.11; where it is set,
    each product parses it with a regular expression: 90 us of host time instead of 17 (torch 2.11, H100).
    """
    before = torch.are_deterministic_algorithms_enabled(), torch.is_deterministic_algorithms_warn_only_enabled()
    torch.use_deterministic_algorithms(enabled and attn_implementation != ALWAYS_DETERMINISTIC)
    # torch would also fill every new tensor with NaN, which costs bandwidth
    torch.utils.deterministic.fill_uninitialized_memory = False  # type: ignore[attr-defined]  # set by a property
    try:
        yield
    finally:
        torch.use_deterministic_algorithms(before[0], warn_only=before[1])


# ---- flash attention over concatenated documents

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
