"""Kernels with faults that the ahead-of-time test must find."""

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
    """Need every value of a row until its sum is known: more than a thread can hold."""
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
    """Launch 32 warps: 1024 threads with NVIDIA's and RDNA's warps of 32, 2048 with CDNA's of 64."""
    _copy[(1,)](*_vectors(4096), BLOCK=4096, num_warps=32)


def spilling() -> None:
    """Need 3 x 128 values per thread, which has at most 256 registers (512 on CDNA)."""
    _hold_much[(1,)](*_vectors(3 * 32768), BLOCK=32768, num_warps=4)


def atomic() -> None:
    """Add floats atomically: a compare-and-swap loop where the chip cannot add them in memory."""
    _add_atomically[(1,)](*_vectors(1024), BLOCK=1024, num_warps=4)


def narrow() -> None:
    """An offset of 32 bits, which overflows beyond 2**31 elements."""
    _copy_rows[(8,)](*_vectors(8192), 1000, BLOCK=1024, num_warps=4)
