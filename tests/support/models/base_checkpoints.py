"""Base models for tests: the quickstart's model in other dtypes, in float8 blocks, and with tensors of other parts."""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file, save_file
from torch import Tensor
from transformers import LlamaConfig, LlamaForCausalLM

from support.command_line import ROOT

QUICKSTART = ROOT / "configs" / "quickstart" / "stories260K"
LARGEST_FLOAT8 = 448.0
BLOCK = 4  # divides 64, 32 and 172: transformers takes the block from the number of scales


def write_base(
    folder: Path, dtype: str = "float32", *, extra: dict[str, Tensor] | None = None, **config: Any
) -> dict[str, Tensor]:
    """Write the quickstart's model as `dtype`; return its weights in float32 as a reader of the files gets them.

    dtype: also "float8": block-float8 layers in a bfloat16 model. extra: further tensors. config: changed keys.
    """
    shutil.copytree(QUICKSTART, folder)
    values = json.loads((folder / "config.json").read_text()) | config
    stored: dict[str, Tensor] = {}
    truth: dict[str, Tensor] = {}
    for name, weight in load_file(folder / "model.safetensors").items():
        if dtype == "float8" and ".layers." in name and weight.ndim == 2:
            stored[name], stored[f"{name}_scale_inv"], truth[name] = _in_blocks(weight)
        else:
            stored[name] = weight.to(torch.bfloat16 if dtype == "float8" else getattr(torch, dtype))
            truth[name] = stored[name].float()
    values["dtype"] = "bfloat16" if dtype == "float8" else dtype
    if dtype == "float8":
        values["quantization_config"] = {
            "quant_method": "fp8", "weight_block_size": [BLOCK, BLOCK], "activation_scheme": "dynamic",
        }  # fmt: skip
    save_file(stored | (extra or {}), folder / "model.safetensors", {"format": "pt"})
    (folder / "config.json").write_text(json.dumps(values))
    return truth


def _in_blocks(weight: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """Return (float8 weight, scale of each block, the weight that both describe)."""
    rows, columns = weight.shape
    grid = rows // BLOCK, columns // BLOCK
    blocks = weight.float().reshape(grid[0], BLOCK, grid[1], BLOCK)
    scale = blocks.abs().amax((1, 3), keepdim=True) / LARGEST_FLOAT8
    quantised = (blocks / scale).to(torch.float8_e4m3fn)
    truth = (quantised.float() * scale).reshape(rows, columns)
    return quantised.reshape(rows, columns), scale.reshape(grid), truth


def plain_model(weights: dict[str, Tensor], dtype: torch.dtype) -> LlamaForCausalLM:
    """Return the quickstart's model with these weights cast to `dtype`, in transformers' own classes."""
    model = LlamaForCausalLM(LlamaConfig.from_pretrained(QUICKSTART)).to(dtype)
    found = model.load_state_dict({name: weight.to(dtype) for name, weight in weights.items()}, strict=False)
    assert set(found.missing_keys) <= {"lm_head.weight"} and not found.unexpected_keys
    model.tie_weights()
    return model.eval()


def tensors_in(folder: Path) -> dict[str, Tensor]:
    """Return all tensors of a saved model, read from its files directly; its index must name them all."""
    index = folder / "model.safetensors.index.json"
    if not index.is_file():
        return load_file(folder / "model.safetensors")
    places: dict[str, str] = json.loads(index.read_text())["weight_map"]
    found = {name: tensor for file in set(places.values()) for name, tensor in load_file(folder / file).items()}
    assert set(found) == set(places) and not (folder / "model.safetensors").exists()
    files = {path.name for path in folder.glob("*.safetensors")}
    assert files == set(places.values())
    return found


def same_bytes(found: Tensor, expected: Tensor) -> bool:
    """Return whether two tensors have the same dtype, shape and bytes."""
    if found.dtype != expected.dtype or found.shape != expected.shape:
        return False
    return torch.equal(found.contiguous().view(torch.uint8), expected.contiguous().view(torch.uint8))
