r"""MXFP4: weights of 4 bits in blocks of 32 neighbours of a row, which share a power of two.

    w = e2m1[nibble] · 2^(scale - 127)      e2m1: 0, 0.5, 1, 1.5, 2, 3, 4, 6 and their negatives

Source: OCP Microscaling Formats (MX) 1.0. The bytes are those of gpt-oss: the first of two weights is in the low half.
Scale 255 is no number. Dequantised weights are exact in float32 and bfloat16, unless they leave the dtype's range.
There is no backward: such weights are frozen.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import NamedTuple

import torch

from ligertune_kernels.chips import Chip, launch_options
from ligertune_kernels.launcher import Launcher, cached, chip_of, runs_triton, tl, triton
from ligertune_kernels.ops.block_scaled.tiles import DEQUANTISED_MX_BLOCKS, QUANTISED_ROWS

MX_BLOCK = 32  # weights that share a scale
E2M1 = (0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0)
BIAS = 127  # of the scales


class Mxfp4(NamedTuple):
    """Weights (X, rows, 32·G) of X experts in MXFP4, as a checkpoint stores them."""

    blocks: torch.Tensor  # (X, rows, G, 16) uint8
    scales: torch.Tensor  # (X, rows, G) uint8

    @property
    def tensors(self) -> tuple[torch.Tensor, ...]:
        """The parts that are tensors, in the order of the fields."""
        return self.blocks, self.scales

    @property
    def names(self) -> tuple[str, ...]:
        """Names of the fields that are tensors."""
        return self._fields[: len(self.tensors)]

    @property
    def constants(self) -> tuple[()]:
        """The other fields: there are none."""
        return ()

    @property
    def shape(self) -> tuple[int, int, int]:
        """Shape of the weights that the bytes hold."""
        n_experts, n_rows, n_groups = self.scales.shape
        return n_experts, n_rows, n_groups * MX_BLOCK

    def apply(self, function: Callable[[torch.Tensor], torch.Tensor]) -> Mxfp4:
        """Return the weights with a function applied to each tensor."""
        return Mxfp4(function(self.blocks), function(self.scales))

    def dequantize(self, shape: tuple[int, ...], dtype: torch.dtype) -> torch.Tensor:
        """Return the weights as `dequantize_mxfp4` does."""
        return dequantize_mxfp4(self, shape, dtype)

    def write(self, out: torch.Tensor) -> None:
        """Write the weights to `out` (X, rows, columns), in its dtype. Outside traces only."""
        _check_shape(self, tuple(out.shape))
        _write(self, out)

    def magnitudes(self) -> torch.Tensor:
        """Return one value: NaN if a weight is no number, else 0."""
        return torch.where((self.scales == 255).any(), float("nan"), 0.0).view(1)


def quantize_mxfp4(weight: torch.Tensor, *, best_scale: bool = False) -> Mxfp4:  # (X, rows, columns)
    """Quantise weights as the MX specification says: a block's scale is the exponent of its largest value, less 2.

    Values are rounded to the nearest of e2m1, ties to the even code; those above 6 become 6. A weight that was
    dequantised from MXFP4 keeps its values. best_scale: take twice the scale where that loses less of a block; a
    largest value of 4 that has become 3.999 would be 3 under the specification's scale. Raises ValueError for other
    dtypes than floating point, and for columns that are no multiple of 32.
    """
    if weight.ndim != 3 or weight.shape[-1] % MX_BLOCK:
        found = tuple(weight.shape)
        raise ValueError(f"quantize_mxfp4: weight has shape {found}: expected (X, rows, a multiple of {MX_BLOCK})")
    if not weight.is_floating_point():
        raise ValueError(f"quantize_mxfp4: weight is {weight.dtype}: expected a floating-point dtype")
    n_experts, n_rows, n_columns = weight.shape
    rows = weight.detach().reshape(-1, n_columns)
    chunks = rows.split(max(1, QUANTISED_ROWS // max(1, n_columns)))
    blocks, scales = (torch.cat(part) for part in zip(*(_quantised_rows(c, best_scale) for c in chunks), strict=True))
    return Mxfp4(blocks.view(n_experts, n_rows, -1, MX_BLOCK // 2), scales.view(n_experts, n_rows, -1))


def _quantised_rows(rows: torch.Tensor, best_scale: bool) -> tuple[torch.Tensor, torch.Tensor]:
    """Return (bytes (N, G, 16), scales (N, G)) of some rows (N, 32·G)."""
    values = rows.float().unflatten(1, (-1, MX_BLOCK))
    largest = values.abs().amax(2)
    exponent = torch.frexp(largest).exponent - 1  # of a power of two: its own
    scales = (exponent - 2 + BIAS).clamp(0, 254).to(torch.uint8)
    code, error = _codes(values, scales)
    if best_scale:
        wider = (scales + 1).clamp(max=254)
        wider_code, wider_error = _codes(values, wider)
        is_better = wider_error < error
        code = torch.where(is_better.unsqueeze(2), wider_code, code)
        scales = torch.where(is_better, wider, scales)
    code |= values.signbit().to(torch.uint8) << 3
    return code[..., 0::2] | (code[..., 1::2] << 4), torch.where(largest.isfinite(), scales, 255)


def _codes(values: torch.Tensor, scales: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Return the codes of absolute values (N, G, 32) under scales (N, G), and each block's sum of squared errors."""
    # Powers of two from their bits: exp2 is not exact on every device. 2^-127 is subnormal.
    inverse = ((2 * BIAS - scales.int()).clamp(max=254) << 23).view(torch.float32)
    scaled = values.abs() * inverse.unsqueeze(2)
    code = torch.zeros_like(scaled, dtype=torch.uint8)
    # half way between two neighbours; with an even code below, the middle belongs to that one
    for middle, below_is_even in zip((0.25, 0.75, 1.25, 1.75, 2.5, 3.5, 5.0), (True, False) * 4, strict=False):
        code += scaled > middle if below_is_even else scaled >= middle
    table = torch.tensor(E2M1, device=values.device)
    error = (scaled - table[code.int()]).square().sum(2) / inverse.double().square()
    return code, error


