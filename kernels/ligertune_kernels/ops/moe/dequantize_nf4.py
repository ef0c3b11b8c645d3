r"""NF4: 16 values per weight, the quantiles of a normal distribution, in blocks of 64 with double quantisation.

    w = table[nibble] · absmax      absmax = map[scale] · block_scale + offset      (Dettmers et al. 2023, QLoRA)

The bytes are those of bitsandbytes (quantize_4bit with quant_type="nf4", compress_statistics=True) for each expert: two
weights per byte, the first one in the high half; one 8-bit scale per 64 weights, and a float32 scale per 256 of those.
Everything is computed in float32 and rounded once. There is no backward: such weights are frozen.
"""

from __future__ import annotations

import math
from typing import NamedTuple

import torch
from torch.nn import functional

from ligertune_kernels.chips import Chip, launch_options
from ligertune_kernels.launcher import Launcher, cached, chip_of, runs_triton, tl, triton
from ligertune_kernels.ops.moe.tiles import DEQUANTISED_BLOCKS, QUANTISED_CHUNK

BLOCK = 64  # weights that share a scale
SCALE_BLOCK = 256  # scales that share a float32 scale

TABLE = (
    -1.0, -0.6961928009986877, -0.5250730514526367, -0.39491748809814453, -0.28444138169288635, -0.18477343022823334,
    -0.09105003625154495, 0.0, 0.07958029955625534, 0.16093020141124725, 0.24611230194568634, 0.33791524171829224,
    0.44070982933044434, 0.5626170039176941, 0.7229568362236023, 1.0,
)  # fmt: skip


class Nf4(NamedTuple):
    """Weights of X experts in 4 bits; n are the weights of one expert."""

    packed: torch.Tensor  # (X, ceil(n / 64) · 32) uint8
    scales: torch.Tensor  # (X, ceil(n / 64)) uint8
    block_scales: torch.Tensor  # (X, ceil(n / 64 / 256)) float32
    offset: torch.Tensor  # (X,) float32


