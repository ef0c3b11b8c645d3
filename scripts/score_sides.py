"""Sides of scripts/bench_classification: training of one recipe by ligertune, by Trainer and by TRL's RewardTrainer."""

from __future__ import annotations

import statistics
from pathlib import Path
from typing import Any

import torch
from preference_sides import StepTimes, arguments_of, device, examples_of_steps, is_out_of_memory, ours, with_losses
from transformers import DataCollatorWithPadding, PreTrainedModel, Trainer, TrainingArguments

from ligertune.attention.choice import installed
from ligertune.models.load import build_model
from ligertune.models.read_config import read_config
from ligertune.models.trainable import apply_method
from ligertune.patching.patch import patch
from ligertune.planning.feature_spec import feature_of
from ligertune.recipe import load_recipe
from ligertune.training.metrics.meter import resident_peak_bytes
from ligertune.training.resolve import plan_for
from ligertune.training.setup import Job


def measure(side: str, recipe: str) -> dict[str, Any]:
    """Train a recipe with a side. Returns its speed, peak memory and losses, or the reason of a failure."""
    job = plan_for(load_recipe(Path(recipe)))
    try:
        found = ours(job) if side == "ligertune" else theirs(job, side)
    except Exception as error:
        if not is_out_of_memory(error):
            raise
        return {"failed": "out of memory"}
    warmup, steps = job.plan.measurement.warmup_steps, examples_of_steps(job)
    seconds = found.pop("seconds")[warmup:]
    tokens = sum(len(example.input_ids) for step in steps[warmup:] for example in step)
    return {
        **found,
        "tokens_per_second": tokens / sum(seconds),
        "step_ms": 1000 * statistics.median(seconds),
        "lengths": [len(part.input_ids) for step in steps for example in step for part in example.documents()],
    }


def theirs(job: Job, side: str) -> dict[str, Any]:
    """Train with transformers or TRL, with the same weights and batches. side: trainer, liger or patched."""
    flash = installed("flash-attn") and torch.cuda.is_available()
    model = scored_model(job, "flash_attention_2" if flash else "sdpa", patched=side == "patched")
    job.tokenizer.tokenizer.pad_token_id = job.tokenizer.pad_token_id
    make = reward_trainer if job.plan.build.task == "reward" else classification_trainer
    trainer = make(job, model, {"use_liger_kernel": side == "liger"})
    times = StepTimes(job.plan.measurement.warmup_steps)
    trainer.add_callback(times)
    trainer.train()
    peak = torch.cuda.max_memory_allocated() if torch.cuda.is_available() else resident_peak_bytes()
    return {"seconds": times.seconds(), "losses": [float(loss) for loss in trainer.losses], "peak": peak}


def scored_model(job: Job, attention: str, *, patched: bool) -> PreTrainedModel:
    """Return the model that ligertune would train, without its kernels unless `patched`."""
    build = job.plan.build
    spec = build.model.model_copy(update={"attn_implementation": attention})
    config = read_config(spec)
    feature_of(build.task).prepare_config(config, build)
    dtype = getattr(torch, job.plan.precision.weights)
    model = build_model(spec, config, dtype=dtype, device=device(), seed=build.seed)
    model.config.pad_token_id = job.tokenizer.pad_token_id
    if patched:
        patch(model, loss="torch")  # the loss of a score head is small
    return apply_method(model, build.method, seed=build.seed)


def classification_trainer(job: Job, model: PreTrainedModel, more: dict[str, Any]) -> Trainer:
    """Return transformers' Trainer on ligertune's examples, in its order."""
    from datasets import Dataset

    given = arguments_of(job)
    del given["max_length"]  # of TRL's configurations
    rows = [
        {"input_ids": example.input_ids.tolist(), "labels": int(example.targets[0])}
        for step in examples_of_steps(job)
        for example in step
    ]
    return with_losses(Trainer)(
        model,
        TrainingArguments(**given, **more),
        data_collator=DataCollatorWithPadding(job.tokenizer.tokenizer),
        train_dataset=Dataset.from_list(rows),
        processing_class=job.tokenizer.tokenizer,
    )


def reward_trainer(job: Job, model: PreTrainedModel, more: dict[str, Any]) -> Any:
    """Return TRL's RewardTrainer on ligertune's examples, in its order."""
    from datasets import Dataset
    from trl import RewardConfig, RewardTrainer

    pairs = [example.documents() for step in examples_of_steps(job) for example in step]
    rows = [
        {"chosen_ids": chosen.input_ids.tolist(), "rejected_ids": rejected.input_ids.tolist()}
        for chosen, rejected in pairs
    ]
    return with_losses(RewardTrainer)(
        model=model,
        args=RewardConfig(**arguments_of(job), **more),
        train_dataset=Dataset.from_list(rows),
        processing_class=job.tokenizer.tokenizer,
    )