def dequantize_mxfp4_reference(stored: Mxfp4, shape: tuple[int, ...], dtype: torch.dtype) -> torch.Tensor:
    """Compute `dequantize_mxfp4` in plain torch."""
    out = torch.empty(shape, dtype=dtype, device=stored.blocks.device)
    _write_reference(stored, out)
    return out


def _write_reference(stored: Mxfp4, out: torch.Tensor) -> None:
    """Write the weights to `out`, one expert after the other to bound the temporaries."""
    table = torch.tensor([*E2M1, *(-value for value in E2M1)], device=out.device)
    pairs = torch.stack((table.repeat(16), table.repeat_interleave(16)), 1)  # (256, 2): of each byte
    for expert, (blocks, scales) in enumerate(zip(*stored.tensors, strict=True)):
        values = pairs[blocks.int()].flatten(2)  # (rows, G, 32)
        scale = torch.ldexp(torch.ones_like(scales, dtype=torch.float32), scales.int() - BIAS)
        scale[scales == 255] = float("nan")
        out[expert] = (values * scale.unsqueeze(2)).view(out.shape[1:])


@triton.jit
def _dequantize_mx_kernel(
    blocks_ptr,  # (X, n_blocks, 16)
    scales_ptr,  # (X, n_blocks)
    out_ptr,  # (X, n_blocks, 32)
    n_blocks,
    BLOCK: tl.constexpr, BLOCKS: tl.constexpr,
):  # fmt: skip
    expert = tl.program_id(1).to(tl.int64)  # a layer can have more than 2**31 weights
    offs = tl.program_id(0) * BLOCKS + tl.arange(0, BLOCKS)
    inside = offs < n_blocks
    exponent = tl.load(scales_ptr + expert * n_blocks + offs, mask=inside, other=0).to(tl.int32)
    bits = tl.where(exponent == 0, 0x00400000, exponent << 23)  # 2^-127 is subnormal
    bits = tl.where(exponent == 255, 0x7FC00000, bits)  # NaN
    scale = bits.to(tl.float32, bitcast=True)[:, None]
    n_bytes: tl.constexpr = BLOCK // 2
    byte = offs[:, None].to(tl.int64) * n_bytes + tl.arange(0, n_bytes)[None, :]
    packed = tl.load(blocks_ptr + expert * n_blocks * n_bytes + byte, mask=inside[:, None], other=0).to(tl.int32)
    values = tl.interleave(_e2m1(packed & 15) * scale, _e2m1(packed >> 4) * scale)
    place = offs[:, None].to(tl.int64) * BLOCK + tl.arange(0, BLOCK)[None, :]
    out = out_ptr + expert * n_blocks * BLOCK + place
    tl.store(out, values.to(out_ptr.dtype.element_ty), mask=inside[:, None])