def nf4_bytes(shape: tuple[int, ...]) -> int:
    """Return the bytes of a weight (X, ...) in 4 bits, each expert quantised by itself."""
    blocks = -(-math.prod(shape[1:]) // BLOCK)
    return shape[0] * (blocks * (BLOCK // 2 + 1) + 4 * -(-blocks // SCALE_BLOCK) + 4)


@cached
def _scale_map() -> torch.Tensor:  # (256,)
    """Return the values of an 8-bit scale: a sign, an exponent of variable length, and a linear fraction.

    Tim Dettmers, arXiv:1511.04561.
    """
    values = [0.0, 1.0]
    for exponent in range(7):
        bounds = torch.linspace(0.1, 1, 2**exponent + 1, dtype=torch.float32, device="cpu")
        means = (10.0 ** (exponent - 6)) * ((bounds[:-1] + bounds[1:]) / 2)
        values += [*means.tolist(), *(-means).tolist()]
    return torch.tensor(sorted(values), dtype=torch.float32, device="cpu")


@cached
def _constants(device: torch.device) -> tuple[torch.Tensor, torch.Tensor]:
    """Return (table (16,), map of the scales (256,)) on a device."""
    with torch.inference_mode(False):
        return torch.tensor(TABLE, dtype=torch.float32, device=device), _scale_map().to(device)


def _nearest(x: torch.Tensor, values: torch.Tensor) -> torch.Tensor:
    """Return the index of the nearest of the sorted values, as uint8; of the lower one in the middle."""
    return torch.bucketize(x, (values[:-1] + values[1:]) / 2, out_int32=True).to(torch.uint8)


def quantize_nf4(weight: torch.Tensor) -> Nf4:  # (X, ...) floating point
    """Quantise each expert by itself, where the weight is. Temporaries: 30 bytes for each of QUANTISED_CHUNK weights.

    Raises ValueError for a weight that is not in floating point.
    """
    if not weight.is_floating_point():
        raise ValueError(f"quantize_nf4: weight is {weight.dtype}: expected a floating-point dtype")
    flat = weight.detach().flatten(1)
    columns = max(1, QUANTISED_CHUNK // max(1, len(flat)) // BLOCK) * BLOCK
    parts = [_packed_blocks(chunk) for chunk in flat.split(columns, 1)]
    packed, absmax = (torch.cat(part, 1) for part in zip(*parts, strict=True))
    offset = absmax.mean(1, dtype=torch.float64).float()  # the same bits on every device, whatever the order of the sum
    centred = absmax - offset.unsqueeze(1)
    grouped = functional.pad(centred, (0, -centred.shape[1] % SCALE_BLOCK)).unflatten(1, (-1, SCALE_BLOCK))
    block_scales = grouped.abs().amax(2)
    scales = _nearest(_normalised(grouped, block_scales), _constants(weight.device)[1])
    return Nf4(packed, scales.flatten(1)[:, : absmax.shape[1]].contiguous(), block_scales, offset)


def _packed_blocks(weight: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Return (bytes, absmax (X, blocks)) of some weights (X, columns) of each expert."""
    blocks = functional.pad(weight.float(), (0, -weight.shape[1] % BLOCK)).unflatten(1, (-1, BLOCK))
    absmax = blocks.abs().amax(2)
    index = _nearest(_normalised(blocks, absmax), _constants(weight.device)[0]).flatten(1)
    return (index[:, 0::2] << 4) | index[:, 1::2], absmax


def _normalised(blocks: torch.Tensor, absmax: torch.Tensor) -> torch.Tensor:
    """Return blocks / absmax within [-1, 1], in the roundings of bitsandbytes."""
    return (blocks * (1.0 / absmax.clamp(min=1e-38)).unsqueeze(2)).clamp(-1, 1)


def absmax_of(nf4: Nf4) -> torch.Tensor:  # (X, blocks)
    """Return the largest absolute value of each block, in float32 as the 8-bit scales tell it."""
    _, scale_map = _constants(nf4.packed.device)
    wide = nf4.block_scales.repeat_interleave(SCALE_BLOCK, 1)[:, : nf4.scales.shape[1]]
    return scale_map[nf4.scales.int()] * wide + nf4.offset.unsqueeze(1)


def dequantize_nf4_reference(nf4: Nf4, shape: tuple[int, ...], dtype: torch.dtype) -> torch.Tensor:
    """Compute `dequantize_nf4` in plain torch, one expert after the other to bound the temporaries."""
    table, _ = _constants(nf4.packed.device)
    out = torch.empty(shape, dtype=dtype, device=nf4.packed.device)
    absmax = absmax_of(nf4)
    pairs = torch.stack((table.repeat_interleave(16), table.repeat(16)), 1)  # (256, 2): of each byte
    for expert in range(shape[0]):
        values = pairs[nf4.packed[expert].int()].view(-1, BLOCK) * absmax[expert].unsqueeze(1)
        out[expert] = values.flatten()[: out[expert].numel()].view(shape[1:])
    return out


@triton.jit
def _dequantize_kernel(
    packed_ptr,  # (X, n_blocks, 32)
    scales_ptr,  # (X, n_blocks)
    block_scales_ptr,  # (X, n_block_scales)
    offset_ptr,  # (X,)
    table_ptr,  # (16,)
    map_ptr,  # (256,)
    out_ptr,  # (X, n_weights)
    n_blocks, n_block_scales, n_weights,
    BLOCK: tl.constexpr, SCALE_BLOCK: tl.constexpr, BLOCKS: tl.constexpr,
):  # fmt: skip
    expert = tl.program_id(1).to(tl.int64)  # a layer can have more than 2**31 weights
    blocks = tl.program_id(0) * BLOCKS + tl.arange(0, BLOCKS)
    inside = blocks < n_blocks
    scale = tl.load(scales_ptr + expert * n_blocks + blocks, mask=inside, other=0).to(tl.int32)
    wide = tl.load(block_scales_ptr + expert * n_block_scales + blocks // SCALE_BLOCK, mask=inside, other=0.0)
    absmax = (tl.load(map_ptr + scale) * wide + tl.load(offset_ptr + expert))[:, None]
    n_bytes: tl.constexpr = BLOCK // 2
    bytes_at = (expert * n_blocks + blocks[:, None]) * n_bytes + tl.arange(0, n_bytes)[None, :]
    packed = tl.load(packed_ptr + bytes_at, mask=inside[:, None], other=0).to(tl.int32)
    high = tl.load(table_ptr + (packed >> 4)) * absmax
    low = tl.load(table_ptr + (packed & 15)) * absmax
    offs = blocks[:, None] * BLOCK + tl.arange(0, BLOCK)[None, :]
    values = tl.interleave(high, low).to(out_ptr.dtype.element_ty)
    tl.store(out_ptr + expert * n_weights + offs, values, mask=offs < n_weights)


@cached
def _launch(chip: Chip) -> Launcher:
    # Without fused multiply-add the scales are rounded as bitsandbytes and the reference round them.
    options = {**launch_options(DEQUANTISED_BLOCKS * BLOCK, chip), "enable_fp_fusion": False}
    return Launcher(
        _dequantize_kernel, {"BLOCK": BLOCK, "SCALE_BLOCK": SCALE_BLOCK, "BLOCKS": DEQUANTISED_BLOCKS, **options}
    )


def dequantize_nf4(nf4: Nf4, shape: tuple[int, ...], dtype: torch.dtype) -> torch.Tensor:  # (X, ...)
    """Return the weights of X experts in `dtype`. Deterministic, the same bits on every device; no gradient.

    Raises ValueError for a shape that does not fit the bytes.
    """
    n_blocks = -(-math.prod(shape[1:]) // BLOCK)
    if nf4.scales.shape != (shape[0], n_blocks):
        found = tuple(nf4.scales.shape)
        raise ValueError(f"dequantize_nf4: shape {tuple(shape)} has {n_blocks} blocks per expert: scales are {found}")
    if nf4.packed.is_meta:  # compiled for a GPU that is absent: the operator would launch nothing
        return _dequantize(nf4, shape, dtype)
    return _dequantize_op(*nf4, list(shape), dtype)  # one operator in every kind of trace, which reads 4 bits


def _dequantize(nf4: Nf4, shape: tuple[int, ...], dtype: torch.dtype) -> torch.Tensor:
    n_blocks = nf4.scales.shape[1]
    if dtype is torch.float64 or not math.prod(shape) or not runs_triton(nf4.packed):
        return dequantize_nf4_reference(nf4, shape, dtype)
    out = torch.empty(shape, dtype=dtype, device=nf4.packed.device)
    _launch(chip_of(out.device))(
        (-(-n_blocks // DEQUANTISED_BLOCKS), shape[0], 1), (*nf4, *_constants(out.device), out),
        (n_blocks, nf4.block_scales.shape[1], out[0].numel()),
    )  # fmt: skip
    return out


@torch.library.custom_op("ligertune_kernels::dequantize_nf4", mutates_args=())
def _dequantize_op(
    packed: torch.Tensor,
    scales: torch.Tensor,
    block_scales: torch.Tensor,
    offset: torch.Tensor,
    shape: list[int],
    dtype: torch.dtype,
) -> torch.Tensor:
    return _dequantize(Nf4(packed, scales, block_scales, offset), tuple(shape), dtype)


@_dequantize_op.register_fake
def _(
    packed: torch.Tensor,
    scales: torch.Tensor,
    block_scales: torch.Tensor,
    offset: torch.Tensor,
    shape: list[int],
    dtype: torch.dtype,
) -> torch.Tensor:
    return packed.new_empty(shape, dtype=dtype)
