"""Settings of torch's scaled_dot_product_attention: no cuDNN kernel, and a deterministic backward."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator

import torch


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
