r"""NF4 and FP4: 16 values per weight in blocks of 64, with or without double quantisation of the blocks' scales.

    w = table[nibble] · absmax      absmax = map[scale] · block_scale + offset      (Dettmers et al. 2023, QLoRA)

NF4's values are the quantiles of a normal distribution; FP4's are floating-point numbers of a sign, two exponent bits
and one fraction bit. The bytes are those of bitsandbytes (quantize_4bit) for each expert: two weights per byte, the
first one in the high half; one 8-bit scale per 64 weights, and a float32 scale per 256 of those. Without double
quantisation a block's scale is its absmax in float32. Everything is computed in float32 and rounded once. There is no
backward: such weights are frozen.
"""

from __future__ import annotations

import math
from collections.abc import Callable
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
FP4_TABLE = (
    0.0, 0.0052083334885537624, 0.6666666865348816, 1.0, 0.3333333432674408, 0.5, 0.1666666716337204, 0.25,
    0.0, -0.0052083334885537624, -0.6666666865348816, -1.0, -0.3333333432674408, -0.5, -0.1666666716337204, -0.25,
)  # fmt: skip
TABLES = {"nf4": TABLE, "fp4": FP4_TABLE}


class Nf4(NamedTuple):
    """Weights of X experts in 4 bits, NF4 or FP4; n are the weights of one expert.

    Without double quantisation `scales` are float32, and `block_scales` and `offset` have no elements. One expert's
    bytes may end with its last weight; those of several experts end with a whole block.
    """

    packed: torch.Tensor  # (X, ceil(n / block) · block / 2) uint8
    scales: torch.Tensor  # (X, ceil(n / block)) uint8
    block_scales: torch.Tensor  # (X, ceil(n / block / 256)) float32
    offset: torch.Tensor  # (X,) float32
    quant_type: str = "nf4"
    block: int = BLOCK  # weights that share a scale

    @property
    def tensors(self) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor]:
        """The parts that are tensors, in the order of the fields."""
        return self.packed, self.scales, self.block_scales, self.offset

    @property
    def names(self) -> tuple[str, ...]:
        """Names of the fields that are tensors."""
        return self._fields[: len(self.tensors)]

    @property
    def constants(self) -> tuple[str, int]:
        """The other fields."""
        return self.quant_type, self.block

    @property
    def is_nested(self) -> bool:
        """Whether the scales are quantised, too (double quantisation)."""
        return self.scales.dtype == torch.uint8

    def apply(self, function: Callable[[torch.Tensor], torch.Tensor]) -> Nf4:
        """Return the weights with a function applied to each tensor."""
        return Nf4(*map(function, self.tensors), self.quant_type, self.block)

    def dequantize(self, shape: tuple[int, ...], dtype: torch.dtype) -> torch.Tensor:
        """Return the weights as `dequantize_nf4` does."""
        return dequantize_nf4(self, shape, dtype)

    def write(self, out: torch.Tensor) -> None:
        """Write the weights to `out` (X, ...), in its dtype. Outside traces only."""
        dequantize_nf4_into(self, out)

    def magnitudes(self) -> torch.Tensor:
        """Return the largest absolute values of the blocks; NaN or infinity where a weight was no number."""
        return absmax_of(self)


