"""Sides of scripts/bench_preference: training of one recipe by ligertune and by TRL's trainers, in this process."""

from __future__ import annotations

import json
import statistics
import time
from pathlib import Path
from typing import Any

import bench_pages  # noqa: F401 (puts ligertune on the path)
import numpy as np
import torch
from transformers import AutoModelForCausalLM, PreTrainedModel, TrainerCallback

from ligertune.attention.choice import installed
from ligertune.data.batching.order import DataOrder
from ligertune.data.examples import Example
from ligertune.features.distill.recipe import DistillSpec
from ligertune.features.preference.recipe import PreferenceSpec
from ligertune.models.load import build_model
from ligertune.models.read_config import read_config
from ligertune.models.trainable import apply_method
from ligertune.patching.patch import patch
from ligertune.recipe import load_recipe
from ligertune.run import run
from ligertune.training.metrics.meter import resident_peak_bytes
from ligertune.training.resolve import plan_for
from ligertune.training.setup import Job


def measure(side: str, recipe: str) -> dict[str, Any]:
    """Train a recipe with a side. Returns its speed, peak memory and losses, or the reason of a failure."""
    offload = ["train.gradient_checkpointing=offload"] if side == "ligertune_offload" else []
    job = plan_for(load_recipe(Path(recipe), offload))
    try:
        found = ours(job) if side.startswith("ligertune") else theirs(job, side)
    except Exception as error:
        if not is_out_of_memory(error):
            raise
        return {"failed": "out of memory"}
    warmup, steps = job.plan.measurement.warmup_steps, examples_of_steps(job)
    seconds = found.pop("seconds")[warmup:]
    tokens = sum(len(example.input_ids) for step in steps[warmup:] for example in step)
    lengths = [len(part.input_ids) for step in steps for example in step for part in example.documents()]
    return {
        **found,
        "tokens_per_second": tokens / sum(seconds),
        "step_ms": 1000 * statistics.median(seconds),
        "lengths": lengths,
        "device_memory": job.plan.machine.memory_bytes,
    }


def is_out_of_memory(error: BaseException | None) -> bool:
    while error is not None and not isinstance(error, torch.OutOfMemoryError):
        error = error.__cause__ or error.__context__
    return error is not None


def examples_of_steps(job: Job) -> list[list[Example]]:
    """Return the examples of each step, in ligertune's order."""
    plan, examples = job.plan, job.data.train
    steps, size = plan.schedule.total_steps, plan.batching.global_batch_size
    order = DataOrder(examples.lengths, total_rows=steps * size, seed=plan.build.seed, batching=plan.batching)
    return [[examples[int(row[0])] for row in order.step(step)] for step in range(steps)]


def ours(job: Job) -> dict[str, Any]:
    """Train with ligertune."""
    lines: list[dict] = []
    report = run(job, lines.append)
    trained = [line for line in lines if "loss" in line]
    peak = report.peak_memory
    return {
        "seconds": [line["seconds"] for line in trained],
        "losses": [line["loss"] for line in trained],
        "peak": peak.get("allocated_steady", peak["allocated_run"]),
        "planned": planned_peak(job),
    }


def planned_peak(job: Job) -> int | None:
    """Return the bytes that the plan predicts for the longest measured step, flattened to one row."""
    plan = job.plan
    if plan.memory is None or not torch.cuda.is_available():
        return None
    steps = examples_of_steps(job)[plan.measurement.warmup_steps :]
    longest = max(sum(len(example.input_ids) for example in step) for step in steps)
    return plan.memory.peak(1, longest, accumulates=False, memory=plan.machine.memory_bytes).total


# ---- TRL, through its public classes


class StepTimes(TrainerCallback):
    """Times between the ends of steps, with the device synchronised; peak memory after the warm-up."""

    def __init__(self, warmup: int) -> None:
        self.warmup = warmup
        self.ends: list[float] = []

    def on_train_begin(self, *arguments: Any, **kwargs: Any) -> None:
        self._mark()

    def on_step_end(self, *arguments: Any, **kwargs: Any) -> None:
        self._mark()

    def _mark(self) -> None:
        if torch.cuda.is_available():
            torch.cuda.synchronize()
            if len(self.ends) == self.warmup:
                torch.cuda.reset_peak_memory_stats()
        self.ends.append(time.perf_counter())

    def seconds(self) -> list[float]:
        return np.diff(self.ends).tolist()


def with_losses(trainer: type) -> type:
    """Return a subclass that keeps the losses of its steps: some trainers log them rounded."""

    class WithLosses(trainer):
        def training_step(self, *arguments: Any, **kwargs: Any) -> torch.Tensor:
            loss = super().training_step(*arguments, **kwargs)
            self.losses = [*getattr(self, "losses", []), loss.detach()]
            return loss

    return WithLosses


def theirs(job: Job, side: str) -> dict[str, Any]:
    """Train with TRL, with the same weights and batches. side: trl, trl_liger, trl_patched or trl_offload."""
    flash = installed("flash-attn") and torch.cuda.is_available()
    attention = "flash_attention_2" if flash else "sdpa"
    model = student(job, attention, patched=side == "trl_patched")
    job.tokenizer.tokenizer.pad_token_id = job.tokenizer.pad_token_id
    make = distillation if job.plan.build.task == "distill" else preference
    more = {"use_liger_kernel": side == "trl_liger"}
    if side == "trl_offload":
        more["activation_offloading"] = True
    trainer, setting = make(job, model, attention, more)
    times = StepTimes(job.plan.measurement.warmup_steps)
    trainer.add_callback(times)
    trainer.train()
    peak = torch.cuda.max_memory_allocated() if torch.cuda.is_available() else resident_peak_bytes()
    losses = [float(loss) for loss in trainer.losses]
    return {"seconds": times.seconds(), "losses": losses, "peak": peak, "setting": setting}


