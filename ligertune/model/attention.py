"""Which of torch's attention kernels `sdpa` may choose, and whether they give the same bits each time."""

from __future__ import annotations

import contextlib
import functools
import os
from collections.abc import Iterator

import torch

WORKSPACE = "CUBLAS_WORKSPACE_CONFIG"


def prefer_flash() -> None:
    """Keep cuDNN's attention out of this process.

    torch prefers it on Hopper, and it plans anew for every new shape: 90 ms for each length of batch not seen before. A
    Llama-3.2-1B step on Alpaca batches of 16 took 140 ms with it and 65 ms with flash attention (H100, torch 2.11).
    """
    torch.backends.cuda.enable_cudnn_sdp(False)


@functools.cache
def allow_products() -> None:
    """Let torch's deterministic mode take products on a GPU; once, before the first one of this process.

    torch asks for CUBLAS_WORKSPACE_CONFIG then, looks once whether it is there, and never again; but where it is, each
    product reads its size anew with a regular expression: 90 us of the host for one, 220 with a bias, that takes 17
    without (torch 2.11, H100). Torch gives each stream's products a workspace of their own, of one size, so that they
    are deterministic with or without it. So it is there for one product only. A variable that the user sets stays.
    """
    if WORKSPACE in os.environ or not torch.cuda.is_available():
        return
    device = torch.device("cuda", torch.cuda.current_device())
    os.environ[WORKSPACE] = ":4096:8"
    try:
        one = torch.ones(16, 16, device=device)
        one @ one
        torch._C._cuda_clearCublasWorkspaces()  # which are of that size, and not of the usual one
    finally:
        del os.environ[WORKSPACE]


# Its backward adds in one order, and refuses a mode that was not on when its forward was compiled.
ALWAYS_THE_SAME = "flex_attention"


@contextlib.contextmanager
def same_bits(enabled: bool, attn_implementation: str = "sdpa") -> Iterator[None]:
    """A backward that gives the same bits in every run, and so after a resume.

    Flash attention then adds up its gradients in a fixed order; our own kernels always do. It is on in the backward
    alone, since in the strict mode that flash attention asks for, an operation without a deterministic form raises, and
    models route their tokens with such ones. Compiled layers need it in the forward too, where their backward is made.
    """
    before = torch.are_deterministic_algorithms_enabled(), torch.is_deterministic_algorithms_warn_only_enabled()
    allow_products()
    torch.use_deterministic_algorithms(enabled and attn_implementation != ALWAYS_THE_SAME)
    # torch would also fill every new tensor with NaN, which finds bugs and costs bandwidth
    torch.utils.deterministic.fill_uninitialized_memory = False
    try:
        yield
    finally:
        torch.use_deterministic_algorithms(before[0], warn_only=before[1])
