"""Side of the training benchmarks by unsloth, on ligertune's weights, token ids and order.

`python -m benchmarks.sides.unsloth unsloth RECIPE` trains in this process and prints one point. The recipe's model is
a folder with weights: unsloth loads it, and quantises it for QLoRA. PEFT draws the adapter from the recipe's seed.
"""

from __future__ import annotations

import unsloth  # isort: skip  # before the others: it changes transformers, PEFT and TRL when it is imported

import pickle
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

import torch
from transformers import PreTrainedModel

from benchmarks.sides import trainers
from benchmarks.sides.trainers import Setup
from ligertune.training.setup import Job

RESOLVE = """
import pickle, sys
from benchmarks.sides.trainers import resolve
with open(sys.argv[2], "wb") as file:
    pickle.dump(resolve(sys.argv[1]), file)
"""
NAMED = ("unsloth", "transformers", "trl", "peft", "bitsandbytes", "xformers")


def main(side: str, recipe: str) -> int:
    return trainers.main(side, recipe, measure, resolve_apart)


def resolve_apart(recipe: str) -> Job:
    """Resolve the recipe in another process, without unsloth: its masks fail the check of packed rows."""
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "job"
        subprocess.run([sys.executable, "-c", RESOLVE, recipe, str(path)], check=True)
        return pickle.loads(path.read_bytes())


def measure(job: Job, side: str) -> dict[str, Any]:
    """Train with unsloth's model: TRL's DPOTrainer for pairs, else transformers' Trainer."""
    checkpointing = "unsloth" if job.plan.build.execution.gradient_checkpointing else False
    job.tokenizer.tokenizer.pad_token_id = job.tokenizer.pad_token_id
    # the model has its checkpointing already, which a trainer would replace
    model = model_of(job, checkpointing)
    setup = Setup(job, model, attention_of(model), {"gradient_checkpointing": False})
    maker = trainers.preference if job.plan.build.task == "dpo" else trainers.fine_tuning
    trainer, setting = maker(setup)
    versions = ", ".join(f"{name} {version}" for name in NAMED if (version := trainers.version_of(name)))
    settings = [f"`use_gradient_checkpointing={checkpointing!r}`", *filter(None, [setting]), versions]
    return trainers.train(setup, trainer, ", ".join(settings))


def model_of(job: Job, checkpointing: str | bool) -> PreTrainedModel:
    """Load the recipe's model as unsloth's documentation does, with a LoRA adapter unless all weights train."""
    build = job.plan.build
    method = build.method
    # packed rows are joined to one
    longest = job.plan.data_options.max_length * job.plan.batching.micro_batch_size
    model, _ = unsloth.FastLanguageModel.from_pretrained(
        model_name=str(build.model.model_name_or_path),
        max_seq_length=longest,
        dtype=getattr(torch, job.plan.precision.weights),
        load_in_4bit=method.type == "qlora",
        full_finetuning=method.type == "full",
        use_gradient_checkpointing=checkpointing,
        fix_tokenizer=False,
    )
    if method.type == "full":
        return model
    return unsloth.FastLanguageModel.get_peft_model(
        model,
        r=method.lora_r,
        lora_alpha=method.lora_alpha,
        lora_dropout=method.lora_dropout,
        use_gradient_checkpointing=checkpointing,
        random_state=build.seed,
    )


def attention_of(model: PreTrainedModel) -> str:
    """Return the attention that unsloth chose for this machine."""
    dispatch = sys.modules.get("unsloth.utils.attention_dispatch")
    if dispatch is None:  # without a GPU unsloth trains with the functions of transformers
        return model.config._attn_implementation
    if dispatch.HAS_FLASH_ATTENTION:
        return "flash_attention_2"
    return "xformers" if dispatch.HAS_XFORMERS else "sdpa"


if __name__ == "__main__":
    sys.exit(main(*sys.argv[1:]))