def nf4_bytes(shape: tuple[int, ...], *, double_quant: bool = True) -> int:
    """Return the bytes of a weight (X, ...) in 4 bits, each expert quantised by itself."""
    blocks = -(-math.prod(shape[1:]) // BLOCK)
    scales = blocks + 4 * -(-blocks // SCALE_BLOCK) + 4 if double_quant else 4 * blocks
    return shape[0] * (blocks * (BLOCK // 2) + scales)


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
def _constants(device: torch.device, quant_type: str = "nf4") -> tuple[torch.Tensor, torch.Tensor]:
    """Return (table (16,), map of the scales (256,)) on a device."""
    with torch.inference_mode(False):
        return torch.tensor(TABLES[quant_type], dtype=torch.float32, device=device), _scale_map().to(device)


def _nibbles(x: torch.Tensor, quant_type: str) -> torch.Tensor:
    """Return the index in the table of the value nearest to each x in [-1, 1], as uint8."""
    table, _ = _constants(x.device, quant_type)
    if quant_type == "nf4":  # sorted
        return _nearest(x, table)
    order = sorted((i for i in range(16) if i != 8), key=FP4_TABLE.__getitem__)  # 8 is a second zero
    order = torch.tensor(order, device=x.device)
    return order[_nearest(x, table[order]).int()].to(torch.uint8)


def _nearest(x: torch.Tensor, values: torch.Tensor) -> torch.Tensor:
    """Return the index of the nearest of the sorted values, as uint8; of the lower one in the middle."""
    return torch.bucketize(x, (values[:-1] + values[1:]) / 2, out_int32=True).to(torch.uint8)


def quantize_nf4(
    weight: torch.Tensor,  # (X, ...) floating point
    *,
    quant_type: str = "nf4",
    double_quant: bool = True,
) -> Nf4:
    """Quantise each expert by itself, where the weight is. Temporaries: 30 bytes for each of QUANTISED_CHUNK weights.

    quant_type: nf4 or fp4. double_quant: store the scales in 8 bits. Raises ValueError for a weight that is not in
    floating point.
    """
    if not weight.is_floating_point():
        raise ValueError(f"quantize_nf4: weight is {weight.dtype}: expected a floating-point dtype")
    if quant_type not in TABLES:
        raise ValueError(f"quantize_nf4: quant_type is {quant_type!r}: expected nf4 or fp4")
    flat = weight.detach().flatten(1)
    columns = max(1, QUANTISED_CHUNK // max(1, len(flat)) // BLOCK) * BLOCK
    parts = [_packed_blocks(chunk, quant_type) for chunk in flat.split(columns, 1)]
    packed, absmax = (torch.cat(part, 1) for part in zip(*parts, strict=True))
    if not double_quant:
        return Nf4(packed, absmax, absmax.new_empty(len(flat), 0), absmax.new_empty(len(flat), 0), quant_type)
    offset = absmax.mean(1, dtype=torch.float64).float()  # the same bits on every device, whatever the order of the sum
    centred = absmax - offset.unsqueeze(1)
    grouped = functional.pad(centred, (0, -centred.shape[1] % SCALE_BLOCK)).unflatten(1, (-1, SCALE_BLOCK))
    block_scales = grouped.abs().amax(2)
    scales = _nearest(_normalised(grouped, block_scales), _constants(weight.device)[1])
    return Nf4(packed, scales.flatten(1)[:, : absmax.shape[1]].contiguous(), block_scales, offset, quant_type)


def _packed_blocks(weight: torch.Tensor, quant_type: str) -> tuple[torch.Tensor, torch.Tensor]:
    """Return (bytes, absmax (X, blocks)) of some weights (X, columns) of each expert."""
    blocks = functional.pad(weight.float(), (0, -weight.shape[1] % BLOCK)).unflatten(1, (-1, BLOCK))
    absmax = blocks.abs().amax(2)
    index = _nibbles(_normalised(blocks, absmax), quant_type).flatten(1)
    return (index[:, 0::2] << 4) | index[:, 1::2], absmax


def _normalised(blocks: torch.Tensor, absmax: torch.Tensor) -> torch.Tensor:
    """Return blocks / absmax within [-1, 1], in the roundings of bitsandbytes."""
    return (blocks * (1.0 / absmax.clamp(min=1e-38)).unsqueeze(2)).clamp(-1, 1)


def absmax_of(nf4: Nf4) -> torch.Tensor:  # (X, blocks)
    """Return the largest absolute value of each block, in float32 as the scales tell it."""
    if not nf4.is_nested:
        return nf4.scales
    _, scale_map = _constants(nf4.packed.device)
    wide = nf4.block_scales.repeat_interleave(SCALE_BLOCK, 1)[:, : nf4.scales.shape[1]]
    return scale_map[nf4.scales.int()] * wide + nf4.offset.unsqueeze(1)


def dequantize_nf4_reference(nf4: Nf4, shape: tuple[int, ...], dtype: torch.dtype) -> torch.Tensor:
    """Compute `dequantize_nf4` in plain torch."""
    out = torch.empty(shape, dtype=dtype, device=nf4.packed.device)
    _write_reference(nf4, out)
    return out


def _write_reference(nf4: Nf4, out: torch.Tensor) -> None:
    """Write the weights to `out`, one expert after the other to bound the temporaries."""
    table, _ = _constants(nf4.packed.device, nf4.quant_type)
    absmax = absmax_of(nf4)
    pairs = torch.stack((table.repeat_interleave(16), table.repeat(16)), 1)  # (256, 2): of each byte
    for expert in range(len(out)):
        found = pairs[nf4.packed[expert].int()].flatten()
        found = functional.pad(found, (0, absmax.shape[1] * nf4.block - len(found)))
        values = found.view(-1, nf4.block) * absmax[expert].unsqueeze(1)
        out[expert] = values.flatten()[: out[expert].numel()].view(out.shape[1:])


@triton.jit
def _dequantize_kernel(
    packed_ptr,  # (X, n_blocks, BLOCK / 2)
    scales_ptr,  # (X, n_blocks)
    block_scales_ptr,  # (X, n_block_scales)
    offset_ptr,  # (X,)
    table_ptr,  # (16,)
    map_ptr,  # (256,)
    out_ptr,  # (X, n_weights)
    n_blocks, n_block_scales, n_weights,
    BLOCK: tl.constexpr, SCALE_BLOCK: tl.constexpr, BLOCKS: tl.constexpr, NESTED: tl.constexpr, WHOLE: tl.constexpr,
):  # fmt: skip
    expert = tl.program_id(1).to(tl.int64)  # a layer can have more than 2**31 weights
    blocks = tl.program_id(0) * BLOCKS + tl.arange(0, BLOCKS)
    inside = blocks < n_blocks
    scale = tl.load(scales_ptr + expert * n_blocks + blocks, mask=inside, other=0)
    if NESTED:
        wide = tl.load(block_scales_ptr + expert * n_block_scales + blocks // SCALE_BLOCK, mask=inside, other=0.0)
        absmax = (tl.load(map_ptr + scale.to(tl.int32)) * wide + tl.load(offset_ptr + expert))[:, None]
    else:
        absmax = scale[:, None]
    n_bytes: tl.constexpr = BLOCK // 2
    byte = blocks[:, None] * n_bytes + tl.arange(0, n_bytes)[None, :]
    # The bytes of a last block that is not full may end with its last weight.
    stored = inside[:, None] if WHOLE else byte < (n_weights + 1) // 2
    packed = tl.load(packed_ptr + expert * n_blocks * n_bytes + byte, mask=stored, other=0).to(tl.int32)
    high = tl.load(table_ptr + (packed >> 4)) * absmax
    low = tl.load(table_ptr + (packed & 15)) * absmax
    offs = blocks[:, None] * BLOCK + tl.arange(0, BLOCK)[None, :]
    values = tl.interleave(high, low).to(out_ptr.dtype.element_ty)
    tl.store(out_ptr + expert * n_weights + offs, values, mask=offs < n_weights)


@cached
def _launch(chip: Chip, block: int, nested: bool, whole: bool) -> Launcher:
    # Without fused multiply-add the scales are rounded as bitsandbytes and the reference round them.
    blocks = max(1, DEQUANTISED_BLOCKS * BLOCK // block)  # the tile keeps its size
    options = {**launch_options(blocks * block, chip), "enable_fp_fusion": False}
    constants = {"BLOCK": block, "SCALE_BLOCK": SCALE_BLOCK, "BLOCKS": blocks, "NESTED": nested, "WHOLE": whole}
    return Launcher(_dequantize_kernel, {**constants, **options})


def dequantize_nf4(nf4: Nf4, shape: tuple[int, ...], dtype: torch.dtype) -> torch.Tensor:  # (X, ...)
    """Return the weights of X experts in `dtype`. Deterministic, the same bits on every device; no gradient.

    Raises ValueError for a shape that does not fit the bytes.
    """
    _check_shape(nf4, shape)
    if nf4.packed.is_meta:  # compiled for a GPU that is absent: the operator would launch nothing
        return _dequantize(nf4, shape, dtype)
    # one operator in every kind of trace, which reads 4 bits
    return _dequantize_op(*nf4.tensors, nf4.quant_type, nf4.block, list(shape), dtype)


def dequantize_nf4_into(nf4: Nf4, out: torch.Tensor) -> None:  # (X, ...) contiguous
    """Write the weights of X experts to `out`, in its dtype. Outside traces only: no operator is recorded.

    Raises ValueError for a shape that does not fit the bytes.
    """
    _check_shape(nf4, out.shape)
    _write(nf4, out)


def _check_shape(nf4: Nf4, shape: tuple[int, ...]) -> None:
    n_blocks = -(-math.prod(shape[1:]) // nf4.block)
    if nf4.scales.shape != (shape[0], n_blocks):
        found = tuple(nf4.scales.shape)
        raise ValueError(f"dequantize_nf4: shape {tuple(shape)} has {n_blocks} blocks per expert: scales are {found}")


def _dequantize(nf4: Nf4, shape: tuple[int, ...], dtype: torch.dtype) -> torch.Tensor:
    out = torch.empty(shape, dtype=dtype, device=nf4.packed.device)
    _write(nf4, out)
    return out


def _write(nf4: Nf4, out: torch.Tensor) -> None:
    if out.dtype is torch.float64 or not out.numel() or not runs_triton(nf4.packed):
        _write_reference(nf4, out)
        return
    n_blocks = nf4.scales.shape[1]
    n_weights = out.numel() // len(out)
    launch = _launch(chip_of(out.device), nf4.block, nf4.is_nested, n_weights % nf4.block == 0)
    blocks = max(1, DEQUANTISED_BLOCKS * BLOCK // nf4.block)
    launch(
        (-(-n_blocks // blocks), len(out), 1), (*nf4.tensors, *_constants(out.device, nf4.quant_type), out),
        (n_blocks, nf4.block_scales.shape[1], n_weights),
    )  # fmt: skip


@torch.library.custom_op("ligertune_kernels::dequantize_nf4", mutates_args=())
def _dequantize_op(
    packed: torch.Tensor,
    scales: torch.Tensor,
    block_scales: torch.Tensor,
    offset: torch.Tensor,
    quant_type: str,
    block: int,
    shape: list[int],
    dtype: torch.dtype,
) -> torch.Tensor:
    return _dequantize(Nf4(packed, scales, block_scales, offset, quant_type, block), tuple(shape), dtype)


@_dequantize_op.register_fake
def _(
    packed: torch.Tensor,
    scales: torch.Tensor,
    block_scales: torch.Tensor,
    offset: torch.Tensor,
    quant_type: str,
    block: int,
    shape: list[int],
    dtype: torch.dtype,
) -> torch.Tensor:
    return packed.new_empty(shape, dtype=dtype)
