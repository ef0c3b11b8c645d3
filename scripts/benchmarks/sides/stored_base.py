"""LoRA on checkpoints whose weights are stored in few bits: checkpoints are written here, and a short run trains."""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

from benchmarks import inputs
from benchmarks.sides.our_run import our_run

if TYPE_CHECKING:
    from torch import Tensor

STEPS, WARMUP = 8, 2
RANK, ALPHA = 16, 32


def write_checkpoint(folder: Path, files: Mapping[str, Mapping[str, Tensor]], quantization: dict[str, Any] | None):
    """Write the tensors of each file, their index, the bundled tokenizer, and the quantisation into config.json."""
    from safetensors.torch import save_file
    from transformers import AutoTokenizer

    places = {}
    for file, tensors in files.items():
        save_file(dict(tensors), folder / f"{file}.safetensors", {"format": "pt"})
        places |= dict.fromkeys(tensors, f"{file}.safetensors")
    size = sum(tensor.nbytes for tensors in files.values() for tensor in tensors.values())
    index = {"metadata": {"total_size": size}, "weight_map": places}
    (folder / "model.safetensors.index.json").write_text(json.dumps(index), encoding="utf-8")
    values = json.loads((folder / "config.json").read_text(encoding="utf-8"))
    if quantization is not None:
        values["quantization_config"] = quantization
    (folder / "config.json").write_text(json.dumps(values), encoding="utf-8")
    AutoTokenizer.from_pretrained(inputs.TOKENIZER).save_pretrained(folder)


def adapter_recipe(source: inputs.Inputs, base: str, tokens: int) -> Path:
    """Write the recipe that trains an adapter on the checkpoint in `source.out / base`, one row of random words a step.

    The run is in `run-<base>`. tokens: length of a row.
    """
    settings = {
        "model.model_name_or_path": source.out / base,
        "model.dtype": "float32" if source.small else "bfloat16",
        "method.type": "lora",
        "method.lora_r": RANK,
        "method.lora_alpha": ALPHA,
        "data.datasets": inputs.random_words(source, tokens, STEPS + 3),
        "data.packing": False,
        "data.max_length": tokens,
        "data.on_overlength": "truncate",
        "data.cache": False,
        "data.num_proc": 1,
        "train.per_device_train_batch_size": 1,
        "train.gradient_accumulation_steps": 1,
        "train.max_steps": STEPS,
        "train.gradient_checkpointing": True,
        "train.learning_rate": 3e-4,
        "report.warmup_steps": WARMUP,
        "logging.logging_steps": 1,
        "checkpoint.output_dir": source.out / f"run-{base}",
        "checkpoint.save_strategy": "no",
        "checkpoint.overwrite": True,
    }
    return inputs.write_recipe(source.out / f"{base}.json", settings)


def train_adapter(recipe: Path) -> dict[str, Any]:
    """Train as the recipe says. Sizes are bytes that torch has allocated; the peak counts loading too."""
    from ligertune.recipe import load_recipe
    from ligertune.training.resolve import plan_for

    job = plan_for(load_recipe(recipe))
    report, loaded, lines = our_run(job)
    return {
        "peak": max(loaded["peak"], report.peak_memory["allocated_run"]),
        "planned": job.plan.peak.total,
        "load_peak": loaded["peak"],
        "load_seconds": report.seconds_to_first_step["loading the model"],
        "tokens_per_second": report.throughput.tokens_per_second,
        "losses": [line["loss"] for line in lines if "loss" in line],
    }