def device() -> torch.device:
    return torch.device("cuda" if torch.cuda.is_available() else "cpu")


def student(job: Job, attention: str, *, patched: bool) -> PreTrainedModel:
    """Return the model that ligertune would train, without its kernels unless `patched`."""
    build = job.plan.build
    spec = build.model.model_copy(update={"attn_implementation": attention})
    dtype = getattr(torch, job.plan.precision.weights)
    model = build_model(spec, read_config(spec), dtype=dtype, device=device(), seed=build.seed)
    if patched:
        patch(model, loss="torch")  # TRL computes its loss itself
    return apply_method(model, build.method, seed=build.seed)


def arguments_of(job: Job) -> dict[str, Any]:
    """Return the arguments that TRL's trainers share."""
    plan = job.plan
    on_gpu = torch.cuda.is_available()
    return {
        "output_dir": str(plan.output_dir / "trl"), "max_steps": plan.schedule.total_steps,
        "per_device_train_batch_size": plan.batching.micro_batch_size, "learning_rate": plan.schedule.learning_rate,
        "lr_scheduler_type": "constant", "optim": "adamw_torch_fused", "weight_decay": 0.0, "max_grad_norm": 1.0,
        "train_sampling_strategy": "sequential", "logging_steps": 1, "save_strategy": "no", "report_to": "none",
        "use_cpu": not on_gpu, "bf16": on_gpu, "disable_tqdm": True,
        "gradient_checkpointing": bool(plan.build.execution.gradient_checkpointing),
        "max_length": plan.data_options.max_length,
    }  # fmt: skip


def preference(job: Job, model: Any, attention: str, more: dict[str, Any]) -> tuple[Any, str]:
    """Return a DPOTrainer, and what a reader must know about its settings."""
    from datasets import Dataset
    from trl import DPOConfig, DPOTrainer

    lines = Path(job.plan.data_options.datasets[0].path).read_text(encoding="utf-8").splitlines()
    places = [int(example.source.split(":")[-1]) - 1 for step in examples_of_steps(job) for example in step]
    rows = Dataset.from_list([json.loads(lines[place]) for place in places])
    tokenizer = job.tokenizer.tokenizer
    given = {**arguments_of(job), **more, "padding_free": False}
    given["beta"] = job.plan.build.section(PreferenceSpec).beta
    adapter = job.plan.build.method.type == "lora"

    def trainer(precompute: bool) -> Any:
        config = DPOConfig(precompute_ref_log_probs=precompute, **given)
        reference = None if precompute or adapter else student(job, attention, patched=False)
        return with_losses(DPOTrainer)(
            model, ref_model=reference, args=config, train_dataset=rows, processing_class=tokenizer
        )

    try:
        return trainer(True), ""
    except ValueError as error:  # liger-kernel's loss may not read precomputed log-probabilities
        if "precompute" not in str(error):
            raise
    kind = "the model with its adapter switched off" if adapter else "a second model in memory"
    return trainer(False), f"the reference is {kind}, because this loss reads no log-probabilities"


def distillation(job: Job, model: Any, attention: str, more: dict[str, Any]) -> tuple[Any, str]:
    """Return a GKDTrainer on the labels of the data (lmbda 0), fed with ligertune's examples."""
    from datasets import Dataset
    from trl.experimental.gkd import GKDConfig, GKDTrainer

    spec = job.plan.build.section(DistillSpec)
    dtype = getattr(torch, job.plan.precision.weights)
    teacher = AutoModelForCausalLM.from_pretrained(spec.teacher, dtype=dtype, attn_implementation=attention).to(
        device()
    )
    config = GKDConfig(
        **arguments_of(job), **more, lmbda=0.0, beta=spec.beta, remove_unused_columns=False,
        dataset_kwargs={"skip_prepare_dataset": True},
    )  # fmt: skip
    queue = iter(examples_of_steps(job))
    pad = job.tokenizer.pad_token_id
    trainer = with_losses(GKDTrainer)(
        model=model,
        teacher_model=teacher,
        args=config,
        data_collator=lambda rows: padded(next(queue), pad),
        train_dataset=Dataset.from_list([{"input_ids": [1]}] * len(job.data.train)),
        processing_class=job.tokenizer.tokenizer,
    )
    return trainer, ""


def padded(examples: list[Example], pad: int) -> dict[str, torch.Tensor]:
    """Return a padded batch. GKDTrainer wants to know the prompts, and trains on labels behind their first token."""
    length = max(len(example.input_ids) for example in examples)
    batch = {"input_ids": (pad, "input_ids"), "labels": (-100, "labels"), "attention_mask": (0, None)}
    made = {}
    for name, (fill, field) in batch.items():
        rows = [getattr(example, field) if field else np.ones(len(example.input_ids)) for example in examples]
        made[name] = torch.tensor(
            np.stack([np.pad(row, (0, length - len(row)), constant_values=fill) for row in rows])
        ).long()
    prompts = {"prompts": made["input_ids"][:, :1], "prompt_attention_mask": made["attention_mask"][:, :1]}
    return {**made, **prompts}
