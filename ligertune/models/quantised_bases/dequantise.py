"""Weights of quantised checkpoints, computed from the tensors that store them.

All formats here are affine within a group of input columns:

    W[f, e] = scale[f, group(e)] (q[f, e] - zero[f, group(e)])        q: 2, 4 or 8 bits, W: (F, E)

They differ in how q, scale and zero are packed and transposed. The product is computed in float32 and rounded once to
the dtype of the model. Layouts as published by AutoGPTQ, AutoAWQ, HQQ and compressed-tensors.
"""

from __future__ import annotations

from collections.abc import Mapping

import torch
from torch import Tensor

Parts = Mapping[str, Tensor]  # name within the layer, such as qweight -> tensor of the checkpoint
Shape = tuple[int, int]  # (F, E)

FLOAT8 = (torch.float8_e4m3fn, torch.float8_e5m2)


def unpacked(words: Tensor, bits: int) -> Tensor:
    """Return the unsigned values (..., N, 32 / bits) uint8 of words (..., N) int32, lowest bits first."""
    octets = words.contiguous().view(torch.uint8).view(*words.shape, 4)
    if bits == 8:
        return octets
    shifts = torch.arange(0, 8, bits, dtype=torch.uint8, device=words.device)
    return (octets[..., None] >> shifts).bitwise_and_(2**bits - 1).flatten(-2)


def group_index(inputs: int, groups: int, group_size: int = 0) -> Tensor:
    """Return the group (E,) int64 of each input column, for groups of equal size; the last one may be smaller."""
    size = group_size if group_size > 0 else -(-inputs // groups)
    return torch.arange(inputs) // size


def affine(
    values: Tensor,  # (F, E) integers or float8
    scale: Tensor,  # (F, G)
    zero: Tensor | float,  # (F, G), or one number
    index: Tensor | None,  # (E,) group of each column; None: G equal groups
    dtype: torch.dtype,
) -> Tensor:  # (F, E)
    """Return scale (values - zero), rounded once to `dtype`. Differences of 8-bit integers are exact in 16 bits."""
    outputs, inputs = values.shape
    if index is None:
        grouped = values.reshape(outputs, scale.shape[1], -1)
        zero = zero.to(dtype)[..., None] if isinstance(zero, Tensor) else zero
        scale = scale[..., None]
    else:
        grouped = values
        zero = zero.to(dtype)[:, index] if isinstance(zero, Tensor) else zero
        scale = scale[:, index]
    weight = grouped.to(dtype, copy=True)
    # in place; with a scale of another 16-bit dtype the product is in float32, and rounded once
    weight.sub_(zero).mul_(scale)
    return weight.view(outputs, inputs)


def gptq_weight(parts: Parts, shape: Shape, dtype: torch.dtype, *, stored_minus_one: bool) -> Tensor:
    """Return the weight (F, E) of a GPTQ layer.

    qweight: (E bits / 32, F) int32. qzeros: (G, F bits / 32) int32. scales: (G, F). g_idx: (E,) int32, or none.
    stored_minus_one: the zeros are stored minus one (checkpoint_format: gptq), modulo 2**bits.
    """
    outputs, inputs = shape
    bits = 32 * len(parts["qweight"]) // inputs
    values = unpacked(parts["qweight"], bits).transpose(0, 1).reshape(outputs, -1)
    zeros = unpacked(parts["qzeros"], bits).flatten(-2)[:, :outputs]
    if stored_minus_one:
        zeros = (zeros + 1) & (2**bits - 1)  # 2**bits - 1 stands for 0
    return affine(values, parts["scales"].t(), zeros.t(), parts.get("g_idx"), dtype)


def awq_weight(parts: Parts, shape: Shape, dtype: torch.dtype) -> Tensor:
    """Return the weight (F, E) of a layer that AutoAWQ stored as `gemm`.

    qweight: (E, F / 8) int32. qzeros: (G, F / 8) int32. scales: (G, F). A word holds even columns, then the odd ones.
    """
    values, zeros = (
        unpacked(parts[name], 4).unflatten(-1, (2, 4)).transpose(-1, -2).flatten(1).t()
        for name in ("qweight", "qzeros")
    )
    return affine(values, parts["scales"].t(), zeros, parts.get("g_idx"), dtype)


def hqq_weight(parts: Parts, shape: Shape, dtype: torch.dtype, *, bits: int, axis: int) -> Tensor:
    """Return the weight (F, E) of an HQQ layer: groups are rows (axis 1) or columns (axis 0) of a reshaped weight.

    W_q: uint8; with 8 / bits blocks of rows in its bits, the first block in the highest. scale, zero: (N, 1) or (1, N).
    """
    shifts = range(8 - bits, -1, -bits)
    values = torch.cat([(parts["W_q"] >> shift) & (2**bits - 1) for shift in shifts])
    scale = parts["scale"]
    rows = scale.numel() if axis == 1 else shape[0] * shape[1] // scale.numel()  # packing may have added rows
    # its zero points are no integers
    return values[:rows].float().sub_(parts["zero"].float()).mul_(scale.float()).to(dtype).view(shape)


def compressed_weight(parts: Parts, shape: Shape, dtype: torch.dtype) -> Tensor:
    """Return the weight (F, E) of a layer of compressed-tensors: pack-quantized, int-quantized or float-quantized.

    weight_packed: (F, E bits / 32) int32, values + 2**(bits - 1); or weight: (F, E) int8 or float8.
    weight_scale: (F, G), (1,), or (F / b, E / c) for blocks. weight_zero_point: (F bits / 32, G) int32 packed along F
    and offset as the values; or (F, G) int8. weight_g_idx: (E,).
    """
    outputs, inputs = shape
    packed = parts.get("weight_packed")
    zero = parts.get("weight_zero_point")
    scale = parts["weight_scale"]
    scale = scale.view(1, 1) if scale.numel() == 1 else scale
    if packed is None:
        values = parts["weight"]
        offset: Tensor | float = 0.0 if zero is None or values.dtype in FLOAT8 else zero.view(scale.shape)
    else:
        bits = 32 * packed.shape[1] // inputs
        values = unpacked(packed, bits).flatten(-2)[:, :inputs]
        offset = float(2 ** (bits - 1))
        if zero is not None and zero.dtype == torch.int32:
            offset = unpacked(zero, bits).transpose(1, 2).reshape(-1, zero.shape[1])[:outputs]
        elif zero is not None:
            offset = zero.view(scale.shape).to(torch.int16) + 2 ** (bits - 1)
    index = parts.get("weight_g_idx")
    if len(scale) != outputs:  # one scale for the tensor, or one for each block of rows
        rows = -(-outputs // len(scale))
        scale = scale.repeat_interleave(rows, 0)[:outputs]
        offset = offset.repeat_interleave(rows, 0)[:outputs] if isinstance(offset, Tensor) else offset
    return affine(values, scale, offset, index, dtype)
