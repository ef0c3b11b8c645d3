"""Kernels with the faults that the ahead-of-time test is there to find."""

from __future__ import annotations

import torch
import triton
import triton.language as tl


@triton.jit
def _copy(x_ptr, y_ptr, BLOCK: tl.constexpr):
    offs = tl.arange(0, BLOCK)
    tl.store(y_ptr + offs, tl.load(x_ptr + offs))


@triton.jit
def _hold_much(x_ptr, y_ptr, BLOCK: tl.constexpr):
    """Rolls a row that no thread can hold: every value is needed until the sum is known."""
    offs = tl.arange(0, BLOCK)
    a = tl.load(x_ptr + offs).to(tl.float32)
    b = tl.load(x_ptr + BLOCK + offs).to(tl.float32)
    c = tl.load(x_ptr + 2 * BLOCK + offs).to(tl.float32)
    total = tl.sum(a * b + c, axis=0)
    tl.store(y_ptr + offs, a * total)
    tl.store(y_ptr + BLOCK + offs, b * total + tl.sum(a * c, axis=0))
    tl.store(y_ptr + 2 * BLOCK + offs, c * total + tl.sum(a * b, axis=0))


@triton.jit
def _add_atomically(x_ptr, y_ptr, BLOCK: tl.constexpr):
    offs = tl.arange(0, BLOCK)
    tl.atomic_add(y_ptr + offs, tl.load(x_ptr + offs), sem="relaxed")


@triton.jit
def _copy_rows(x_ptr, y_ptr, stride, BLOCK: tl.constexpr):
    offs = tl.program_id(0) * stride + tl.arange(0, BLOCK)
    tl.store(y_ptr + tl.program_id(0).to(tl.int64) * stride + tl.arange(0, BLOCK), tl.load(x_ptr + offs))


def _vectors(n: int) -> tuple[torch.Tensor, torch.Tensor]:
    return torch.empty(n, device="meta"), torch.empty(n, device="meta")


def too_many_warps() -> None:
    """32 warps: 1024 threads of NVIDIA's and RDNA's 32, 2048 of CDNA's 64."""
    _copy[(1,)](*_vectors(4096), BLOCK=4096, num_warps=32)


def spilling() -> None:
    """3 x 128 values a thread, of which it can hold at most 256 (512 on CDNA)."""
    _hold_much[(1,)](*_vectors(3 * 32768), BLOCK=32768, num_warps=4)


def atomic() -> None:
    """A loop of compare-and-swap where the chip cannot add floats in memory."""
    _add_atomically[(1,)](*_vectors(1024), BLOCK=1024, num_warps=4)


def narrow() -> None:
    """An offset of 32 bits, which overflows beyond 2**31 elements."""
    _copy_rows[(8,)](*_vectors(8192), 1000, BLOCK=1024, num_warps=4)