@triton.jit
def _e2m1(nibble):
    """Return the values of 4 bits in float32, from twice their value as an integer."""
    exponent = (nibble >> 1) & 3
    fraction = nibble & 1
    doubled = tl.where(exponent == 0, fraction, (2 + fraction) << (tl.maximum(exponent, 1) - 1))
    value = (doubled.to(tl.float32) * 0.5).to(tl.int32, bitcast=True)
    return (value | (nibble >> 3 << 31)).to(tl.float32, bitcast=True)  # Triton computes -x as 0 - x, which loses -0


@cached
def _mx_launch(chip: Chip) -> Launcher:
    constants = {"BLOCK": MX_BLOCK, "BLOCKS": DEQUANTISED_MX_BLOCKS}
    return Launcher(_dequantize_mx_kernel, {**constants, **launch_options(DEQUANTISED_MX_BLOCKS * MX_BLOCK, chip)})


def dequantize_mxfp4(stored: Mxfp4, shape: tuple[int, ...], dtype: torch.dtype) -> torch.Tensor:  # (X, rows, columns)
    """Return the weights of X experts in `dtype`. Deterministic, the same bits on every device; no gradient.

    Raises ValueError for a shape that does not fit the bytes.
    """
    _check_shape(stored, shape)
    if stored.blocks.is_meta:  # compiled for a GPU that is absent: the operator would launch nothing
        return _dequantize(stored, dtype)
    return _dequantize_op(*stored.tensors, dtype)  # one operator in every kind of trace, which reads 4 bits


def _check_shape(stored: Mxfp4, shape: tuple[int, ...]) -> None:
    if stored.shape != tuple(shape):
        raise ValueError(f"dequantize_mxfp4: shape is {tuple(shape)}: the bytes hold {stored.shape}")


def _dequantize(stored: Mxfp4, dtype: torch.dtype) -> torch.Tensor:
    out = torch.empty(stored.shape, dtype=dtype, device=stored.blocks.device)
    _write(stored, out)
    return out


def _write(stored: Mxfp4, out: torch.Tensor) -> None:
    if not out.is_contiguous():
        raise ValueError("dequantize_mxfp4: out is not contiguous")
    if out.dtype is torch.float64 or not out.numel() or not runs_triton(stored.blocks):
        _write_reference(stored, out)
        return
    n_blocks = stored.scales[0].numel()
    grid = (-(-n_blocks // DEQUANTISED_MX_BLOCKS), len(out), 1)
    tensors = (stored.blocks.contiguous(), stored.scales.contiguous(), out)
    _mx_launch(chip_of(out.device))(grid, tensors, (n_blocks,))


@torch.library.custom_op("ligertune_kernels::dequantize_mxfp4", mutates_args=())
def _dequantize_op(blocks: torch.Tensor, scales: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    return _dequantize(Mxfp4(blocks, scales), dtype)


@_dequantize_op.register_fake
def _(blocks: torch.Tensor, scales: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    return blocks.new_empty(*blocks.shape[:2], scales.shape[2] * MX_BLOCK, dtype=dtype)
