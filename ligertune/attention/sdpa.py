"""Which of torch's attention kernels `sdpa` may choose, and whether they give the same bits each time."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator

import torch


def prefer_flash() -> None:
    """Keep cuDNN's attention out of this process.

    torch prefers it on Hopper, and it plans anew for every new shape: 90 ms for each length of batch not seen before. A
    Llama-3.2-1B step on Alpaca batches of 16 took 140 ms with it and 65 ms with flash attention (H100, torch 2.11).
    """
    torch.backends.cuda.enable_cudnn_sdp(False)


# Its backward adds in one order, and refuses a mode that was not on when its forward was compiled.
ALWAYS_THE_SAME = "flex_attention"


@contextlib.contextmanager
def same_bits(enabled: bool, attn_implementation: str = "sdpa") -> Iterator[None]:
    """A backward that gives the same bits in every run, and so after a resume.

    Flash attention then adds up its gradients in a fixed order; our own kernels always do. It is on in the backward
    alone, since in the strict mode that flash attention asks for, an operation without a deterministic form raises, and
    models route their tokens with such ones. Compiled layers need it in the forward too, where their backward is made.

    CUBLAS_WORKSPACE_CONFIG is left alone. torch has asked for it in this mode, and no longer does in 2.11; but where it
    is set, each product reads it with a regular expression: 90 us of the host where 17 do (torch 2.11, H100).
    """
    before = torch.are_deterministic_algorithms_enabled(), torch.is_deterministic_algorithms_warn_only_enabled()
    torch.use_deterministic_algorithms(enabled and attn_implementation != ALWAYS_THE_SAME)
    # torch would also fill every new tensor with NaN, which finds bugs and costs bandwidth
    torch.utils.deterministic.fill_uninitialized_memory = False
    try:
        yield
    finally:
        torch.use_deterministic_algorithms(before[0], warn_only=before[1])
