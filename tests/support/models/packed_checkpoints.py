"""Quantised checkpoints of a small Llama, packed word by word as the formats' papers and first programs do.

The weights are rounded to the nearest value. `write_packed` also returns what a reader must compute, in float32.
"""

from __future__ import annotations

import json
import shutil
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor

from support.models.base_checkpoints import QUICKSTART

WIDTH = 192  # of the MLP: the quickstart's 172, with rows of zeros, so that values fill words and groups
DEPTH = 2
AWQ_ORDER = (0, 2, 4, 6, 1, 3, 5, 7)


@dataclass(frozen=True)
class Packing:
    """A format with its options. config: its quantization_config."""

    method: str
    bits: int = 4
    group_size: int = 16
    symmetric: bool = False
    act_order: bool = False
    axis: int = 1
    stored: str = ""  # format of compressed-tensors, or checkpoint_format of GPTQ
    config: dict[str, Any] = field(default_factory=dict)


PACKINGS = {
    "gptq": Packing("gptq"),
    "gptq_2bit": Packing("gptq", bits=2),
    "gptq_8bit": Packing("gptq", bits=8, symmetric=True),
    "gptq_v2_act_order": Packing("gptq", act_order=True, stored="gptq_v2"),
    "gptq_uneven": Packing("gptq", group_size=128),  # 192 columns: the last group is half as wide
    "awq": Packing("awq"),
    "awq_cut": Packing("awq", group_size=80),  # 192 columns are groups of 80, 80 and 32
    "hqq": Packing("hqq"),
    "hqq_8bit": Packing("hqq", bits=8),
    "hqq_2bit_columns": Packing("hqq", bits=2, axis=0),
    "int4": Packing("compressed-tensors", symmetric=True, stored="pack-quantized"),
    "int4_asymmetric": Packing("compressed-tensors", stored="pack-quantized"),
    "int8": Packing("compressed-tensors", bits=8, group_size=0, symmetric=True, stored="int-quantized"),
    "float8": Packing("compressed-tensors", bits=8, group_size=0, symmetric=True, stored="float-quantized"),
}


def small_llama() -> dict[str, Tensor]:
    """Return the weights of the quickstart's model in float32: 2 layers, an MLP of 192."""
    found = {}
    for name, weight in load_file(QUICKSTART / "model.safetensors").items():
        if ".layers." in name and int(name.split(".layers.")[1].split(".")[0]) >= DEPTH:
            continue
        if "gate_proj" in name or "up_proj" in name:
            weight = torch.nn.functional.pad(weight, (0, 0, 0, WIDTH - len(weight)))
        if "down_proj" in name:
            weight = torch.nn.functional.pad(weight, (0, WIDTH - weight.shape[1]))
        found[name] = weight.float()
    return found


def write_packed(folder: Path, packing: Packing, **settings: Any) -> dict[str, Tensor]:
    """Write a checkpoint; return its weights in float32. settings: changed keys of quantization_config."""
    shutil.copytree(QUICKSTART, folder)
    stored: dict[str, Tensor] = {}
    truth: dict[str, Tensor] = {}
    for name, weight in small_llama().items():
        if ".layers." not in name or weight.ndim != 2:
            stored[name] = truth[name] = weight
            continue
        parts, truth[name] = packed(weight.numpy(), packing)
        layer = name.removesuffix(".weight")
        stored |= {f"{layer}.{part}": torch.from_numpy(value) for part, value in parts.items() if part != "float8"}
        if "float8" in parts:
            stored[f"{layer}.weight"] = torch.from_numpy(parts["float8"]).to(torch.float8_e4m3fn)
    save_file(stored, folder / "model.safetensors", {"format": "pt"})
    values = json.loads((folder / "config.json").read_text())
    values |= {"num_hidden_layers": DEPTH, "intermediate_size": WIDTH}
    values["quantization_config"] = {**settings_of_packing(packing), **settings}
    (folder / "config.json").write_text(json.dumps(values))
    return truth


def settings_of_packing(packing: Packing) -> dict[str, Any]:
    """Return the quantization_config that the format's own program writes."""
    common = {"quant_method": packing.method, "bits": packing.bits, "group_size": packing.group_size}
    if packing.method == "gptq":
        return {
            **common,
            "desc_act": packing.act_order,
            "sym": packing.symmetric,
            **_format("checkpoint_format", packing),
        }
    if packing.method == "awq":
        return {**common, "version": "gemm", "zero_point": True}
    if packing.method == "hqq":
        weights = {
            "nbits": packing.bits,
            "group_size": packing.group_size,
            "axis": packing.axis,
            "view_as_float": False,
        }
        params = {"weight_quant_params": weights, "scale_quant_params": None, "zero_quant_params": None}
        return {"quant_method": "hqq", "quant_config": params, "skip_modules": ["lm_head"]}
    kind = "float" if packing.stored == "float-quantized" else "int"
    weights = {"num_bits": packing.bits, "type": kind, "symmetric": packing.symmetric, "dynamic": False}
    weights |= (
        {"strategy": "group", "group_size": packing.group_size} if packing.group_size else {"strategy": "channel"}
    )
    return {
        "quant_method": "compressed-tensors",
        "format": packing.stored,
        "ignore": ["lm_head"],
        "quantization_status": "compressed",
        "config_groups": {"group_0": {"targets": ["Linear"], "weights": weights}},
    }


def _format(key: str, packing: Packing) -> dict[str, str]:
    return {key: packing.stored} if packing.stored else {}


