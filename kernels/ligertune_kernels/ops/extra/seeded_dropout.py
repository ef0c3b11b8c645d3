r"""Dropout by a seed: the same seed drops the same elements again, so that no mask is kept for the backward.

    y = x / (1 - p)   where u >= p,   0 elsewhere        u: uniform numbers in [0, 1], one for each element

The numbers are those of Philox 4x32-10 (Salmon et al. 2011), from which torch draws on a GPU, too: element i reads
number i mod 4 of counter (i div 4, stream) under the key `seed`. y is computed in fp32 and rounded once. The op is
linear in x, so the gradient of x is the op itself on the gradient of y.
"""

from __future__ import annotations

import torch
from torch import Tensor

from ligertune_kernels.chips import Chip, launch_options
from ligertune_kernels.launcher import Launcher, cached, chip_of, runs_triton, tl, triton
from ligertune_kernels.ops.extra.tiles import DROPOUT_BLOCK

_LOW = 0xFFFFFFFF
_MULTIPLIERS = (0xD2511F53, 0xCD9E8D57)
_INCREMENTS = (0x9E3779B9, 0xBB67AE85)  # of the key's halves, added after each round
_UNIT = 2.0**-32  # from a whole number below 2**32 to [0, 1]


def draw_seed(device: torch.device) -> Tensor:  # () int64
    """Draw a seed from torch's generator of a device, without waiting for the device."""
    return torch.randint(2**62, (), device=device)


def seeded_dropout_reference(
    x: Tensor, seed: Tensor, p: float, *, stream: int = 0, add_to: Tensor | None = None
) -> Tensor:
    """Compute `seeded_dropout` in plain torch, with the same random numbers."""
    wide = torch.promote_types(x.dtype, torch.float32)
    kept = _uniform(x.numel(), seed, stream).view(x.shape) >= p
    y = torch.where(kept, x.to(wide) * (1.0 / (1.0 - p)), 0.0)
    return (y if add_to is None else y + add_to.to(wide)).to(x.dtype)


def _uniform(count: int, seed: Tensor, stream: int) -> Tensor:
    """Return `count` uniform float32 numbers: Philox in int64, whose products keep the upper half of 64 bits."""
    quads = torch.arange(-(-count // 4), device=seed.device)
    counter = [quads & _LOW, quads >> 32, torch.full_like(quads, stream), torch.zeros_like(quads)]
    keys = [seed & _LOW, (seed >> 32) & _LOW]
    for _ in range(10):
        first = counter[0] * _MULTIPLIERS[0]
        second = counter[2] * _MULTIPLIERS[1]
        upper = [(second >> 32) & _LOW, (first >> 32) & _LOW]
        counter = [upper[0] ^ counter[1] ^ keys[0], second & _LOW, upper[1] ^ counter[3] ^ keys[1], first & _LOW]
        keys = [(key + increment) & _LOW for key, increment in zip(keys, _INCREMENTS, strict=True)]
    return torch.stack(counter, dim=1).view(-1)[:count].to(torch.float32) * _UNIT


@triton.jit(do_not_specialize=["n_rows", "stream"])
def _dropout_kernel(
    x_ptr, add_ptr, y_ptr,  # (n_rows, n_cols), contiguous
    seed_ptr,  # () int64
    n_cols, n_rows, stream, p, scale,
    ADDS: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    start = tl.program_id(0).to(tl.int64) * BLOCK
    quads = start // 4 + tl.arange(0, BLOCK // 4)
    low = quads.to(tl.uint32)
    high = (quads >> 32).to(tl.uint32)
    streams = tl.full([BLOCK // 4], stream, tl.uint32)
    r0, r1, r2, r3 = tl.philox(tl.load(seed_ptr), low, high, streams, low * 0)
    numbers = tl.join(tl.join(r0, r2), tl.join(r1, r3)).reshape(BLOCK)  # r0, r1, r2, r3 of each counter
    kept = numbers.to(tl.uint32, bitcast=True).to(tl.float32) * 2.3283064365386963e-10 >= p
    offs = start + tl.arange(0, BLOCK)
    inside = offs < tl.full([], n_rows, tl.int64) * n_cols
    x = tl.load(x_ptr + offs, mask=inside, other=0.0).to(tl.float32)
    y = tl.where(kept, x * scale, 0.0)
    if ADDS:
        y += tl.load(add_ptr + offs, mask=inside, other=0.0).to(tl.float32)
    tl.store(y_ptr + offs, y.to(y_ptr.dtype.element_ty), mask=inside)


@cached
def _launch(adds: bool, chip: Chip) -> Launcher:
    constants = {"ADDS": adds, "BLOCK": DROPOUT_BLOCK, **launch_options(DROPOUT_BLOCK, chip)}
    return Launcher(_dropout_kernel, constants)


def seeded_dropout(
    x: Tensor,  # any shape
    seed: Tensor,  # () int64, such as `draw_seed` returns
    p: float,
    *,
    stream: int = 0,
    add_to: Tensor | None = None,  # as x
) -> Tensor:  # as x, contiguous
    """Return x with elements dropped with probability p, and the others divided by 1 - p.

    stream: from 0; others drop other elements under one seed. add_to: added to the result, before it is rounded. Raises
    ValueError for p outside of [0, 1), and for shapes that differ. Not differentiable: see above. Deterministic.
    """
    if not 0 <= p < 1:
        raise ValueError(f"seeded_dropout: p is {p}: expected a number from 0 to below 1")
    if add_to is not None and add_to.shape != x.shape:
        raise ValueError(f"seeded_dropout: shapes {tuple(x.shape)}, {tuple(add_to.shape)}: expected the same")
    if not runs_triton(x):
        return seeded_dropout_reference(x, seed, p, stream=stream, add_to=add_to)
    x = x.contiguous()
    added = x if add_to is None else add_to.contiguous()
    y = torch.empty_like(x)
    if x.numel():
        n_cols = x.shape[-1] if x.ndim else 1
        _launch(add_to is not None, chip_of(x.device))(
            (-(-x.numel() // DROPOUT_BLOCK), 1, 1), (x, added, y, seed), (n_cols,), x.numel() // n_cols, stream,
            p, 1.0 / (1.0 - p),
        )  # fmt: skip
    return y
