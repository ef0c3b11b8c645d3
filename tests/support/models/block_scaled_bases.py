"""Tiny bases in MXFP4 and block float8 with the bundled tokenizer, and the same weights dequantised by transformers."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import torch
import transformers
from ligertune_kernels import quantize_float8_blocks, quantize_mxfp4
from safetensors.torch import load_file, save_file
from transformers import AutoModelForCausalLM, AutoTokenizer, FineGrainedFP8Config, Mxfp4Config

from support.command_line import RECIPE

SIZES = {
    "vocab_size": 512, "hidden_size": 64, "intermediate_size": 96, "num_hidden_layers": 2, "num_attention_heads": 4,
    "num_key_value_heads": 2, "bos_token_id": 1, "eos_token_id": 2, "pad_token_id": 0,
}  # fmt: skip
EXPERTS = {"num_experts_per_tok": 2, "head_dim": 16}
FAMILIES: dict[str, Any] = {
    "gpt_oss": transformers.GptOssConfig(
        **SIZES, **EXPERTS, num_local_experts=4, layer_types=["full_attention"] * 2, rope_parameters=None
    ),
    "qwen3": transformers.Qwen3Config(**SIZES, head_dim=16),
    "qwen3_moe": transformers.Qwen3MoeConfig(**SIZES, **EXPERTS, moe_intermediate_size=48, num_experts=4),
    "deepseek_v3": transformers.DeepseekV3Config(
        **{**SIZES, "num_key_value_heads": 4}, num_experts_per_tok=2, moe_intermediate_size=48, n_routed_experts=4,
        n_shared_experts=1, first_k_dense_replace=1, q_lora_rank=32, kv_lora_rank=16, qk_rope_head_dim=16,
        qk_nope_head_dim=16, v_head_dim=16, n_group=1, topk_group=1, num_nextn_predict_layers=0,
    ),
}  # fmt: skip
MXFP4 = {
    "quant_method": "mxfp4",
    "modules_to_not_convert": [
        "model.layers.*.self_attn",
        "model.layers.*.mlp.router",
        "model.embed_tokens",
        "lm_head",
    ],
}
BLOCK = (16, 16)  # divides all sizes of FAMILIES: transformers takes the block from the number of scales


def write_stored(
    folder: Path, family: str, *, block: tuple[int, int] = BLOCK, scales: torch.dtype = torch.float32, **changes: Any
) -> dict[str, torch.Tensor]:
    """Write a random model of a family, gpt_oss in MXFP4 and others in block float8, in two files; return its tensors.

    scales: dtype of float8's scales. changes: of its quantisation config.
    """
    config = FAMILIES[family]
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        model = AutoModelForCausalLM.from_config(config, dtype=torch.bfloat16)
    model.save_pretrained(folder)
    AutoTokenizer.from_pretrained(RECIPE.parent / "stories260K").save_pretrained(folder)
    dense = load_file(folder / "model.safetensors")
    (folder / "model.safetensors").unlink()
    if family == "gpt_oss":
        tensors, quantization = _in_mxfp4(dense), MXFP4
    else:
        tensors = _in_float8(dense, block, scales)
        quantization = {
            "quant_method": "fp8", "weight_block_size": list(block), "activation_scheme": "dynamic",
            "modules_to_not_convert": ["lm_head", "model.layers.0.mlp.gate"],
        }  # fmt: skip
    values = json.loads((folder / "config.json").read_text()) | {"quantization_config": {**quantization, **changes}}
    (folder / "config.json").write_text(json.dumps(values, indent=2))
    _write_shards(folder, tensors)
    return tensors


def _in_mxfp4(dense: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    tensors = {}
    for name, weight in dense.items():
        if weight.ndim == 3:
            stored = quantize_mxfp4(weight.transpose(1, 2))
            tensors[f"{name}_blocks"] = stored.blocks
            tensors[f"{name}_scales"] = stored.scales
        else:
            tensors[name] = weight
    return tensors


def _in_float8(dense: dict[str, torch.Tensor], block: tuple[int, int], scales: torch.dtype) -> dict[str, torch.Tensor]:
    tensors = {}
    for name, weight in dense.items():
        if ".layers." in name and weight.ndim == 2 and not name.endswith("mlp.gate.weight"):
            stored = quantize_float8_blocks(weight[None], block=block, scale_dtype=scales)
            tensors[name] = stored.values[0]
            tensors[f"{name}_scale_inv"] = stored.scales[0].to(scales)
        else:
            tensors[name] = weight
    return tensors


def _write_shards(folder: Path, tensors: dict[str, torch.Tensor]) -> None:
    names = sorted(tensors)
    halves = names[: len(names) // 2], names[len(names) // 2 :]
    places = {}
    for number, chosen in enumerate(halves, 1):
        file = f"model-{number:05d}-of-00002.safetensors"
        save_file({name: tensors[name].contiguous() for name in chosen}, folder / file, {"format": "pt"})
        places |= dict.fromkeys(chosen, file)
    index = {"metadata": {"total_size": sum(t.nbytes for t in tensors.values())}, "weight_map": places}
    (folder / "model.safetensors.index.json").write_text(json.dumps(index, indent=2))


def dequantised(folder: Path, dtype: torch.dtype = torch.float32) -> transformers.PreTrainedModel:
    """Return the model of a base as transformers dequantises it."""
    method = json.loads((folder / "config.json").read_text())["quantization_config"]["quant_method"]
    cls = Mxfp4Config if method == "mxfp4" else FineGrainedFP8Config
    model = AutoModelForCausalLM.from_pretrained(folder, dtype=dtype, quantization_config=cls(dequantize=True))
    return model.to(dtype)  # type: ignore[arg-type]  # transformers 5.17 dequantises MXFP4 to bfloat16, which is exact


def write_dequantised(folder: Path, base: Path) -> Path:
    """Write the model of `dequantised` in float32 with the tokenizer of the base."""
    weights = dequantised(base)
    plain = AutoModelForCausalLM.from_config(FAMILIES[weights.config.model_type], dtype=torch.float32)
    plain.load_state_dict(weights.state_dict())
    plain.save_pretrained(folder)  # transformers 5.17 cannot save what it has dequantised
    AutoTokenizer.from_pretrained(base).save_pretrained(folder)
    return folder