def packed(weight: np.ndarray, packing: Packing) -> tuple[dict[str, np.ndarray], Tensor]:
    """Return the tensors that store a weight (F, E), and the weight that they stand for."""
    if packing.method == "hqq":
        return _packed_by_hqq(weight, packing)
    if packing.stored == "float-quantized":
        scale = np.abs(weight).max(1, keepdims=True).clip(1e-6) / 448
        values = torch.from_numpy(weight / scale).to(torch.float8_e4m3fn).float()
        return {"float8": values.numpy(), "weight_scale": scale}, values * torch.from_numpy(scale)
    inputs = weight.shape[1]
    size = packing.group_size or inputs
    index = np.arange(inputs) // size
    if packing.act_order:
        index = np.random.default_rng(0).permutation(index)
    values, scale, zero = rounded(weight, index, packing)
    truth = torch.from_numpy((values - zero[:, index]).astype(np.float32) * scale[:, index].astype(np.float32))
    if packing.method == "gptq":
        parts = _packed_as_gptq(values, scale, zero, packing)
        return {**parts, "g_idx": index.astype(np.int32)}, truth
    if packing.method == "awq":
        return _packed_as_awq(values, scale, zero), truth
    return _packed_as_compressed(values, scale, zero, packing), truth


def rounded(weight: np.ndarray, index: np.ndarray, packing: Packing) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """Return values (F, E), scales (F, G) float16 and zero points (F, G) of columns in groups `index`."""
    largest = 2**packing.bits - 1
    groups = range(index.max() + 1)
    low = np.stack([weight[:, index == group].min(1) for group in groups], 1).clip(max=0)
    high = np.stack([weight[:, index == group].max(1) for group in groups], 1).clip(min=0)
    if packing.symmetric:
        high = np.maximum(high, -low)
        scale = (high / (largest // 2)).clip(1e-4).astype(np.float16)
        zero = np.full(scale.shape, 2 ** (packing.bits - 1))
    else:
        scale = ((high - low) / largest).clip(1e-4).astype(np.float16)
        zero = np.rint(-low / scale.astype(np.float32)).clip(0, largest).astype(np.int64)
    values = np.rint(weight / scale[:, index].astype(np.float32)) + zero[:, index]
    return values.clip(0, largest).astype(np.int64), scale, zero


def words(values: np.ndarray, bits: int, axis: int, order: tuple[int, ...] | None = None) -> np.ndarray:
    """Return values packed into int32 along an axis: value `order[i]` of a word at bit `bits * i`."""
    per_word = 32 // bits
    missing = -values.shape[axis] % per_word
    moved = np.moveaxis(values, axis, 0)
    moved = np.concatenate([moved, np.zeros((missing, *moved.shape[1:]), moved.dtype)])
    found = np.zeros((len(moved) // per_word, *moved.shape[1:]), np.uint32)
    for word in range(len(found)):
        for place in range(per_word):
            source = place if order is None else order[place]
            found[word] |= moved[word * per_word + source].astype(np.uint32) << np.uint32(bits * place)
    return np.ascontiguousarray(np.moveaxis(found, 0, axis)).view(np.int32)


def _packed_as_gptq(values: np.ndarray, scale: np.ndarray, zero: np.ndarray, packing: Packing) -> dict[str, np.ndarray]:
    minus = 0 if packing.stored == "gptq_v2" else 1
    return {
        "qweight": words(values.T, packing.bits, 0),
        "qzeros": words((zero.T - minus) & (2**packing.bits - 1), packing.bits, 1),
        "scales": np.ascontiguousarray(scale.T),
    }


def _packed_as_awq(values: np.ndarray, scale: np.ndarray, zero: np.ndarray) -> dict[str, np.ndarray]:
    return {
        "qweight": words(values.T, 4, 1, AWQ_ORDER),
        "qzeros": words(zero.T, 4, 1, AWQ_ORDER),
        "scales": np.ascontiguousarray(scale.T),
    }


def _packed_as_compressed(
    values: np.ndarray, scale: np.ndarray, zero: np.ndarray, packing: Packing
) -> dict[str, np.ndarray]:
    if packing.stored == "int-quantized":
        return {"weight": (values - zero).astype(np.int8), "weight_scale": scale}
    parts = {
        "weight_packed": words(values, packing.bits, 1),
        "weight_scale": scale,
        "weight_shape": np.array(values.shape),
    }
    return parts if packing.symmetric else {**parts, "weight_zero_point": words(zero, packing.bits, 0)}


def _packed_by_hqq(weight: np.ndarray, packing: Packing) -> tuple[dict[str, np.ndarray], Tensor]:
    shape = (-1, packing.group_size) if packing.axis == 1 else (packing.group_size, -1)
    grouped = weight.reshape(shape)
    low = grouped.min(packing.axis, keepdims=True)
    high = grouped.max(packing.axis, keepdims=True)
    scale = ((high - low) / (2**packing.bits - 1)).clip(1e-4).astype(np.float16)
    zero = (-low / scale.astype(np.float32)).astype(np.float16)  # no integer
    exact = scale.astype(np.float32), zero.astype(np.float32)
    values = np.rint(grouped / exact[0] + exact[1]).clip(0, 2**packing.bits - 1).astype(np.uint8)
    per_byte = 8 // packing.bits
    step = len(values) // per_byte
    octets = np.zeros((step, values.shape[1]), np.uint8)
    for place in range(per_byte):  # the first block of rows in the highest bits
        octets |= values[place * step : (place + 1) * step] << np.uint8(8 - packing.bits * (place + 1))
    truth = (values.astype(np.float32) - exact[1]) * exact[0]
    parts = {"W_q": octets, "scale": scale, "zero": zero, "shape": np.array(weight.shape)}
    for name, value in (("nbits", packing.bits), ("group_size", packing.group_size), ("axis", packing.axis)):
        parts[name] = np.array(value, np.int32)
    return parts, torch.from_numpy(truth.reshape(weight.shape))
